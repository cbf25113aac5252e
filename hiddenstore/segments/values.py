"""What the numbers of a segment may be: whatever its bytes, a reader gives out nothing that the format forbids.

Each function returns what is wrong in words, or None. Shapes: t tokens of a sample, r its final rows, S samples of a
unit, L layers, T rows of a part, N raw rows, k top tokens.
"""

from collections.abc import Mapping

import numpy as np

from hiddenstore.codecs.base import RAW_INDEX, SmallField
from hiddenstore.records import TopK

_GROUP_SCALE = "group_scale"
_E4M3_NAN = 0x7F


def rows_fault(final_rows: np.ndarray, tokens: int) -> str | None:
    """Positions int32 [r] ascend inside their sample."""
    if not len(final_rows):
        return None
    ascending = final_rows[0] >= 0 and final_rows[-1] < tokens and (np.diff(final_rows) > 0).all()
    return None if ascending else f"they are not ascending positions of {tokens:,} tokens"


def top_tokens_fault(topk: TopK) -> str | None:
    """Log-probs and their normaliser are finite."""
    is_finite = bool(topk.log_probs.isfinite().all() and topk.lse.isfinite().all())
    return None if is_finite else "log-probabilities are not finite"


def small_fault(fields: Mapping[str, SmallField], small: Mapping[str, np.ndarray]) -> str | None:
    """Scales are finite and above 0, a token's 0 in rows that are kept raw alone; offsets are finite.

    ``small`` are arrays of a group; raw_index int [N, 2] holds (layer, row) as the arrays [L, T] count them.
    """
    for name, spec in fields.items():
        if spec.values == "any" or name not in small:
            continue
        values = small[name]
        if spec.bf16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        bad = ~np.isfinite(values)
        if spec.values == "positive":
            bad |= values <= 0
            if "T" in spec.axes and RAW_INDEX in small and len(small[RAW_INDEX]):
                layers, rows = small[RAW_INDEX].T
                bad[layers, rows] &= values[layers, rows] != 0
        if bad.any():
            return f"{name} holds {values[bad][0]}, expected {_EXPECTED[spec.values]}"
    return None


def codes_fault(parts: Mapping[str, slice], codes: np.ndarray, raw: np.ndarray) -> str | None:
    """Group scales of rows uint8 [t, C] are numbers other than 0, but in the rows kept raw, int [N]."""
    if _GROUP_SCALE not in parts:
        return None
    bits = codes[:, parts[_GROUP_SCALE]] & _E4M3_NAN
    bad = (bits == _E4M3_NAN) | (bits == 0)
    bad[raw] = False
    return "a group scale is 0 or no number" if bad.any() else None


_EXPECTED = {"finite": "a finite number", "positive": "a finite number above 0"}
