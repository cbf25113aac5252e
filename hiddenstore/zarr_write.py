"""Zarr v3 arrays written once, streaming, in bytes that depend on nothing but the values.

A large array is one shard file: inner chunks of a fixed number of rows end to end, each followed by its crc32c, then
the shard index. Its metadata repeats the checksums, so that whoever trusts the metadata knows a chunk of another file.
A small array is one chunk with its crc32c. Every chunk is written, also one of zeros, because a missing chunk reads as
the fill value. An array of no elements has metadata only.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hiddenstore import blosc_chunks
from hiddenstore.documents import canonical
from hiddenstore.fs import Filesystem, WritableFile
from hiddenstore.zarr_spec import ALIGNMENT, CHUNK_CRCS, CRC_BYTES, DIRECT_CHUNK_BYTES, METADATA, ArraySpec, crc32c
from schemas import FileEntry

_WRITE_BYTES = 1 << 22


class HashedFile:
    """A new file whose size and sha256 are known when it closes. Aborts when an exception leaves the block."""

    def __init__(self, fs: Filesystem, folder: str, path: str) -> None:
        self._file: WritableFile = fs.create(f"{folder}/{path}")
        self._path = path
        self._size = 0
        self._digest = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def close(self) -> FileEntry:
        self._file.close()
        return FileEntry(path=self._path, size=self._size, sha256=self._digest.hexdigest())

    def abort(self) -> None:
        self._file.abort()


def write_bytes(fs: Filesystem, folder: str, path: str, data: bytes | memoryview) -> FileEntry:
    """One whole new file, fsynced."""
    file = HashedFile(fs, folder, path)
    try:
        file.write(data)
    except BaseException:
        file.abort()
        raise
    return file.close()


def write_group(fs: Filesystem, folder: str, attributes: Mapping[str, Any]) -> FileEntry:
    """The metadata of a Zarr v3 group at ``folder``."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return write_bytes(fs, folder, METADATA, canonical(document))


def write_array(fs: Filesystem, folder: str, name: str, spec: ArraySpec, values: np.ndarray) -> list[FileEntry]:
    """One array under ``folder/name``; entries have paths relative to ``folder``."""
    if values.shape != spec.shape or values.dtype != np.dtype(spec.dtype):
        raise ValueError(f"{name}: expected {spec.dtype} {spec.shape}, found {values.dtype} {values.shape}")
    if spec.chunk_rows is not None:
        with ShardWriter(fs, folder, name, spec) as shard:
            shard.append(values)
        return shard.entries
    entries = [write_bytes(fs, folder, f"{name}/{METADATA}", canonical(spec.metadata()))]
    if spec.size:
        data = np.ascontiguousarray(values).astype(np.dtype(spec.dtype).newbyteorder("<"), copy=False).tobytes()
        entries.append(write_bytes(fs, folder, f"{name}/{spec.file_path}", data + _crc_bytes(data)))
    return entries


class ShardWriter:
    """One sharded array, appended row by row; ``entries`` is filled when the block ends without an exception.

    Memory: one chunk and up to 4 MiB of small ones on their way to the file.
    """

    def __init__(self, fs: Filesystem, folder: str, name: str, spec: ArraySpec) -> None:
        self.entries: list[FileEntry] = []
        self._fs, self._folder, self._name, self._spec = fs, folder, name, spec
        self._file = HashedFile(fs, folder, f"{name}/{spec.file_path}") if spec.size else None
        assert spec.chunk_rows is not None
        self._chunk = np.zeros((spec.chunk_rows, spec.shape[1]), dtype=np.dtype(spec.dtype).newbyteorder("<"))
        self._filled = self._rows = self._offset = self._pending_bytes = 0
        self._index: list[tuple[int, int]] = []
        self._crcs: list[int] = []
        self._pending: list[bytes | memoryview] = []

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
        rows = self._chunk.shape[0]
        start = 0
        while start < len(values):
            if self._filled == 0 and len(values) - start >= rows:
                self._emit(np.ascontiguousarray(values[start : start + rows]))
                taken = rows
            else:
                taken = min(rows - self._filled, len(values) - start)
                self._chunk[self._filled : self._filled + taken] = values[start : start + taken]
                self._filled += taken
                if self._filled == rows:
                    self._emit(self._chunk.copy())
                    self._filled = 0
            start += taken
        self._rows += len(values)
        # What is pending may be a view of the caller's memory.
        self._flush()

    def _emit(self, chunk: np.ndarray) -> None:
        data = _encode_chunk(chunk, self._spec)
        crc = crc32c(data)
        self._crcs.append(crc)
        if self._spec.direct:
            self._put(bytes(-self._offset % ALIGNMENT))
        self._index.append((self._offset, len(data) + CRC_BYTES))
        self._put(data)
        self._put(crc.to_bytes(CRC_BYTES, "little"))

    def _put(self, data: bytes | memoryview) -> None:
        """Append to the file: large pieces as they are, small ones gathered."""
        self._offset += len(data)
        if len(data) >= DIRECT_CHUNK_BYTES and self._file is not None:
            self._flush()
            self._file.write(data)
            return
        self._pending.append(data)
        self._pending_bytes += len(data)
        if self._pending_bytes >= _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._file is None or not self._pending:
            return
        self._file.write(b"".join(self._pending))
        self._pending.clear()
        self._pending_bytes = 0

    def _finish(self) -> None:
        if self._rows != self._spec.shape[0]:
            raise ValueError(f"{self._name}: {self._spec.shape[0]} rows announced, {self._rows} written")
        if self._filled:
            self._chunk[self._filled :] = 0
            self._emit(self._chunk)
        spec = replace(self._spec, attributes={**self._spec.attributes, CHUNK_CRCS: self._crcs})
        metadata = canonical(spec.metadata())
        self.entries.append(write_bytes(self._fs, self._folder, f"{self._name}/{METADATA}", metadata))
        if self._file is not None:
            index = np.array(self._index, dtype="<u8").tobytes()
            self._pending += [index, _crc_bytes(index)]
            self._flush()
            self.entries.append(self._file.close())


def _encode_chunk(chunk: np.ndarray, spec: ArraySpec) -> bytes | memoryview:
    if spec.compressed:
        return blosc_chunks.compress(chunk)
    return chunk.reshape(-1).view(np.uint8).data.toreadonly()


def _crc_bytes(data: bytes | memoryview) -> bytes:
    return crc32c(data).to_bytes(CRC_BYTES, "little")
