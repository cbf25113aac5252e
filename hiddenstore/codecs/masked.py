"""``q4q3``: rows that the loss mask needs as in ``q4``, others in 3 bits a value. ``q3``: all but the first ones so.

A 3-bit row is a ``q4`` row whose codes lie in -4 … 3: decoding, copying and repairing know no classes. Only the encoder
and what a container stores do. Which row is which follows from the loss mask, or from its place in the sample, so
nothing else has to say it.
Measurements: docs/design/021.

Shapes: n rows, D width, G groups of ``q4``, P pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hiddenstore.codecs.affine import Q4Codec
from hiddenstore.codecs.base import FIXED_CHUNK_TOKENS, MaskedCodec

FIRST_ROWS = 4
"""Of a sample, fine whatever the mask says: attention sinks are among them."""
ROWS_BEFORE = 16
"""Rows before a supervised one that are fine too: the last of a question lead to its answer. So is the row behind one,
where a final row is stored."""

CHECKED_ROWS = 16
"""First rows of a sample that are fine in ``q3``: they tell a layer from its neighbour, which coarse ones cannot."""

_FINE, _COARSE = 17, 13
_SIGNS_OF_FOUR_BITS = 0x88


@dataclass(frozen=True)
class Q4Q3Codec(Q4Codec, MaskedCodec):
    """Rows are fine within ``FIRST_ROWS`` of their sample, and where a token of t - 1 … t + ``ROWS_BEFORE`` is taught.

    A piece is G bytes. A fine row is the 17 G bytes of ``q4``. A coarse row has codes -4 … 3: 12 G bytes of codes, then
    G of group scales. Byte i < 12 G holds in its low six bits the codes of channels i (bits 0 – 2) and i + 16 G (bits
    3 – 5); bits 6 – 7 of the bytes j, j + 4 G and j + 8 G, lowest first, are the same six bits of channels 12 G + j and
    28 G + j. The bound is that of ``q4``; a coarse row takes 3.25 bits a value.
    """

    name: str = "q4q3"
    everywhere: str = "q4"
    follows_mask: bool = True
    chunk_pieces: int = FIXED_CHUNK_TOKENS * _FINE
    formula: str = (
        "rows as G-byte pieces end to end in the order of tokens: 17 of a fine row (a row of q4), 13 of a coarse one; "
        f"fine are the first {FIRST_ROWS} rows of a sample and those with a supervised token at most {ROWS_BEFORE} "
        "tokens ahead or one behind; coarse rows as in docs/format.md, then decoded as q4"
    )

    def fine_rows(self, mask: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        counts = np.asarray(lengths, dtype=np.int64)
        stops = np.repeat(np.cumsum(counts), counts)
        rows, starts = np.arange(len(stops)), stops - np.repeat(counts, counts)
        supervised = np.zeros(len(stops) + 1, dtype=np.int64)
        np.cumsum(mask != 0, out=supervised[1:])
        near = supervised[np.minimum(rows + ROWS_BEFORE + 1, stops)] - supervised[np.maximum(rows - 1, starts)]
        return (near > 0) | (rows - starts < FIRST_ROWS)

    def pieces(self, fine: np.ndarray) -> np.ndarray:
        return np.where(fine, _FINE, _COARSE)

    def piece_bytes(self, width: int) -> int:
        return self.code_columns(width) // _FINE

    def mean_row_bits(self, width: int, tokens: int, supervised: int, samples: int) -> float:
        return self._mean_bits(width, tokens, supervised + samples * (FIRST_ROWS + ROWS_BEFORE + 1))

    def _mean_bits(self, width: int, tokens: int, fine: int) -> float:
        saved = 8.0 * self.piece_bytes(width) * (_FINE - _COARSE)
        return self.row_bits(width) - saved * (1 - min(tokens, fine) / max(1, tokens))

    def to_pieces(self, codes: np.ndarray, fine: np.ndarray) -> np.ndarray:
        size = codes.shape[1] // _FINE
        if fine.all():
            return codes.reshape(-1, size)
        stored, first = np.empty((int(self.pieces(fine).sum()), size), dtype=np.uint8), self._first(fine)
        _windows(stored, _FINE)[first[fine]] = codes[fine]
        _windows(stored, _COARSE)[first[~fine]] = _narrow(codes[~fine], size)
        return stored

    def from_pieces(self, pieces: np.ndarray, fine: np.ndarray, out: np.ndarray) -> None:
        size = pieces.shape[1]
        if fine.all():
            out[...] = pieces.reshape(out.shape)
            return
        first = self._first(fine)
        out[fine] = _windows(pieces, _FINE)[first[fine]]
        out[~fine] = _wide(_windows(pieces, _COARSE)[first[~fine]], size)

    def _first(self, fine: np.ndarray) -> np.ndarray:
        """The first piece of each row, int64 [n]."""
        pieces = self.pieces(fine)
        return np.cumsum(pieces) - pieces


def _windows(pieces: np.ndarray, count: int) -> np.ndarray:
    """Every run of ``count`` pieces as one row, over the same memory: pieces uint8 [P, G], C-contiguous."""
    rows, size = max(0, len(pieces) - count + 1), pieces.shape[1]
    return np.lib.stride_tricks.as_strided(pieces, (rows, count * size), (size, 1))


def _narrow(codes: np.ndarray, size: int) -> np.ndarray:
    """Rows of ``q4`` uint8 [n, 17 G] with codes -4 … 3 as coarse ones [n, 13 G]."""
    nibbles = codes[:, : 16 * size]
    if ((nibbles ^ (nibbles << 1)) & _SIGNS_OF_FOUR_BITS).any():
        raise ValueError("a coarse row holds a code outside -4 … 3")
    pairs = (nibbles & 7) | ((nibbles >> 1) & 0x38)
    last = pairs[:, 12 * size :]
    high = np.concatenate([last & 3, (last >> 2) & 3, last >> 4], axis=1) << 6
    return np.concatenate([pairs[:, : 12 * size] | high, codes[:, 16 * size :]], axis=1)


def _wide(rows: np.ndarray, size: int) -> np.ndarray:
    """The inverse of ``_narrow``."""
    codes = np.empty((len(rows), 17 * size), dtype=np.uint8)
    pairs, high = codes[:, : 16 * size], rows[:, : 12 * size] >> 6
    np.bitwise_and(rows[:, : 12 * size], 63, out=pairs[:, : 12 * size])
    first, second, third = (high[:, part * 4 * size : (part + 1) * 4 * size] for part in range(3))
    pairs[:, 12 * size :] = first | (second << 2) | (third << 4)
    pairs[...] = (pairs & 7) | ((pairs & 0x38) << 1)
    # The third bit of a code is its sign, and stands for the fourth too.
    pairs |= (pairs & 0x44) << 1
    codes[:, 16 * size :] = rows[:, 12 * size :]
    return codes


Q4Q3 = Q4Q3Codec()


@dataclass(frozen=True)
class Q3Codec(Q4Q3Codec):
    """``Q4Q3Codec`` in which the first ``CHECKED_ROWS`` of a sample are fine and no others: any mask may be taught."""

    name: str = "q3"
    follows_mask: bool = False
    formula: str = (
        "rows as G-byte pieces end to end in the order of tokens: 17 of a fine row (a row of q4), 13 of a coarse one; "
        f"fine are the first {CHECKED_ROWS} rows of a sample; coarse rows as in docs/format.md, then decoded as q4"
    )

    def fine_rows(self, mask: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        counts = np.asarray(lengths, dtype=np.int64)
        return np.arange(len(mask)) - np.repeat(np.cumsum(counts) - counts, counts) < CHECKED_ROWS

    def mean_row_bits(self, width: int, tokens: int, supervised: int, samples: int) -> float:
        return self._mean_bits(width, tokens, samples * CHECKED_ROWS)


Q3 = Q3Codec()
