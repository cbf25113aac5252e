"""Our own reader of the arrays of ``zarr_write``: rows [a, b) by ranged reads, every checksum verified.

Stock Zarr readers open the same files at two to four times the CPU. The interpreter lock is free during reads,
checksums, decompression and copies. Whatever disagrees with its checksum or with the metadata is a CorruptionError that
names the file.
"""

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from numcodecs import blosc

from hiddenstore.documents import sha256_hex
from hiddenstore.errors import CorruptionError, FormatError
from hiddenstore.fs import Filesystem
from hiddenstore.zarr_write import CHUNK_CRCS, CRC_BYTES, ArraySpec, crc32c

MAX_CHUNK_BYTES = 1 << 28

_READ_BYTES = 1 << 21
_BLOSC_HEADER_BYTES = 16


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
        self._bounds: list[int] | None = None
        self._crcs: list[int] = spec.attributes.get(CHUNK_CRCS, [])
        if len(self._crcs) != spec.chunks or not all(type(crc) is int and 0 <= crc < 1 << 32 for crc in self._crcs):
            raise FormatError(f"{folder} does not name the checksum of every chunk", kind="array-invalid")

    def read_rows(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows [start, stop) into ``out`` [stop - start, width], C-contiguous and of the array's dtype."""
        rows, bounds = self.spec.chunk_rows, self._index()
        assert rows is not None
        if not 0 <= start <= stop <= self.spec.shape[0]:
            raise IndexError(f"rows {start}…{stop} of {self.spec.shape[0]}")
        if start == stop:
            return
        chunk, last = start // rows, -(-stop // rows)
        while chunk < last:
            end = chunk + 1
            while end < last and bounds[end + 1] - bounds[chunk] <= _READ_BYTES:
                end += 1
            with _scratch(bounds[end] - bounds[chunk]) as buffer:
                self._fs.read_into(self._path, bounds[chunk], buffer.data)
                if self.spec.compressed:
                    for index in range(chunk, end):
                        low, high = bounds[index] - bounds[chunk], bounds[index + 1] - bounds[chunk]
                        self._place_compressed(index, buffer[low:high], start, stop, out)
                else:
                    self._place_plain(chunk, buffer.reshape(end - chunk, -1), start, stop, out)
            chunk = end

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [start, stop) piece by piece: (offset from ``start``, rows [n, width] valid until the next piece)."""
        rows, row_bytes = self.spec.chunk_rows, self.spec.row_bytes
        assert rows is not None
        step = max(1, _READ_BYTES // max(1, self.spec.chunk_bytes)) * rows
        with _scratch(min(step + rows, stop - start) * row_bytes) as buffer:
            low = start
            while low < stop:
                high = min(stop, (low // rows) * rows + step)
                piece = buffer[: (high - low) * row_bytes].view(self._dtype).reshape(high - low, -1)
                self.read_rows(low, high, piece)
                yield low - start, piece
                low = high

    def _place_plain(self, chunk: int, stored: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """Verify chunks uint8 [n, bytes] from number ``chunk`` on and put their rows of [start, stop) into place."""
        rows = self.spec.chunk_rows
        assert rows is not None
        self._verify(chunk, stored)
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

    def _place_compressed(self, index: int, stored: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """Verify one chunk uint8 [bytes] and put its rows of [start, stop) into place."""
        rows = self.spec.chunk_rows
        assert rows is not None
        self._verify(index, stored[None])
        first = index * rows
        low, high = max(start, first), min(stop, first + rows)
        target = out[low - start : high - start]
        if high - low == rows:
            self._decompress(index, stored[:-CRC_BYTES], target.reshape(-1).view(np.uint8))
            return
        with _scratch(self.spec.chunk_bytes) as buffer:
            self._decompress(index, stored[:-CRC_BYTES], buffer)
            np.copyto(target, buffer.view(self._dtype).reshape(rows, -1)[low - first : high - first])

    def _verify(self, chunk: int, stored: np.ndarray) -> None:
        """Check stored chunks uint8 [n, bytes] from number ``chunk`` on: body, crc32c behind it and in the metadata."""
        behind = stored[:, -CRC_BYTES:].copy().view("<u4")[:, 0].tolist()
        for index, (body, crc) in enumerate(zip(stored[:, :-CRC_BYTES], behind, strict=True), start=chunk):
            found = crc32c(body)
            if found != crc or found != self._crcs[index]:
                reason = (
                    f"chunk {index} has crc32c {found:08x}, expected {crc:08x} by the shard "
                    f"and {self._crcs[index]:08x} by zarr.json"
                )
                raise _corrupt(self._fs, self._path, "chunk-corrupt", reason)

    def _decompress(self, index: int, body: np.ndarray, target: np.ndarray) -> None:
        # blosc trusts its header: bytes 4-7 are the decoded size, 12-15 the encoded one.
        sizes = body[:_BLOSC_HEADER_BYTES].view("<u4").tolist() if len(body) >= _BLOSC_HEADER_BYTES else [0] * 4
        if sizes[1] != target.size or sizes[3] != len(body):
            raise _corrupt(
                self._fs, self._path, "chunk-corrupt", f"chunk {index} has a blosc header that is not its own"
            )
        try:
            blosc.decompress(body, target)
        except (RuntimeError, ValueError) as error:
            raise _corrupt(self._fs, self._path, "chunk-corrupt", f"chunk {index} does not decompress") from error

    def _index(self) -> list[int]:
        """Chunk i lies at bytes [bounds[i], bounds[i + 1]) of the shard."""
        if self._bounds is None:
            self._bounds = self._read_index()
        return self._bounds

    def _read_index(self) -> list[int]:
        spec = self.spec
        if spec.size == 0:
            return [0]
        found = self._fs.size(self._path)
        if found is None:
            raise _corrupt(self._fs, self._path, "file-missing", "it does not exist")
        expected = self._file_size
        if expected is None:
            expected = found if spec.compressed else spec.chunks * (spec.chunk_bytes + CRC_BYTES) + spec.index_bytes
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
        bounds: list[int] = [0, *(int(offset) + int(length) for offset, length in pairs)]
        offsets: list[int] = pairs[:, 0].tolist()
        largest = spec.chunk_bytes + CRC_BYTES + (_BLOSC_HEADER_BYTES if spec.compressed else 0)
        smallest = CRC_BYTES + _BLOSC_HEADER_BYTES if spec.compressed else largest
        fitting = all(smallest <= high - low <= largest for low, high in pairwise(bounds))
        if offsets != bounds[:-1] or bounds[-1] + spec.index_bytes != found or not fitting:
            raise _corrupt(self._fs, self._path, "shard-index", "its chunks do not lie end to end")
        return bounds


class _Pool(threading.local):
    def __init__(self) -> None:
        self.free: list[np.ndarray] = []


_POOL = _Pool()


@contextmanager
def _scratch(size: int) -> Iterator[np.ndarray]:
    """uint8 [size] of reused memory of this thread; fresh pages would cost as much as the copy."""
    free = _POOL.free
    buffer = free.pop() if free else np.empty(0, dtype=np.uint8)
    if buffer.size < size:
        buffer = np.empty(size, dtype=np.uint8)
    try:
        yield buffer[:size]
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
