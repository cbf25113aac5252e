"""Rotary frequencies, plain or stretched (linear, YaRN, Llama 3, LongRoPE), as transformers and engines compute them.

Sources: transformers ``modeling_rope_utils`` (formulas and defaults); YaRN, arXiv 2309.00071; LongRoPE, arXiv
2402.13753; vLLM for LongRoPE's one choice per model instead of one per forward.

Shapes: E head width.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.config import ROPE_OPTIONAL, ROPE_REQUIRED, RopeScaling

INHERITED = ("linear", "llama3", "yarn")
"""Kinds a drafter takes over from its target: LongRoPE's factors are fitted to the target's own heads."""


def inherited_scaling(rope: Mapping[str, Any], max_position: int) -> dict[str, Any] | None:
    """The part of a target's rope settings that a drafter takes over, or None.

    ``max_position`` stands in for a YaRN target's unnamed original window, as in transformers.
    """
    kind = rope.get("rope_type") or rope.get("type")
    if kind not in INHERITED:
        return None
    keys = (*ROPE_REQUIRED[kind], *ROPE_OPTIONAL[kind])
    scaling = {"rope_type": kind} | {key: rope[key] for key in keys if rope.get(key) is not None}
    if kind != "linear":
        scaling.setdefault("original_max_position_embeddings", max_position)
    return scaling


def published_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of a ``config.json``, from its new form (``rope_parameters``) or the old one.

    Raises:
        ValueError: a scaling that drafters here do not know, or two forms that disagree.
    """
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
    settings = {key: value for key, value in rope.items() if key in RopeScaling.model_fields}
    window = config.get("original_max_position_embeddings")
    if window is not None and "original_max_position_embeddings" in (*ROPE_REQUIRED.get(kind, ()),):
        settings.setdefault("original_max_position_embeddings", window)
    return theta, RopeScaling.model_validate({**settings, "rope_type": kind})


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None, max_position: int) -> tuple[Tensor, float]:
    """Angle per position fp32 [E/2], and what cos and sin are multiplied by.

    ``max_position`` is the serving window: where it exceeds the original one, LongRoPE takes its long factors for
    every text, so that a sample is rotated the same whatever it is packed with.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / theta**exponent
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / _number(scaling.factor), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(plain, theta, scaling), _yarn_attention(scaling)
    return _longrope(plain, scaling, max_position)


def _number(value: float | None) -> float:
    assert value is not None
    return float(value)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Wavelengths up to original/high stay, those beyond original/low are divided by the factor, a blend between."""
    factor, low, high = _number(scaling.factor), _number(scaling.low_freq_factor), _number(scaling.high_freq_factor)
    turns = _number(scaling.original_max_position_embeddings) * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - share) * plain / factor + share * plain


def _yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Channels that turn more than beta_fast times in the original window stay, fewer than beta_slow are divided."""
    head_dim, original = 2 * plain.shape[0], _number(scaling.original_max_position_embeddings)

    def channel(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast or 32), channel(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(plain.shape[0], dtype=torch.float32) - low) / ((high - low) or 0.001)).clamp(0, 1)
    return plain / _number(scaling.factor) * ramp + plain * (1 - ramp)


def _yarn_attention(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    grown = 0.1 * math.log(_number(scaling.factor))
    if scaling.mscale and scaling.mscale_all_dim:
        return (grown * scaling.mscale + 1) / (grown * scaling.mscale_all_dim + 1)
    return grown + 1


def _longrope(plain: Tensor, scaling: RopeScaling, max_position: int) -> tuple[Tensor, float]:
    original = _number(scaling.original_max_position_embeddings)
    factors = scaling.long_factor if max_position > original else scaling.short_factor
    assert factors is not None
    factor = scaling.factor or max_position / original
    attention = scaling.attention_factor
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(factors), attention
