"""The WebDataset container: one tar of ``<sample>.<field>`` members that stock ``webdataset`` iterates, and its index.

The reader never scans the tar. The index, whose sha256 the commit record names, tells where each member lies and its
crc32c; reads touch only the members of the sample and the layers asked for, neighbours in one go. The headers between
them are read by others only; the sha256 of the whole tar guards those.

Shapes: t rows of one sample, D target width, C columns of the codes, N raw rows.
"""

import json
import math
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from operator import sub

import numpy as np
import torch
from awscrt.checksums import crc32c
from torch import Tensor

from hiddenstore.codecs import blosc_chunks
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, Encoded, SmallField, select_small, small_of_rows
from hiddenstore.codecs.memory import fresh
from hiddenstore.errors import ConfigError, FormatError, HiddenstoreError, Kind
from hiddenstore.files.documents import canonical
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
    unit_attributes,
)
from hiddenstore.segments.files import CHUNK_CORRUPT, HashedFile, SegmentFiles, write_bytes
from hiddenstore.segments.many import Many, Mixed, NotTogetherError, Wanted, sample_places, unit_arrays
from hiddenstore.segments.rows import ends_of, row_numbers
from hiddenstore.segments.tar_members import (
    BLOCK_BYTES,
    HEADER_BYTES,
    INDEX,
    TAR,
    UNIT_PREFIX,
    TarMembers,
)
from schemas import CaptureSpec, CommitRecord, FileEntry, SampleEntry

MAX_MEMBER_BYTES = (1 << 33) - 1
"""The largest size that a ustar header can state."""

_PLAIN_MEMBERS = 4
_INDEX_BYTES = 30
# The padding to whole blocks is half a block on average.
_MEMBER_BYTES = BLOCK_BYTES + HEADER_BYTES + BLOCK_BYTES // 2 + _INDEX_BYTES

_MASK = f"{LOSS_MASK}.npy"
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
    shares_rows = False

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

    def read_many(self, parts: "Sequence[tuple[TarUnit, np.ndarray]]", groups: Sequence[Wanted]) -> Many:
        return _Together(parts, groups).read()

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


def _is_joined(group: FieldGroup) -> bool:
    """Whether arrays of several samples become those of one."""
    axes = {spec.axes for spec in group.codec.small.values()}
    return not axes if group.codec.compressed else axes <= _JOINED_AXES


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
        for name in unit_arrays(group.codec.small):
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
        rows = group.rows_of(entry)
        small = small_of_rows(group.codec.small, unit.encoded(group).small, len(group.fields), rows)
        for name in _of_samples(group):
            yield _small_name(group, name), _npy(small[name])
    for group in groups:
        rows, codec, fine = group.rows_of(entry), group.codec, group.fine_rows(unit.loss_mask[tokens], [entry.tokens])
        for layer, states in enumerate(codes[group.name]):
            parts = states.cut(rows.start, rows.stop)
            if codec.compressed:
                yield _code_name(group, layer), _compressed(parts, codec.chunk_tokens(width))
            else:
                header = npy_header(codec.code_dtype, group.stored_shape(len(rows), fine, width))
                yield _code_name(group, layer), [header, *map(_bytes_of, group.stored(parts, fine))]


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


class TarUnit:
    """One tar. Keeps its index and the arrays that all samples share."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self._record, self.width = record, capture.target.hidden_size
        self.sample_places = sample_places(record)
        self._files = SegmentFiles(fs, path, record)
        self.members = TarMembers(self._files, record)
        self._shared: dict[str, np.ndarray] = {}

    def plain(self, names: Sequence[str], index: int) -> list[np.ndarray]:
        entry, fields = self._record.samples[index], [f"{name}.npy" for name in names]
        shapes: dict[str, Shape] = {SPANS: (-1, 3), FINAL_ROWS: (entry.final_rows,)}
        members, arrays = self.members.of_sample(index, [(field, None) for field in fields]), []
        for name, field, member in zip(names, fields, members, strict=True):
            dtype = "uint8" if name == LOSS_MASK else "int32"
            arrays.append(self._values(field, member, dtype, shapes.get(name, (entry.tokens,))).copy())
        return arrays

    def encoded(
        self, group: FieldGroup, index: int, layers: Sequence[int], out: Collection[np.ndarray] | None = None
    ) -> Encoded:
        if not layers:
            return Encoded([])
        rows, codec = len(group.rows_of(self._record.samples[index])), group.codec
        shape, dtype = (rows, codec.code_columns(self.width)), codec.code_dtype
        codes = [fresh(shape, getattr(torch, dtype)).numpy() for _ in layers] if out is None else out
        names = [_code_name(group, layer) for layer in layers]
        targets = [target.reshape(-1).view(np.uint8) for target in codes]
        is_direct = not codec.compressed and group.masked is None
        bodies = [(name, target if is_direct else None) for name, target in zip(names, targets, strict=True)]
        beside = [_small_name(group, name) for name in _of_samples(group)]
        beside += [] if group.masked is None else [_MASK]
        members = self.members.of_sample(index, [*bodies, *((name, None) for name in beside)])
        read = dict(zip(beside, members[len(layers) :], strict=True))
        for name, target, member in zip(names, targets, members, strict=False):
            if codec.compressed:
                self._decompress(name, member, target)
            elif group.masked is not None:
                fine = group.masked.fine_rows(self._values(_MASK, read[_MASK], "uint8", (rows,)), [rows])
                pieces = self._values(name, member, dtype, group.stored_shape(rows, fine, self.width))
                group.masked.from_pieces(pieces, fine, target.reshape(shape))
            elif member.tobytes() != npy_header(dtype, shape):
                raise self._files.misfit(TAR, f"{name} is not {dtype} {list(shape)}")
        return Encoded([torch.from_numpy(target) for target in codes], self._small(group, layers, rows, read))

    def decode(self, group: FieldGroup, index: int, layers: Sequence[int], out: Tensor) -> None:
        if not layers or not out.shape[1]:
            return
        if group.codec.small:
            group.states.decode(self.encoded(group, index, layers), out)
        else:
            self.encoded(group, index, layers, out.view(torch.uint16).numpy())

    def _small(
        self, group: FieldGroup, layers: Sequence[int], rows: int, members: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The small arrays of some layers of one sample."""
        fields = group.codec.small
        sizes = {"L": len(group.fields), "T": rows, "D": self.width, "N": -1}
        arrays = {}
        for name, spec in fields.items():
            field, shape = _small_name(group, name), spec.shape(sizes)
            if field in members:
                arrays[name] = self._values(field, members[field], spec.dtype, shape)
            else:
                arrays[name] = self.shared_array(group, name)
        return self._of_layers(group, layers, rows, arrays)

    def shared_array(self, group: FieldGroup, name: str) -> np.ndarray:
        """A small array that all samples share; read once."""
        field, spec = _small_name(group, name), group.codec.small[name]
        if field not in self._shared:
            shape = spec.shape({"L": len(group.fields), "D": self.width})
            array = self._values(field, self.members.of_unit(field), spec.dtype, shape)
            self._require_valid(group, {name: array})
            self._shared[field] = array
        return self._shared[field]

    def _of_layers(
        self, group: FieldGroup, layers: Sequence[int], rows: int, arrays: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Some layers of small arrays after a check of their values; raw rows are picked and renumbered."""
        fields = group.codec.small
        own = {name: arrays[name] for name in _of_samples(group)}
        if RAW_INDEX not in fields:
            self._require_valid(group, own)
            return select_small(fields, arrays, layers, range(rows))
        index, raw = arrays[RAW_INDEX], arrays[RAW_ROWS]
        if len(index) != len(raw) or (len(index) and not 0 <= index[:, 1].min() <= index[:, 1].max() < rows):
            raise self._files.misfit(TAR, f"raw rows of {group.name} do not lie in their sample")
        if len(index) and not 0 <= index[:, 0].min() <= index[:, 0].max() < len(group.fields):
            raise self._files.misfit(TAR, f"raw rows of {group.name} are of no layer")
        self._require_valid(group, own)
        small = select_small(fields, arrays, layers, range(rows))
        first, last = (index[:, 0].searchsorted(layers, side) for side in ("left", "right"))
        picked = row_numbers(first, last - first)
        slots = np.repeat(np.arange(len(layers), dtype=np.int32), last - first)
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


class _Together:
    """Samples of some units of one store at once. Field by field they are joined first and looked at then."""

    def __init__(self, parts: Sequence[tuple[TarUnit, np.ndarray]], groups: Sequence[Wanted]) -> None:
        self._parts, self._groups, self._width = parts, groups, parts[0][0].width
        self._places = np.concatenate([unit.sample_places[indices] for unit, indices in parts])
        self._runs: list[memoryview] = []
        self._members: dict[str, tuple[list[int], list[int]]] = {}

    def read(self) -> Many:
        if not all(_is_joined(group) for group, layers in self._groups if layers):
            raise NotTogetherError
        names = [INPUT_IDS, LOSS_MASK, SPANS, *([FINAL_ROWS] if self._groups[1][1] else [])]
        fields = [f"{name}.npy" for name in names]
        for group, layers in self._groups:
            if layers and not group.codec.compressed:
                fields += [_code_name(group, layer) for layer in layers]
                fields += [_small_name(group, name) for name in _of_samples(group)]
        self._check(fields)
        plain = {name: self._plain(name) for name in names}
        return plain, [self._states(group, layers) if layers else None for group, layers in self._groups]

    def _check(self, fields: Sequence[str]) -> None:
        """Read members and compare their checksums. Where they lie is kept, no view of each: as many as live through a
        few passes of Python's cyclic garbage collector bring on one over everything, which costs more than the reading.
        """
        read = [unit.members.of_samples(indices, fields) for unit, indices in self._parts]
        self._runs = [run for of_unit, _ in read for run in of_unit]
        starts, sizes, crcs = np.concatenate([columns for _, columns in read], axis=2).transpose(1, 0, 2)
        for name, *ends, expected in zip(
            fields, starts.tolist(), (starts + sizes).tolist(), crcs.tolist(), strict=True
        ):
            if [crc32c(run[start:stop]) for run, start, stop in zip(self._runs, *ends, strict=True)] != expected:
                raise NotTogetherError
            self._members[name] = ends[0], ends[1]

    def _plain(self, name: str) -> np.ndarray:
        field, dtype = f"{name}.npy", "uint8" if name == LOSS_MASK else "int32"
        if name != SPANS:
            return self._joined(field, dtype, self._places[:, 3 if name == FINAL_ROWS else 1].tolist(), lambda n: (n,))
        counts = self._counts(field, _SPAN_BYTES)
        turns = self._joined(field, dtype, counts, lambda n: (n, 3)).reshape(-1, 3)
        return np.column_stack([np.repeat(np.arange(len(counts), dtype=np.int32), counts), turns])

    def _states(self, group: FieldGroup, layers: Sequence[int]) -> Mixed:
        codec, lengths = group.codec, self._places[:, 1 if group.name == AUX else 3]
        firsts = ends_of([len(indices) for _, indices in self._parts])[:-1]
        rows = np.add.reduceat(lengths, firsts).tolist()
        if codec.compressed:
            shape, dtype = (sum(rows), codec.code_columns(self._width)), getattr(torch, codec.code_dtype)
            codes = [torch.empty(shape, dtype=dtype) for _ in layers]
            arrays = [of_layer.numpy() for of_layer in codes]
            slices = iter(pairwise(ends_of(lengths).tolist()))
            for unit, indices in self._parts:
                for index, (low, high) in zip(indices.tolist(), slices, strict=False):
                    unit.encoded(group, index, layers, [of_layer[low:high] for of_layer in arrays])
            return Mixed(Encoded(codes), rows)
        codes = [torch.from_numpy(self._codes(group, _code_name(group, layer), lengths)) for layer in layers]
        return Mixed(Encoded(codes, self._small(group, layers, lengths) if codec.small else {}), rows)

    def _codes(self, group: FieldGroup, name: str, lengths: np.ndarray) -> np.ndarray:
        """The codes of one layer [n, C]."""
        dtype, columns = group.codec.code_dtype, group.codec.code_columns(self._width)
        if group.masked is None:
            return self._joined(name, dtype, lengths.tolist(), lambda n: (n, columns)).reshape(-1, columns)
        fine, size = group.masked.fine_rows(self._plain(LOSS_MASK), lengths), group.masked.piece_bytes(self._width)
        counts = np.diff(ends_of(group.masked.pieces(fine))[ends_of(lengths)])
        pieces = self._joined(name, dtype, counts.tolist(), lambda n: (n, size)).reshape(-1, size)
        codes = np.empty((len(fine), columns), dtype=np.uint8)
        group.masked.from_pieces(pieces, fine, codes)
        return codes

    def _small(self, group: FieldGroup, layers: Sequence[int], lengths: np.ndarray) -> dict[str, np.ndarray]:
        """The small arrays of some layers, after a check of their values; those of a unit [U, L, D]."""
        fields, depth, ends, chosen = group.codec.small, len(group.fields), ends_of(lengths), list(layers)
        small = {n: np.stack([unit.shared_array(group, n) for unit, _ in self._parts]) for n in unit_arrays(fields)}
        raw = self._counts(_small_name(group, RAW_INDEX), _RAW_INDEX_BYTES) if RAW_INDEX in fields else []
        for name in _of_samples(group):
            spec, field = fields[name], _small_name(group, name)
            if "N" in spec.axes:
                shape = partial(_raw_shape, spec, self._width)
                small[name] = self._joined(field, spec.dtype, raw, shape).reshape(shape(sum(raw)))
                continue
            values = self._joined(field, spec.dtype, lengths.tolist(), lambda n: (depth, n))
            # Each sample's [L, t] lies behind the one before it.
            first = np.arange(ends[-1]) + np.repeat((depth - 1) * ends[:-1], lengths)
            small[name] = values[first + np.arange(depth)[:, None] * np.repeat(lengths, lengths)]
        if raw:
            owner = np.repeat(np.arange(len(raw)), raw)
            layer, row = small[RAW_INDEX].T
            if ((layer < 0) | (layer >= depth) | (row < 0) | (row >= lengths[owner])).any():
                raise NotTogetherError
            small[RAW_INDEX] = np.stack([layer, row + ends[owner]], axis=1)
        if small_fault(fields, small):
            raise NotTogetherError
        places = {name: (chosen,) if "T" in spec.axes else (slice(None), chosen) for name, spec in fields.items()}
        picked = {name: values[places[name]] for name, values in small.items() if "N" not in fields[name].axes}
        if raw:
            slots, kept = np.nonzero(np.array(chosen)[:, None] == small[RAW_INDEX][:, 0])
            picked[RAW_INDEX] = np.stack([slots, small[RAW_INDEX][kept, 1]], axis=1)
            picked[RAW_ROWS] = small[RAW_ROWS][kept]
        return picked

    def _counts(self, field: str, row_bytes: int) -> list[int]:
        """Rows of an array of each sample, by the size of its member."""
        return [(stop - start - HEADER_BYTES) // row_bytes for start, stop in zip(*self._members[field], strict=True)]

    def _joined(self, field: str, dtype: str, counts: Sequence[int], shape: Callable[[int], Shape]) -> np.ndarray:
        """The values of an array of each sample end to end, each of the shape of its count."""
        little, (starts, stops) = np.dtype(dtype).newbyteorder("<"), self._members[field]
        shapes = {count: shape(count) for count in set(counts)}
        sizes = {count: HEADER_BYTES + math.prod(of_one) * little.itemsize for count, of_one in shapes.items()}
        heads = {count: npy_header(dtype, of_one) for count, of_one in shapes.items()}
        bodies = [start + HEADER_BYTES for start in starts]
        are_whole = list(map(sub, stops, starts)) == [sizes[count] for count in counts]
        written = b"".join([run[start:body] for run, start, body in zip(self._runs, starts, bodies, strict=True)])
        if not are_whole or written != b"".join([heads[count] for count in counts]):
            raise NotTogetherError
        data = bytearray().join([run[body:stop] for run, body, stop in zip(self._runs, bodies, stops, strict=True)])
        return np.frombuffer(data, little).astype(dtype, copy=False)


def _raw_shape(spec: SmallField, width: int, rows: int) -> Shape:
    return spec.shape({"N": rows, "D": width})


WEBDATASET = WebDatasetContainer()
