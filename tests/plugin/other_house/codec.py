"""``fp8``: E4M3 with one bf16 scale a token; 8.0 bits a value.

Shapes: L layers, T tokens of the unit, n tokens of a part of it, D width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import (
    FIXED_CHUNK_TOKENS,
    Encoded,
    EncodedLayers,
    RowPart,
    SmallField,
    bits_to_numpy,
    bits_to_tensor,
    output,
)

LARGEST = 448.0


@dataclass(frozen=True)
class Fp8Codec:
    """h = bf16(code * token_scale); rows of zeros have scale 1."""

    name: str = "fp8"
    exact: bool = False
    code_dtype: str = "uint8"
    compressed: bool = False
    formula: str = "bf16(E4M3 code * token_scale) in float32"
    small: Mapping[str, SmallField] = field(
        default_factory=lambda: {"token_scale": SmallField("uint16", ("L", "T"), bf16=True)}
    )
    nominal_bits: float = 8.0
    # Values up to half a step beyond the largest code round to it.
    reach: float = LARGEST * (1 + 2**-5)
    same_layer: float = 4e-3

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def code_columns(self, width: int) -> int:
        return width

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return 8.0 * width + 16.0

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        return self.encode_layers([layer] for layer in states).joined()

    def encode_layers(self, layers: Iterable[Sequence[Tensor]]) -> EncodedLayers:
        codes, scales = [], []
        for parts in layers:
            values = torch.cat(list(parts)).float()
            peak = values.abs().amax(dim=1)
            scale = torch.where(peak > 0, peak / LARGEST, 1.0).bfloat16()
            scaled = (values / scale.float()[:, None]).clamp(-LARGEST, LARGEST)
            codes.append([scaled.to(torch.float8_e4m3fn).view(torch.uint8)])
            scales.append(bits_to_numpy(scale))
        return EncodedLayers(codes, {"token_scale": np.stack(scales)} if scales else {})

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        out = output(part, out, part.codes[0].shape[1] if part.codes else 0)
        for layer, codes in enumerate(part.codes):
            self.decode_rows(codes, part.small, layer, 0, out[layer])
        return out

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        scale = bits_to_tensor(small["token_scale"][layer, start : start + len(codes)], codes.device).float()
        out.copy_(codes.view(torch.float8_e4m3fn).float() * scale[:, None])


FP8 = Fp8Codec()
