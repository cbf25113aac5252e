"""Rotary frequencies, plain or stretched by transformers' own functions (linear, YaRN, Llama 3, LongRoPE).

Source of LongRoPE's one choice per model instead of one per forward: vLLM. Shapes: E head width.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trainer.config import ROPE_OPTIONAL, ROPE_REQUIRED, RopeScaling

INHERITED = ("linear", "llama3", "yarn")
"""Kinds a drafter takes over from its target: LongRoPE's factors are fitted to the target's own heads."""


def inherited_scaling(rope: Mapping[str, Any], max_position: int) -> dict[str, Any] | None:
    """The part of a target's rope settings that a drafter takes over, or None. ``max_position`` stands in for a YaRN
    target's unnamed original window, as in transformers."""
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in INHERITED:
        return None
    keys = (*ROPE_REQUIRED[kind], *ROPE_OPTIONAL[kind])
    scaling = {"rope_type": kind} | {key: rope[key] for key in keys if rope.get(key) is not None}
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", max_position)
    return scaling


def published_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a ``config.json``, from its new form (``rope_parameters``) or the old one. Raises ValueError:
    a scaling that drafters here do not know, two forms that disagree, or a factor that engines read otherwise."""
    new = config.get("rope_parameters") or {}
    old = {key: config[key] for key in ("rope_theta",) if config.get(key)} | (config.get("rope_scaling") or {})
    differing = sorted(key for key in new.keys() & old.keys() if new[key] != old[key])
    if differing:
        raise ValueError(f"rope_parameters and the older form disagree on {', '.join(differing)}")
    rope = {**old, **new}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = float(rope.get("rope_theta") or 10000.0)
    if kind == "default":
        return theta, None
    share = rope.get("attn_factor") if kind == "yarn" else None
    if share not in (None, 1) and rope.get("attention_factor") is None:
        why = "SGLang multiplies cos and sin by it, vLLM and transformers do not; attention_factor says which"
        raise ValueError(f"attn_factor is {share!r} without an attention_factor: {why}")
    settings = {key: value for key, value in rope.items() if key in RopeScaling.model_fields}
    window = config.get("original_max_position_embeddings")
    if window is not None and "original_max_position_embeddings" in (*ROPE_REQUIRED.get(kind, ()),):
        settings.setdefault("original_max_position_embeddings", window)
    return theta, RopeScaling.model_validate({**settings, "rope_type": kind})


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, max_position: int) -> tuple[Tensor, float]:
    """Angle per position fp32 [E/2], and what cos and sin are multiplied by. ``max_position`` is the serving window:
    where it exceeds the original one, LongRoPE takes its long factors for every text, so that a sample is rotated the
    same whatever it is packed with."""
    if scaling is None:
        return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    original = scaling.original_max_position_embeddings or max_position
    rope = {"factor": max_position / original, **scaling.written(), "rope_theta": theta}
    # What the functions read of a model's config, in the spelling of transformers 4 and 5.
    config = SimpleNamespace(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        partial_rotary_factor=1.0,
        rope_theta=theta,
        rope_scaling=rope,
        rope_parameters=rope,
        max_position_embeddings=original,
        standardize_rope_params=lambda: None,
    )
    angles, attention = ROPE_INIT_FUNCTIONS[scaling.rope_type](config, torch.device("cpu"), seq_len=max_position)
    return angles, attention
