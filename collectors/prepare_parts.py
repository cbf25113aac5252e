"""Writes the files of a DATA folder beside its name and gives them that name at the end: parts, rejects, data.json."""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from collectors.prepare_batches import SCHEMA
from collectors.rows import Problem
from hiddenstore.disk import PosixDisk
from hiddenstore.errors import ConflictError, HiddenstoreError
from hiddenstore.fs import Filesystem, WritableFile, storage_error
from hiddenstore.fs_local import LocalFilesystem
from hiddenstore.layout import DATA_JSON
from schemas.manifest import FileEntry

REJECTS_JSONL = "rejects.jsonl"
GROUP_TOKENS = 1 << 20
GROUP_ROWS = 8192
PART_TOKENS = 64 << 20


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[LocalFilesystem]:
    """A folder that becomes ``out`` when the block ends well and vanishes when it does not.

    Raises:
        ConflictError: ``output-exists``.
        StorageError: the disk refused.
    """
    refuse_existing(out)
    temp = out.parent / f".{out.name}.preparing-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep(out)
        temp.mkdir()
    except OSError as error:
        raise storage_error(error, str(out)) from error
    with _held(temp):
        try:
            yield LocalFilesystem(temp)
            _publish(temp, out)
        finally:
            shutil.rmtree(temp, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """An empty folder may be written into; anything else is somebody's work."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "prepared data" if (out / DATA_JSON).is_file() else "something else"
        raise ConflictError(
            f"{out} exists already and holds {what}; prepare never overwrites",
            kind="output-exists",
            hint=f"choose another -o, or remove {out} first",
        )


def _publish(temp: Path, out: Path) -> None:
    disk = PosixDisk()
    try:
        disk.sync_folder(str(temp))
        # rename replaces an empty folder and nothing else.
        temp.rename(out)
        disk.sync_folder(str(out.parent.absolute()))
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            refuse_existing(out)
        raise storage_error(error, str(out)) from error


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """A lock on the folder says that its writer lives; the system drops it with the process."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _sweep(out: Path) -> None:
    """Remove what killed runs left beside ``out``."""
    name = re.compile(rf"\.{re.escape(out.name)}\.preparing-[0-9a-f]{{8}}")
    for left in [path for path in out.parent.iterdir() if name.fullmatch(path.name)]:
        handle = os.open(left, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except OSError:
            continue
        finally:
            os.close(handle)


class PartWriter:
    """Parquet parts ``part-00000.parquet`` …; holds at most one row group of samples."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self.files: list[FileEntry] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_tokens = self._waiting_rows = self._part_tokens = 0
        self._sink: _HashedSink | None = None
        self._writer: pq.ParquetWriter | None = None

    def write(self, samples: pa.RecordBatch, tokens: int) -> None:
        """Append samples (columns of ``SCHEMA``) that hold ``tokens`` tokens together."""
        self._waiting.append(samples)
        self._waiting_tokens += tokens
        self._waiting_rows += samples.num_rows
        if self._waiting_tokens >= GROUP_TOKENS or self._waiting_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> tuple[FileEntry, ...]:
        """Finish the last part; every file with its size and sha256."""
        self._write_group()
        self._close_part()
        return tuple(self.files)

    def abort(self) -> None:
        """Let go of the open part without writing its footer."""
        if self._sink is not None:
            self._sink.is_discarding = True
        self._close_part(keep=False)

    def _write_group(self) -> None:
        if not self._waiting_rows:
            return
        if self._writer is None:
            name = f"part-{len(self.files):05d}.parquet"
            self._sink = _HashedSink(self._fs.create(name), name)
            self._writer = pq.ParquetWriter(self._sink, SCHEMA, compression="zstd", write_page_checksum=True)
        table = pa.Table.from_batches(self._waiting, SCHEMA).combine_chunks()
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._part_tokens += self._waiting_tokens
        self._waiting, self._waiting_tokens, self._waiting_rows = [], 0, 0
        if self._part_tokens >= PART_TOKENS:
            self._close_part()

    def _close_part(self, keep: bool = True) -> None:
        writer, sink = self._writer, self._sink
        self._writer = self._sink = None
        self._part_tokens = 0
        if writer is None or sink is None:
            return
        writer.close()
        entry = sink.finish(keep)
        if entry is not None:
            self.files.append(entry)


class RejectsWriter:
    """``rejects.jsonl``: one object per unusable row, in order; no file when there is none."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._file: WritableFile | None = None

    def write(self, problem: Problem) -> None:
        """Append one row's place, reason and detail."""
        if self._file is None:
            self._file = self._fs.create(REJECTS_JSONL)
        line = {"place": problem.place, "reason": problem.reason, "detail": problem.detail}
        self._file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()


class _HashedSink(io.RawIOBase):
    """What pyarrow writes a part into: counts and hashes on the way to the filesystem seam."""

    def __init__(self, file: WritableFile, name: str) -> None:
        self._file = file
        self._name = name
        self._size = 0
        self._digest = hashlib.sha256()
        self.is_discarding = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.is_discarding:
            self._file.write(view)
            self._digest.update(view)
        self._size += len(view)
        return len(view)

    def finish(self, keep: bool) -> FileEntry | None:
        if not keep:
            self._file.abort()
            return None
        self._file.close()
        return FileEntry(path=self._name, size=self._size, sha256=self._digest.hexdigest())


def write_document(fs: Filesystem, name: str, data: bytes) -> None:
    """A small file, whole and durable; StorageError when the disk refuses."""
    file = fs.create(name)
    try:
        file.write(data)
        file.close()
    except HiddenstoreError:
        file.abort()
        raise
