"""The Zarr container in which samples of a unit share rows: what they begin alike with stands once, with the first that
has it, and one more array tells where. Rows are shared whose codes are equal, so nothing is read otherwise than from
``hiddenstore.segments.zarr``, which has the form of everything else. Measurements: docs/design/023.

Shapes: S samples of a unit, T tokens of all of them, t of one, C columns of the codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, CodeLayout, Encoded, EncodedLayers, MaskedCodec, rows_at
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.base import AUX, INPUT_IDS, EncodedUnit, FieldGroup, Overhead, groups_of
from hiddenstore.segments.many import NotTogetherError
from hiddenstore.segments.prefixes import PrefixTree, equal_rows, key_of
from hiddenstore.segments.rows import SharedRows, ends_of
from hiddenstore.segments.zarr import ZarrContainer, ZarrUnit, write_plain, write_small, write_states
from hiddenstore.segments.zarr_arrays import ArraySpec, write_array
from schemas import CaptureSpec, CommitRecord, FileEntry

SHARED_ROWS = "shared_rows"
_ENTRY_BYTES = 8
_NOTE = (
    "(owner, n) a sample: its first n rows of the aux arrays are those of sample owner and stand there once; so these "
    "arrays have the other rows of each sample end to end, and start and tokens of the commit record do not count them"
)


class SharedZarrContainer(ZarrContainer):
    """Arrays of a unit as files of a Zarr v3 group, prefixes once."""

    name = "zarr-shared"
    shares_rows = True

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        aux, final = groups_of(capture)
        codes = [[part.cpu() for part in layer] for layer in unit.aux.codes]
        shared = equal_prefixes(replace(unit, aux=EncodedLayers(codes, unit.aux.small)), aux)
        files = write_plain(fs, path, unit, capture, shared_rows=_NOTE)
        spec = ArraySpec(shared.array.shape, "int32", ("sample", "owner_rows"))
        files += write_array(fs, path, SHARED_ROWS, spec, shared.array)
        fine, width = aux.fine_rows(unit.loss_mask, shared.lengths), capture.target.hidden_size
        standing = None if fine is None else fine[shared.stands]
        files += write_states(fs, path, aux, (_select(layer, shared.stands) for layer in codes), standing, width)
        files += write_small(fs, path, aux, _select_small(aux.codec, unit.aux.small, shared.stands))
        files += write_states(fs, path, final, unit.final.codes, None, width)
        return [*files, *write_small(fs, path, final, unit.final.small)]

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> "SharedZarrUnit":
        return SharedZarrUnit(fs, path, record, capture)

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """As the other's, and one array of two numbers a sample more."""
        plain = super().overhead(capture, samples, segments)
        return Overhead(plain.size_bytes + _ENTRY_BYTES * samples, plain.files + 2 * segments)


ZARR_SHARED = SharedZarrContainer()


class SharedZarrUnit(ZarrUnit):
    """One group in which ``shared_rows`` tells which rows of the aux layers stand in another sample."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        super().__init__(fs, path, record, capture)
        self._aux = groups_of(capture)[0]

    @cached_property
    def _shared(self) -> SharedRows:
        array = self._array(SHARED_ROWS, "int32", (len(self._record.samples), 2))
        try:
            shared = SharedRows.read(array, self._sample_places[:, 1])
        except ValueError as error:
            raise self._files.misfit(SHARED_ROWS, str(error)) from error
        if (fault := self._fault(shared)) is not None:
            raise self._files.misfit(SHARED_ROWS, fault)
        return shared

    def _fault(self, shared: SharedRows) -> str | None:
        """Rows that are shared are of the same tokens and classes, and no image is among them."""
        samples, masked = self._record.samples, self._aux.masked
        key = 2 * self._plain(INPUT_IDS).astype(np.int64)
        if masked is not None:
            key += super().fine_rows(masked)
        if (number := shared.unequal(key)) is not None:
            return f"sample {samples[number].id} has other tokens, or rows in other bits, than the rows it shares"
        for number in np.flatnonzero(shared.rows).tolist():
            images = (*samples[number].images, *samples[shared.owners[number]].images)
            if any(image.start < shared.rows[number] for image in images):
                return f"sample {samples[number].id} shares rows of an image"
        return None

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


def _select(codes: Sequence[Tensor], stands: np.ndarray) -> list[Tensor]:
    """The rows of parts [t, C] that stand with their own sample, bool [T]."""
    blocks, start = [], 0
    for block in codes:
        rows = stands[start : start + len(block)]
        start += len(block)
        blocks.append(block if rows.all() else block[torch.from_numpy(rows)])
    return blocks


def _select_small(codec: CodeLayout, small: Mapping[str, np.ndarray], stands: np.ndarray) -> dict[str, np.ndarray]:
    """The same of small arrays."""
    arrays = dict(small)
    for name, spec in codec.small.items():
        if name in arrays and "T" in spec.axes:
            arrays[name] = np.compress(stands, arrays[name], axis=spec.axes.index("T"))
    if RAW_INDEX in arrays:
        layer, row = arrays[RAW_INDEX].T
        stays, number = stands[row], np.cumsum(stands) - 1
        arrays[RAW_INDEX] = np.stack([layer[stays], number[row[stays]]], axis=1).astype(np.int32)
        arrays[RAW_ROWS] = arrays[RAW_ROWS][stays]
    return arrays


def equal_prefixes(unit: EncodedUnit, aux: FieldGroup) -> SharedRows:
    """The prefixes of samples that have the same codes, and beside them the same small arrays, in every stored layer;
    codes on the CPU. Nothing is shared where no layer is stored."""
    lengths = np.array([entry.tokens for entry in unit.samples], dtype=np.int64)
    ends, rows_of = ends_of(lengths), _Rows(unit.aux, aux)
    tree, pairs = PrefixTree(), []
    for number, entry in enumerate(unit.samples):
        start, stop = int(ends[number]), int(ends[number + 1])

        def equal(owner: int, rows: int, start: int = start) -> int:
            return rows_of.equal(start, int(ends[owner]), rows)

        key = key_of(unit.input_ids[start:stop], unit.loss_mask[start:stop], entry.images, aux.codec)
        pairs.append(tree.add(key, equal) if aux.fields else (0, 0))
    owners, rows = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return SharedRows(lengths, owners, rows)


class _Rows:
    """What the rows of a unit are stored as, in every layer."""

    def __init__(self, states: EncodedLayers, group: FieldGroup) -> None:
        self._codes = [[part.numpy() for part in layer] for layer in states.codes]
        self._ends = [ends_of([len(part) for part in layer]) for layer in self._codes]
        self._small = [
            np.moveaxis(states.small[name], spec.axes.index("T"), 0)
            for name, spec in group.codec.small.items()
            if name in states.small and "T" in spec.axes
        ]
        index, raw = states.small.get(RAW_INDEX, np.zeros((0, 2), np.int32)), states.small.get(RAW_ROWS, ())
        self._raw = {(int(row), int(layer)): values.tobytes() for (layer, row), values in zip(index, raw, strict=True)}
        self._raw_layers = range(len(states.codes)) if len(index) else range(0)

    def equal(self, one: int, other: int, rows: int) -> int:
        """How many of the ``rows`` from ``one`` and from ``other`` on are the same."""
        for array in self._small:
            rows = equal_rows(array[one : one + rows], array[other : other + rows])
        for layer in range(len(self._codes)):
            rows = equal_rows(self._run(layer, one, rows), self._run(layer, other, rows))
        for row in range(rows):
            if any(self._raw.get((one + row, k)) != self._raw.get((other + row, k)) for k in self._raw_layers):
                return row
        return rows

    def _run(self, layer: int, first: int, rows: int) -> np.ndarray:
        ends, parts = self._ends[layer], self._codes[layer]
        number, runs = int(np.searchsorted(ends, first, side="right")) - 1, [parts[0][:0]]
        while rows > 0:
            run = parts[number][first - ends[number] :][:rows]
            runs.append(run)
            first, rows, number = first + len(run), rows - len(run), number + 1
        return runs[-1] if len(runs) == 2 else np.concatenate(runs)
