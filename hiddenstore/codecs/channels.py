"""What the channels of a layer are like over its tokens, for codecs that bring them to one scale, and which rows are
too odd for that.

Shapes: T tokens of the unit, D width, S sampled tokens.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.memory import fresh

SAMPLED_TOKENS = 256
SAMPLED_CHANNELS = 512
RAW_PEAK = 4.0

_SIGMA_PER_MAD = 1.4826
_FLOOR = 1e-12
_CEILING = 1e30
# |code value| * c <= 2 max|y| c, so rows below this limit decode below 2**127 and stay finite.
_LARGEST_DEVIATION = 2.0**125
_LARGEST_DEVIATION_BITS = (125 + 127) << 7


def channel_statistics(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Scale c and offset mu of each channel from bfloat16 [T, D]: float32 [D] each, exact in bf16.

    The rows may come in parts [t, D] that lie end to end, at least one.

    mu = median, c = 1.4826 * median |(h - mu) / t| with t = the token's own median |h - mu|, so that neither an outlier
    token nor a token of large norm moves them. Taken over S = min(T, 256) evenly spaced tokens without the non-finite
    ones, t over at most 512 evenly spaced channels. A channel whose median deviation is 0 takes its root mean square, a
    constant one the median channel's scale.
    """
    tokens, width, device = sum(map(len, parts)), parts[0].shape[1], parts[0].device
    rows = rows_of_parts(parts, _spread(tokens, SAMPLED_TOKENS, device))
    held = (rows.view(torch.int16) & 0x7FFF).amax(dim=1) < _LARGEST_DEVIATION_BITS
    if not bool(held.all()):
        rows = rows[held]
    if not len(rows):
        ones = torch.ones(width, dtype=torch.float32, device=device)
        return ones, torch.zeros_like(ones)
    # Turned before it is converted: torch turns a matrix in tiles only where the type stays.
    sampled = fresh((width, len(rows)), torch.float32, device).copy_(rows.T.contiguous())
    # Plus zero: among zeros of either sign nothing says which one is in the middle.
    offset = lower_median(sampled).add_(0.0)
    size = sampled.sub_(offset[:, None]).abs_()
    seen = size[_spread(width, SAMPLED_CHANNELS, device)].T.contiguous()
    token_size = lower_median(seen)
    token_size = torch.where(token_size > 0, token_size, seen.mean(dim=1))
    relative = size.div_(torch.where(token_size > 0, token_size, 1.0))
    scale = lower_median(relative) * _SIGMA_PER_MAD
    still = torch.nonzero(scale <= 0).flatten()
    if len(still):
        scale[still] = relative[still].square().mean(dim=1).sqrt()
    scale.clamp_(max=_CEILING)
    live = scale[scale > 0]
    typical = live.median() if live.numel() else scale.new_ones(())
    scale = torch.where(scale > 0, scale, typical).clamp_(min=_FLOOR)
    return scale.bfloat16().float(), offset


def lower_median(rows: Tensor) -> Tensor:
    """The element floor((n-1)/2) of each sorted row of a contiguous [r, n] without NaN: what ``torch.median`` gives."""
    if rows.device.type != "cpu":
        return rows.median(dim=1).values
    # numpy sorts a few hundred numbers with vector instructions, in less time than it finds the middle, and than torch.
    return torch.from_numpy(np.sort(rows.numpy(), axis=1)[:, (rows.shape[1] - 1) // 2].copy())


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Indices of min(count, most) evenly spaced of ``count`` places."""
    taken = min(count, most)
    return (torch.arange(taken, device=device) * count) // max(taken, 1)


def rows_of_parts(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Rows int64 [n], ascending, of parts [t, D] that lie end to end."""
    if len(parts) == 1:
        return parts[0][rows]
    starts = list(accumulate(map(len, parts), initial=0))
    cuts = torch.searchsorted(rows, torch.tensor(starts, device=rows.device)).tolist()
    picked = [
        part[rows[low:high] - start]
        for part, start, low, high in zip(parts, starts, cuts, cuts[1:], strict=False)
        if low < high
    ]
    return torch.cat(picked) if picked else parts[0][:0]


def raw_rows(peak: Tensor, scale: Tensor) -> Tensor:
    """Which rows are kept raw, bool [n], by peak = max |y| fp32 [n] and the channels' scale fp32 [D]."""
    limit = min(_CEILING, _LARGEST_DEVIATION / float(scale.max())) if scale.numel() else _CEILING
    held = peak < limit
    if not bool(held.any()):
        return ~held
    return ~(held & (peak <= RAW_PEAK * peak[held].median()))
