"""``q4``: packed int4 codes, an E4M3 scale per 32 channels, over the channel scales of ``affine``; 4.26 bits a value.

    h = bf16( (q * (g * s_t)) * c_d + mu_d )          every operation rounded to float32

With G = ceil(D / 32), a row of the code array is 16 G bytes of codes, then G bytes of group scales. Channel d is in
group d mod G; its code q, -8 … 7 in two's complement, is the low half of byte d if d < 16 G, else the high half of byte
d - 16 G. Channels D … 32 G - 1 only fill the groups up. Groups of strided channels are as good as neighbours once the
channels are scaled, and let whole vectors share a scale.

g is signed so that the side of the group that reaches further from zero takes code -8: that uses all 16 codes. Its size
is rounded up to E4M3, so that per element |error| <= |g| * s_t * c_d / 2 + 1 bf16 ulp of the larger of the two values;
rows kept raw are exact. Relative error of a Gaussian 8.6 %; with codes -7 … 7 and g to nearest it is 9.7 %.

Shapes: m rows of a block, D width, G groups.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from hiddenstore.codecs.affine import AffineCodec, round_up
from hiddenstore.codecs.base import RowPart

GROUP = 32

# Values up to half a step beyond the last code are within the bound.
_FAR_SIDE, _NEAR_SIDE = 8.5, 7.5
_E4M3_LARGEST, _E4M3_SMALLEST_NORMAL = 448.0, 2.0**-6
_SMALLEST_TOKEN_SCALE = 2.0**-100
# float32 bits of a normal E4M3 number, shifted to its 4 + 3 bits, less the difference of the exponent biases.
_E4M3_SHIFT, _E4M3_BIAS = 20, (127 - 7) << 3


@dataclass(frozen=True)
class Q4Codec(AffineCodec):
    """See the module for formula, layout of a row and bound."""

    name: str = "q4"
    code_dtype: str = "uint8"
    formula: str = (
        "bf16((code * (group_scale * token_scale)) * channel_scale + channel_offset) in float32; rows in raw_index "
        "verbatim; with G group scales (E4M3 bits) in a row, channel d is in group d mod G, its signed 4-bit code the "
        "low half of byte d if d < 16 G, else the high half of byte d - 16 G"
    )
    nominal_bits: float = 4.5
    reach: float = _FAR_SIDE * _E4M3_LARGEST
    same_layer: float = 4e-3

    def columns(self, width: int) -> int:
        return GROUP * _groups(width)

    def code_columns(self, width: int) -> int:
        return (GROUP // 2 + 1) * _groups(width)

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        groups = _groups(width)
        return RowPart("codes", "|u1", GROUP // 2 * groups), RowPart("group_scale", "|u1", groups)

    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor) -> None:
        rows, columns = y.shape
        half = columns // 2
        grouped = y.view(rows, GROUP, columns // GROUP)
        above, below = grouped.amax(dim=1), grouped.amin(dim=1).neg_()
        far, near = torch.maximum(above, below), torch.minimum(above, below)
        torch.amax(far, dim=1, out=peak)
        wanted = torch.maximum(far / _FAR_SIDE, near / _NEAR_SIDE)
        token_scale.copy_(round_up(wanted.amax(dim=1) / _E4M3_LARGEST).clamp_(min=_SMALLEST_TOKEN_SCALE))
        group_scale, bits = _round_up_e4m3(wanted.div_(token_scale[:, None]), above > below)
        codes[:, half:] = bits
        grouped.mul_(group_scale.mul_(token_scale[:, None]).reciprocal_()[:, None])
        packed = y.round_().clamp_(-8.0, 7.0).to(torch.int8)
        low, high = packed[:, :half], packed[:, half:]
        torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=codes[:, :half].view(torch.int8))

    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        rows, columns = values.shape
        half = columns // 2
        packed = codes[:, :half].view(torch.int8)
        values[:, :half].copy_((packed << 4) >> 4)
        values[:, half:].copy_(packed >> 4)
        group_scale = _e4m3_values(codes.device)[codes[:, half:].int()].mul_(token_scale[:, None])
        values.view(rows, GROUP, columns // GROUP).mul_(group_scale[:, None])


def _groups(width: int) -> int:
    return -(-width // GROUP)


def _round_up_e4m3(sizes: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes fp32 in 0 … 448 as normal E4M3 numbers not below them, with a sign: their values and bits uint8."""
    rounded = sizes.clamp_(_E4M3_SMALLEST_NORMAL, _E4M3_LARGEST).view(torch.int32)
    rounded = (rounded + ((1 << _E4M3_SHIFT) - 1)) >> _E4M3_SHIFT
    values = (rounded << _E4M3_SHIFT).view(torch.float32)
    bits = rounded.sub_(_E4M3_BIAS).to(torch.uint8)
    return torch.where(negative, -values, values), torch.where(negative, bits | 0x80, bits)


@cache
def _e4m3_values(device: torch.device) -> Tensor:
    """fp32 [256]: the number of each E4M3 bit pattern."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


Q4 = Q4Codec()
