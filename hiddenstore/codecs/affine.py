"""What ``q8`` and ``q4`` share: states brought to unit scale per channel and token, and odd rows kept raw.

    y = (h - mu_d) / c_d            mu_d, c_d: robust centre and size of channel d over the unit's own tokens
    h = bf16( code_value * c_d + mu_d )          every operation rounded to float32, then to bf16

A codec turns y into codes with a scale per token and back; the rest is here. A row is kept raw, bit-exact, when it has
non-finite values, when its largest |y| is far above the unit's median (attention sinks, or one element that would take
all the codes), or when its numbers could overflow. The limit is on max |y| and not on the norm: a row whose norm is
large but even loses nothing by its own scale. Measurements: docs/design/003.

Shapes: L layers, T tokens of the unit, m rows of a block, D width, C columns of a code array, S sampled tokens, N raw
rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import (
    FIXED_CHUNK_TOKENS,
    RAW_INDEX,
    RAW_ROWS,
    Encoded,
    EncodedLayers,
    RowPart,
    SmallField,
    bits_to_numpy,
    bits_to_tensor,
    fresh,
    output,
)

SAMPLED_TOKENS = 256
SAMPLED_CHANNELS = 512
RAW_PEAK = 4.0

_SIGMA_PER_MAD = 1.4826
_FLOOR = 1e-12
_CEILING = 1e30
# |code value| * c <= 2 max|y| c, so rows below this limit decode below 2**127 and stay finite.
_LARGEST_DEVIATION = 2.0**125
# float32 blocks small enough for a CPU's cache and large enough for the cost of a call; on a GPU, enough to fill it.
_BLOCK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 26}

_SMALL = {
    "token_scale": SmallField("uint16", ("L", "T"), bf16=True),
    "channel_scale": SmallField("uint16", ("L", "D"), bf16=True),
    "channel_offset": SmallField("uint16", ("L", "D"), bf16=True),
    RAW_INDEX: SmallField("int32", ("N", "2")),
    RAW_ROWS: SmallField("uint16", ("N", "D"), bf16=True),
}


@dataclass(frozen=True)
class AffineCodec(ABC):
    """Base of the codecs that store y in codes. A subclass gives the three methods at the end, and what they make."""

    name: str
    code_dtype: str
    formula: str
    nominal_bits: float
    reach: float
    same_layer: float
    exact: bool = False
    compressed: bool = False
    small: Mapping[str, SmallField] = field(default_factory=lambda: dict(_SMALL))

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return 8.0 * self.code_columns(width) + 16.0

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        return self.encode_layers([layer] for layer in states).joined()

    def encode_layers(self, layers: Iterable[Sequence[Tensor]]) -> EncodedLayers:
        """Elementwise work in float32 blocks that stay in cache; statistics from at most 256 evenly spaced tokens."""
        codes, scales, channel_scales, offsets, places, rows = [], [], [], [], [], []
        for index, parts in enumerate(layers):
            scale, offset = channel_statistics(*parts)
            layer_codes, token_scale, where = self._quantise(parts, scale, offset)
            codes.append([layer_codes])
            scales.append(bits_to_numpy(token_scale.bfloat16()))
            channel_scales.append(bits_to_numpy(scale.bfloat16()))
            offsets.append(bits_to_numpy(offset.bfloat16()))
            rows.append(bits_to_numpy(_rows_at(parts, where)))
            place = where.cpu().numpy().astype(np.int32)
            places.append(np.stack([np.full_like(place, index), place], axis=1))
        if not codes:
            return EncodedLayers([])
        small = {
            "token_scale": np.stack(scales),
            "channel_scale": np.stack(channel_scales),
            "channel_offset": np.stack(offsets),
            RAW_INDEX: np.concatenate(places),
            RAW_ROWS: np.concatenate(rows),
        }
        return EncodedLayers(codes, small)

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        out = output(part, out, part.small["channel_scale"].shape[1] if part.codes else 0)
        for layer, codes in enumerate(part.codes):
            self.decode_rows(codes, part.small, layer, 0, out[layer])
        if part.codes and len(part.small[RAW_INDEX]):
            where = torch.from_numpy(part.small[RAW_INDEX].astype(np.int64)).to(out.device)
            out[where[:, 0], where[:, 1]] = bits_to_tensor(part.small[RAW_ROWS], out.device)
        return out

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        device, stop, width = codes.device, start + codes.shape[0], out.shape[1]
        token_scale = bits_to_tensor(small["token_scale"][layer, start:stop], device).float()
        scale = bits_to_tensor(small["channel_scale"][layer], device).float()
        offset = bits_to_tensor(small["channel_offset"][layer], device).float()
        step = _block_rows(device, width)
        scratch = torch.empty((min(step, len(codes)), self.columns(width)), device=device)
        for low in range(0, len(codes), step):
            rows = slice(low, low + step)
            values = scratch[: len(codes[rows])]
            self.values_of(codes[rows], token_scale[rows], values)
            values = values[:, :width]
            # Codes and scales are so short that their product is exact: fused or not, only the sum is rounded.
            if codes.is_cuda:
                torch.addcmul(offset, values, scale, out=out[rows])
            else:
                out[rows].copy_(torch.addcmul(offset, values, scale, out=values))

    def _quantise(self, parts: Sequence[Tensor], scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [T, C], token scales float32 [T] exact in bf16, raw rows int64 [N] (their codes and scales are 0)."""
        tokens, width, device = sum(map(len, parts)), len(scale), scale.device
        codes = fresh((tokens, self.code_columns(width)), getattr(torch, self.code_dtype), device)
        peak, token_scale = torch.empty(tokens, device=device), torch.empty(tokens, device=device)
        step = _block_rows(device, width)
        inverse = scale.reciprocal()
        # Columns that only fill up a group stay zero: in place, 0 times any scale is 0 again.
        scratch = torch.zeros((min(step, tokens), self.columns(width)), device=device)
        start = 0
        for block in (block for part in parts if len(part) for block in part.split(step)):
            rows = slice(start, start + len(block))
            y = scratch[: len(block)]
            y[:, :width].copy_(block).sub_(offset).mul_(inverse)
            self.codes_of(y, codes[rows], token_scale[rows], peak[rows])
            start = rows.stop
        where = torch.nonzero(_raw_rows(peak, scale)).flatten()
        codes[where] = 0
        token_scale[where] = 0.0
        return codes, token_scale, where

    def columns(self, width: int) -> int:
        """Values of a row as the codec groups them: ``width``, filled up with zeros where it must be."""
        return width

    @abstractmethod
    def code_columns(self, width: int) -> int:
        """Columns of the codes of a row of ``width`` values."""

    @abstractmethod
    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor) -> None:
        """Fill codes [m, C], token_scale and peak = max |y| fp32 [m] from y fp32 [m, columns], which may be spent."""

    @abstractmethod
    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        """Fill values fp32 [m, columns], what codes [m, C] say of y."""


def channel_statistics(*parts: Tensor) -> tuple[Tensor, Tensor]:
    """Scale c and offset mu of each channel from bfloat16 [T, D]: float32 [D] each, exact in bf16.

    The rows may come in parts [t, D] that lie end to end, at least one.

    mu = median, c = 1.4826 * median |(h - mu) / t| with t = the token's own median |h - mu|, so that neither an outlier
    token nor a token of large norm moves them. Taken over S = min(T, 256) evenly spaced tokens without the non-finite
    ones, t over at most 512 evenly spaced channels. A channel whose median deviation is 0 takes its root mean square, a
    constant one the median channel's scale.
    """
    tokens, width, device = sum(map(len, parts)), parts[0].shape[1], parts[0].device
    sampled = _rows_at(parts, _spread(tokens, SAMPLED_TOKENS, device)).float()
    sampled = sampled[(sampled.abs() < _LARGEST_DEVIATION).all(dim=1)].T.contiguous()
    if sampled.shape[1] == 0:
        return torch.ones(width, device=device), torch.zeros(width, device=device)
    offset = lower_median(sampled)
    size = sampled.sub_(offset[:, None]).abs_()
    seen = size[_spread(width, SAMPLED_CHANNELS, device)].T.contiguous()
    token_size = lower_median(seen)
    token_size = torch.where(token_size > 0, token_size, seen.mean(dim=1))
    relative = size.div_(torch.where(token_size > 0, token_size, 1.0))
    scale = lower_median(relative) * _SIGMA_PER_MAD
    scale = torch.where(scale > 0, scale, relative.square().mean(dim=1).sqrt()).clamp_(max=_CEILING)
    live = scale[scale > 0]
    typical = live.median() if live.numel() else torch.ones((), device=device)
    scale = torch.where(scale > 0, scale, typical).clamp_(min=_FLOOR)
    return scale.bfloat16().float(), offset


def lower_median(rows: Tensor) -> Tensor:
    """The element floor((n-1)/2) of each sorted row of a contiguous [r, n] without NaN: what ``torch.median`` gives."""
    if rows.device.type != "cpu":
        return rows.median(dim=1).values
    # numpy partitions with vector instructions, eight times as fast as torch.
    middle = (rows.shape[1] - 1) // 2
    return torch.from_numpy(np.partition(rows.numpy(), middle, axis=1)[:, middle].copy())


def round_up(values: Tensor) -> Tensor:
    """The smallest bf16 number that is not below each non-negative float32, as float32."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _spread(count: int, most: int, device: torch.device) -> Tensor:
    """Indices of min(count, most) evenly spaced of ``count`` places."""
    taken = min(count, most)
    return (torch.arange(taken, device=device) * count) // max(taken, 1)


def _rows_at(parts: Sequence[Tensor], rows: Tensor) -> Tensor:
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


def _raw_rows(peak: Tensor, scale: Tensor) -> Tensor:
    limit = min(_CEILING, _LARGEST_DEVIATION / float(scale.max())) if scale.numel() else _CEILING
    held = peak < limit
    if not bool(held.any()):
        return ~held
    return ~(held & (peak <= RAW_PEAK * peak[held].median()))


def _block_rows(device: torch.device, width: int) -> int:
    elements = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])
    return max(1, elements // max(1, width))
