"""``bf16`` and ``lossless``: the states as they are; ``rebuilt``: no array, for what comes back from other layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import FIXED_CHUNK_TOKENS, Encoded, EncodedLayers, RowPart, SmallField, output
from schemas.capture import REBUILT

_LONGEST_CHUNK = 512


@dataclass(frozen=True)
class VerbatimCodec:
    """Codes are the bf16 bits as uint16; decoding is bit-exact, NaN payloads included.

    ``bits`` a value takes, about; units are cut as if it were not compressed. ``chunk_bytes`` is the size of a chunk
    before compression, None for ``FIXED_CHUNK_TOKENS`` tokens.
    """

    name: str
    bits: float
    compressed: bool = False
    chunk_bytes: int | None = None
    exact: bool = True
    code_dtype: str = "uint16"
    formula: str = "bf16 bits"
    small: Mapping[str, SmallField] = field(default_factory=dict)
    nominal_bits: float = 16.0
    reach: float | None = None
    same_layer: float = 3e-4

    def chunk_tokens(self, width: int) -> int:
        if self.chunk_bytes is None:
            return FIXED_CHUNK_TOKENS
        # A chunk is decompressed whole for any row of it: at small widths a quarter of the bytes keeps samples cheap.
        return max(1, min(self.chunk_bytes // (2 * width), max(_LONGEST_CHUNK, self.chunk_bytes // (8 * width))))

    def code_columns(self, width: int) -> int:
        return width

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return self.bits * width

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        return self.encode_layers([layer] for layer in states).joined()

    def encode_layers(self, layers: Iterable[Sequence[Tensor]]) -> EncodedLayers:
        """The codes are the memory of the states where it is contiguous."""
        return EncodedLayers([[part.detach().contiguous().view(torch.uint16) for part in parts] for parts in layers])

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        out = output(part, out, part.codes[0].shape[1] if part.codes else 0)
        for layer, codes in enumerate(part.codes):
            out[layer].copy_(codes.view(torch.bfloat16))
        return out

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        out.copy_(codes.view(torch.bfloat16))


BF16 = VerbatimCodec(name="bf16", bits=16.0)


LOSSLESS_CHUNK_BYTES = 1 << 20

LOSSLESS = VerbatimCodec(name="lossless", bits=11.0, compressed=True, chunk_bytes=LOSSLESS_CHUNK_BYTES)


@dataclass(frozen=True)
class NothingStored:
    """0 bits a value; what is not stored is in ``capture.states``."""

    name: str = REBUILT
    exact: bool = False
    code_dtype: str = "uint8"
    compressed: bool = False
    formula: str = "not stored: the target's last blocks make it of the decoded top aux layer"
    small: Mapping[str, SmallField] = field(default_factory=dict)
    nominal_bits: float = 0.0

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def code_columns(self, width: int) -> int:
        return 0

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return 0.0


NOTHING = NothingStored()
