"""Rows of JSON lines, JSON and parquet files, plain or gzipped, one at a time, as they lie in the file.

Nothing is parsed beyond what finding the next row takes, so that worker processes can do the rest. Memory is bounded by
one row (at most ``MAX_ROW_BYTES``) or one small parquet batch, whose values that rows share lie in it once.
"""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from io import BufferedReader, FileIO
from itertools import count, islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import ijson
import numpy as np

from hiddenstore.conversation import TABLE_BATCH_ROWS, ColumnFilter, Problem, Row, Source, conversation_columns
from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.targets.folder import first_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

LINES = (".jsonl", ".ndjson")
SUFFIXES = (*LINES, ".json", ".parquet")
MAX_ROW_BYTES = 64 << 20

_BUFFER_BYTES = 1 << 20
_PIECE_BYTES = 1 << 16
# What is read of a parquet file at once, by the bytes that it says its values have: small reads cost far more each.
# Arrow makes the dictionary of a row group anew for each of these.
_READ_BYTES, _READ_ROWS = 16 << 20, 1 << 14
_VALUE_BYTES = 8
_MAX_DEPTH = 500
_SPACE = b" \t\r\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_LARGE = f"a row may have {MAX_ROW_BYTES >> 20} MiB"


def open_file(path: Path, label: str, columns: ColumnFilter = conversation_columns) -> Source:
    """The source behind one file, whose ``count`` is 0 where it is blank; ``columns`` says which of a table to read.
    Raises ConfigError, StorageError: ``input-unreadable``, ``io-error``; and what ``columns`` raises."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}", kind=Kind.IO_ERROR) from error
    if magic == b"PAR1":
        return _open_parquet(path, label, columns)
    name, first = path.name.lower().removesuffix(".gz"), _first_line(path)
    if not first:
        return Source(label, size, lambda: iter(()), 0)
    if not name.endswith((*LINES, ".json")) and not first.startswith((b"{", b"[")):
        raise ConfigError(
            f"{path} is neither JSON nor parquet (expected {', '.join(SUFFIXES)}, with or without .gz)",
            kind=Kind.INPUT_UNREADABLE,
        )
    if first == b"{":
        raise ConfigError(
            f"{path} begins with an object over several lines: expected one object a line, or an array of them",
            kind=Kind.INPUT_UNREADABLE,
            hint=f"jq -c . {quote(str(path))} > rows.jsonl; where its member data holds the rows, jq -c '.data[]'",
        )
    # A row of JSON lines may be a list, which costs itself alone; an array over several lines is the file.
    is_array = first == b"[" if name.endswith(LINES) else first.startswith(b"[")
    return Source(label, size, partial(_array_rows if is_array else _line_rows, path, label))


def rows_within(source: Source, cut: slice) -> Source:
    """The rows of a source within ``cut``, counted from 0; blank lines are no rows."""
    count = None if source.count is None else len(range(source.count)[cut])
    size = source.size * count // source.count if source.count and count is not None else source.size
    return replace(source, rows=lambda: islice(source.rows(), cut.start, cut.stop), count=count, size=size)


class ByteStream:
    """A file read as bytes, unpacked when it is gzip; ConfigError or StorageError ``input-unreadable``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._raw = BufferedReader(FileIO(path), _BUFFER_BYTES)
        self._is_gzip = self._raw.peek(2)[:2] == b"\x1f\x8b"
        self._file: BufferedReader[FileIO] | gzip.GzipFile = (
            gzip.GzipFile(fileobj=self._raw) if self._is_gzip else self._raw
        )
        self._position = 0

    def line(self, limit: int) -> bytes:
        """The next line with its end, at most ``limit`` bytes of it; empty at the end of the file."""
        try:
            return self._file.readline(limit)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _unreadable(self._path, error) from error
        except OSError as error:
            raise StorageError(f"{self._path}: {error}", kind=Kind.IO_ERROR) from error

    def consumed(self, length: int) -> int:
        """Bytes of the file itself that ``length`` unpacked bytes took, counted since the last call when packed."""
        if not self._is_gzip:
            return length
        before, self._position = self._position, self._raw.tell()
        return self._position - before

    def close(self) -> None:
        self._file.close()
        self._raw.close()


def _first_line(path: Path) -> bytes:
    """The first that is not blank, without blanks around it; of a long one its beginning."""
    with closing(ByteStream(path)) as stream:
        while line := stream.line(_PIECE_BYTES):
            if text := line.removeprefix(_BYTE_ORDER_MARK).strip(_SPACE):
                return text
    return b""


def _line_rows(path: Path, label: str) -> Iterator[Row]:
    with closing(ByteStream(path)) as stream:
        for number in count(1):
            line = stream.line(MAX_ROW_BYTES)
            if not line:
                return
            location, length = f"{label}:{number}", len(line)
            payload: bytes | Problem = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if length == MAX_ROW_BYTES and not line.endswith(b"\n"):
                while (rest := stream.line(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
                    length += len(rest)
                payload = Problem(location, "row-too-large", _TOO_LARGE)
            elif not line.strip(_SPACE):
                continue
            yield Row(location, payload, stream.consumed(length), path.parent)


def _array_rows(path: Path, label: str) -> Iterator[Row]:
    """Elements of one JSON array as they arrive; what follows a broken element cannot be found, so it ends the run."""
    events: list[tuple[str, Any]] = ijson.sendable_list()
    # The other backends turn lone surrogates into question marks and end at integers beyond 64 bits.
    parser = ijson.get_backend("python").basic_parse_coro(events, use_float=True)
    builder = ijson.ObjectBuilder()
    line = start = 1
    depth = size = 0
    with closing(ByteStream(path)) as stream, _dropped(parser):
        # Pieces end where lines end, so that what a piece brings to light lies on its line.
        while piece := stream.line(_PIECE_BYTES):
            size += len(piece)
            _send(parser, piece if depth else piece.removeprefix(_BYTE_ORDER_MARK), path, line)
            for event, value in events:
                if depth == 1:
                    start = line
                depth += event.startswith("start_") - event.startswith("end_")
                if depth > _MAX_DEPTH:
                    raise _broken_array(path, line, "it is nested too deeply")
                builder.event(event, value)
                if depth == 1 and builder.value:
                    yield Row(f"{label}:{start}", builder.value.pop(), stream.consumed(size), path.parent)
                    size = 0
            if size > MAX_ROW_BYTES:
                raise _broken_array(path, line, _TOO_LARGE)
            events.clear()
            line += piece.endswith(b"\n")
        _send(parser, b"", path, line)


@contextmanager
def _dropped(parser: Any) -> Iterator[None]:
    """A parser left in the middle complains when it goes, unless it is closed."""
    try:
        yield
    finally:
        with suppress(ijson.JSONError, ValueError):
            parser.close()


def _send(parser: Any, piece: bytes, path: Path, line: int) -> None:
    try:
        if piece:
            parser.send(piece)
        else:
            parser.close()
    except (ijson.JSONError, ValueError) as error:
        raise _broken_array(path, line, getattr(error, "msg", str(error))) from error


def _broken_array(path: Path, line: int, reason: str) -> ConfigError:
    return ConfigError(f"{path} is not a valid JSON array: at line {line}: {reason}", kind=Kind.INPUT_UNREADABLE)


def _open_parquet(path: Path, label: str, columns: ColumnFilter) -> Source:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names, about = file.schema_arrow.names, file.metadata
            size = sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise_refusal(error, path)
        raise _unreadable(path, error) from error
    columns_read = columns(names, str(path)) if about.num_rows else []
    rows = about.num_rows
    return Source(label, size, partial(_parquet_rows, path, label, columns_read, size / max(1, rows)), rows)


def _parquet_rows(path: Path, label: str, columns: list[str], share: float) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        types = pq.read_schema(path)
        for batch in _parquet_batches(path, columns):
            sizes = sum(map(_bytes_of, batch.columns), np.zeros(len(batch), np.int64)).tolist()
            start = 0
            while start < len(batch):
                at_once = sum(sizes[start : start + TABLE_BATCH_ROWS]) <= min(_READ_BYTES, MAX_ROW_BYTES)
                end = start + (TABLE_BATCH_ROWS if at_once else 1)
                is_row = sizes[start] <= MAX_ROW_BYTES
                for value in _values_of(batch.slice(start, end - start), types) if is_row else [{}]:
                    number += 1
                    location, size = f"{label}:{number}", round(share * number) - round(share * (number - 1))
                    payload: Any = {name: _without_absent(item) for name, item in value.items()}
                    payload = payload if is_row else Problem(location, "row-too-large", _TOO_LARGE)
                    yield Row(location, payload, size, path.parent, sizes[start])
                    start += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise_refusal(error, path)
        raise _unreadable(path, error) from error


def _parquet_batches(path: Path, columns: list[str]) -> "Iterator[pa.RecordBatch]":
    """Rows with texts as dictionaries: a text that a file holds once and names in every row is in memory once."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as plain:
        about = plain.metadata
        leaves = [about.schema.column(number) for number in range(about.num_columns)]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        with pq.ParquetFile(path, metadata=about, read_dictionary=texts) as shared:
            for groups, rows, size in _runs(about):
                most, done = max(1, min(_READ_ROWS, _READ_BYTES * rows // max(1, size))), 0
                try:
                    batches = shared.iter_batches(most, groups, columns)
                    if len(groups) > 1:
                        # Arrow reads no texts within lists from several groups in one call, and threads cost more than
                        # a small one.
                        whole = pa.concat_tables(
                            shared.read_row_group(group, columns, use_threads=False) for group in groups
                        )
                        batches = whole.combine_chunks().to_batches()
                    for batch in batches:
                        yield batch
                        done += len(batch)
                except OSError as error:
                    if "DictAccumulator" not in str(error):
                        raise
                    # Arrow has none of texts told by how each differs from the one before. Any row may have them all.
                    few = max(1, min(_READ_ROWS, _READ_BYTES // max(1, size)))
                    for batch in plain.iter_batches(few, groups, columns):
                        yield batch.slice(min(done, len(batch)))
                        done = max(0, done - len(batch))


def _runs(about: "pq.FileMetaData") -> Iterator[tuple[list[int], int, int]]:
    """Row groups to read at once, their rows, and the bytes that these are said to have: a read of a small group costs
    far more than its rows."""
    groups: list[int] = []
    rows = size = 0
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        if groups and (rows + group.num_rows > _READ_ROWS or size + group.total_byte_size > _READ_BYTES):
            yield groups, rows, size
            groups, rows, size = [], 0, 0
        groups.append(number)
        rows, size = rows + group.num_rows, size + group.total_byte_size
    yield groups, rows, size


def _values_of(batch: "pa.RecordBatch", types: "pa.Schema") -> list[dict[str, Any]]:
    import pyarrow as pa

    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        with suppress(pa.ArrowNotImplementedError):
            column = column.cast(types.field(types.get_all_field_indices(name)[0]).type)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, batch.schema.names).to_pylist()


def _bytes_of(column: "pa.Array") -> np.ndarray:
    """int64 [N]: the bytes of each row as text, and some for every value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ExtensionArray):
        return _bytes_of(column.storage)
    kind = column.type
    if pa.types.is_dictionary(kind):
        named, places = np.unique(column.indices.drop_null().to_numpy(), return_inverse=True)
        lengths = np.full(len(column), _VALUE_BYTES)
        lengths[column.is_valid().to_numpy(zero_copy_only=False)] = _bytes_of(column.dictionary.take(named))[places]
        return lengths
    if pa.types.is_struct(kind):
        return sum(map(_bytes_of, column.flatten()), np.full(len(column), _VALUE_BYTES))
    if pa.types.is_nested(kind):
        lists = column.cast(pa.list_(kind.value_type)) if pa.types.is_fixed_size_list(kind) else column
        offsets, totals = lists.offsets.to_numpy(), np.append(0, _bytes_of(lists.values).cumsum())
        is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
        starts, stops = (offsets, offsets + lists.sizes.to_numpy()) if is_view else (offsets[:-1], offsets[1:])
        return totals[stops] - totals[starts] + _VALUE_BYTES
    try:
        lengths = pc.binary_length(column).fill_null(0).to_numpy()
    except pa.ArrowNotImplementedError:
        return np.full(len(column), _VALUE_BYTES)
    return lengths.astype(np.int64) + _VALUE_BYTES


def _without_absent(value: Any) -> Any:
    """Parquet gives every member of a struct to every row; those that were absent come back as None."""
    if isinstance(value, dict):
        return {key: _without_absent(item) for key, item in value.items() if item is not None}
    return [_without_absent(item) for item in value] if isinstance(value, list) else value


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} cannot be read: {first_line(error)}", kind=Kind.INPUT_UNREADABLE)
