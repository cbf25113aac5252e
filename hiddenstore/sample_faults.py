"""What the tokens, mask and turns of a sample may be, in DATA as in a segment: a digest proves who wrote them, no more.

Each function returns what is wrong in words, or None. Shapes: t tokens of a sample, n turns.
"""

import numpy as np

from schemas.prepared import ROLES


def tokens_fault(input_ids: np.ndarray, vocab: int) -> str | None:
    """Token ids int32 [t] lie in the vocabulary."""
    if len(input_ids) and not 0 <= input_ids.min() <= input_ids.max() < vocab:
        outside = input_ids[(input_ids < 0) | (input_ids >= vocab)][0]
        return f"token {outside} is outside the target's {vocab:,}"
    return None


def mask_fault(loss_mask: np.ndarray, supervised: int | None) -> str | None:
    """A mask uint8 [t] is 0 or 1, and has as many ones as its record says, where one does."""
    if len(loss_mask) and loss_mask.max() > 1:
        return "it is not of zeros and ones"
    ones = int(np.count_nonzero(loss_mask))
    return None if supervised in (None, ones) else f"it supervises {ones:,} tokens, its record says {supervised:,}"


def spans_fault(spans: np.ndarray, tokens: int) -> str | None:
    """Turns int32 [n, 3] have a role that exists and lie in their sample."""
    roles, starts, ends = spans.T
    bad = (roles < 0) | (roles >= len(ROLES)) | (starts < 0) | (starts > ends) | (ends > tokens)
    return f"turn {spans[bad][0].tolist()} (role, start, end) is none of {tokens:,} tokens" if bad.any() else None
