"""Our own reader of the arrays of ``zarr_write``: rows [a, b) by ranged reads, every checksum verified.

Stock Zarr readers open the same files at two to four times the CPU. The interpreter lock is free during reads,
checksums, decompression and copies. Whatever disagrees with its checksum or with the metadata is a CorruptionError that
names the file.
"""

import json
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import google_crc32c
import numpy as np

from hiddenstore import blosc_chunks
from hiddenstore.documents import sha256_hex
from hiddenstore.errors import CorruptionError, FormatError
from hiddenstore.fs import Filesystem
from hiddenstore.zarr_write import ALIGNMENT, CHUNK_CRCS, CRC_BYTES, ArraySpec, crc32c

MAX_CHUNK_BYTES = 1 << 28
CHECK_CHUNKS = True
"""Off, this process reads chunks without their checksums: for benchmarks that measure what checking costs."""

# A request for chunks that are copied stays in cache; one straight into place need not.
_READ_BYTES = 1 << 21
_DIRECT_BYTES = 1 << 23


def parse_metadata(data: bytes, where: str) -> ArraySpec:
    """The spec an array's ``zarr.json`` describes.

    Raises:
        FormatError: ``array-invalid`` for anything but the arrays of format 1.
    """
    try:
        document = json.loads(data)
        spec = _spec(document)
        same = spec.metadata() == document
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where} is not the metadata of an array: {error!r}", kind="array-invalid") from error
    if not same:
        raise FormatError(f"{where} describes an array that format 1 does not have", kind="array-invalid")
    return spec


def _spec(document: dict[str, Any]) -> ArraySpec:
    codecs = document["codecs"]
    sharded = codecs[0]["name"] == "sharding_indexed"
    configuration = codecs[0]["configuration"] if sharded else {}
    chain = configuration["codecs"] if sharded else codecs
    shape = tuple(document["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {shape}")
    chunk_rows = configuration["chunk_shape"][0] if sharded else None
    if sharded and not (type(chunk_rows) is int and chunk_rows > 0 and len(shape) == 2):
        raise ValueError(f"chunk of {chunk_rows} rows of {shape}")
    return ArraySpec(
        shape=shape,
        dtype=str(np.dtype(document["data_type"])),
        dimensions=tuple(document["dimension_names"]),
        chunk_rows=chunk_rows,
        compressed=len(chain) == 3,
        attributes=document["attributes"],
    )


def read_small(fs: Filesystem, folder: str, spec: ArraySpec, sha256: str | None = None) -> np.ndarray:
    """The whole of a single-chunk array, its checksum and when given the sha256 of its file verified."""
    path = f"{folder}/{spec.file_path}"
    little = np.dtype(spec.dtype).newbyteorder("<")
    if spec.size == 0:
        return np.zeros(spec.shape, dtype=spec.dtype)
    expected = spec.size * little.itemsize + CRC_BYTES
    _check_size(fs, path, expected)
    data = fs.read_range(path, 0, expected)
    _check_crc(fs, path, memoryview(data)[:-CRC_BYTES], data[-CRC_BYTES:], "its only chunk", kind="array-corrupt")
    if sha256 is not None and sha256_hex(data) != sha256:
        raise _corrupt(fs, path, "array-corrupt", "its sha256 is not the one the commit record names")
    array = np.frombuffer(data, dtype=little, count=spec.size).reshape(spec.shape)
    return array.astype(spec.dtype, copy=False)


class ShardReader:
    """One sharded array. Opening reads nothing; the index is read and checked before the first rows.

    Safe to use from many threads.
    """

    def __init__(self, fs: Filesystem, folder: str, spec: ArraySpec, file_size: int | None = None) -> None:
        if spec.chunk_bytes > MAX_CHUNK_BYTES:
            raise FormatError(f"{folder} has chunks of {spec.chunk_bytes:,} bytes", kind="array-invalid")
        self.spec = spec
        self._fs = fs
        self._path = f"{folder}/{spec.file_path}"
        self._file_size = file_size
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._rows = spec.chunk_rows or 1
        self._bounds: list[tuple[int, int]] | None = None
        self._crcs: list[int] = spec.attributes.get(CHUNK_CRCS, [])
        if len(self._crcs) != spec.chunks or not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in self._crcs):
            raise FormatError(f"{folder} does not name the checksum of every chunk", kind="array-invalid")

    def read_rows(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows [start, stop) into ``out`` [stop - start, width], C-contiguous and of the array's dtype."""
        rows, bounds = self._rows, self._index()
        if not 0 <= start <= stop <= self.spec.shape[0]:
            raise IndexError(f"rows {start}…{stop} of {self.spec.shape[0]}")
        if start == stop:
            return
        most = _DIRECT_BYTES if self.spec.direct else _READ_BYTES
        chunk, last = start // rows, -(-stop // rows)
        while chunk < last:
            end = chunk + 1
            while end < last and bounds[end][1] - bounds[chunk][0] <= most:
                end += 1
            if self.spec.direct:
                self._read_direct(chunk, end, start, stop, out)
            else:
                self._read_copied(chunk, end, start, stop, out)
            chunk = end

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [start, stop) piece by piece: (offset from ``start``, rows [n, width] valid until the next piece)."""
        rows, row_bytes = self._rows, self.spec.row_bytes
        step = max(1, _READ_BYTES // max(1, self.spec.chunk_bytes)) * rows
        with _scratch(min(step + rows, stop - start) * row_bytes) as buffer:
            low = start
            while low < stop:
                high = min(stop, (low // rows) * rows + step)
                piece = buffer[: (high - low) * row_bytes].view(self._dtype).reshape(high - low, -1)
                self.read_rows(low, high, piece)
                yield low - start, piece
                low = high

    def _read_direct(self, chunk: int, end: int, start: int, stop: int, out: np.ndarray) -> None:
        """Chunks [chunk, end) in one request, their rows of [start, stop) straight into place; then verify them."""
        bounds, size, row_bytes = self._index(), self.spec.chunk_bytes, self.spec.row_bytes
        target = out.reshape(-1).view(np.uint8)
        before = max(0, start - chunk * self._rows) * row_bytes
        behind = max(0, end * self._rows - stop) * row_bytes
        place = max(0, chunk * self._rows - start) * row_bytes
        with _scratch(before + behind + (end - chunk) * 2 * ALIGNMENT, bounds[chunk][0]) as spare:
            bodies, tails = [], []
            for index in range(chunk, end):
                head = before if index == chunk else 0
                rest = behind if index == end - 1 else 0
                wanted = size - head - rest
                parts = (spare[:head], target[place : place + wanted], spare[before : before + rest])
                bodies.append([part for part in parts if part.size])
                place += wanted
                gap = (bounds[index + 1][0] if index + 1 < end else bounds[index][1]) - bounds[index][0] - size
                tails.append(spare[before + behind + (index - chunk) * 2 * ALIGNMENT :][:gap])
            pieces = [part.data for body, tail in zip(bodies, tails, strict=True) for part in (*body, tail)]
            self._fs.read_scatter(self._path, bounds[chunk][0], pieces)
            for index, (body, tail) in enumerate(zip(bodies, tails, strict=True), start=chunk):
                self._verify(index, body, tail[:CRC_BYTES])

    def _read_copied(self, chunk: int, end: int, start: int, stop: int, out: np.ndarray) -> None:
        """Chunks [chunk, end) through memory of this thread: small ones and compressed ones."""
        bounds = self._index()
        first = bounds[chunk][0]
        with _scratch(bounds[end - 1][1] - first, first) as buffer:
            self._fs.read_into(self._path, first, buffer.data)
            for index in range(chunk, end):
                stored = buffer[bounds[index][0] - first : bounds[index][1] - first]
                self._verify(index, [stored[:-CRC_BYTES]], stored[-CRC_BYTES:])
            if self.spec.compressed:
                for index in range(chunk, end):
                    stored = buffer[bounds[index][0] - first : bounds[index][1] - first - CRC_BYTES]
                    self._place_compressed(index, stored, start, stop, out)
            else:
                self._place_plain(chunk, buffer.reshape(end - chunk, -1), start, stop, out)

    def _place_plain(self, chunk: int, stored: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """Put the rows of [start, stop) of chunks uint8 [n, bytes] from number ``chunk`` on into place."""
        rows = self._rows
        values = stored[:, :-CRC_BYTES].view(self._dtype).reshape(len(stored), rows, -1)
        first = chunk * rows
        low, high = max(start, first) - first, min(stop, first + len(stored) * rows) - first
        target = out[first + low - start : first + high - start]
        head = min(-(-low // rows) * rows, high)
        tail = max(high // rows * rows, head)
        np.copyto(target[: head - low], values[0, low:head])
        whole = values[head // rows : tail // rows]
        np.copyto(target[head - low : tail - low].reshape(whole.shape), whole)
        if tail < high:
            np.copyto(target[tail - low :], values[tail // rows, : high - tail])

    def _place_compressed(self, index: int, body: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """Put the rows of [start, stop) of one chunk uint8 [bytes] into place."""
        rows = self._rows
        first = index * rows
        low, high = max(start, first), min(stop, first + rows)
        target = out[low - start : high - start]
        if high - low == rows:
            self._decompress(index, body, target.reshape(-1).view(np.uint8))
            return
        with _scratch(self.spec.chunk_bytes) as buffer:
            self._decompress(index, body, buffer)
            np.copyto(target, buffer.view(self._dtype).reshape(rows, -1)[low - first : high - first])

    def _verify(self, index: int, body: Sequence[np.ndarray], behind: np.ndarray) -> None:
        """Check chunk ``index``, given in parts, against its crc32c behind it and in the metadata."""
        if not CHECK_CHUNKS:
            return
        found = crc32c(body[0])
        for part in body[1:]:
            found = int(google_crc32c.extend(found, part))
        crc = int.from_bytes(behind.tobytes(), "little")
        if found != crc or found != self._crcs[index]:
            reason = (
                f"chunk {index} has crc32c {found:08x}, expected {crc:08x} by the shard "
                f"and {self._crcs[index]:08x} by zarr.json"
            )
            raise _corrupt(self._fs, self._path, "chunk-corrupt", reason)

    def _decompress(self, index: int, body: np.ndarray, target: np.ndarray) -> None:
        try:
            blosc_chunks.decompress(body, target)
        except ValueError as error:
            raise _corrupt(self._fs, self._path, "chunk-corrupt", f"chunk {index} {error}") from error

    def _index(self) -> list[tuple[int, int]]:
        """First byte of each chunk and the byte behind its checksum."""
        if self._bounds is None:
            self._bounds = self._read_index()
        return self._bounds

    def _read_index(self) -> list[tuple[int, int]]:
        spec = self.spec
        if spec.size == 0:
            return []
        found = self._fs.size(self._path)
        if found is None:
            raise _corrupt(self._fs, self._path, "file-missing", "it does not exist")
        expected = found if self._file_size is None else self._file_size
        if found != expected or found < spec.index_bytes:
            reason = f"expected {max(expected, spec.index_bytes)} bytes, found {found}"
            raise _corrupt(self._fs, self._path, "file-size", reason)
        data = self._fs.read_range(self._path, found - spec.index_bytes, spec.index_bytes)
        _check_crc(
            self._fs,
            self._path,
            memoryview(data)[:-CRC_BYTES],
            data[-CRC_BYTES:],
            "the shard index",
            kind="shard-index",
        )
        pairs = np.frombuffer(data, dtype="<u8", count=spec.chunks * 2).reshape(spec.chunks, 2)
        bounds: list[tuple[int, int]] = [(offset, offset + length) for offset, length in pairs.tolist()]
        if not self._lie_in_order(bounds, found - spec.index_bytes):
            raise _corrupt(self._fs, self._path, "shard-index", "its chunks do not lie end to end")
        return bounds

    def _lie_in_order(self, bounds: list[tuple[int, int]], stop: int) -> bool:
        """Whether the chunks fill the bytes up to ``stop``, aligned ones with less than ``ALIGNMENT`` between them."""
        spec = self.spec
        largest = spec.chunk_bytes + CRC_BYTES + (blosc_chunks.HEADER_BYTES if spec.compressed else 0)
        smallest = CRC_BYTES + blosc_chunks.HEADER_BYTES if spec.compressed else largest
        loosest = ALIGNMENT if spec.direct else 1
        ends = [0, *(high for _, high in bounds)]
        return ends[-1] == stop and all(
            smallest <= high - low <= largest and 0 <= low - end < loosest
            for end, (low, high) in zip(ends, bounds, strict=False)
        )


class _Pool(threading.local):
    def __init__(self) -> None:
        self.free: list[np.ndarray] = []


_POOL = _Pool()


@contextmanager
def _scratch(size: int, offset: int = 0) -> Iterator[np.ndarray]:
    """uint8 [size] of reused memory of this thread; fresh pages would cost as much as the copy.

    It lies in memory as byte ``offset`` lies in its file, modulo ``ALIGNMENT``: a copy by the kernel to a place a few
    bytes ahead of that is up to five times slower.
    """
    free = _POOL.free
    buffer = free.pop() if free else np.empty(0, dtype=np.uint8)
    if buffer.size < size + 2 * ALIGNMENT:
        buffer = np.empty(size + 2 * ALIGNMENT, dtype=np.uint8)
    first = (offset - buffer.ctypes.data) % ALIGNMENT
    try:
        yield buffer[first : first + size]
    finally:
        if buffer.size <= 4 * _READ_BYTES and len(free) < 4:
            free.append(buffer)


def _check_size(fs: Filesystem, path: str, expected: int) -> None:
    found = fs.size(path)
    if found is None:
        raise _corrupt(fs, path, "file-missing", "it does not exist")
    if found != expected:
        raise _corrupt(fs, path, "file-size", f"expected {expected} bytes, found {found}")


def _check_crc(fs: Filesystem, path: str, body: memoryview, stored: bytes, what: str, kind: str) -> None:
    expected, found = int.from_bytes(stored, "little"), crc32c(body)
    if expected != found:
        reason = f"{what} has crc32c {found:08x}, expected {expected:08x}"
        raise _corrupt(fs, path, kind, reason)


def _corrupt(fs: Filesystem, path: str, kind: str, reason: str) -> CorruptionError:
    return CorruptionError(
        f"{fs.root}/{path} is damaged: {reason}",
        kind=kind,
        path=path,
        hint=shlex.join(["hiddenstore", "verify", fs.root, "--full"]),
    )
