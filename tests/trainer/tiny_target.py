"""A tiny random Llama with sharp logits, for tests that need a live target."""

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '</s>' }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
SPECIALS = ["<unk>", "</s>", "<user>", "<assistant>", "<system>"]


def make_tokenizer():
    words = SPECIALS + [chr(code) for code in range(33, 127)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast


def make_model(seed=0, vocab=99, layers=4, eos=1):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.15,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    return model


def save_target(folder, seed=0, **options):
    """Write model and tokenizer; returns the folder as str."""
    make_model(seed, **options).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)
