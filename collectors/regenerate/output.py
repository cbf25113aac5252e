"""Where rewritten conversations go: one file of JSON lines or parquet, or a folder of such files."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from hiddenstore.conversation import FINISH_REASON, MEMBERS_OF_TEXT, TEMPLATE_KWARGS, TOOLS_COLUMN, WEIGHT
from hiddenstore.fs.publish import new_file, new_folder, refuse_existing_file, refuse_existing_folder
from hiddenstore.fs.seam import WritableFile

Row = dict[str, Any]

_TEXTS = ("role", "content", FINISH_REASON, *MEMBERS_OF_TEXT)
_MESSAGE = pa.struct([(name, pa.string()) for name in (*_TEXTS, "tool_calls")] + [(WEIGHT, pa.int8())])
_BESIDE = (TOOLS_COLUMN, TEMPLATE_KWARGS)
SCHEMA = pa.schema([("messages", pa.list_(_MESSAGE)), *((name, pa.string()) for name in _BESIDE)])
"""Columns of a parquet file: ``tool_calls`` and those beside the messages are JSON text, for their members differ by
row."""
_GROUP_ROWS = 1000


def refuse_existing(out: Path, rows_per_file: int | None) -> None:
    """Raise ConflictError ``output-exists`` where something lies at ``out``."""
    (refuse_existing_folder if rows_per_file else refuse_existing_file)(out)


@contextmanager
def rows_into(out: Path, rows_per_file: int | None = None) -> Iterator[Callable[[Row], None]]:
    """What takes each row with ``messages``; all of it is there in the end, or nothing. ``out`` is a file, parquet by
    its name, or with ``rows_per_file`` a folder of parquet files with so many rows each. Raises ConflictError:
    ``output-exists``. StorageError: the disk refused."""
    if rows_per_file is not None:
        numbers = count()
        with new_folder(out) as folder, _ParquetRows(rows_per_file) as rows:
            rows.open_next = lambda: (folder / f"train-{next(numbers):05}.parquet").open("wb", buffering=0)
            yield rows.take
    elif out.suffix == ".parquet":
        with new_file(out) as file, _ParquetRows(None) as rows:
            rows.open_next = lambda: _Sink(file)
            yield rows.take
    else:
        with new_file(out) as file:
            yield lambda row: file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


class _Sink(io.RawIOBase):
    """A new file as pyarrow writes one."""

    def __init__(self, file: WritableFile) -> None:
        self._new = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._new.write(memoryview(data))
        return len(data)


class _ParquetRows:
    """Rows into the parquet file that ``open_next`` opens, a new one after each ``limit`` rows."""

    open_next: Callable[[], io.RawIOBase]

    def __init__(self, limit: int | None) -> None:
        self._limit, self._rows = limit, list[Row]()
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if self._rows and kind is None:
            self._write()
        self._end()

    def take(self, row: Row) -> None:
        """Keep a row; so many of them are written at once."""
        messages = [{**message, "tool_calls": _json_text(message.get("tool_calls"))} for message in row["messages"]]
        self._rows.append({"messages": messages, **{name: _json_text(row.get(name)) for name in _BESIDE}})
        if len(self._rows) == (self._limit or _GROUP_ROWS):
            self._write()
            if self._limit is not None:
                self._end()

    def _write(self) -> None:
        if self._writer is None:
            self._file = self.open_next()
            self._writer = pq.ParquetWriter(self._file, SCHEMA)
        self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows = []

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self._writer = None


def _json_text(value: Any) -> str | None:
    return json.dumps(value, ensure_ascii=False) if value else None
