"""A tiny Qwen2.5-VL with its image processor, and conversations about noise."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.collectors.tiny import save_target, tiny_tokenizer

TOKEN, TOKEN_TEXT = 95, "|"
"""The placeholder of ``tiny_families``' Qwen2.5-VL, and what the tiny tokenizer calls it."""
# As the family's own it has no generation tags: answers are found by comparing prefixes.
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}>{{ m['content'] }}{{ eos_token }}{% else %}"
    "{{ bos_token }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{{ 'z|y' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def save_image_target(folder: Path, family: str = "qwen2.5-vl", longest_edge: int = 1024) -> Path:
    """A target whose images take a token for every 8 x 8 pixels."""
    from transformers import Qwen2VLImageProcessorPil

    save_target(folder, family)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": 64, "longest_edge": longest_edge}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size).save_pretrained(folder)
    return folder


def noise(height: int, width: int, seed: int) -> bytes:
    """A PNG file."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def openai_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def about(*parts: dict[str, Any], question: str = "What is this?", answer: str = "Noise, of course.") -> dict[str, Any]:
    """A row about images."""
    content = [*parts, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}
