"""Batches of one unit: bucketed by length, right-padded, a pure function of the unit's lengths and the token budget.

Right padding without an attention mask is exact for every causal family, sliding windows included: a real token never
sees a later position, positions count from 0 in every row, and what padding computes is thrown away. Packing several
samples in one row would need masks that some attention kernels and sliding-window layers drop.
"""

from collections.abc import Sequence
from typing import Any

# Below this share of real tokens a batch is closed: a padded token costs as much as a real one.
MIN_FILL = 0.75


def plan_batches(lengths: Sequence[int], batch_tokens: int, boundary: int | None = None) -> list[list[int]]:
    """Group sample indices into batches of at most ``batch_tokens`` padded tokens.

    Shortest first, ties by index; a sample longer than the budget is a batch of its own. No batch mixes samples up to
    ``boundary`` tokens with longer ones (``rope_boundary``).

    >>> plan_batches([5, 90, 6, 100], 200)
    [[0, 2], [1, 3]]
    """
    batches: list[list[int]] = []
    real = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        length = lengths[index]
        padded = (len(batches[-1]) + 1) * length if batches else 0
        crosses = boundary is not None and batches and lengths[batches[-1][-1]] <= boundary < length
        if not batches or padded > batch_tokens or crosses or real + length < MIN_FILL * padded:
            batches.append([])
            real = 0
        batches[-1].append(index)
        real += length
    return batches


def rope_kind(config: object) -> str:
    """The kind of rotary embedding a text config names, ``default`` when it names none."""
    parameters = _rope_parameters(config)
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def rope_boundary(config: object) -> int | None:
    """Length at which a text config's rotary embedding changes its frequencies for the whole batch, if it does.

    Phi-3's ``longrope`` picks its long factors when the longest row exceeds the original context, so a long sample
    would change the states of the short ones beside it.
    """
    if rope_kind(config) not in ("longrope", "dynamic"):
        return None
    original = _rope_parameters(config).get("original_max_position_embeddings")
    original = original or getattr(config, "original_max_position_embeddings", None)
    original = original or getattr(config, "max_position_embeddings", None)
    return None if original is None else int(original)


def _rope_parameters(config: object) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
