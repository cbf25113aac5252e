"""The WebDataset container: one tar of ``<sample>.<field>`` members that stock ``webdataset`` iterates, and its index.

The reader never scans the tar. The index, whose sha256 the commit record names, tells where each member lies and its
crc32c; reads touch only the members of the sample and the layers asked for, neighbours in one go. The headers between
them are read by others only; the sha256 of the whole tar guards those.

Shapes: t rows of one sample, D target width, C columns of the codes, N raw rows.
"""

import json
import math
import tarfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from awscrt.checksums import crc32c
from torch import Tensor

from hiddenstore.codecs import blosc_chunks
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, Encoded, fresh, raw_places, select_small
from hiddenstore.documents import canonical
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.base import (
    AUX,
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    FieldGroup,
    Overhead,
    groups_of,
    small_fault,
    small_of_rows,
    unit_attributes,
)
from hiddenstore.segments.files import CHUNK_CORRUPT, HashedFile, SegmentFiles, write_bytes
from hiddenstore.segments.many import ends_of, sample_places
from schemas import CaptureSpec, CommitRecord, FileEntry, SampleEntry

TAR = "samples.tar"
INDEX = "index.json"
UNIT_PREFIX = "__unit__/"
HEADER_BYTES = 128
BLOCK_BYTES = 512
MAX_MEMBER_BYTES = (1 << 33) - 1
"""The largest size that a ustar header can state."""

_PLAIN_MEMBERS = 4
_INDEX_BYTES = 30
# The padding to whole blocks is half a block on average.
_MEMBER_BYTES = BLOCK_BYTES + HEADER_BYTES + BLOCK_BYTES // 2 + _INDEX_BYTES
# A gap is read and dropped rather than jumped: a call costs more than this many bytes.
_GAP_BYTES = 1 << 14

_SPAN_BYTES = 12
_RAW_INDEX_BYTES = 8
# Small arrays of several samples that become those of one.
_JOINED_AXES = {("L", "T"), ("L", "D"), ("N", "2"), ("N", "D")}

Shape = tuple[int, ...]
Pieces = list[bytes | np.ndarray]


class WebDatasetContainer:
    """Samples of a unit as members of a tar."""

    name = "webdataset"
    samples_apart = True

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        with HashedFile(fs, path, TAR) as file:
            tar = _TarWriter(file)
            for name, pieces in _unit_members(unit, capture):
                tar.add_unit(name, pieces)
            codes = {group.name: [_Rows(layer) for layer in unit.encoded(group).codes] for group in groups_of(capture)}
            for number, entry in enumerate(unit.samples):
                for name, pieces in _sample_members(unit, capture, codes, number, entry):
                    tar.add(entry.id, name, pieces)
            file.write(bytes(2 * BLOCK_BYTES))
            written = file.close()
        return [written, write_bytes(fs, path, INDEX, canonical(tar.index))]

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> "TarUnit":
        return TarUnit(fs, path, record, capture)

    def token_runs(self, fs: Filesystem, path: str) -> list[int]:
        try:
            sizes = json.loads(fs.read(f"{path}/{INDEX}"))["fields"][f"{INPUT_IDS}.npy"]["size"]
            return [(int(size) - HEADER_BYTES) // 4 for size in sizes]
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, HiddenstoreError):
                raise
            raise FormatError(f"{fs.root}/{path}/{INDEX} is no index ({error})", kind=Kind.ARRAY_INVALID) from error

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """Headers, padding and index of every member: about 930 bytes, much beside the states of a narrow target."""
        groups = [group for group in groups_of(capture) if group.fields]
        members = _PLAIN_MEMBERS + sum(len(group.fields) + len(_of_samples(group)) for group in groups)
        return Overhead(samples * members * _MEMBER_BYTES, 2 * segments)


@lru_cache(maxsize=1 << 12)
def npy_header(dtype: str, shape: Shape) -> bytes:
    """The 128 bytes before the values of a version 1.0 ``.npy`` file, little-endian, row-major."""
    descr = np.dtype(dtype).newbyteorder("<").str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + f"{text:<117}\n".encode()


def tar_header(name: str, size: int) -> bytes:
    """The block before a member; ConfigError ``member-too-large`` beyond what it can state."""
    if size > MAX_MEMBER_BYTES:
        raise ConfigError(
            f"{name} has {size:,} bytes, but a member of a tar holds at most {MAX_MEMBER_BYTES:,}",
            kind=Kind.MEMBER_TOO_LARGE,
            hint="--container zarr has no such limit; or prepare with a smaller --max-tokens",
        )
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")


def _code_name(group: FieldGroup, layer: int) -> str:
    return f"{group.fields[layer]}.{'blosc' if group.codec.compressed else 'npy'}"


def _small_name(group: FieldGroup, name: str) -> str:
    return f"{group.name}_{name}.npy"


def _of_samples(group: FieldGroup) -> list[str]:
    """Small arrays of a group of which each sample has its rows."""
    return [name for name, spec in group.codec.small.items() if {"T", "N"} & set(spec.axes)]


def _of_unit(group: FieldGroup) -> list[str]:
    """Small arrays of a group that all samples share."""
    return [name for name, spec in group.codec.small.items() if not {"T", "N"} & set(spec.axes)]


class _TarWriter:
    """Members of a ustar archive, written front to back; ``index`` says where each lies."""

    def __init__(self, file: HashedFile) -> None:
        self._file, self._offset = file, 0
        self._unit: dict[str, list[int]] = {}
        self._fields: dict[str, dict[str, list[int]]] = {}
        self.index = {"unit": self._unit, "fields": self._fields}

    def add_unit(self, name: str, pieces: Pieces) -> None:
        """A member that all samples share."""
        self._unit[name] = list(self._member(f"{UNIT_PREFIX}{name}", pieces))

    def add(self, sample_id: str, name: str, pieces: Pieces) -> None:
        """A member of one sample."""
        columns = self._fields.setdefault(name, {"offset": [], "size": [], "crc32c": []})
        for column, value in zip(columns.values(), self._member(f"{sample_id}.{name}", pieces), strict=True):
            column.append(value)

    def _member(self, name: str, pieces: Pieces) -> tuple[int, int, int]:
        size = sum(len(piece) for piece in pieces)
        header, padding = tar_header(name, size), bytes(-size % BLOCK_BYTES)
        offset = self._offset + len(header)
        self._offset = offset + size + len(padding)
        self._file.write(header)
        crc = self._file.write(*(piece if isinstance(piece, bytes) else piece.data for piece in pieces))
        self._file.write(padding)
        return offset, size, crc


def _unit_members(unit: EncodedUnit, capture: CaptureSpec) -> Iterator[tuple[str, Pieces]]:
    yield "unit.json", [canonical(unit_attributes(unit.unit, capture))]
    for group in groups_of(capture):
        small = unit.encoded(group).small
        for name in _of_unit(group):
            if name in small:
                yield _small_name(group, name), _npy(small[name])


def _sample_members(
    unit: EncodedUnit, capture: CaptureSpec, codes: "dict[str, list[_Rows]]", number: int, entry: SampleEntry
) -> Iterator[tuple[str, Pieces]]:
    """Small members first: the layers of one drafter are then one read with them."""
    tokens, width = slice(entry.start, entry.start + entry.tokens), capture.target.hidden_size
    yield f"{INPUT_IDS}.npy", _npy(unit.input_ids[tokens])
    yield f"{LOSS_MASK}.npy", _npy(unit.loss_mask[tokens])
    yield f"{SPANS}.npy", _npy(unit.spans[unit.spans[:, 0] == number, 1:])
    if capture.final != "none":
        yield f"{FINAL_ROWS}.npy", _npy(unit.final_rows[entry.final_start : entry.final_start + entry.final_rows])
    groups = [group for group in groups_of(capture) if codes[group.name]]
    for group in groups:
        small = small_of_rows(unit.encoded(group).small, group, group.rows_of(entry))
        for name in _of_samples(group):
            yield _small_name(group, name), _npy(small[name])
    for group in groups:
        rows, codec = group.rows_of(entry), group.codec
        for layer, states in enumerate(codes[group.name]):
            parts = states.cut(rows.start, rows.stop)
            if codec.compressed:
                yield _code_name(group, layer), _compressed(parts, codec.chunk_tokens(width))
            else:
                header = npy_header(codec.code_dtype, (len(rows), codec.code_columns(width)))
                yield _code_name(group, layer), [header, *map(_bytes_of, parts)]


class _Rows:
    """Blocks [t, C] of one layer whose rows lie end to end."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self._blocks = [block.cpu().numpy() for block in blocks if len(block)]
        self._starts = list(accumulate(map(len, self._blocks), initial=0))

    def cut(self, start: int, stop: int) -> list[np.ndarray]:
        """Rows [start, stop) as views."""
        views = []
        number = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[number], min(self._starts[number + 1], stop)
            views.append(self._blocks[number][start - first : last - first])
            start, number = last, number + 1
        return views


def _npy(values: np.ndarray) -> Pieces:
    return [npy_header(str(values.dtype), values.shape), _bytes_of(values)]


def _compressed(parts: Sequence[np.ndarray], step: int) -> Pieces:
    """Rows in blosc buffers of ``step`` rows end to end."""
    if not parts:
        return []
    rows = _little_endian(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return [blosc_chunks.compress(rows[start : start + step]) for start in range(0, len(rows), step)]


def _bytes_of(values: np.ndarray) -> np.ndarray:
    return _little_endian(values).reshape(-1).view(np.uint8)


def _little_endian(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


class _Member(NamedTuple):
    """Bytes of the tar and the kind of the error when they are damaged; ``body`` takes what follows a header."""

    name: str
    offset: int
    size: int
    crc: int
    kind: Kind
    body: np.ndarray | None


class _Index(NamedTuple):
    """``unit`` int64 [3] of offset, size, crc32c; ``fields`` the same per sample: int64 [3, S], rows of ``table``."""

    unit: dict[str, np.ndarray]
    fields: dict[str, np.ndarray]
    table: np.ndarray


class _LastSamples(threading.local):
    """What a thread read last of many samples, whose fields are asked for one after the other: the first byte and the
    bytes of the run of each, and by field offset, size and crc32c of each."""

    members: "TarMembers | None" = None
    indices: np.ndarray | None = None
    runs: Sequence[tuple[int, memoryview]]
    places: dict[str, list[list[int]]]


_LAST = _LastSamples()


class TarMembers:
    """The members of one tar. Opening reads nothing; the index (24 bytes a member in memory) is read once."""

    def __init__(self, files: SegmentFiles, record: CommitRecord) -> None:
        self._files, self._record = files, record
        self._index: _Index | None = None

    def of_sample(self, index: int, fields: Sequence[tuple[str, np.ndarray | None]]) -> list[np.ndarray]:
        """Members of the ``index``-th sample by field, each uint8 [size] of memory nobody else has.

        A field with a uint8 array beside it is read into that, but for its ``.npy`` header, which is returned.
        """
        sample, stored = self._record.samples[index].id, self._read_index().fields
        members = []
        for name, body in fields:
            if name not in stored:
                raise self._files.misfit(INDEX, f"it names no member {name}")
            offset, size, crc = stored[name][:, index].tolist()
            if body is not None and size != HEADER_BYTES + body.size:
                raise self._files.misfit(TAR, f"{name} has {size} bytes, expected {HEADER_BYTES + body.size}")
            members.append(_Member(f"{sample}.{name}", offset, size, crc, CHUNK_CORRUPT, body))
        return self._read(members)

    def of_samples(self, indices: np.ndarray, fields: Sequence[str]) -> list[list[memoryview]]:
        """Members of some samples, at ascending int64 [S], by field; the samples stay in memory of this thread until it
        reads others."""
        index = self._read_index()
        if absent := [name for name in fields if name not in index.fields]:
            raise self._files.misfit(INDEX, f"it names no member {absent[0]}")
        if _LAST.members is not self or _LAST.indices is not indices:
            columns = index.table[:, :, indices]
            _LAST.runs, _LAST.places = self._read_runs(columns), dict(zip(index.fields, columns.tolist(), strict=True))
            _LAST.members, _LAST.indices = self, indices
        members = []
        for name in fields:
            offsets, sizes, crcs = _LAST.places[name]
            parts = [
                data[offset - first : offset - first + size]
                for (first, data), offset, size in zip(_LAST.runs, offsets, sizes, strict=True)
            ]
            if [crc32c(part) for part in parts] != crcs:
                raise self._files.damaged(TAR, CHUNK_CORRUPT, f"a member {name} has another crc32c")
            members.append(parts)
        return members

    def _read_runs(self, columns: np.ndarray) -> list[tuple[int, memoryview]]:
        """The run of each sample whose members lie at ``columns`` int64 [fields, 3, S]: near neighbours share one."""
        starts, stops = columns[:, 0].min(axis=0), (columns[:, 0] + columns[:, 1]).max(axis=0)
        if (starts[1:] < stops[:-1]).any():
            raise self._files.misfit(INDEX, "samples do not lie one after the other")
        runs = []
        for run in np.split(np.arange(len(starts)), np.flatnonzero(starts[1:] - stops[:-1] > _GAP_BYTES) + 1):
            first = int(starts[run[0]])
            data = np.empty(int(stops[run[-1]]) - first, dtype=np.uint8).data
            self._read_into(first, [data])
            runs += [(first, data)] * len(run)
        return runs

    def of_unit(self, field: str) -> np.ndarray:
        """A member that all samples share, uint8 [size]."""
        unit = self._read_index().unit
        if field not in unit:
            raise self._files.misfit(INDEX, f"it names no member {UNIT_PREFIX}{field}")
        offset, size, crc = unit[field].tolist()
        return self._read([_Member(f"{UNIT_PREFIX}{field}", offset, size, crc, Kind.ARRAY_CORRUPT, None)])[0]

    def _read(self, members: Sequence[_Member]) -> list[np.ndarray]:
        """Neighbours are read in one call; nothing is given out before its crc32c fits."""
        heads = [np.empty(member.size if member.body is None else HEADER_BYTES, np.uint8) for member in members]
        skipped = np.empty(_GAP_BYTES, dtype=np.uint8)
        ordered = sorted(zip(members, heads, strict=True), key=lambda pair: pair[0].offset)
        start = end = ordered[0][0].offset
        buffers: list[memoryview] = []
        for member, head in ordered:
            if not 0 <= member.offset - end <= _GAP_BYTES:
                self._read_into(start, buffers)
                start = end = member.offset
                buffers = []
            buffers += [skipped[: member.offset - end].data, head.data]
            if member.body is not None:
                buffers.append(member.body.data)
            end = member.offset + member.size
        self._read_into(start, buffers)
        for member, head in ordered:
            crc = crc32c(head) if member.body is None else crc32c(member.body, crc32c(head))
            if crc != member.crc:
                reason = f"member {member.name} has crc32c {crc:08x}, expected {member.crc:08x}"
                raise self._files.damaged(TAR, member.kind, reason)
        return heads

    def _read_into(self, start: int, buffers: list[memoryview]) -> None:
        self._files.fs.read_scatter(f"{self._files.path}/{TAR}", start, [buffer for buffer in buffers if len(buffer)])

    def _read_index(self) -> _Index:
        if self._index is None:
            data, size = self._files.read(INDEX), self._files.entry(TAR).size
            try:
                self._index = _parse(json.loads(data), len(self._record.samples), size)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise self._files.misfit(INDEX, f"it is no index of {TAR} ({error})") from error
        return self._index


def _parse(document: dict[str, Any], samples: int, tar_bytes: int) -> _Index:
    unit = {name: _columns([[value] for value in row], 1, tar_bytes)[:, 0] for name, row in document["unit"].items()}
    fields = document["fields"]
    rows = [_columns([one["offset"], one["size"], one["crc32c"]], samples, tar_bytes) for one in fields.values()]
    table = np.array(rows, dtype=np.int64).reshape(len(fields), 3, samples)
    return _Index(unit, dict(zip(fields, table, strict=True)), table)


def _columns(rows: list[list[int]], count: int, tar_bytes: int) -> np.ndarray:
    """Offset, size and crc32c int64 [3, count]; ValueError for members that the tar cannot hold."""
    if [len(row) for row in rows] != [count] * 3 or any(set(map(type, row)) - {int} for row in rows):
        raise ValueError("a member has no whole offset, size and crc32c")
    columns = np.array(rows, dtype=np.int64).reshape(3, count)
    offset, size, crc = columns
    if (columns < 0).any() or (offset % BLOCK_BYTES).any() or (offset > tar_bytes).any():
        raise ValueError("a member lies at an offset that is none")
    if (size > tar_bytes - offset).any() or (crc >> 32).any():
        raise ValueError("a member leaves the file")
    return columns


WEBDATASET = WebDatasetContainer()


class TarUnit:
    """One tar. Keeps its index and the arrays that all samples share."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self._record, self._width = record, capture.target.hidden_size
        self._sample_places = sample_places(record)
        self._files = SegmentFiles(fs, path, record)
        self._members = TarMembers(self._files, record)
        self._shared: dict[str, np.ndarray] = {}

    def plain(self, name: str, index: int) -> np.ndarray:
        entry, field = self._record.samples[index], f"{name}.npy"
        shapes: dict[str, Shape] = {SPANS: (-1, 3), FINAL_ROWS: (entry.final_rows,)}
        dtype = "uint8" if name == LOSS_MASK else "int32"
        (member,) = self._members.of_sample(index, [(field, None)])
        return self._values(field, member, dtype, shapes.get(name, (entry.tokens,))).copy()

    def encoded(
        self, group: FieldGroup, index: int, layers: Sequence[int], out: Sequence[Tensor] | None = None
    ) -> Encoded:
        if not layers:
            return Encoded([])
        rows, codec = len(group.rows_of(self._record.samples[index])), group.codec
        shape, dtype = (rows, codec.code_columns(self._width)), codec.code_dtype
        codes = [fresh(shape, getattr(torch, dtype)) for _ in layers] if out is None else list(out)
        names = [_code_name(group, layer) for layer in layers]
        targets = [target.numpy().reshape(-1).view(np.uint8) for target in codes]
        bodies = [(name, None if codec.compressed else target) for name, target in zip(names, targets, strict=True)]
        small = [_small_name(group, name) for name in _of_samples(group)]
        members = self._members.of_sample(index, [*bodies, *((name, None) for name in small)])
        for name, target, member in zip(names, targets, members, strict=False):
            if codec.compressed:
                self._decompress(name, member, target)
            elif member.tobytes() != npy_header(dtype, shape):
                raise self._files.misfit(TAR, f"{name} is not {dtype} {list(shape)}")
        return Encoded(codes, self._small(group, layers, rows, dict(zip(small, members[len(layers) :], strict=True))))

    def decode(self, group: FieldGroup, index: int, layers: Sequence[int], out: Tensor) -> None:
        if not layers or not out.shape[1]:
            return
        if group.codec.small:
            group.states.decode(self.encoded(group, index, layers), out)
        else:
            self.encoded(group, index, layers, list(out.view(torch.uint16)))

    def plain_many(self, name: str, indices: np.ndarray) -> np.ndarray:
        (members,) = self._members.of_samples(indices, [f"{name}.npy"])
        dtype = "uint8" if name == LOSS_MASK else "int32"
        if name != SPANS:
            lengths = self._sample_places[indices, 3 if name == FINAL_ROWS else 1].tolist()
            return self._joined(name, members, dtype, lengths, {length: (length,) for length in lengths})
        counts = [(len(member) - HEADER_BYTES) // _SPAN_BYTES for member in members]
        spans = self._joined(name, members, dtype, counts, {count: (count, 3) for count in counts}).reshape(-1, 3)
        return np.insert(spans, 0, np.repeat(np.arange(len(counts)), counts), 1)

    def decode_many(self, group: FieldGroup, indices: np.ndarray, layers: Sequence[int], out: Tensor) -> None:
        codec, lengths = group.codec, self._sample_places[indices, 1 if group.name == AUX else 3]
        if not layers:
            return
        if codec.compressed or {spec.axes for spec in codec.small.values()} - _JOINED_AXES:
            ends = ends_of(lengths).tolist()
            for number, index in enumerate(indices.tolist()):
                self.decode(group, index, layers, out[:, ends[number] : ends[number + 1]])
            return
        names, columns = [_code_name(group, layer) for layer in layers], codec.code_columns(self._width)
        counts, dtype = lengths.tolist(), codec.code_dtype
        shapes = {count: (count, columns) for count in counts}
        codes = [
            torch.from_numpy(self._joined(name, members, dtype, counts, shapes).reshape(-1, columns))
            for name, members in zip(names, self._members.of_samples(indices, names), strict=True)
        ]
        if not codec.small:
            for target, rows in zip(out.view(torch.uint16), codes, strict=True):
                target.copy_(rows)
            return
        small = self._of_layers(group, layers, out.shape[1], self._small_of_many(group, indices, lengths))
        group.states.decode(Encoded(codes, small), out)

    def _small_of_many(self, group: FieldGroup, indices: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        """The small arrays of a group as if the samples were one."""
        arrays = {name: self._shared_array(group, name) for name in _of_unit(group)}
        names, ends, depth = _of_samples(group), ends_of(lengths), len(group.fields)
        stored = self._members.of_samples(indices, [_small_name(group, name) for name in names])
        fields = dict(zip(names, stored, strict=True))
        counts: list[int] = []
        if RAW_INDEX in fields:
            counts = [(len(member) - HEADER_BYTES) // _RAW_INDEX_BYTES for member in fields[RAW_INDEX]]
        for name, members in fields.items():
            spec = group.codec.small[name]
            letter, numbers = ("N", counts) if "N" in spec.axes else ("T", lengths.tolist())
            shapes = {n: spec.shape({"L": depth, "D": self._width, letter: n}) for n in set(numbers)}
            values = self._joined(name, members, spec.dtype, numbers, shapes)
            if "N" in spec.axes:
                arrays[name] = values.reshape(spec.shape({"N": sum(counts), "D": self._width}))
                continue
            # Each sample's [L, t] lies behind the one before it.
            layer = np.arange(depth)[:, None] * np.repeat(lengths, lengths)
            arrays[name] = values[layer + np.arange(ends[-1]) + np.repeat((depth - 1) * ends[:-1], lengths)]
        if RAW_INDEX in fields:
            index, owner = arrays[RAW_INDEX].copy(), np.repeat(np.arange(len(counts)), counts)
            if ((index[:, 1] < 0) | (index[:, 1] >= lengths[owner])).any():
                raise self._files.misfit(TAR, f"raw rows of {group.name} do not lie in their sample")
            index[:, 1] += ends[owner]
            order = np.lexsort((index[:, 1], index[:, 0]))
            arrays[RAW_INDEX], arrays[RAW_ROWS] = index[order], arrays[RAW_ROWS][order]
        return arrays

    def _joined(
        self, name: str, members: Sequence[memoryview], dtype: str, counts: Sequence[int], shapes: Mapping[int, Shape]
    ) -> np.ndarray:
        """The values of ``.npy`` members end to end, each of the shape that its count has in ``shapes``."""
        little = np.dtype(dtype).newbyteorder("<")
        sizes = {count: HEADER_BYTES + math.prod(shape) * little.itemsize for count, shape in shapes.items()}
        heads = {count: npy_header(dtype, shape) for count, shape in shapes.items()}
        are_whole = list(map(len, members)) == [sizes[count] for count in counts]
        if not are_whole or b"".join([m[:HEADER_BYTES] for m in members]) != b"".join([heads[n] for n in counts]):
            raise self._files.misfit(TAR, f"a member {name} is not {dtype} of the length of its sample")
        data = bytearray().join([member[HEADER_BYTES:] for member in members])
        return np.frombuffer(data, little).astype(dtype, copy=False)

    def _small(
        self, group: FieldGroup, layers: Sequence[int], rows: int, members: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The small arrays of some layers of one sample."""
        fields = group.codec.small
        sizes = {"L": len(group.fields), "T": rows, "D": self._width, "N": -1}
        arrays = {}
        for name, spec in fields.items():
            field, shape = _small_name(group, name), spec.shape(sizes)
            if field in members:
                arrays[name] = self._values(field, members[field], spec.dtype, shape)
            else:
                arrays[name] = self._shared_array(group, name)
        return self._of_layers(group, layers, rows, arrays)

    def _shared_array(self, group: FieldGroup, name: str) -> np.ndarray:
        """A small array that all samples share; read once."""
        field, spec = _small_name(group, name), group.codec.small[name]
        if field not in self._shared:
            shape = spec.shape({"L": len(group.fields), "D": self._width})
            self._shared[field] = self._values(field, self._members.of_unit(field), spec.dtype, shape)
        return self._shared[field]

    def _of_layers(
        self, group: FieldGroup, layers: Sequence[int], rows: int, arrays: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Some layers of small arrays after a check of their values; raw rows are picked and renumbered."""
        fields = group.codec.small
        if RAW_INDEX not in fields:
            self._require_valid(group, arrays)
            return select_small(fields, arrays, layers, range(rows))
        index, raw = arrays[RAW_INDEX], arrays[RAW_ROWS]
        if len(index) != len(raw) or (len(index) and not 0 <= index[:, 1].min() <= index[:, 1].max() < rows):
            raise self._files.misfit(TAR, f"raw rows of {group.name} do not lie in their sample")
        if len(index) and not 0 <= index[:, 0].min() <= index[:, 0].max() < len(group.fields):
            raise self._files.misfit(TAR, f"raw rows of {group.name} are of no layer")
        self._require_valid(group, arrays)
        small = select_small(fields, arrays, layers, range(rows))
        spans = [raw_places(index, layer, range(rows)) for layer in layers]
        picked = np.array([number for span in spans for number in span], dtype=np.int64)
        slots = np.repeat(np.arange(len(layers), dtype=np.int32), [len(span) for span in spans])
        return {**small, RAW_INDEX: np.stack([slots, index[picked, 1]], axis=1), RAW_ROWS: raw[picked]}

    def _require_valid(self, group: FieldGroup, arrays: Mapping[str, np.ndarray]) -> None:
        if reason := small_fault(group.codec.small, arrays):
            raise self._files.misfit(group.name, reason)

    def _values(self, field: str, member: np.ndarray, dtype: str, shape: Shape) -> np.ndarray:
        """The array in a ``.npy`` member; a first length of -1 follows from the member's size."""
        little = np.dtype(dtype).newbyteorder("<")
        row_bytes = little.itemsize * math.prod(shape[1:])
        if shape[0] < 0:
            shape = (max(0, len(member) - HEADER_BYTES) // row_bytes, *shape[1:])
        fits = len(member) == HEADER_BYTES + shape[0] * row_bytes
        if not fits or member[:HEADER_BYTES].tobytes() != npy_header(dtype, shape):
            raise self._files.misfit(TAR, f"{field} is not {dtype} {list(shape)}")
        return member[HEADER_BYTES:].view(little).reshape(shape).astype(dtype, copy=False)

    def _decompress(self, field: str, member: np.ndarray, target: np.ndarray) -> None:
        """Decode a ``.blosc`` member, buffers end to end, into uint8 ``target``."""
        start = done = 0
        try:
            while done < target.size:
                size, decoded = blosc_chunks.sizes(member[start:])
                blosc_chunks.decompress(member[start : start + size], target[done : done + decoded])
                start, done = start + size, done + decoded
        except ValueError as error:
            raise self._files.damaged(TAR, CHUNK_CORRUPT, f"{field} {error}") from error
        if start != len(member):
            raise self._files.misfit(TAR, f"{field} has more than {target.size} bytes")
