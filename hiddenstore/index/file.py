"""One index file: what it covers, and its samples by row group. An index is never truth, only quicker to read.

The header in the metadata of the parquet file is sealed, and so are the fences of the row groups with it; every page
has its checksum. Nothing else of the file is believed.
"""

import io
import shlex
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, Kind, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, twice
from hiddenstore.files.documents import seal, unseal
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.table import COLUMNS, ID_BYTES, NUMBERS, Ids, SampleTable
from schemas.manifest import IndexHeader

GROUP_ROWS = 65_536
HEADER_KEY = b"hiddenstore.index"
MAX_HEADER_BYTES = 1 << 30
_ID = "sample_id"


@dataclass(frozen=True)
class IndexFile:
    """``index/<number>.parquet`` of a store; opening it reads the header only."""

    fs: Filesystem = field(repr=False)
    number: int
    header: IndexHeader = field(repr=False)

    @classmethod
    def open(cls, fs: Filesystem, number: int) -> "IndexFile":
        """Raises NotFoundError when it is gone, CorruptionError ``index-corrupt``."""
        path = layout.index_path(number)
        with _parquet(fs, path) as parquet:
            sealed = (parquet.metadata.metadata or {}).get(HEADER_KEY, b"")
        try:
            return cls(fs, number, unseal(sealed, IndexHeader, f"{fs.root}/{path}"))
        except (CorruptionError, FormatError) as error:
            if error.kind == Kind.FORMAT_FUTURE:
                raise
            raise _damaged(fs, path, error.message) from error

    @property
    def path(self) -> str:
        return layout.index_path(self.number)

    def read(self, columns: Sequence[str] = COLUMNS, groups: Iterable[int] | None = None) -> SampleTable:
        """Samples of some row groups (default: all), sorted by id; ``record`` counts the records of the header. Raises
        NotFoundError: the file is gone; CorruptionError: ``index-corrupt``."""
        wanted = list(range(len(self.header.fences)) if groups is None else groups)
        counts = [min(GROUP_ROWS, self.header.rows - group * GROUP_ROWS) for group in wanted]
        arrays = {name: np.empty(sum(counts), np.int32 if name in NUMBERS else np.uint8) for name in columns}
        ids, packed, start = np.zeros(sum(counts), dtype=f"S{ID_BYTES}"), True, 0
        with _parquet(self.fs, self.path) as parquet:
            for group, count in zip(wanted, counts, strict=True):
                table = parquet.read_row_group(group, [_ID, *columns], use_threads=False).combine_chunks()
                values, packed = _ids_of(table[_ID])
                if len(values) != count or Ids(values[:1], packed)[0] != self.header.fences[group]:
                    raise ValueError(f"row group {group} is not the one its header names")
                if values.dtype.itemsize > ids.dtype.itemsize:
                    ids = ids.astype(values.dtype)
                ids[start : start + count] = values
                for name in columns:
                    arrays[name][start : start + count] = _numbers_of(table[name], arrays[name].dtype)
                start += count
        table = SampleTable(Ids(ids, packed), arrays)
        if start and {"record", "position"} <= arrays.keys() and not self._has_places(table):
            raise _damaged(self.fs, self.path, "a sample has no place in a record")
        return table

    def _has_places(self, table: SampleTable) -> bool:
        if not 0 <= table.record.min() <= table.record.max() < self.covered or table.position.min() < 0:
            return False
        return bool((table.position < np.array(self.header.samples, dtype=np.int32)[table.record]).all())

    @property
    def covered(self) -> int:
        """How many records it covers."""
        return len(self.header.records)

    def starting(self, text: str) -> SampleTable:
        """The samples whose id starts with ``text``; raises as ``read``."""
        fences = self.header.fences
        first = max(0, bisect_left(fences, text) - 1)
        table = self.read(groups=range(first, bisect_right(fences, text + "\x7f")))
        return table.take(np.arange(*table.ids.bounds(text)))


def encode_index(header: IndexHeader, table: SampleTable) -> bytes:
    """The file of a sorted table; the header's ``rows``, ``repeats`` and ``fences`` are filled in."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = table.ids.values
    if table.ids.packed:
        ids = pa.FixedSizeBinaryArray.from_buffers(pa.binary(ID_BYTES), len(values), [None, pa.py_buffer(values)])
    else:
        ids = pa.array(list(table.ids), pa.string())
    fences = tuple(table.ids[start] for start in range(0, len(values), GROUP_ROWS))
    header = IndexHeader(
        **{**dict(header), "fences": fences, "rows": len(values), "repeats": int(table.repeats().sum())}
    )
    arrow = pa.table({_ID: ids, **{name: pa.array(table.columns[name]) for name in COLUMNS}})
    sink = io.BytesIO()
    compression = {_ID: "none", **dict.fromkeys(COLUMNS, "zstd")}
    with pq.ParquetWriter(
        sink,
        arrow.schema,
        use_dictionary=["split"],
        compression=compression,
        write_page_checksum=True,
        store_schema=False,
    ) as writer:
        writer.write_table(arrow, row_group_size=GROUP_ROWS)
        writer.add_key_value_metadata({HEADER_KEY: seal(header)})
    return sink.getvalue()


def index_numbers(fs: Filesystem) -> list[int]:
    """The numbers under ``index/``, ascending."""
    return sorted(number for name in fs.list(layout.INDEX_DIR) if (number := layout.parse_index(name)) is not None)


def live_indexes(fs: Filesystem, opened: Iterable[IndexFile] = ()) -> list[IndexFile]:
    """The index files that no other replaces, the latest first; damaged ones are left out: ``verify`` names them. Of
    those in ``opened`` no header is read again."""
    files: list[IndexFile] = []
    at_hand = {file.number: file for file in opened}
    for number in reversed(index_numbers(fs)):
        if not any(number in file.header.replaces for file in files):
            with suppress(*DAMAGE):
                read = partial(IndexFile.open, fs, number)
                files.append(at_hand.get(number) or twice(fs, read, layout.index_path(number)))
    return files


def renumbered(table: SampleTable, numbers: np.ndarray) -> SampleTable:
    """A table whose records count as ``numbers`` says; those below 0 are left out."""
    table.columns["record"] = numbers[table.record]
    counts = table.record >= 0
    return table if bool(counts.all()) else table.take(counts)


class _SeamFile(io.RawIOBase):
    """A file of a store as Python files are read."""

    def __init__(self, fs: Filesystem, path: str, size: int) -> None:
        self._fs, self._path, self._size, self._place = fs, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._place)]
        if len(view):
            self._fs.read_into(self._path, self._place, view)
        self._place += len(view)
        return len(view)


@contextmanager
def _parquet(fs: Filesystem, path: str) -> Iterator[Any]:
    """An open parquet file; what Arrow finds wrong in the block is CorruptionError ``index-corrupt``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = fs.size(path)
    if size is None:
        raise NotFoundError(f"{fs.root}/{path} does not exist", kind=Kind.PATH_MISSING)
    try:
        # No background reads: see ``parse_registered``.
        with pq.ParquetFile(
            pa.PythonFile(_SeamFile(fs, path, size), mode="r"),
            pre_buffer=False,
            page_checksum_verification=True,
            thrift_string_size_limit=MAX_HEADER_BYTES,
        ) as parquet:
            yield parquet
    except HiddenstoreError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise _damaged(fs, path, str(error)) from error
    finally:
        # Arrow would keep it for the next file, while numpy sorts.
        pa.default_memory_pool().release_unused()


def _ids_of(column: Any) -> tuple[np.ndarray, bool]:
    import pyarrow as pa

    chunk = column.chunk(0)
    if pa.types.is_fixed_size_binary(chunk.type):
        start = chunk.offset * ID_BYTES
        data = np.frombuffer(chunk.buffers()[1], dtype=np.uint8)[start : start + len(chunk) * ID_BYTES]
        return data.view(f"S{ID_BYTES}"), True
    return np.array(chunk.to_pylist(), dtype=np.bytes_), False


def _numbers_of(column: Any, dtype: np.dtype) -> np.ndarray:
    """A view of the only chunk of a column. Arrow's own ``to_numpy`` imports pandas: 0.3 s and 40 MB."""
    import pyarrow as pa

    chunk = column.chunk(0).cast(pa.from_numpy_dtype(dtype))
    if chunk.null_count:
        raise ValueError("a number is missing")
    return np.frombuffer(chunk.buffers()[1], dtype)[chunk.offset : chunk.offset + len(chunk)]


def _damaged(fs: Filesystem, path: str, reason: str) -> CorruptionError:
    message = f"{fs.root}/{path} is damaged: {reason}"
    return CorruptionError(
        message, kind=Kind.INDEX_CORRUPT, path=path, hint=f"hiddenstore repair {shlex.quote(fs.root)}"
    )
