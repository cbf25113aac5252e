"""When a generated answer counts as looping: the one rule for regenerated training text and for decode prompts."""

from collections.abc import Sequence

LOOP_SHARE = 0.3
"""An answer with a larger ``repeated_share`` loops."""


def repeated_share(token_ids: Sequence[int], order: int = 4) -> float:
    """Share of n-grams (default 4) that occurred before in the same answer; 0 for answers shorter than one n-gram.

    >>> repeated_share([1, 2, 3, 4, 1, 2, 3, 4, 1])
    0.3333333333333333
    """
    grams = [tuple(token_ids[i : i + order]) for i in range(len(token_ids) - order + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
