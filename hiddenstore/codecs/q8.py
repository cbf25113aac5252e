"""``q8``: int8 codes, one bf16 scale per token, one bf16 scale and offset per channel; odd rows kept raw.

    h = bf16( (q * s_t) * c_d + mu_d )          every operation rounded to float32

Per element |error| <= s_t * c_d / 2 + 1 bf16 ulp of the larger of the two values. A row is kept raw, bit-exact, when
it has non-finite values, when rms or max |(h - mu) / c| is far above the unit's median (attention sinks), or when its
numbers could overflow. Source: the codec study, section 6; the limit on max |y| is ours: a row of ordinary rms with one
huge element would otherwise spend all its codes on that element.

Shapes: L layers, T tokens of the unit, n tokens of a part, m tokens of a block, D width, S sampled tokens, N raw rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import (
    FIXED_CHUNK_TOKENS,
    RAW_INDEX,
    RAW_ROWS,
    Encoded,
    SmallField,
    bits_to_numpy,
    bits_to_tensor,
    output,
)

SAMPLED_TOKENS = 256
RAW_RMS = 6.0
RAW_PEAK = 4.0

_SIGMA_PER_MAD = 1.4826
_FLOOR = 1e-12
_CEILING = 1e30
_SMALLEST_SCALE = 2.0**-126
# |q s c| <= 2 max|y| c, so rows below this limit decode below 2**127 and stay finite.
_LARGEST_DEVIATION = 2.0**125
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 26}

_SMALL = {
    "token_scale": SmallField("uint16", ("L", "T"), bf16=True),
    "channel_scale": SmallField("uint16", ("L", "D"), bf16=True),
    "channel_offset": SmallField("uint16", ("L", "D"), bf16=True),
    RAW_INDEX: SmallField("int32", ("N", "2")),
    RAW_ROWS: SmallField("uint16", ("N", "D"), bf16=True),
}


@dataclass(frozen=True)
class Q8Codec:
    """8.02 bits a value; see the module for formula and bound."""

    name: str = "q8"
    bits: float = 8.02
    exact: bool = False
    code_dtype: str = "int8"
    compressed: bool = False
    formula: str = "bf16((code * token_scale) * channel_scale + channel_offset) in float32; rows in raw_index verbatim"
    small: Mapping[str, SmallField] = field(default_factory=lambda: dict(_SMALL))

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        """Elementwise work in float32 blocks that stay in cache; statistics from at most 256 evenly spaced tokens."""
        codes, scales, channel_scales, offsets, places, rows = [], [], [], [], [], []
        for index, layer in enumerate(states):
            scale, offset = channel_statistics(layer)
            layer_codes, token_scale, where = _quantise(layer, scale, offset)
            codes.append(layer_codes)
            scales.append(bits_to_numpy(token_scale.bfloat16()))
            channel_scales.append(bits_to_numpy(scale.bfloat16()))
            offsets.append(bits_to_numpy(offset.bfloat16()))
            rows.append(bits_to_numpy(layer[where]))
            place = where.cpu().numpy().astype(np.int32)
            places.append(np.stack([np.full_like(place, index), place], axis=1))
        if not codes:
            return Encoded([])
        small = {
            "token_scale": np.stack(scales),
            "channel_scale": np.stack(channel_scales),
            "channel_offset": np.stack(offsets),
            RAW_INDEX: np.concatenate(places),
            RAW_ROWS: np.concatenate(rows),
        }
        return Encoded(codes, small)

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        out = output(part, out)
        for layer, codes in enumerate(part.codes):
            self.decode_rows(codes, part.small, layer, 0, out[layer])
        if part.codes and len(part.small[RAW_INDEX]):
            where = torch.from_numpy(part.small[RAW_INDEX].astype(np.int64)).to(out.device)
            out[where[:, 0], where[:, 1]] = bits_to_tensor(part.small[RAW_ROWS], out.device)
        return out

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        device, stop = codes.device, start + codes.shape[0]
        token_scale = bits_to_tensor(small["token_scale"][layer, start:stop], device).float()
        scale = bits_to_tensor(small["channel_scale"][layer], device).float()
        offset = bits_to_tensor(small["channel_offset"][layer], device).float()
        step = _block_rows(codes)
        scratch = torch.empty((min(step, len(codes)), codes.shape[1]), device=device)
        for low in range(0, len(codes), step):
            rows = slice(low, low + step)
            values = scratch[: len(codes[rows])]
            # Separate operations on purpose: a fused multiply-add would round differently on another device.
            values.copy_(codes[rows]).mul_(token_scale[rows, None]).mul_(scale).add_(offset)
            out[rows].copy_(values)


def channel_statistics(layer: Tensor) -> tuple[Tensor, Tensor]:
    """Scale c and offset mu of each channel from bfloat16 [T, D]: float32 [D] each, exact in bf16.

    mu = median, c = 1.4826 * median |(h - mu) / t| with t = the token's own median |h - mu|, so that neither an outlier
    token nor a token of large norm moves them. Taken over S = min(T, 256) evenly spaced tokens without the non-finite
    ones. A channel whose median deviation is 0 takes its root mean square, a constant one the median channel's scale.
    """
    tokens, width = layer.shape
    count = min(tokens, SAMPLED_TOKENS)
    picked = (torch.arange(count, device=layer.device) * tokens) // max(count, 1)
    sampled = layer[picked].float()
    sampled = sampled[(sampled.abs() < _LARGEST_DEVIATION).all(dim=1)]
    if sampled.shape[0] == 0:
        return torch.ones(width, device=layer.device), torch.zeros(width, device=layer.device)
    offset = sampled.median(dim=0).values
    deviation = sampled.sub_(offset)
    size = deviation.abs()
    token_size = size.median(dim=1).values
    token_size = torch.where(token_size > 0, token_size, size.mean(dim=1))
    relative = size.div_(torch.where(token_size > 0, token_size, 1.0)[:, None])
    scale = relative.median(dim=0).values * _SIGMA_PER_MAD
    scale = torch.where(scale > 0, scale, relative.square().mean(dim=0).sqrt()).clamp_(max=_CEILING)
    live = scale[scale > 0]
    typical = live.median() if live.numel() else torch.ones((), device=layer.device)
    scale = torch.where(scale > 0, scale, typical).clamp_(min=_FLOOR)
    return scale.bfloat16().float(), offset


def _quantise(layer: Tensor, scale: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes int8 [T, D], token scales float32 [T] exact in bf16, raw rows int64 [N] (their codes and scales are 0)."""
    tokens, width = layer.shape
    codes = torch.empty(layer.shape, dtype=torch.int8, device=layer.device)
    peak = torch.empty(tokens, device=layer.device)
    rms = torch.empty(tokens, device=layer.device)
    token_scale = torch.empty(tokens, device=layer.device)
    step = _block_rows(layer)
    inverse = scale.reciprocal()
    scratch = torch.empty((2, min(step, tokens), width), device=layer.device)
    for start in range(0, tokens, step):
        rows = slice(start, start + step)
        y, size = scratch[:, : min(step, tokens - start)]
        y.copy_(layer[rows]).sub_(offset).mul_(inverse)
        torch.amax(torch.abs(y, out=size), dim=1, out=peak[rows])
        torch.linalg.vector_norm(y, dim=1, out=rms[rows])
        token_scale[rows] = _round_up(peak[rows] / 127.0).clamp_(min=_SMALLEST_SCALE)
        codes[rows] = y.mul_(token_scale[rows].reciprocal()[:, None]).round_()
    rms /= width**0.5
    where = torch.nonzero(_raw_rows(peak, rms, scale)).flatten()
    codes[where] = 0
    token_scale[where] = 0.0
    return codes, token_scale, where


def _raw_rows(peak: Tensor, rms: Tensor, scale: Tensor) -> Tensor:
    limit = min(_CEILING, _LARGEST_DEVIATION / float(scale.max())) if scale.numel() else _CEILING
    held = peak < limit
    if not bool(held.any()):
        return ~held
    return ~(held & (rms <= RAW_RMS * rms[held].median()) & (peak <= RAW_PEAK * peak[held].median()))


def _round_up(values: Tensor) -> Tensor:
    """The smallest bf16 number that is not below each non-negative float32, as float32."""
    return ((values.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _block_rows(states: Tensor) -> int:
    elements = _BLOCK_ELEMENTS.get(states.device.type, _BLOCK_ELEMENTS["cuda"])
    return max(1, elements // max(1, states.shape[1]))


Q8 = Q8Codec()
