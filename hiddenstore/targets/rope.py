"""Rotary embeddings whose frequencies depend on how long a text is."""

from collections.abc import Mapping
from typing import Any


def rope_kind(config: object) -> str:
    """The kind of rotary embedding a text config names, ``default`` when it names none."""
    parameters = _rope_parameters(config)
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def rope_boundary(config: object) -> int | None:
    """Length at which a text config's rotary embedding changes its frequencies for the whole batch, if it does.

    Phi-3's ``longrope`` picks its long factors when the longest row exceeds the original context, so a long sample
    would change the states of the short ones beside it. vLLM picks them for every text where its ``max_model_len`` does
    (its ``phi3_long_rope_scaled_rope.py``).
    """
    if rope_kind(config) not in ("longrope", "dynamic"):
        return None
    original = _rope_parameters(config).get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    original = original or getattr(config, "max_position_embeddings", None)
    return int(original) if isinstance(original, int | float) else None


def _rope_parameters(config: object) -> Mapping[str, Any]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return parameters if isinstance(parameters, Mapping) else {}
