"""The Zarr container: a Zarr v3 group with one code array per captured field and the small arrays beside them.

Samples lie end to end along the token axis. The reader believes the commit record and nothing else: every file must
have the size it names, metadata and small arrays its sha256, chunks of large arrays the crc32c that their metadata
names, so that even a file in another's place is seen. Reads touch only the rows and layers asked for.

Shapes: L layers asked for, T tokens of the unit, t rows of one sample, D width, N raw rows.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import (
    RAW_INDEX,
    RAW_ROWS,
    CodeLayout,
    Encoded,
    MaskedCodec,
    joined_small,
    rows_at,
    select_small,
)
from hiddenstore.codecs.memory import fresh
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.base import (
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    FieldGroup,
    Overhead,
    groups_of,
    small_fault,
    unit_attributes,
)
from hiddenstore.segments.files import SegmentFiles
from hiddenstore.segments.many import (
    MANY_BYTES,
    Many,
    Mixed,
    NotTogetherError,
    Wanted,
    joined_states,
    sample_places,
)
from hiddenstore.segments.rows import ends_of, row_numbers
from hiddenstore.segments.zarr_arrays import (
    METADATA,
    ArraySpec,
    ShardReader,
    parse_metadata,
    read_small,
    write_array,
    write_group,
    write_sharded,
)
from hiddenstore.threads import Lock
from schemas import FINAL, CaptureSpec, CommitRecord, FileEntry, SampleEntry

_PLAIN_ARRAYS = 4
_RAW_CHUNK_BYTES = 1 << 14
# Codes between two samples are read and dropped rather than jumped: a call costs more than this many bytes.
_GAP_BYTES = 1 << 16
_AXES = {"L": "layer", "T": "token", "D": "channel", "N": "raw_row", "2": "layer_and_row"}


class ZarrContainer:
    """Arrays of a unit as files of a Zarr v3 group."""

    name = "zarr"
    samples_apart = False
    shares_rows = False

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        files = write_plain(fs, path, unit, capture)
        for group in groups_of(capture):
            fine = group.fine_rows(unit.loss_mask, [entry.tokens for entry in unit.samples])
            states = unit.encoded(group)
            files += write_states(fs, path, group, states.codes, fine, capture.target.hidden_size)
            files += write_small(fs, path, group, states.small)
        return files

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> "ZarrUnit":
        return ZarrUnit(fs, path, record, capture)

    def token_runs(self, fs: Filesystem, path: str) -> list[int]:
        metadata = f"{path}/{INPUT_IDS}/{METADATA}"
        return list(parse_metadata(fs.read(metadata), f"{fs.root}/{metadata}").shape[:1])

    def read_many(self, parts: "Sequence[tuple[ZarrUnit, np.ndarray]]", groups: Sequence[Wanted]) -> Many:
        names = [INPUT_IDS, LOSS_MASK, SPANS, *([FINAL_ROWS] if groups[1][1] else [])]
        arrays = {name: [unit.plain_many(name, indices) for unit, indices in parts] for name in names}
        for spans, first in zip(arrays[SPANS], ends_of([len(indices) for _, indices in parts]), strict=False):
            spans[:, 0] += first
        plain = {name: np.concatenate(values) for name, values in arrays.items()}
        states: list[Mixed | None] = []
        for group, layers in groups:
            units = [unit.encoded_many(group, indices, layers) for unit, indices in parts] if layers else []
            runs = [run for of_unit in units for run in of_unit]
            states.append(joined_states(group.codec.small, runs) if layers else None)
        return plain, states

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """Each array is a file of numbers and one of metadata, whose bytes do not count beside them."""
        groups = [group for group in groups_of(capture) if group.fields]
        arrays = _PLAIN_ARRAYS + sum(len(group.fields) + len(group.codec.small) for group in groups)
        return Overhead(0, segments * (2 * arrays + 1))


ZARR = ZarrContainer()


def write_plain(fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec, **notes: object) -> list[FileEntry]:
    """The group of a unit, with ``notes`` among its attributes, and its arrays beside the states."""
    files = [write_group(fs, path, unit_attributes(unit.unit, capture) | notes)]
    plain = [
        (INPUT_IDS, ("token",), unit.input_ids),
        (LOSS_MASK, ("token",), unit.loss_mask),
        (SPANS, ("span", "sample_role_start_end"), unit.spans),
    ]
    if capture.final != "none":
        plain.append((FINAL_ROWS, ("final_row",), unit.final_rows))
    for name, dimensions, values in plain:
        files += write_array(fs, path, name, ArraySpec(values.shape, str(values.dtype), dimensions), values)
    return files


def write_states(
    fs: Filesystem,
    path: str,
    group: FieldGroup,
    layers: Iterable[Sequence[Tensor]],
    fine: np.ndarray | None,
    width: int,
) -> Iterator[FileEntry]:
    """The code arrays of a group, each of parts [t, C] end to end; whether rows are fine, bool [T], where its codec
    has classes."""
    for name, codes in zip(group.fields, layers, strict=True):
        shape = group.stored_shape(sum(map(len, codes)), fine, width)
        spec = _code_spec(group, shape, name, width)
        yield from write_sharded(fs, path, name, spec, group.stored((rows.cpu().numpy() for rows in codes), fine))


def write_small(fs: Filesystem, path: str, group: FieldGroup, small: Mapping[str, np.ndarray]) -> Iterator[FileEntry]:
    """The small arrays of a group."""
    for name, values in small.items():
        spec = _small_spec(group.codec, name, values.shape)
        yield from write_array(fs, path, f"{group.name}_{name}", spec, values)


class ZarrUnit:
    """One group. Keeps the small arrays and shard indexes it read: about (4 L + 11) bytes a token (9 more of rows by
    the mask), 4 D a layer."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self._fs, self._path, self._record = fs, path, record
        self._width = capture.target.hidden_size
        self._sample_places = sample_places(record)
        self._files = SegmentFiles(fs, path, record)
        self._arrays: dict[str, np.ndarray] = {}
        self._shards: dict[str, ShardReader] = {}
        self._small: dict[str, _SmallArrays] = {}
        self._fine: tuple[np.ndarray, np.ndarray] | None = None
        # Threads that meet at an unopened array would all open it.
        self._opening = Lock()

    def plain(self, names: Sequence[str], index: int) -> list[np.ndarray]:
        entry = self._record.samples[index]
        return [self._of_sample(name, index, entry) for name in names]

    def _of_sample(self, name: str, index: int, entry: SampleEntry) -> np.ndarray:
        if name == SPANS:
            spans = self._spans()
            return spans[spans[:, 0] == index, 1:].copy()
        if name == FINAL_ROWS:
            return self._plain(name)[entry.final_start : entry.final_start + entry.final_rows].copy()
        return self._plain(name)[entry.start : entry.start + entry.tokens].copy()

    def plain_many(self, name: str, indices: np.ndarray) -> np.ndarray:
        if name == SPANS:
            spans = self._spans()
            number = np.full(len(self._record.samples), -1, dtype=np.int32)
            number[indices] = np.arange(len(indices))
            chosen = spans[number[spans[:, 0]] >= 0]
            chosen[:, 0] = number[chosen[:, 0]]
            return chosen
        return self._plain(name)[row_numbers(*self._places(name == FINAL_ROWS, indices))]

    def _plain(self, name: str) -> np.ndarray:
        rows = self._record.final_rows if name == FINAL_ROWS else self._record.tokens
        return self._array(name, "uint8" if name == LOSS_MASK else "int32", (rows,))

    def group_rows(self, group: FieldGroup) -> int:
        """Rows of the arrays of a group."""
        return self._record.final_rows if group.name == FINAL else self._record.tokens

    def runs(self, group: FieldGroup, index: int) -> list[range]:
        """Where the rows of a sample stand in the arrays of a group, in their order."""
        return [group.rows_of(self._record.samples[index])]

    def _spans(self) -> np.ndarray:
        spans = self._array(SPANS, "int32", (None, 4))
        if len(spans) and not 0 <= spans[:, 0].min() <= spans[:, 0].max() < len(self._record.samples):
            raise self._files.misfit(SPANS, f"a turn is of no sample of {len(self._record.samples)}")
        return spans

    def _places(self, final: bool, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First row and rows, int64 [S] each, of some samples in the arrays of a group."""
        start, tokens, final_start, final_rows, _ = self._sample_places[indices].T
        return (final_start, final_rows) if final else (start, tokens)

    def encoded(
        self, group: FieldGroup, index: int, layers: Sequence[int], out: Collection[np.ndarray] | None = None
    ) -> Encoded:
        return self.encoded_runs(group, layers, self.runs(group, index), out)

    def decode(self, group: FieldGroup, index: int, layers: Sequence[int], out: Tensor) -> None:
        runs = self.runs(group, index)
        # What is more than a copy costs less for all rows at once than for each run of them.
        if layers and (group.masked is not None or (group.codec.small and len(runs) > 1)):
            group.states.decode(self.encoded_runs(group, layers, runs), out)
            return
        start = 0
        for run in runs:
            self._decode_rows(group, run, layers, out[:, start : start + len(run)])
            start += len(run)

    def encoded_many(self, group: FieldGroup, indices: np.ndarray, layers: Sequence[int]) -> list[Encoded]:
        """A part for each run of samples that lie near each other."""
        starts, lengths = self._places(group.name == FINAL, indices)
        if (starts[1:] < (starts + lengths)[:-1]).any():
            raise NotTogetherError
        codec = group.codec
        gap_rows, most = self.gap_rows(group), max(1, MANY_BYTES // (2 * self._width * len(layers)))
        cuts = np.flatnonzero((starts[1:] - (starts + lengths)[:-1] > gap_rows) | (np.diff(starts // most) > 0)) + 1
        parts = []
        for run, run_lengths in zip(np.split(starts, cuts), np.split(lengths, cuts), strict=True):
            rows = range(int(run[0]), int(run[-1] + run_lengths[-1]))
            part = self.encoded_runs(group, layers, [rows])
            picked = row_numbers(run - rows.start, run_lengths)
            parts.append(part if len(picked) == len(rows) else rows_at(codec.small, part, picked))
        return parts

    def gap_rows(self, group: FieldGroup) -> int:
        """The most rows between two that are read in one go."""
        return _GAP_BYTES // group.codec.code_columns(self._width)

    def encoded_runs(
        self, group: FieldGroup, layers: Sequence[int], runs: Sequence[range], out: Collection[np.ndarray] | None = None
    ) -> Encoded:
        """Rows of some runs, end to end; raw rows are counted in all of them."""
        codec, ends = group.codec, list(accumulate(map(len, runs), initial=0))
        if out is None:
            shape, dtype = (ends[-1], codec.code_columns(self._width)), getattr(torch, codec.code_dtype)
            out = [fresh(shape, dtype).numpy() for _ in layers]
        for run, start, stop in zip(runs, ends, ends[1:], strict=False):
            self._read_codes(group, layers, run, [codes[start:stop] for codes in out])
        parts = [self._small_of(group, layers, run) for run in runs] if codec.small and layers else [{}]
        return Encoded([torch.from_numpy(codes) for codes in out], joined_small(codec.small, parts, ends))

    def _decode_rows(self, group: FieldGroup, rows: range, layers: Sequence[int], out: Tensor) -> None:
        if not rows or not layers:
            return
        if not group.codec.small:
            for target, layer in zip(out.view(torch.uint16).numpy(), layers, strict=True):
                self._codes(group, layer).read_rows(rows.start, rows.stop, target)
            return
        small = self._small_of(group, layers, rows)
        for slot, layer in enumerate(layers):
            for start, block in self._codes(group, layer).blocks(rows.start, rows.stop):
                target = out[slot, start : start + len(block)]
                group.states.decode_rows(torch.from_numpy(block), small, slot, start, target)
        if RAW_INDEX in small and len(small[RAW_INDEX]):
            raw = torch.from_numpy(small[RAW_INDEX].astype(np.int64))
            out[raw[:, 0], raw[:, 1]] = torch.from_numpy(small[RAW_ROWS]).view(torch.bfloat16)

    def _read_codes(self, group: FieldGroup, layers: Sequence[int], rows: range, codes: Collection[np.ndarray]) -> None:
        """The codes of some rows into an array [n, C] a layer."""
        for target, layer in zip(codes, layers, strict=True):
            if group.masked is None:
                self._codes(group, layer).read_rows(rows.start, rows.stop, target)
                continue
            fine, ends = self._classes(group.masked)
            start, stop = int(ends[rows.start]), int(ends[rows.stop])
            pieces = np.empty((stop - start, group.masked.piece_bytes(self._width)), dtype=np.uint8)
            self._codes(group, layer).read_rows(start, stop, pieces)
            group.masked.from_pieces(pieces, fine[rows.start : rows.stop], target)

    def _classes(self, codec: MaskedCodec) -> tuple[np.ndarray, np.ndarray]:
        """The class of every row of the unit bool [T], and the pieces before each int64 [T + 1]; made once."""
        if self._fine is None:
            fine = self.fine_rows(codec)
            self._fine = fine, ends_of(codec.pieces(fine))
        return self._fine

    def fine_rows(self, codec: MaskedCodec) -> np.ndarray:
        """The class of every row in the arrays of the aux layers, bool."""
        return codec.fine_rows(self._plain(LOSS_MASK), self._sample_places[:, 1])

    def _small_of(self, group: FieldGroup, layers: Sequence[int], rows: range) -> dict[str, np.ndarray]:
        """The small arrays of some layers and rows; raw rows are counted inside ``rows``."""
        unit, unit_rows = self._small_arrays(group), self.group_rows(group)
        small = select_small(group.codec.small, unit.arrays, layers, rows)
        if unit.raw_rows is None:
            return small
        borders = [layer * unit_rows + row for layer in layers for row in (rows.start, rows.stop)]
        spans = unit.raw_positions.searchsorted(borders).tolist()
        starts, stops = spans[::2], spans[1::2]
        count = sum(stops) - sum(starts)
        index = np.empty((count, 2), dtype=np.int32)
        raw = np.empty((count, self._width), dtype=np.uint16)
        first = 0
        for slot, (layer, start, stop) in enumerate(zip(layers, starts, stops, strict=True)):
            if start == stop:
                continue
            last = first + stop - start
            unit.raw_rows.read_rows(start, stop, raw[first:last])
            index[first:last, 0] = slot
            index[first:last, 1] = unit.raw_positions[start:stop] - (layer * unit_rows + rows.start)
            first = last
        return {**small, RAW_INDEX: index, RAW_ROWS: raw}

    def _small_arrays(self, group: FieldGroup) -> "_SmallArrays":
        """The small arrays of a group for the whole unit; read once."""
        if group.name not in self._small:
            rows = self.group_rows(group)
            sizes = {"L": len(group.fields), "T": rows, "D": self._width}
            arrays = {
                name: self._array(f"{group.name}_{name}", spec.dtype, spec.shape(sizes))
                for name, spec in group.codec.small.items()
                if "N" not in spec.axes
            }
            raw = self._raw_rows(group) if RAW_INDEX in group.codec.small else (np.zeros(0, dtype=np.int64), None)
            places = np.stack(np.divmod(raw[0], max(1, rows)), axis=1)
            if reason := small_fault(group.codec.small, {**arrays, RAW_INDEX: places}):
                raise self._files.misfit(group.name, reason)
            self._small[group.name] = _SmallArrays(arrays, *raw)
        return self._small[group.name]

    def _raw_rows(self, group: FieldGroup) -> tuple[np.ndarray, ShardReader]:
        """Ascending layer * rows + row of what is kept verbatim, and its values."""
        rows = self.group_rows(group)
        index = self._array(f"{group.name}_{RAW_INDEX}", "int32", (None, 2)).astype(np.int64)
        positions = index[:, 0] * rows + index[:, 1]
        inside = ((index >= 0) & (index < [len(group.fields), rows])).all()
        if not inside or (np.diff(positions) <= 0).any():
            raise self._files.misfit(f"{group.name}_{RAW_INDEX}", "its rows are not ascending")
        return positions, self._shard(f"{group.name}_{RAW_ROWS}", "uint16", (len(index), self._width), False)

    def _codes(self, group: FieldGroup, layer: int) -> ShardReader:
        name = group.fields[layer]
        if name in self._shards:
            return self._shards[name]
        shape = (self.group_rows(group), group.codec.code_columns(self._width))
        if group.masked is not None:
            shape = (int(self._classes(group.masked)[1][-1]), group.masked.piece_bytes(self._width))
        return self._shard(name, group.codec.code_dtype, shape, group.codec.compressed)

    def _shard(self, name: str, dtype: str, shape: tuple[int, ...], compressed: bool) -> ShardReader:
        if name not in self._shards:
            with self._opening:
                if name not in self._shards:
                    spec = self._spec(name, dtype, shape)
                    if spec.chunk_rows is None or spec.compressed != compressed:
                        raise self._files.misfit(name, "it is not chunked and compressed as its codec says")
                    size = self._files.entry(f"{name}/{spec.file_path}").size if spec.size else None
                    self._shards[name] = ShardReader(self._fs, f"{self._path}/{name}", spec, size)
        return self._shards[name]

    def _array(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        if name not in self._arrays:
            with self._opening:
                if name not in self._arrays:
                    spec = self._spec(name, dtype, shape)
                    if spec.chunk_rows is not None or spec.compressed:
                        raise self._files.misfit(name, "it is not a single plain chunk")
                    entry = self._files.entry(f"{name}/{spec.file_path}") if spec.size else None
                    self._arrays[name] = read_small(self._fs, f"{self._path}/{name}", spec, entry)
        return self._arrays[name]

    def _spec(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> ArraySpec:
        path = f"{name}/{METADATA}"
        spec = parse_metadata(self._files.read(path), f"{self._fs.root}/{self._path}/{path}")
        fits = len(shape) == len(spec.shape) and all(
            length in (None, stored) for length, stored in zip(shape, spec.shape, strict=True)
        )
        if spec.dtype != dtype or not fits:
            raise self._files.misfit(name, f"expected {dtype} {list(shape)}, found {spec.dtype} {list(spec.shape)}")
        return spec


@dataclass(frozen=True)
class _SmallArrays:
    """Those of a group by name; raw row i is row ``raw_positions[i]`` % rows of layer // rows, ascending."""

    arrays: dict[str, np.ndarray]
    raw_positions: np.ndarray
    raw_rows: ShardReader | None


def _code_spec(group: FieldGroup, shape: tuple[int, ...], name: str, width: int) -> ArraySpec:
    codec = group.codec
    attributes: dict[str, object] = {"codec": codec.name, "formula": codec.formula}
    if group.masked is not None:
        chunk_rows = min(group.masked.chunk_pieces, max(1, shape[0]))
        return ArraySpec(shape, codec.code_dtype, ("piece", "byte"), chunk_rows, attributes=attributes)
    parts = codec.row_parts(width)
    if codec.exact:
        attributes["hs_dtype"] = "bfloat16"
    if parts:
        # What numpy.dtype takes, once the inner lists are tuples.
        attributes["row"] = [[part.name, part.dtype, [part.count]] for part in parts]
    chunk_rows = min(codec.chunk_tokens(width), max(1, shape[0]))
    dimensions = ("final_row" if name == FINAL else "token", "byte" if parts else "channel")
    return ArraySpec(shape, codec.code_dtype, dimensions, chunk_rows, codec.compressed, attributes)


def _small_spec(codec: CodeLayout, name: str, shape: tuple[int, ...]) -> ArraySpec:
    field = codec.small[name]
    chunk_rows = None
    if name == RAW_ROWS:
        chunk_rows = max(1, min(_RAW_CHUNK_BYTES // (2 * shape[1]), shape[0]))
    dimensions = tuple(_AXES[axis] for axis in field.axes)
    attributes = {"hs_dtype": "bfloat16"} if field.bf16 else {}
    return ArraySpec(shape, field.dtype, dimensions, chunk_rows, False, attributes)
