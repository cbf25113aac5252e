"""Many small samples of one or more units at once: a call costs more than all that such a sample holds.

Whatever is wrong with them is said by who reads them one by one: nothing here names a sample.

Shapes: S samples, T tokens of all of them, L layers asked for, D width, R final rows of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import RAW_INDEX, Codec, Encoded, SmallField
from hiddenstore.records import mask_fault, spans_fault, tokens_fault
from hiddenstore.segments.base import FINAL_ROWS, INPUT_IDS, LOSS_MASK, SPANS, Container, FieldGroup
from hiddenstore.segments.rows import ends_of
from schemas import CommitRecord

MANY_BYTES = 1 << 22
"""About how many bytes of decoded states are read at once."""
UNITS_TOGETHER = 32
"""Units that are read from at once; each stays open, with its record and its index."""


class NotTogetherError(Exception):
    """Something keeps samples from being read together; reading each by itself gives it, or says what is wrong."""


Wanted = tuple[FieldGroup, Sequence[int]]
"""A group and which of its layers."""


class Mixed(NamedTuple):
    """States of some units end to end: ``rows`` of each. In ``part``, small arrays without a T or N axis have one more
    axis, first: the unit."""

    part: Encoded
    rows: Sequence[int]


Many = tuple[dict[str, np.ndarray], list[Mixed | None]]
"""Of samples end to end: plain arrays by name, ``spans`` int32 [n, 4] counting the sample first; and the states of each
group of which layers were wanted."""


@runtime_checkable
class ManyContainer(Container, Protocol):
    """A container that reads many samples in few calls."""

    def read_many(self, parts: Sequence[tuple[Any, np.ndarray]], groups: Sequence[Wanted]) -> Many:
        """Samples of units that this container opened, each at int64 [S], ascending; ``groups``: aux and final. Of no
        final layer there are no ``final_rows``.

        Raises NotTogetherError, or what reading any of them raises.
        """


@runtime_checkable
class MixingCodec(Protocol):
    """A codec that decodes rows of several units in one go."""

    def decode_mixed(self, part: Encoded, rows: Sequence[int], out: Tensor) -> None:
        """States as ``Mixed`` has them into ``out`` bfloat16 [L, n, D] on the CPU: the bits that ``decode`` gives."""


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


def unit_arrays(fields: Mapping[str, SmallField]) -> list[str]:
    """The small arrays that all samples of a unit share."""
    return [name for name, spec in fields.items() if not {"T", "N"} & set(spec.axes)]


def mixes(codec: Codec) -> bool:
    """Whether rows of several units decode in one go."""
    return isinstance(codec, MixingCodec) or not unit_arrays(codec.small)


def joined_states(fields: Mapping[str, SmallField], parts: Sequence[Encoded]) -> Mixed:
    """Parts of the same layers, each with small arrays of a unit's own, end to end."""
    rows = [len(part.codes[0]) for part in parts]
    small = {}
    for name, spec in fields.items():
        values = [part.small[name] for part in parts]
        if name == RAW_INDEX:
            values = [index + np.array([0, at]) for index, at in zip(values, ends_of(rows), strict=False)]
        axis = next((spec.axes.index(letter) for letter in "TN" if letter in spec.axes), None)
        small[name] = np.stack(values) if axis is None else np.concatenate(values, axis)
    if len(parts) == 1:
        return Mixed(Encoded(parts[0].codes, small), rows)
    layers = zip(*(part.codes for part in parts), strict=True)
    return Mixed(Encoded([torch.from_numpy(np.concatenate(codes)) for codes in layers], small), rows)


def decode_states(codec: Codec, states: Mixed, out: Tensor) -> None:
    """Decode into ``out`` bfloat16 [L, n, D] on the CPU; NotTogetherError where the codec knows one unit alone."""
    part, rows = states
    of_unit = unit_arrays(codec.small)
    if of_unit and len(rows) > 1:
        if not isinstance(codec, MixingCodec):
            raise NotTogetherError
        codec.decode_mixed(part, rows, out)
        return
    small = {name: values[0] if name in of_unit else values for name, values in part.small.items()}
    codec.decode(Encoded(part.codes, small), out)


def samples_of(plain: Mapping[str, np.ndarray], places: np.ndarray, vocab: int) -> Samples:
    """What samples have beside their states; ``places`` as ``sample_places`` has them. Raises NotTogetherError: the
    format does not allow some of it, or turns do not lie in the order of their samples."""
    input_ids, mask, spans = (plain[name] for name in (INPUT_IDS, LOSS_MASK, SPANS))
    lengths, counts = places[:, 1], places[:, 3] * (FINAL_ROWS in plain)
    rows = plain.get(FINAL_ROWS, np.zeros(0, dtype=np.int32))
    samples = Samples(input_ids, mask, spans, rows, ends_of(lengths), ends_of(counts))
    shifted = rows + np.repeat(samples.tokens[:-1], counts)
    outside = (rows < 0) | (rows >= np.repeat(lengths, counts))
    if outside.any() or (np.diff(shifted) <= 0).any() or tokens_fault(input_ids, vocab):
        raise NotTogetherError
    supervised = np.diff(ends_of(mask)[samples.tokens])
    if mask_fault(mask, int(supervised.sum())) or (supervised != places[:, 4]).any():
        raise NotTogetherError
    if (np.diff(spans[:, 0]) < 0).any():
        raise NotTogetherError
    # A turn ends in its own sample, so each is compared with its own length.
    if spans_fault(spans[:, 1:], int(lengths.max())) or (spans[:, 3] > lengths[spans[:, 0]]).any():
        raise NotTogetherError
    return samples
