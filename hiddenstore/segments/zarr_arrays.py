"""Zarr v3 arrays: written once, streaming, in bytes that depend on nothing but the values; read by our own reader, rows
[a, b) by ranged reads, every checksum verified.

A large array is one shard file: inner chunks of a fixed number of rows end to end, each followed by its crc32c, then
the shard index. Its metadata repeats the checksums, so that whoever trusts the metadata knows a chunk of another file.
A small array is one chunk with its crc32c. Every chunk is written, also one of zeros, because a missing chunk reads as
the fill value. An array of no elements has metadata only.

Stock Zarr readers open the same files at two to eight times the CPU (docs/design/002). The interpreter lock is
free during reads, checksums, decompression and copies. Whatever disagrees with its checksum or with the metadata is a
CorruptionError that names the file.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, count
from operator import sub
from typing import Any

import numpy as np
from awscrt.checksums import crc32c

from hiddenstore.codecs import blosc_chunks
from hiddenstore.codecs.blosc_chunks import Scratch
from hiddenstore.errors import FormatError, Kind
from hiddenstore.files.digests import content_mismatch
from hiddenstore.files.documents import canonical
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.files import CHUNK_CORRUPT, HashedFile, damaged, require_size, write_bytes
from schemas import FileEntry

METADATA = "zarr.json"
CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16
CHUNK_CRCS = "chunk_crc32c"
# Plain chunks from this size on start at multiples of ALIGNMENT: on some machines the kernel copies them up to three
# times faster where source and destination lie alike.
DIRECT_CHUNK_BYTES = 1 << 16
ALIGNMENT = 64

_BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 2, "blocksize": blosc_chunks.BLOCK_BYTES}
MAX_CHUNK_BYTES = 1 << 28
CHECK_CHUNKS = True
"""Off, this process reads chunks without their checksums: for benchmarks that measure what checking costs."""

# What a request brought is still in a core's own cache when it is checked and copied; smaller ones cost more calls.
_REQUEST_BYTES = 1 << 19
_REMOTE_REQUEST_BYTES = 1 << 21
# Without a check nothing is looked at again.
_UNCHECKED_BYTES = 1 << 21
# A call takes at most 1,024 pieces, two a chunk and two more.
_MOST_CHUNKS = 511
# Room for the checksum of a chunk and the gap behind it.
_TAIL_BYTES = 2 * ALIGNMENT


@dataclass(frozen=True)
class ArraySpec:
    """What one array is.

    dtype is a numpy name (``int8``, ``uint8``, ``int32``, ``uint16``); ``chunk_rows`` makes it a sharded [rows, width]
    array, None a single chunk; ``compressed`` puts blosc before the crc32c.
    """

    shape: tuple[int, ...]
    dtype: str
    dimensions: tuple[str, ...]
    chunk_rows: int | None = None
    compressed: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def file_path(self) -> str:
        """Path of the one data file inside the array's folder."""
        return "/".join(["c", *("0" for _ in self.shape)])

    @property
    def chunks(self) -> int:
        """Inner chunks of the shard."""
        assert self.chunk_rows is not None
        return -(-self.shape[0] // self.chunk_rows)

    @property
    def row_bytes(self) -> int:
        return self.shape[1] * np.dtype(self.dtype).itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one decoded inner chunk."""
        assert self.chunk_rows is not None
        return self.chunk_rows * self.row_bytes

    @property
    def direct(self) -> bool:
        """Whether chunks are aligned in the shard."""
        return not self.compressed and self.chunk_bytes >= DIRECT_CHUNK_BYTES

    @property
    def index_bytes(self) -> int:
        return self.chunks * INDEX_ENTRY_BYTES + CRC_BYTES

    def metadata(self) -> dict[str, Any]:
        """The Zarr v3 metadata document."""
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self._grid()}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0,
            "codecs": self._codecs(),
            "attributes": dict(self.attributes),
            "dimension_names": list(self.dimensions),
            "storage_transformers": [],
        }

    def _grid(self) -> list[int]:
        if self.chunk_rows is None:
            return [max(1, length) for length in self.shape]
        return [max(1, self.chunks) * self.chunk_rows, max(1, self.shape[1])]

    def _codecs(self) -> list[dict[str, Any]]:
        little: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
        crc = {"name": "crc32c"}
        values = little if np.dtype(self.dtype).itemsize > 1 else {"name": "bytes"}
        chain = [values, {"name": "blosc", "configuration": _BLOSC}, crc] if self.compressed else [values, crc]
        if self.chunk_rows is None:
            return chain
        configuration = {
            "chunk_shape": [self.chunk_rows, max(1, self.shape[1])],
            "codecs": chain,
            "index_codecs": [little, crc],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": configuration}]


def parse_metadata(data: bytes, where: str) -> ArraySpec:
    """The spec an array's ``zarr.json`` describes. Raises FormatError: ``array-invalid`` for anything but the arrays of
    format 1."""
    try:
        document = json.loads(data)
        spec = _parse(document)
        is_of_format_1 = spec.metadata() == document
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where} is not the metadata of an array: {error!r}", kind=Kind.ARRAY_INVALID) from error
    if not is_of_format_1:
        raise FormatError(f"{where} describes an array that format 1 does not have", kind=Kind.ARRAY_INVALID)
    return spec


def _parse(document: dict[str, Any]) -> ArraySpec:
    chain, chunk_rows, shape = document["codecs"], None, tuple(document["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {shape}")
    if chain[0]["name"] == "sharding_indexed":
        configuration = chain[0]["configuration"]
        chain, chunk_rows = configuration["codecs"], configuration["chunk_shape"][0]
        if not (type(chunk_rows) is int and chunk_rows > 0 and len(shape) == 2):
            raise ValueError(f"chunk of {chunk_rows} rows of {shape}")
    return ArraySpec(
        shape=shape,
        dtype=str(np.dtype(document["data_type"])),
        dimensions=tuple(document["dimension_names"]),
        chunk_rows=chunk_rows,
        compressed=len(chain) == 3,
        attributes=document["attributes"],
    )


def write_group(fs: Filesystem, folder: str, attributes: Mapping[str, Any]) -> FileEntry:
    """The metadata of a Zarr v3 group at ``folder``."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return write_bytes(fs, folder, METADATA, canonical(document))


def write_array(fs: Filesystem, folder: str, name: str, spec: ArraySpec, values: np.ndarray) -> list[FileEntry]:
    """One array under ``folder/name``; entries have paths relative to ``folder``."""
    if spec.chunk_rows is not None:
        return write_sharded(fs, folder, name, spec, [values])
    if values.shape != spec.shape or values.dtype != np.dtype(spec.dtype):
        raise ValueError(f"{name}: expected {spec.dtype} {spec.shape}, found {values.dtype} {values.shape}")
    entries = [write_bytes(fs, folder, f"{name}/{METADATA}", canonical(spec.metadata()))]
    if spec.size:
        data = values.astype(np.dtype(spec.dtype).newbyteorder("<"), copy=False).tobytes()
        entries.append(write_bytes(fs, folder, f"{name}/{spec.file_path}", data + _crc_bytes(crc32c(data))))
    return entries


def write_sharded(
    fs: Filesystem, folder: str, name: str, spec: ArraySpec, parts: Iterable[np.ndarray]
) -> list[FileEntry]:
    """One sharded array given as parts [n, width] whose rows lie end to end.

    No part may change until the chunk that it ends in is written.
    """
    data: AbstractContextManager[HashedFile | None] = nullcontext()
    if spec.size:
        data = HashedFile(fs, folder, f"{name}/{spec.file_path}")
    with data as file:
        shard = _Shard(name, spec, file)
        for part in parts:
            shard.append(part)
        end = shard.finish()
        metadata = replace(spec, attributes={**spec.attributes, CHUNK_CRCS: shard.crcs}).metadata()
        entries = [write_bytes(fs, folder, f"{name}/{METADATA}", canonical(metadata))]
        if file is not None:
            file.write(end)
            entries.append(file.close())
        return entries


class _Shard:
    """The chunks of one sharded array, appended row by row; ``crcs`` has one checksum for each."""

    def __init__(self, name: str, spec: ArraySpec, file: HashedFile | None) -> None:
        assert spec.chunk_rows is not None
        self.crcs: list[int] = []
        self._name, self._spec, self._file = name, spec, file
        self._chunk_rows, self._dtype = spec.chunk_rows, np.dtype(spec.dtype).newbyteorder("<")
        self._pieces: list[memoryview] = []
        self._row_bytes = spec.row_bytes
        self._filled = self._rows = self._offset = 0
        self._index: list[tuple[int, int]] = []
        self._alignment, self._tail = ALIGNMENT if spec.direct else 1, b""

    def append(self, values: np.ndarray) -> None:
        """Rows [n, width] after those before."""
        if values.shape[1:] != self._spec.shape[1:] or values.dtype != np.dtype(self._spec.dtype):
            expected = f"{self._spec.dtype} [n, {self._spec.shape[1]}]"
            raise ValueError(f"{self._name}: expected {expected}, found {values.dtype} {list(values.shape)}")
        rows = len(values)
        data = np.ascontiguousarray(values, dtype=self._dtype).reshape(-1).view(np.uint8).data
        start = 0
        while start < rows:
            stop = min(rows, start + self._chunk_rows - self._filled)
            self._pieces.append(data[start * self._row_bytes : stop * self._row_bytes])
            self._filled += stop - start
            start = stop
            if self._filled == self._chunk_rows:
                self._emit()
        self._rows += rows

    def finish(self) -> bytes:
        """Fill the last chunk with zeros; what stands behind it: its checksum and the shard index."""
        if self._rows != self._spec.shape[0]:
            raise ValueError(f"{self._name}: {self._spec.shape[0]} rows announced, {self._rows} written")
        if self._filled:
            self._pieces.append(memoryview(bytes((self._chunk_rows - self._filled) * self._row_bytes)))
            self._emit()
        index = np.array(self._index, dtype="<u8").tobytes()
        return self._tail + index + _crc_bytes(crc32c(index))

    def _emit(self) -> None:
        """The pieces gathered are one chunk."""
        pieces = self._pieces
        if self._spec.compressed:
            chunk = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces = [blosc_chunks.compress(np.frombuffer(chunk, dtype=self._dtype)).data]
        self._pieces, self._filled = [], 0
        assert self._file is not None
        gap, size = -self._offset % self._alignment, sum(map(len, pieces)) + CRC_BYTES
        crc = self._file.write(*pieces, lead=self._tail + bytes(gap))
        self._tail = _crc_bytes(crc)
        self.crcs.append(crc)
        self._index.append((self._offset + gap, size))
        self._offset += gap + size


def _crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(CRC_BYTES, "little")


def read_small(fs: Filesystem, folder: str, spec: ArraySpec, entry: FileEntry | None = None) -> np.ndarray:
    """The whole of a single-chunk array, its checksum and when given the digest in the entry of its file verified."""
    path = f"{folder}/{spec.file_path}"
    little = np.dtype(spec.dtype).newbyteorder("<")
    if spec.size == 0:
        return np.zeros(spec.shape, dtype=spec.dtype)
    expected = spec.size * little.itemsize + CRC_BYTES
    require_size(fs, path, expected)
    data = np.empty(expected, dtype=np.uint8)
    fs.read_into(path, 0, data.data)
    _check_crc(fs, path, data, "its only chunk", kind=Kind.ARRAY_CORRUPT)
    if entry is not None and (fault := content_mismatch(entry, data.data)):
        raise damaged(fs, path, Kind.ARRAY_CORRUPT, f"{fault}, by its commit record")
    array = data[:-CRC_BYTES].view(little).reshape(spec.shape)
    return array.astype(spec.dtype, copy=False)


class ShardReader:
    """One sharded array. Opening reads nothing; the index is read and checked before the first rows.

    Safe to use from many threads.
    """

    def __init__(self, fs: Filesystem, folder: str, spec: ArraySpec, file_size: int | None = None) -> None:
        if spec.chunk_bytes > MAX_CHUNK_BYTES:
            raise FormatError(f"{folder} has chunks of {spec.chunk_bytes:,} bytes", kind=Kind.ARRAY_INVALID)
        self.spec = spec
        self._fs = fs
        self._path = f"{folder}/{spec.file_path}"
        self._file_size = file_size
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._rows = spec.chunk_rows or 1
        self._row_bytes, self._chunk_bytes, self._compressed = spec.row_bytes, spec.chunk_bytes, spec.compressed
        self._request_bytes = _REMOTE_REQUEST_BYTES if fs.prefers_few_files else _REQUEST_BYTES
        self._bounds: list[tuple[int, int]] | None = None
        named = spec.attributes.get(CHUNK_CRCS)
        self._crcs: list[int] = named if isinstance(named, list) else []
        ints = isinstance(named, list) and len(self._crcs) == spec.chunks and set(map(type, self._crcs)) <= {int}
        if not ints or not (min(self._crcs, default=0) >= 0 and max(self._crcs, default=0) < 1 << 32):
            raise FormatError(f"{folder} does not name the checksum of every chunk", kind=Kind.ARRAY_INVALID)

    def read_rows(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows [start, stop) into ``out`` [stop - start, width], C-contiguous and of the array's dtype."""
        rows = self._rows
        if not 0 <= start <= stop <= self.spec.shape[0]:
            raise IndexError(f"rows {start}…{stop} of {self.spec.shape[0]}")
        if start == stop:
            return
        chunk, last = start // rows, -(-stop // rows)
        if not self._compressed:
            self._read_direct(chunk, last, start, out.reshape(-1).view(np.uint8))
            return
        bounds = self._index()
        while chunk < last:
            end = chunk + 1
            while end < last and bounds[end][1] - bounds[chunk][0] <= self._request_bytes:
                end += 1
            self._read_compressed(chunk, end, start, stop, out)
            chunk = end

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [start, stop) piece by piece: (offset from ``start``, rows [n, width] valid until the next piece)."""
        rows, row_bytes = self._rows, self._row_bytes
        step = max(1, self._request_bytes // max(1, self._chunk_bytes)) * rows
        with Scratch(min(step + rows, stop - start) * row_bytes) as buffer:
            low = start
            while low < stop:
                high = min(stop, (low // rows) * rows + step)
                piece = buffer[: (high - low) * row_bytes].view(self._dtype).reshape(high - low, -1)
                self.read_rows(low, high, piece)
                yield low - start, piece
                low = high

    def _read_direct(self, chunk: int, end: int, start: int, out: np.ndarray) -> None:
        """Chunks [chunk, end), what ``out`` uint8 wants of them straight into place; each request is verified at once.

        ``out`` holds the rows from ``start`` on. What the first and the last chunk have outside of it goes to memory of
        this thread, and so do the checksums.
        """
        bounds, size = self._index(), self._chunk_bytes
        begin = chunk * size - start * self._row_bytes
        before, after = -begin, max(0, begin + (end - chunk) * size - out.size)
        step = min(_MOST_CHUNKS, max(1, (self._request_bytes if CHECK_CHUNKS else _UNCHECKED_BYTES) // size))
        with Scratch(before + after + (end - chunk) * _TAIL_BYTES, bounds[chunk][0]) as spare:
            target, room = out.data, spare.data
            head, tail, sums = room[:before], room[before : before + after], room[before + after :]
            starts = [bound[0] for bound in bounds[chunk:end]]
            bodies = [target[max(0, place) : place + size] for place in range(begin, begin + len(starts) * size, size)]
            gaps = [*map(sub, starts[1:], starts), size + CRC_BYTES]
            ends = [sums[at : at + gap - size] for at, gap in zip(count(0, _TAIL_BYTES), gaps, strict=False)]
            for first in range(0, len(starts), step):
                stop = min(len(starts), first + step)
                pieces = list(chain.from_iterable(zip(bodies[first:stop], ends[first:stop], strict=True)))
                if first == 0:
                    pieces.insert(0, head)
                if stop == len(starts):
                    pieces.insert(-1, tail)
                self._fs.read_scatter(self._path, starts[first], pieces)
                if CHECK_CHUNKS:
                    crc = 0 if first else crc32c(head)
                    crcs = [crc32c(bodies[first], crc), *map(crc32c, bodies[first + 1 : stop])]
                    if stop == len(starts):
                        crcs[-1] = crc32c(tail, crcs[-1])
                    stored = [int.from_bytes(end[:CRC_BYTES], "little") for end in ends[first:stop]]
                    self._verify(chunk + first, crcs, stored)

    def _read_compressed(self, chunk: int, end: int, start: int, stop: int, out: np.ndarray) -> None:
        """Chunks [chunk, end) through memory of this thread."""
        bounds = self._index()
        first = bounds[chunk][0]
        with Scratch(bounds[end - 1][1] - first, first) as buffer:
            self._fs.read_into(self._path, first, buffer.data)
            stored = [buffer[low - first : high - first] for low, high in bounds[chunk:end]]
            if CHECK_CHUNKS:
                crcs = [crc32c(one[:-CRC_BYTES]) for one in stored]
                self._verify(chunk, crcs, [int.from_bytes(one[-CRC_BYTES:], "little") for one in stored])
            for index, one in enumerate(stored, start=chunk):
                self._copy_decompressed(index, one[:-CRC_BYTES], start, stop, out)

    def _copy_decompressed(self, index: int, body: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """The rows of [start, stop) out of one compressed chunk uint8 [bytes]."""
        rows = self._rows
        first = index * rows
        low, high = max(start, first), min(stop, first + rows)
        target = out[low - start : high - start]
        try:
            if high - low == rows:
                blosc_chunks.decompress(body, target.reshape(-1).view(np.uint8))
                return
            with Scratch(self._chunk_bytes) as buffer:
                blosc_chunks.decompress(body, buffer)
                np.copyto(target, buffer.view(self._dtype).reshape(rows, -1)[low - first : high - first])
        except ValueError as error:
            raise damaged(self._fs, self._path, CHUNK_CORRUPT, f"chunk {index} {error}") from error

    def _verify(self, chunk: int, crcs: list[int], stored: list[int]) -> None:
        """The crc32c of chunks from ``chunk`` on must be those in the metadata and those stored behind them."""
        named = self._crcs[chunk : chunk + len(crcs)]
        if crcs == stored == named:
            return
        for index, (actual, shard, metadata) in enumerate(zip(crcs, stored, named, strict=True), start=chunk):
            if not actual == shard == metadata:
                reason = f"chunk {index} has crc32c {actual:08x}, expected {shard:08x} by the shard"
                raise damaged(self._fs, self._path, CHUNK_CORRUPT, f"{reason} and {metadata:08x} by zarr.json")

    def _index(self) -> list[tuple[int, int]]:
        """First byte of each chunk and the byte behind its checksum; read once."""
        if self._bounds is None:
            self._bounds = self._read_index() if self.spec.size else []
        return self._bounds

    def _read_index(self) -> list[tuple[int, int]]:
        spec = self.spec
        size = self._fs.size(self._path) or 0 if self._file_size is None else self._file_size
        require_size(self._fs, self._path, max(size, spec.index_bytes))
        data = np.empty(spec.index_bytes, dtype=np.uint8)
        self._fs.read_into(self._path, size - spec.index_bytes, data.data)
        _check_crc(self._fs, self._path, data, "the shard index", kind=Kind.SHARD_INDEX)
        pairs = data[:-CRC_BYTES].view("<u8").reshape(spec.chunks, 2)
        if not self._lie_in_order(pairs, size - spec.index_bytes):
            raise damaged(self._fs, self._path, Kind.SHARD_INDEX, "its chunks do not lie end to end")
        return [(offset, offset + length) for offset, length in pairs.tolist()]

    def _lie_in_order(self, pairs: np.ndarray, stop: int) -> bool:
        """Whether chunks, offset and length uint64 [n, 2], fill the bytes up to ``stop``.

        Before aligned ones there are less than ``ALIGNMENT`` unused bytes, before others none.
        """
        spec = self.spec
        largest = spec.chunk_bytes + CRC_BYTES + (blosc_chunks.HEADER_BYTES if spec.compressed else 0)
        smallest = CRC_BYTES + blosc_chunks.HEADER_BYTES if spec.compressed else largest
        loosest = ALIGNMENT if spec.direct else 1
        if int(pairs.max()) > stop:
            return False
        offsets, lengths = pairs.astype(np.int64).T
        gaps = offsets - np.concatenate([[0], (offsets + lengths)[:-1]])
        fitting = (lengths >= smallest) & (lengths <= largest) & (gaps >= 0) & (gaps < loosest)
        return bool(fitting.all()) and int(offsets[-1] + lengths[-1]) == stop


def _check_crc(fs: Filesystem, path: str, data: np.ndarray, what: str, kind: Kind) -> None:
    """Bytes uint8 [n] whose last four are the crc32c of the others."""
    expected, actual = int.from_bytes(data[-CRC_BYTES:].tobytes(), "little"), crc32c(data[:-CRC_BYTES])
    if expected != actual:
        raise damaged(fs, path, kind, f"{what} has crc32c {actual:08x}, expected {expected:08x}")
