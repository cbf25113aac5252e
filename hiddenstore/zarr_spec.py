"""What the Zarr v3 arrays of a segment look like: their metadata document, made and parsed, and their checksum."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import google_crc32c
import numpy as np

from hiddenstore import blosc_chunks
from hiddenstore.errors import FormatError

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
        values = little if np.dtype(self.dtype).itemsize > 1 else {"name": "bytes"}
        squeeze = [{"name": "blosc", "configuration": dict(_BLOSC)}] if self.compressed else []
        chain = [values, *squeeze, {"name": "crc32c"}]
        if self.chunk_rows is None:
            return chain
        configuration = {
            "chunk_shape": [self.chunk_rows, max(1, self.shape[1])],
            "codecs": chain,
            "index_codecs": [little, {"name": "crc32c"}],
            "index_location": "end",
        }
        return [{"name": "sharding_indexed", "configuration": configuration}]


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


def crc32c(data: bytes | memoryview | np.ndarray) -> int:
    """Castagnoli crc of contiguous memory; releases the interpreter lock."""
    # The C function refuses a memoryview, but takes an array over the same memory.
    return int(google_crc32c.value(np.frombuffer(data, dtype=np.uint8) if isinstance(data, memoryview) else data))
