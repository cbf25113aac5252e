"""Zarr v3 arrays written once, streaming, in bytes that depend on nothing but the values.

A large array is one shard file: inner chunks of a fixed number of rows end to end, each followed by its crc32c, then
the shard index. Its metadata repeats the checksums, so that whoever trusts the metadata knows a chunk of another file.
A small array is one chunk with its crc32c. Every chunk is written, also one of zeros, because a missing chunk reads as
the fill value. An array of no elements has metadata only.
"""

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from awscrt.checksums import crc32c

from hiddenstore.codecs import blosc_chunks
from hiddenstore.errors import FormatError, Kind
from hiddenstore.files.documents import canonical
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.files import HashedFile, write_bytes
from schemas import FileEntry

METADATA = "zarr.json"
CRC_BYTES = 4
INDEX_ENTRY_BYTES = 16
CHUNK_CRCS = "chunk_crc32c"
# Plain chunks from this size on start at multiples of ALIGNMENT and are read straight into place: the kernel copies
# them up to three times faster where source and destination lie alike.
DIRECT_CHUNK_BYTES = 1 << 16
ALIGNMENT = 64

_BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 2, "blocksize": blosc_chunks.BLOCK_BYTES}


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
        """Whether chunks are aligned in the shard and read without a copy."""
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

    Nothing is copied but compressed chunks that several parts share: no part may change until all are written.
    """
    data: AbstractContextManager[HashedFile | None] = nullcontext()
    if spec.size:
        data = HashedFile(fs, folder, f"{name}/{spec.file_path}")
    with data as file:
        shard = _Shard(name, spec, file)
        for part in parts:
            shard.append(part)
        index = shard.finish()
        metadata = replace(spec, attributes={**spec.attributes, CHUNK_CRCS: shard.crcs}).metadata()
        entries = [write_bytes(fs, folder, f"{name}/{METADATA}", canonical(metadata))]
        if file is not None:
            file.write(index, _crc_bytes(crc32c(index)))
            entries.append(file.close())
        return entries


class _Shard:
    """The chunks of one sharded array, appended row by row; ``crcs`` has one checksum for each."""

    def __init__(self, name: str, spec: ArraySpec, file: HashedFile | None) -> None:
        assert spec.chunk_rows is not None
        self.crcs: list[int] = []
        self._name, self._spec, self._file = name, spec, file
        self._chunk_rows, self._dtype = spec.chunk_rows, np.dtype(spec.dtype).newbyteorder("<")
        self._parts: list[np.ndarray] = []
        self._filled = self._rows = self._offset = 0
        self._index: list[tuple[int, int]] = []

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

    def finish(self) -> bytes:
        """Fill the last chunk with zeros; the shard index."""
        if self._rows != self._spec.shape[0]:
            raise ValueError(f"{self._name}: {self._spec.shape[0]} rows announced, {self._rows} written")
        if self._filled:
            self._parts.append(np.zeros((self._chunk_rows - self._filled, self._spec.shape[1]), dtype=self._dtype))
            self._emit()
        return np.array(self._index, dtype="<u8").tobytes()

    def _emit(self) -> None:
        """The parts gathered are one chunk."""
        bodies = [part.reshape(-1).view(np.uint8) for part in self._parts]
        if self._spec.compressed:
            chunk = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            bodies = [np.frombuffer(blosc_chunks.compress(chunk), dtype=np.uint8)]
        self._parts, self._filled = [], 0
        assert self._file is not None
        gap, size = -self._offset % ALIGNMENT if self._spec.direct else 0, sum(map(len, bodies)) + CRC_BYTES
        self._file.write(bytes(gap))
        crc = self._file.write(*(body.data for body in bodies))
        self._file.write(_crc_bytes(crc))
        self.crcs.append(crc)
        self._index.append((self._offset + gap, size))
        self._offset += gap + size


def _crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(CRC_BYTES, "little")
