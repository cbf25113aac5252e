"""The files of a DATA folder (parts, rejects, data.json) and the counts that data.json states."""

import hashlib
import io
import json
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hiddenstore.conversation import Problem
from hiddenstore.errors import ConflictError, HiddenstoreError, Kind
from hiddenstore.files.layout import DATA_JSON
from hiddenstore.fs import is_address, open_filesystem
from hiddenstore.fs.publish import new_folder, upload
from hiddenstore.fs.seam import Filesystem, WritableFile
from hiddenstore.inputs import IMAGES, PREPARED
from schemas.manifest import FileEntry
from schemas.prepared import RejectCount

REJECTS_JSONL = "rejects.jsonl"
GROUP_TOKENS = 1 << 20
GROUP_ROWS = 8192
PART_TOKENS = 64 << 20
EXAMPLES_PER_REASON = 3


@dataclass
class Tally:
    """Samples of one DATA folder and the rows left out of it.

    ``totals`` adds up tokens, supervised, final rows, validation, cut and the like; ``ids`` are the 16 bytes of every
    sample id; ``examples`` the first few rows of every reason.
    """

    rows: int = 0
    samples: int = 0
    longest: int = 0
    duplicates: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    rejects: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    ids: set[bytes] = field(default_factory=set)

    def reject(self, problem: Problem) -> None:
        """Count one row that is left out."""
        self.rejects[problem.reason] += 1
        examples = self.examples.setdefault(problem.reason, [])
        if len(examples) < EXAMPLES_PER_REASON:
            examples.append(f"{problem.location}: {problem.detail}")

    def reject_counts(self) -> tuple[RejectCount, ...]:
        """Rows refused by reason, most first."""
        return tuple(
            RejectCount(reason=reason, rows=rows, examples=tuple(self.examples[reason]))
            for reason, rows in sorted(self.rejects.items(), key=lambda item: (-item[1], item[0]))
        )

    def members(self) -> dict[str, Any]:
        """What data.json states of the counts, by the members of ``PreparedData``."""
        return {
            "rows_read": self.rows,
            "samples": self.samples,
            "validation_samples": self.totals["validation"],
            "tokens": self.totals["tokens"],
            "supervised_tokens": self.totals["supervised"],
            "final_rows": self.totals["final_rows"],
            "longest": self.longest,
            "cut": self.totals["cut"],
            "duplicates": self.duplicates,
            "rejects": self.reject_counts(),
        }


@contextmanager
def data_files(fs: Filesystem) -> Iterator[tuple["PartWriter", "PartWriter", "RejectsWriter"]]:
    """The writers of parts, images and rejects, for the caller to close; an error lets go of what is open."""
    writers = PartWriter(fs), PartWriter(fs, IMAGES, "images"), RejectsWriter(fs)
    try:
        yield writers
    except BaseException:
        for writer in writers:
            with suppress(HiddenstoreError):
                writer.abort()
        raise


@contextmanager
def new_data(out: str | Path) -> Iterator[Filesystem]:
    """A local folder to write DATA into, which becomes ``out`` when the block ends well and vanishes when it does not.

    To object storage the files go at the end, ``data.json`` last; the same files that a killed run left there stay.
    Raises ConflictError: ``output-exists``; ``file-exists``, a killed run left other files there."""
    if not is_address(out):
        with new_folder(Path(out), refuse_existing_data) as new:
            yield open_filesystem(new)
        return
    fs = open_filesystem(out)
    if fs.size(DATA_JSON) is not None:
        raise _existing_data(fs.root, "prepared data")
    fs.require_atomic_put()
    with tempfile.TemporaryDirectory(prefix="hiddenstore-") as folder:
        yield open_filesystem(folder)
        upload(Path(folder), fs, last=DATA_JSON)


def refuse_existing_data(out: Path) -> None:
    """An empty folder may be written into; anything else is somebody's work."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise _existing_data(out, "prepared data" if (out / DATA_JSON).is_file() else "something else")


def _existing_data(out: str | Path, content: str) -> ConflictError:
    problem = f"{out} exists already and holds {content}; prepare never overwrites"
    return ConflictError(
        problem, kind=Kind.OUTPUT_EXISTS, hint=f"choose another -o, or first: {shlex.join(['rm', '-r', str(out)])}"
    )


class PartWriter:
    """Parquet parts ``part-00000.parquet`` …; holds at most one row group, of samples or of what ``schema`` says."""

    def __init__(self, fs: Filesystem, schema: pa.Schema = PREPARED, name: str = "part") -> None:
        self._fs, self._schema, self._name = fs, schema, name
        self._files: list[FileEntry] = []
        self._group: list[pa.RecordBatch] = []
        self._group_tokens = self._group_rows = self._part_tokens = 0
        self._part: tuple[_HashedSink, pq.ParquetWriter] | None = None

    def write(self, samples: pa.RecordBatch, tokens: int) -> None:
        """Append rows that hold ``tokens`` tokens in all, or as many times 16 bytes of images."""
        self._group.append(samples)
        self._group_tokens += tokens
        self._group_rows += samples.num_rows
        if self._group_tokens >= GROUP_TOKENS or self._group_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> tuple[FileEntry, ...]:
        """Finish the last part; every file with its size and sha256."""
        self._write_group()
        self._close_part()
        return tuple(self._files)

    def abort(self) -> None:
        """Let go of the open part without writing its footer."""
        if self._part is not None:
            (sink, writer), self._part = self._part, None
            sink.abort()
            writer.close()

    def _write_group(self) -> None:
        if not self._group_rows:
            return
        if self._part is None:
            sink = _HashedSink(self._fs, f"{self._name}-{len(self._files):05d}.parquet")
            self._part = sink, pq.ParquetWriter(sink, self._schema, compression="zstd", write_page_checksum=True)
        table = pa.Table.from_batches(self._group, self._schema).combine_chunks()
        self._part[1].write_table(table, row_group_size=table.num_rows)
        self._part_tokens += self._group_tokens
        self._group, self._group_tokens, self._group_rows = [], 0, 0
        if self._part_tokens >= PART_TOKENS:
            self._close_part()

    def _close_part(self) -> None:
        if self._part is not None:
            (sink, writer), self._part = self._part, None
            self._part_tokens = 0
            writer.close()
            self._files.append(sink.finish())


class RejectsWriter:
    """``rejects.jsonl``: one object per unusable row, in order; no file when there is none."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self._file: WritableFile | None = None

    def write(self, problem: Problem) -> None:
        """Append one row's place, reason and detail."""
        if self._file is None:
            self._file = self._fs.create(REJECTS_JSONL)
        line = {"place": problem.location, "reason": problem.reason, "detail": problem.detail}
        self._file.write(json.dumps(line, ensure_ascii=True).encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()


class _HashedSink(io.RawIOBase):
    """What pyarrow writes a part into: counts and hashes on the way to the filesystem seam."""

    def __init__(self, fs: Filesystem, name: str) -> None:
        self._file = fs.create(name)
        self._name = name
        self._size = 0
        self._digest = hashlib.sha256()
        self._is_aborted = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self._is_aborted:
            self._file.write(view)
            self._digest.update(view)
        self._size += len(view)
        return len(view)

    def finish(self) -> FileEntry:
        self._file.close()
        return FileEntry(path=self._name, size=self._size, sha256=self._digest.hexdigest())

    def abort(self) -> None:
        self._is_aborted = True
        self._file.abort()


def write_document(fs: Filesystem, name: str, data: bytes) -> None:
    """A small file, whole and durable; StorageError when the disk refuses."""
    file = fs.create(name)
    try:
        file.write(data)
        file.close()
    except HiddenstoreError:
        file.abort()
        raise
