"""Many small samples of one unit at once: a call costs more than all that such a sample holds.

Whatever is wrong with them is said by who reads them one by one: nothing here names a sample.

Shapes: S samples, T tokens of all of them, L layers asked for, D width, R final rows of all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from hiddenstore.records import mask_fault, spans_fault, tokens_fault
from hiddenstore.segments.base import FINAL_ROWS, INPUT_IDS, LOSS_MASK, SPANS, ContainerReader, FieldGroup
from schemas import CommitRecord

MANY_BYTES = 1 << 22
"""About how many bytes of decoded states are read at once."""


@runtime_checkable
class ManyReader(ContainerReader, Protocol):
    """A container that reads many samples in few calls. ``indices`` int64 [S] ascend; samples come end to end.

    Raises what reading one by one raises, for any of them.
    """

    def plain_many(self, name: str, indices: np.ndarray) -> np.ndarray:
        """What samples have in a plain array, joined; ``spans`` int32 [n, 4], counting in ``indices`` first."""

    def decode_many(self, group: FieldGroup, indices: np.ndarray, layers: Sequence[int], out: Tensor) -> None:
        """Their states decoded into ``out`` bfloat16 [L, rows of all of them, D] on the CPU."""


@dataclass(frozen=True, eq=False)
class Samples:
    """input_ids int32 [T]; loss_mask uint8 [T]; spans int32 [n, 4], the sample first; final_rows int32 [R], counted in
    their sample; tokens and rows int64 [S + 1]: where each sample starts, and the end."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    final_rows: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray


def sample_places(record: CommitRecord) -> np.ndarray:
    """int64 [S, 5] of start, tokens, final_start, final_rows and supervised tokens of every sample."""
    rows = [(one.start, one.tokens, one.final_start, one.final_rows, one.supervised) for one in record.samples]
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def row_numbers(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of ranges end to end."""
    return np.repeat(starts - ends_of(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))


def ends_of(lengths: np.ndarray) -> np.ndarray:
    """int64 [n + 1]: where ranges of these lengths start when they lie end to end, and the end."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


def plain_of_many(unit: ManyReader, indices: np.ndarray, places: np.ndarray, vocab: int, final: bool) -> Samples | None:
    """What samples have beside their states; None where the format does not allow some of it, or
    turns do not lie in the order of their samples."""
    chosen = places[indices]
    lengths, counts = chosen[:, 1], chosen[:, 3] if final else np.zeros(len(indices), dtype=np.int64)
    rows = unit.plain_many(FINAL_ROWS, indices) if final else np.zeros(0, dtype=np.int32)
    input_ids, mask, spans = (unit.plain_many(name, indices) for name in (INPUT_IDS, LOSS_MASK, SPANS))
    samples = Samples(input_ids, mask, spans, rows, ends_of(lengths), ends_of(counts))
    shifted = rows + np.repeat(samples.tokens[:-1], counts)
    outside = (rows < 0) | (rows >= np.repeat(lengths, counts))
    if outside.any() or (np.diff(shifted) <= 0).any() or tokens_fault(input_ids, vocab):
        return None
    supervised = np.diff(ends_of(mask)[samples.tokens])
    if mask_fault(mask, int(supervised.sum())) or (supervised != chosen[:, 4]).any():
        return None
    if (np.diff(spans[:, 0]) < 0).any():
        return None
    # A turn ends in its own sample, so each is compared with its own length.
    if spans_fault(spans[:, 1:], int(lengths.max())) or (spans[:, 3] > lengths[spans[:, 0]]).any():
        return None
    return samples
