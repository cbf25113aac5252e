"""Small targets as prepare sees them: a byte-level BPE tokenizer, a chat template and a config; no weights."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
CONTEXT = 256

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FOLDS_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set intro = messages[0]['content'] + '\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set intro = '' %}{% set rest = messages %}{% endif %}"
    "{% if rest | length == 0 %}{{ raise_exception('a system message alone') }}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ m['role'] }}\n{{ (intro if loop.first else '') + m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in m['content'] %}"
    "{{ m['content'].split('</think>')[-1] | trim }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMPTY_THOUGHT_LAST = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USERS_ONLY = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
)
EMPTY_TAGS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% generation %}{% endgeneration %}{% endfor %}"
)
NO_PROMPT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
BROKEN = "{% for m in messages %}{{ m['content'] }"

_TEXT = [
    "The quick brown fox jumps over the lazy dog and asks the assistant a question about numbers.",
    "user assistant system tool What is two and two? It is four. How many apples are there? There are 12 apples.",
    "def add(a, b):\n    return a + b\n",
]


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    return tokenizer.to_str()


HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m['content'] }}"
    "{% if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}"
    "{% else %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
"""gpt-oss's, without its system message and its tools."""
MARKS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]


def tiny_tokenizer(template: str | None = CHATML_TAGGED) -> Any:
    """A tokenizer of 400 tokens with every byte in its alphabet."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=SPECIAL[2:],
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_target(folder: Path, template: str | None = CHATML_TAGGED, **config: Any) -> str:
    """A target folder with tokenizer and config; returns its path."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.save_pretrained(folder)
    settings = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, **config}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of alternating user and assistant turns."""
    start = [{"role": "system", "content": system}] if system is not None else []
    return start + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def write_rows(path: Path, rows: list[Any]) -> str:
    """JSON lines; a row that is bytes is written as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)
