"""Random tiny targets of every family and prepared data for them; nothing is downloaded.

initializer_range 0.15 and unequal norm weights make a wrong layer, norm or scale visible at once.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

from collectors.targets.load import LoadedTarget, wrap_model
from hiddenstore.targets.folder import TargetFolder
from hiddenstore.targets.identity import chat_template_sha256, config_sha256, tokenizer_sha256
from tests.collectors.tiny_families import more_config

VOCAB = 96
WIDTH = 64
LAYERS = 4
WINDOW = 8
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ bos_token }}{{ m['content'] }}{% endif %}{% endfor %}"
)


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    } | more


def _without_head_dim(**more: Any) -> dict[str, Any]:
    return {key: value for key, value in _common(**more).items() if key != "head_dim"}


def _experts(**more: Any) -> dict[str, Any]:
    return {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48} | more


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_common()),
    "llama-tied": lambda: hf.LlamaConfig(**_common(tie_word_embeddings=True)),
    "mistral": lambda: hf.MistralConfig(**_common(sliding_window=WINDOW)),
    "phi3": lambda: hf.Phi3Config(**_without_head_dim(sliding_window=WINDOW)),
    "qwen2": lambda: hf.Qwen2Config(**_without_head_dim(tie_word_embeddings=True)),
    "qwen3": lambda: hf.Qwen3Config(**_common()),
    "gemma2": lambda: hf.Gemma2Config(
        **_common(
            sliding_window=WINDOW,
            query_pre_attn_scalar=16,
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
            final_logit_softcapping=5.0,
        )
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_common(sliding_window=WINDOW, query_pre_attn_scalar=16, tie_word_embeddings=True)
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**_common(**_experts())),
    "mixtral": lambda: hf.MixtralConfig(**_common(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "granite": lambda: hf.GraniteConfig(
        **_without_head_dim(embedding_multiplier=6.0, logits_scaling=3.0, residual_multiplier=0.5)
    ),
    "cohere": lambda: hf.CohereConfig(**_without_head_dim(tie_word_embeddings=True, logit_scale=0.3)),
    "olmo2": lambda: hf.Olmo2Config(**_without_head_dim()),
}


def tiny_tokenizer() -> Any:
    """One token per printable ASCII character; ids 0, 1, 2 are pad, bos and eos."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(32 + i): 3 + i for i in range(VOCAB - 3)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random model whose norm weights all differ."""
    return model_of(CONFIGS[family]() if family in CONFIGS else more_config(family), seed, dtype)


def model_of(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same for any config."""
    torch.manual_seed(seed)
    whole = type(config) in hf.AutoModelForImageTextToText._model_mapping
    model = (hf.AutoModelForImageTextToText if whole else hf.AutoModelForCausalLM).from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.rand_like(weight) - 0.3)
    return model.eval()


def tiny_target(family: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedTarget:
    """A tiny model in memory as a LoadedTarget."""
    model = tiny_model(family, seed, dtype)
    tokenizer = tiny_tokenizer()
    folder = TargetFolder(
        name=family,
        revision=None,
        config=model.config.get_text_config(decoder=True),
        tokenizer=tokenizer,
        config_sha256=config_sha256(model.config.to_dict()),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=chat_template_sha256(TEMPLATE),
        whole_config=model.config,
    )
    return wrap_model(folder, model)


def save_target(folder: Path, family: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny model and its tokenizer as save_pretrained writes them."""
    tiny_model(family, seed, dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tidies_up(folder: Path) -> None:
    """Have a tokenizer take spaces before punctuation out of what it decodes, as transformers 4.57 does by one word of
    Llama 3's settings and a later one by two."""
    file = folder / "tokenizer_config.json"
    words = ("clean_up_tokenization_spaces", "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    file.write_text(json.dumps(json.loads(file.read_text()) | dict.fromkeys(words, True)))
