"""The first pass over a dump: tokens and masks of every sample as prepared DATA, so that units follow from it alone.

It lies in ``STORE/.import/`` and stays there: an interrupted import goes on from it, also when the sources of finished
units are gone, and a dump that has grown or changed adds another one.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from collectors.engines.dump.matching import Matcher, rows_of
from collectors.engines.dump.peer import PeerSource, Unusable
from collectors.targets.load import EngineTarget
from collectors.tokenize.write import (
    REJECTS_JSONL,
    PartWriter,
    RejectsWriter,
    Tally,
    data_files,
    new_data,
    write_document,
)
from hiddenstore.console.progress import Progress
from hiddenstore.conversation import Problem
from hiddenstore.errors import CaptureError, InterruptError, Kind, StorageError
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import seal
from hiddenstore.files.layout import DATA_JSON
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem, storage_errors
from hiddenstore.inputs import PREPARED, PreparedInput, input_digest
from hiddenstore.records import Sample, final_row_positions
from schemas.prepared import PreparedData

FOLDER = ".import"
# Counted and shown, and no fault of the dump: they do not spend the budget of rejects.
SKIPPED = ("duplicate", "already-stored", "nothing-supervised", "not-captured")
_LATEST = 3
_SOURCES = "sources.parquet"
_FILES = pa.schema([("file", pa.binary()), ("size", pa.int64()), ("mtime_ns", pa.int64())])

FileFacts = tuple[int, int]
"""Size and ``mtime_ns`` of a file: peers give the files of every dump the same names."""


@dataclass
class ScanTally(Tally):
    """Counts of one pass; ``padding`` rows stay behind, ``latest`` refusals are shown when there are too many."""

    padding: int = 0
    names: list[tuple[str, str]] = field(default_factory=list)
    latest: list[str] = field(default_factory=list)

    def add(self, sample: Sample, padding: int) -> None:
        """Count a sample that will be imported."""
        self.samples += 1
        self.longest = max(self.longest, sample.tokens)
        is_held_out = sample.split == "validation"
        rows = len(final_row_positions(sample.loss_mask, "supervised"))
        self.totals.update(tokens=sample.tokens, supervised=sample.supervised, final_rows=rows, validation=is_held_out)
        self.padding += padding
        self.names.append((sample.id, sample.split))

    def reject(self, problem: Problem) -> None:
        super().reject(problem)
        self.duplicates += problem.reason == "duplicate"
        if problem.reason not in SKIPPED:
            self.latest = [*self.latest, f"{problem.location}: {problem.detail}"][-_LATEST:]

    @property
    def refused(self) -> int:
        return sum(count for reason, count in self.rejects.items() if reason not in SKIPPED)


def count_refused(scan: PreparedInput) -> int:
    """How many locations a finished pass could not use, those that are no fault of the dump apart."""
    return sum(count.rows for count in scan.info.rejects if count.reason not in SKIPPED)


def scan_key(peer: str, folder: Path, *settings: str) -> str:
    """Names the passes over one dump under settings that decide what its samples are."""
    text = "\n".join([peer, str(folder.resolve()), *settings])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def finished_scans(store: Filesystem, key: str) -> list[PreparedInput]:
    """The passes made so far, oldest first."""
    folders = [open_filesystem(f"{store.root}/{FOLDER}/{name}") for name in _names(store, key)]
    return [PreparedInput.open(folder) for folder in folders if folder.size(DATA_JSON) is not None]


def _names(store: Filesystem, key: str) -> list[str]:
    return [name for name in store.list(FOLDER) if name.startswith(f"{key}-")]


def covered_locations(scans: Sequence[PreparedInput], source: PeerSource, known: Mapping[Path, FileFacts]) -> set[str]:
    """Locations that need no further look: imported and skipped ones whose file is as it was read, or gone; a rejected
    one is tried again, and so is one of a pass that says nothing of its files. ``known`` as in ``dump_files``."""
    covered: set[str] = set()
    is_gone = lru_cache(maxsize=1)(lambda path: file_facts(path) is None)
    for scan in scans:
        read = files_read(scan, source.folder) or {}
        named: Iterable[str] = (sample.source for sample in scan.samples())
        if scan.fs.size(REJECTS_JSONL) is not None:
            lines = [json.loads(line) for line in scan.fs.read(REJECTS_JSONL).splitlines()]
            named = chain(named, [line["place"] for line in lines if line["reason"] in SKIPPED])
        for location in named:
            path = source.file_of(location)
            if (path in read and read[path] == known.get(path)) or is_gone(path):
                covered.add(location)
    return covered


def dump_files(source: PeerSource, locations: Sequence[str]) -> dict[Path, FileFacts]:
    """Every file of a dump that is there. Asked for before the files are read: what changes meanwhile has changed when
    the next run compares."""
    known = {path: file_facts(path) for path in dict.fromkeys(map(source.file_of, locations))}
    return {path: facts for path, facts in known.items() if facts is not None}


def file_facts(path: Path) -> FileFacts | None:
    """What a file is now; None where there is none. Raises StorageError: it cannot be looked at."""
    try:
        with storage_errors(path):
            state = path.stat()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    return state.st_size, state.st_mtime_ns


def files_read(scan: PreparedInput, folder: Path) -> dict[Path, FileFacts] | None:
    """The files of the dump in ``folder`` as a pass read them; None of a pass that does not say, or not legibly."""
    if scan.fs.size(_SOURCES) is None:
        return None
    try:
        rows = pq.read_table(io.BytesIO(scan.fs.read(_SOURCES)), schema=_FILES)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise_refusal(error, f"{scan.folder}/{_SOURCES}")
        return None
    columns = (rows[name].to_pylist() for name in _FILES.names)
    return {folder / os.fsdecode(name): (size, time) for name, size, time in zip(*columns, strict=True)}


def _sources(files: Mapping[Path, FileFacts], folder: Path) -> bytes:
    """What ``files_read`` gives back."""
    rows = [(os.fsencode(path.relative_to(folder)), *facts) for path, facts in files.items()]
    table = pa.Table.from_pylist([dict(zip(_FILES.names, row, strict=True)) for row in rows], schema=_FILES)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


@dataclass(eq=False)
class Scan:
    """A pass over a dump, on its way into ``store``; ``max_rejects``: share of locations that may be refused."""

    source: PeerSource
    target: EngineTarget
    matcher: Matcher
    store: Filesystem
    key: str
    is_stored: Callable[[str], bool]
    max_rejects: float
    stop: Callable[[], bool]
    tally: ScanTally = field(default_factory=ScanTally)

    def run(self, locations: Sequence[str], known: Mapping[Path, FileFacts]) -> PreparedInput | None:
        """Read tokens and masks at ``locations``; None where there is no sample among them. ``known``: the files they
        lie in, and maybe others, as ``dump_files`` found them before. Raises CaptureError: ``too-many-rejects``;
        nothing is left behind; InterruptError: asked to stop; the pass begins anew next time."""
        # On object storage a kill may leave a part of a pass: its number is not given again.
        number = 1 + max((int(name.rpartition("-")[2]) for name in _names(self.store, self.key)), default=-1)
        out = f"{self.store.root}/{FOLDER}/{self.key}-{number:03d}"
        self.tally.rows = len(locations)
        try:
            with new_data(out) as fs:
                files = {path: known[path] for path in map(self.source.file_of, locations) if path in known}
                fs.put_if_absent(_SOURCES, _sources(files, self.source.folder))
                with data_files(fs) as (parts, _images, rejects):
                    self._read(locations, parts, rejects)
                    rejects.close()
                    written = parts.close()
                write_document(fs, DATA_JSON, seal(self._document().model_copy(update={"files": written})))
        except _NoSampleError:
            return None
        finally:
            self.store.remove_empty(FOLDER)
        return PreparedInput.open(out)

    def _read(self, locations: Sequence[str], parts: PartWriter, rejects: RejectsWriter) -> None:
        tally, allowed = self.tally, max(1, int(len(locations) * self.max_rejects))
        with Progress("read tokens", len(locations), "samples") as progress:
            for location in locations:
                if self.stop():
                    raise InterruptError("stopped by a signal", kind=Kind.INTERRUPTED)
                text = location.encode(errors="backslashreplace").decode()
                try:
                    if text != location:
                        raise Unusable("not-unicode", "the name of its file is no UTF-8")
                    sample = self._sample(location)
                except Unusable as unusable:
                    problem = Problem(text, unusable.reason, unusable.detail)
                    tally.reject(problem)
                    rejects.write(problem)
                    if tally.refused > allowed:
                        raise _too_many(tally, allowed) from None
                else:
                    parts.write(_row(sample), sample.tokens)
                progress.advance(1, samples=tally.samples, rejects=tally.refused)
        if not tally.samples:
            raise _NoSampleError

    def _sample(self, location: str) -> Sample:
        peer, vocab_size = self.source.read(location, states=False), self.target.head.vocab_size
        sample = self.matcher.sample(peer, location)
        if not sample.tokens:
            raise Unusable("empty", "it is padding only")
        highest = int(sample.input_ids.max())
        if highest >= vocab_size:
            raise Unusable("token-out-of-range", f"token {highest}, but the target has {vocab_size} tokens")
        if not sample.supervised:
            raise Unusable("nothing-supervised", "its loss mask is all zero")
        if self.is_stored(sample.id):
            raise Unusable("already-stored", f"the store holds sample {sample.id}")
        key = bytes.fromhex(sample.id)
        if key in self.tally.ids:
            raise Unusable("duplicate", f"another place holds sample {sample.id}")
        self.tally.ids.add(key)
        self.tally.add(sample, peer.rows - rows_of(peer, sample.input_ids).stop)
        return sample

    def _document(self) -> PreparedData:
        folder, tally, supervises_all = self.target.folder, self.tally, self.matcher.all_supervised
        return PreparedData(
            digest=input_digest(tally.names),
            target=folder.label,
            tokenizer_sha256=folder.tokenizer_sha256,
            tokenizer_rules_sha256=folder.tokenizer_rules_sha256,
            chat_template_sha256=folder.chat_template_sha256,
            vocab_size=self.target.head.vocab_size,
            loss_on="all" if supervises_all else "assistant",
            mask_from="all" if supervises_all else "prefixes",
            max_tokens=None,
            overlong="cut",
            validation_share=self.matcher.validation,
            **tally.members(),
        )


class _NoSampleError(Exception):
    """A pass has no sample to import."""


def _row(sample: Sample) -> pa.RecordBatch:
    row = {
        "sample_id": sample.id,
        "input_ids": sample.input_ids.astype(np.int32).tolist(),
        "loss_mask": sample.loss_mask.astype(np.uint8).tolist(),
        "spans": [{"role": int(r), "start": int(a), "end": int(b)} for r, a, b in sample.spans],
        "split": sample.split,
        "source": sample.source,
    }
    return pa.RecordBatch.from_pylist([row], schema=PREPARED)


def _too_many(tally: ScanTally, allowed: int) -> CaptureError:
    reasons = sorted(tally.rejects.items())
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons if reason not in SKIPPED)
    return CaptureError(
        f"{tally.refused} of {tally.rows} samples cannot be imported ({counts}), more than the {allowed} allowed; "
        f"latest {'; '.join(tally.latest)}",
        kind=Kind.TOO_MANY_REJECTS,
        hint="if the dump is known to be damaged, allow more of it: --max-rejects 5%",
    )
