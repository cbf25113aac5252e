"""The Zarr container in which samples of a unit share rows. What two conversations have in common from their first
token on, such as a system prompt, tools, or the turns before, has the same states in every aux layer: it stands once,
in the first sample that has it, and one more array tells where.

Everything else, and every array's form, is that of ``hiddenstore.segments.zarr``. Measurements: docs/design/023.

Shapes: S samples of a unit, T tokens of all of them, t of one, N raw rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import get_codec
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, CodeLayout, Encoded, EncodedLayers, MaskedCodec, rows_at
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.base import AUX, INPUT_IDS, EncodedUnit, FieldGroup, Overhead, groups_of
from hiddenstore.segments.many import NotTogetherError
from hiddenstore.segments.rows import SharedRows, ends_of
from hiddenstore.segments.zarr import ZarrContainer, ZarrUnit, write_plain, write_states
from hiddenstore.segments.zarr_arrays import ArraySpec, write_array
from schemas import CaptureSpec, CommitRecord, FileEntry

SHARED_ROWS = "shared_rows"
BLOCK = 16
"""Tokens of the shortest prefix that is shared: a read more costs more than fewer rows."""

# Rounding in batches of other lengths moves a row by a few percent, another layer or token by most of it; where an
# expert is chosen otherwise, single rows by more.
_ALIKE, _SHARE_ALIKE = 0.1, 0.9
_ROWS_COMPARED = 64
_ENTRY_BYTES = 8


class SharedZarrContainer(ZarrContainer):
    """Arrays of a unit as files of a Zarr v3 group, prefixes once."""

    name = "zarr-shared"

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        files, shared = write_plain(fs, path, unit, capture), prefixes(unit, capture)
        spec = ArraySpec(shared.array.shape, "int32", ("sample", "owner_rows"))
        files += write_array(fs, path, SHARED_ROWS, spec, shared.array)
        for group in groups_of(capture):
            states, fine = unit.encoded(group), group.fine_rows(unit.loss_mask, shared.lengths)
            if group.name == AUX and shared.rows.any():
                states, fine = (
                    _standing(group.codec, states, shared.stands),
                    None if fine is None else fine[shared.stands],
                )
            files += write_states(fs, path, group, states, fine, capture.target.hidden_size)
        return files

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> "SharedZarrUnit":
        return SharedZarrUnit(fs, path, record, capture)

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """As the other's, and one array of two numbers a sample more."""
        plain = super().overhead(capture, samples, segments)
        return Overhead(plain.size_bytes + _ENTRY_BYTES * samples, plain.files + 2 * segments)


ZARR_SHARED = SharedZarrContainer()


class SharedZarrUnit(ZarrUnit):
    """One group in which ``shared_rows`` tells which rows of the aux layers stand in another sample."""

    @cached_property
    def _shared(self) -> SharedRows:
        array = self._array(SHARED_ROWS, "int32", (len(self._record.samples), 2))
        try:
            shared = SharedRows.read(array, self._sample_places[:, 1])
        except ValueError as error:
            raise self._files.misfit(SHARED_ROWS, str(error)) from error
        if (other := shared.unequal(self._plain(INPUT_IDS))) is not None:
            sample = self._record.samples[other].id
            raise self._files.misfit(SHARED_ROWS, f"sample {sample} has other tokens than the rows it shares")
        return shared

    def group_rows(self, group: FieldGroup) -> int:
        return int(self._shared.ends[-1]) if group.name == AUX else super().group_rows(group)

    def runs(self, group: FieldGroup, index: int) -> list[range]:
        return self._shared.runs(index) if group.name == AUX else super().runs(group, index)

    def fine_rows(self, codec: MaskedCodec) -> np.ndarray:
        return super().fine_rows(codec)[self._shared.stands]

    def encoded_many(self, group: FieldGroup, indices: np.ndarray, layers: Sequence[int]) -> list[Encoded]:
        """One part of all samples, of which each row is read once."""
        if group.name != AUX:
            return super().encoded_many(group, indices, layers)
        runs = [run for index in indices.tolist() for run in self._shared.runs(index)]
        if not runs:
            raise NotTogetherError
        numbers = _numbers(runs)
        rows = np.unique(numbers)
        near = np.split(rows, np.flatnonzero(np.diff(rows) > self.gap_rows(group)) + 1)
        read = [range(int(run[0]), int(run[-1]) + 1) for run in near]
        encoded = self.encoded_runs(group, layers, read)
        return [rows_at(group.codec.small, encoded, np.searchsorted(_numbers(read), numbers))]


def _numbers(runs: Sequence[range]) -> np.ndarray:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


def _standing(codec: CodeLayout, states: EncodedLayers, stands: np.ndarray) -> EncodedLayers:
    """States of the rows that stand with their own sample, bool [T]."""

    def select(codes: Sequence[Tensor]) -> Iterator[Tensor]:
        start = 0
        for block in codes:
            rows = stands[start : start + len(block)]
            start += len(block)
            yield block if rows.all() else block[torch.from_numpy(np.flatnonzero(rows)).to(block.device)]

    small = dict(states.small)
    for name, spec in codec.small.items():
        if "T" in spec.axes:
            small[name] = np.compress(stands, small[name], axis=spec.axes.index("T"))
    if RAW_INDEX in small:
        layer, row = small[RAW_INDEX].T
        stays, number = stands[row], np.cumsum(stands) - 1
        small[RAW_INDEX] = np.stack([layer[stays], number[row[stays]]], axis=1).astype(np.int32)
        small[RAW_ROWS] = small[RAW_ROWS][stays]
    return EncodedLayers([list(select(codes)) for codes in states.codes], small)


Limit = Callable[[int, int, int], int]
"""Given a sample, one before it and how many leading tokens they have in common: how many of these rows to share."""


def prefixes(unit: EncodedUnit, capture: CaptureSpec) -> SharedRows:
    """The prefixes that samples of a unit share. One ends before an image, which equal tokens may stand for, where one
    of both samples has a row in fewer bits than the other, and is none where the states differ by more than rounding
    explains."""
    (aux, _), tokens = groups_of(capture), [entry.tokens for entry in unit.samples]
    ends = ends_of(tokens)
    fine, states = aux.fine_rows(unit.loss_mask, tokens), _Decoded(unit, capture)

    def limit(sample: int, owner: int, rows: int) -> int:
        rows = min([rows, *(image.start for number in (sample, owner) for image in unit.samples[number].images)])
        if fine is not None:
            rows = _equal(fine[ends[sample] :], fine[ends[owner] :], rows)
        is_alike = rows >= BLOCK and states.alike(int(ends[sample]), int(ends[owner]), rows)
        return rows if is_alike else 0

    return shared_rows([unit.input_ids[start:stop] for start, stop in pairwise(ends.tolist())], limit)


class _Decoded:
    """What rows of a unit decode to, a few of them at a time."""

    def __init__(self, unit: EncodedUnit, capture: CaptureSpec) -> None:
        self._unit, self._codec = unit, get_codec(capture.codecs.aux)
        self._joined: Encoded | None = None

    def alike(self, sample: int, owner: int, rows: int) -> bool:
        """Whether rows from ``sample`` and from ``owner`` on are the same states, by some that are spread over them."""
        if self._joined is None:
            joined = self._unit.aux.joined()
            self._joined = Encoded([codes.cpu() for codes in joined.codes], joined.small)
        if not self._joined.codes:
            return True
        spread = np.unique(np.linspace(0, rows - 1, min(rows, _ROWS_COMPARED)).astype(np.int64))
        places = np.concatenate([sample + spread, owner + spread])
        pair = rows_at(self._codec.small, self._joined, places)
        one, other = self._codec.decode(pair).float().tensor_split(2, dim=1)
        near = torch.linalg.vector_norm(one - other, dim=2) <= _ALIKE * torch.linalg.vector_norm(other, dim=2)
        return bool((near.float().mean(dim=1) >= _SHARE_ALIKE).all())


def shared_rows(tokens: Sequence[np.ndarray], limit: Limit) -> SharedRows:
    """The longest prefix that each sample int32 [t] has in common with one before it, of equals with the first of them;
    what ``limit`` leaves of it, where that is ``BLOCK`` rows or more."""
    nodes: dict[tuple[int, bytes], int] = {}
    firsts: list[int] = []
    owners, rows = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    for sample, ids in enumerate(tokens):
        node, depth, owner = -1, 0, 0
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            # A block is known by the blocks before it, so no two prefixes are taken for one.
            node = nodes.setdefault((node, ids[start : start + BLOCK].tobytes()), len(firsts))
            if node == len(firsts):
                firsts.append(sample)
            elif firsts[node] != sample:
                depth, owner = start + BLOCK, firsts[node]
        if depth:
            depth = limit(sample, owner, depth + _equal(ids[depth:], tokens[owner][depth:]))
        if depth >= BLOCK:
            owners[sample], rows[sample] = owner, depth
    return SharedRows(np.array([len(ids) for ids in tokens], dtype=np.int64), owners, rows)


def _equal(one: np.ndarray, other: np.ndarray, most: int | None = None) -> int:
    """How many of the first values of two arrays are equal, before the first that is not."""
    size = min(len(one), len(other)) if most is None else most
    places = np.flatnonzero(one[:size] != other[:size])
    return int(places[0]) if len(places) else size
