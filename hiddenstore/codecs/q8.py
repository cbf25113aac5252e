"""``q8``: int8 codes and one bf16 scale per token, over channel scales and offsets (``affine``); 8.02 bits a value.

    h = bf16( (q * s_t) * c_d + mu_d )          every operation rounded to float32

Per element |error| <= s_t * c_d / 2 + 1 bf16 ulp of the larger of the two values; rows kept raw are exact.

Shapes: m rows of a block, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenstore.codecs.affine import AffineCodec, round_up

_LARGEST_CODE = 127.0
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class Q8Codec(AffineCodec):
    """See the module for formula and bound."""

    name: str = "q8"
    code_dtype: str = "int8"
    formula: str = "bf16((code * token_scale) * channel_scale + channel_offset) in float32; rows in raw_index verbatim"
    nominal_bits: float = 8.5
    # Half a step beyond the last code is within the bound.
    reach: float = _LARGEST_CODE + 0.5
    same_layer: float = 3e-4

    def code_columns(self, width: int) -> int:
        return width

    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor) -> None:
        torch.maximum(y.amax(dim=1), y.amin(dim=1).neg_(), out=peak)
        token_scale.copy_(round_up(peak / _LARGEST_CODE).clamp_(min=_SMALLEST_SCALE))
        codes.copy_(y.mul_(token_scale.reciprocal()[:, None]).round_())

    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        if codes.is_cuda:
            torch.mul(codes, token_scale[:, None], out=values)
        else:
            # A CPU converts mixed operands through a temporary.
            values.copy_(codes).mul_(token_scale[:, None])


Q8 = Q8Codec()
