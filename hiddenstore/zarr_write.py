"""Zarr v3 arrays written once, streaming, in bytes that depend on nothing but the values.

A large array is one shard file: inner chunks of a fixed number of rows end to end, each followed by its crc32c, then
the shard index. Its metadata repeats the checksums, so that whoever trusts the metadata knows a chunk of another file.
A small array is one chunk with its crc32c. Every chunk is written, also one of zeros, because a missing chunk reads as
the fill value. An array of no elements has metadata only.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import google_crc32c
import numpy as np

from hiddenstore import blosc_chunks
from hiddenstore.documents import canonical
from hiddenstore.fs import Filesystem, WritableFile
from hiddenstore.zarr_spec import ALIGNMENT, CHUNK_CRCS, CRC_BYTES, METADATA, ArraySpec, crc32c
from schemas import FileEntry

# Calls that end at multiples of this give the page cache large pages: cheaper to write, and to read later. Pages of
# 1 MiB and more cost twice as much on a virtual machine whose host takes free memory of that size back.
_BLOCK_BYTES = 1 << 19
_MOST_PIECES = 1024


class HashedFile:
    """A new file whose size and sha256 are known when it closes.

    Pieces are hashed at once and reach the disk many in one call: their memory must not change until ``close``.
    """

    def __init__(self, fs: Filesystem, folder: str, path: str) -> None:
        self._file: WritableFile = fs.create(f"{folder}/{path}")
        self._path = path
        self._size = self._pending_bytes = 0
        self._pending: deque[memoryview] = deque()
        self._digest = hashlib.sha256()

    def write(self, *pieces: bytes | memoryview) -> None:
        """Append pieces of bytes."""
        for piece in pieces:
            self._digest.update(piece)
            self._pending.append(memoryview(piece))
            self._pending_bytes += len(piece)
        self._flush(self._pending_bytes // _BLOCK_BYTES * _BLOCK_BYTES)

    def close(self) -> FileEntry:
        self._flush(self._pending_bytes)
        self._file.close()
        return FileEntry(path=self._path, size=self._size, sha256=self._digest.hexdigest())

    def abort(self) -> None:
        self._file.abort()

    def _flush(self, size: int) -> None:
        """The first ``size`` pending bytes go to the disk."""
        pieces, left = [], size
        while left:
            piece = self._pending.popleft()
            if len(piece) > left:
                self._pending.appendleft(piece[left:])
                piece = piece[:left]
            pieces.append(piece)
            left -= len(piece)
        if pieces:
            self._file.write_all(pieces if len(pieces) <= _MOST_PIECES else [memoryview(b"".join(pieces))])
        self._pending_bytes -= size
        self._size += size


def write_bytes(fs: Filesystem, folder: str, path: str, *pieces: bytes | memoryview) -> FileEntry:
    """One whole new file, fsynced."""
    file = HashedFile(fs, folder, path)
    try:
        file.write(*pieces)
        return file.close()
    except BaseException:
        file.abort()
        raise


def write_group(fs: Filesystem, folder: str, attributes: Mapping[str, Any]) -> FileEntry:
    """The metadata of a Zarr v3 group at ``folder``."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return write_bytes(fs, folder, METADATA, canonical(document))


def write_array(fs: Filesystem, folder: str, name: str, spec: ArraySpec, values: np.ndarray) -> list[FileEntry]:
    """One array under ``folder/name``; entries have paths relative to ``folder``."""
    if values.shape != spec.shape or values.dtype != np.dtype(spec.dtype):
        raise ValueError(f"{name}: expected {spec.dtype} {spec.shape}, found {values.dtype} {values.shape}")
    if spec.chunk_rows is not None:
        return write_parts(fs, folder, name, spec, [values])
    entries = [write_bytes(fs, folder, f"{name}/{METADATA}", canonical(spec.metadata()))]
    if spec.size:
        data = np.ascontiguousarray(values).astype(np.dtype(spec.dtype).newbyteorder("<"), copy=False).tobytes()
        entries.append(write_bytes(fs, folder, f"{name}/{spec.file_path}", data, _crc_bytes(data)))
    return entries


def write_parts(
    fs: Filesystem, folder: str, name: str, spec: ArraySpec, parts: Iterable[np.ndarray]
) -> list[FileEntry]:
    """One sharded array given as parts [n, width] whose rows lie end to end."""
    with ShardWriter(fs, folder, name, spec) as shard:
        for part in parts:
            shard.append(part)
    return shard.entries


class ShardWriter:
    """One sharded array, appended row by row; ``entries`` is filled when the block ends without an exception.

    Nothing is copied but compressed chunks that several parts share: memory given to ``append`` must not change until
    the block ends.
    """

    def __init__(self, fs: Filesystem, folder: str, name: str, spec: ArraySpec) -> None:
        self.entries: list[FileEntry] = []
        self._fs, self._folder, self._name, self._spec = fs, folder, name, spec
        self._file = HashedFile(fs, folder, f"{name}/{spec.file_path}") if spec.size else None
        assert spec.chunk_rows is not None
        self._chunk_rows, self._dtype = spec.chunk_rows, np.dtype(spec.dtype).newbyteorder("<")
        self._parts: list[np.ndarray] = []
        self._filled = self._rows = self._offset = 0
        self._index: list[tuple[int, int]] = []
        self._crcs: list[int] = []

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        finished = False
        try:
            if kind is None:
                self._finish()
                finished = True
        finally:
            if not finished and self._file is not None:
                self._file.abort()

    def append(self, values: np.ndarray) -> None:
        """Rows [n, width] after those before."""
        if values.shape[1:] != self._spec.shape[1:] or values.dtype != np.dtype(self._spec.dtype):
            expected = f"{self._spec.dtype} [n, {self._spec.shape[1]}]"
            raise ValueError(f"{self._name}: expected {expected}, found {values.dtype} {list(values.shape)}")
        values = np.ascontiguousarray(values, dtype=self._dtype)
        start = 0
        while start < len(values):
            part = values[start : start + self._chunk_rows - self._filled]
            self._parts.append(part)
            self._filled += len(part)
            start += len(part)
            if self._filled == self._chunk_rows:
                self._emit()
        self._rows += len(values)

    def _emit(self) -> None:
        """The parts gathered are one chunk."""
        bodies = _stored(self._parts, self._spec)
        self._parts, self._filled = [], 0
        crc, size = 0, 0
        for body in bodies:
            crc, size = google_crc32c.extend(crc, body), size + len(body)
        before = -self._offset % ALIGNMENT if self._spec.direct else 0
        self._crcs.append(crc)
        self._index.append((self._offset + before, size + CRC_BYTES))
        self._offset += before + size + CRC_BYTES
        if self._file is not None:
            self._file.write(bytes(before), *(body.data for body in bodies), crc.to_bytes(CRC_BYTES, "little"))

    def _finish(self) -> None:
        if self._rows != self._spec.shape[0]:
            raise ValueError(f"{self._name}: {self._spec.shape[0]} rows announced, {self._rows} written")
        if self._filled:
            self._parts.append(np.zeros((self._chunk_rows - self._filled, self._spec.shape[1]), dtype=self._dtype))
            self._emit()
        spec = replace(self._spec, attributes={**self._spec.attributes, CHUNK_CRCS: self._crcs})
        metadata = canonical(spec.metadata())
        self.entries.append(write_bytes(self._fs, self._folder, f"{self._name}/{METADATA}", metadata))
        if self._file is not None:
            index = np.array(self._index, dtype="<u8").tobytes()
            self._file.write(index, _crc_bytes(index))
            self.entries.append(self._file.close())


def _stored(parts: list[np.ndarray], spec: ArraySpec) -> list[np.ndarray]:
    """The bytes of a chunk given in parts [n, width], uint8 [bytes] each."""
    if not spec.compressed:
        return [part.reshape(-1).view(np.uint8) for part in parts]
    chunk = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return [np.frombuffer(blosc_chunks.compress(chunk), dtype=np.uint8)]


def _crc_bytes(data: bytes) -> bytes:
    return crc32c(data).to_bytes(CRC_BYTES, "little")
