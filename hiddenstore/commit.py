"""Commit records: the only truth about what a store holds.

``CommitRecord.segment`` is the path of its segment relative to the store (``segments/<unit>-<8 hex>``) and file entries
are relative to that. A record is published once by put-if-absent and never changed; a repair and a recapture publish
the next revision, and the highest revision of a unit counts. Anything under ``commits/`` that is no record is garbage.
"""

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from hiddenstore.errors import CorruptionError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.damage import twice
from hiddenstore.files.documents import load, opened, parsed, read_bounded, seal
from hiddenstore.fs.seam import Filesystem, is_inside
from hiddenstore.threads import Threads, reading_threads
from schemas.manifest import CommitHead, CommitRecord, Engine

DAMAGED = "damaged-on-disk"
"""Reason of the rejects that a repair leaves. Their samples are pending; those of a capture never are."""

READ_AT_ONCE = 16
MAX_COUNT = 1 << 48

SAMPLE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a sample may be called."""
C = TypeVar("C")
_SAMPLE_IDS = re.compile(rf"(?:{SAMPLE_ID.pattern}\n)*")


@dataclass(frozen=True)
class Commit:
    """A record as it lies on disk: file name under ``commits/``, sha256 of its bytes, content."""

    name: str
    sha256: str
    record: CommitRecord


def latest_names(fs: Filesystem) -> list[str]:
    """Names of the records that count: the highest revision of each unit, sorted by unit."""
    latest = latest_revisions(fs)
    return [latest[unit][1] for unit in sorted(latest)]


def latest_revisions(fs: Filesystem) -> dict[str, tuple[int, str]]:
    """The highest revision of each unit and the name of its record, from the folder listing alone."""
    latest: dict[str, tuple[int, str]] = {}
    for unit, revision, name in layout.parse_commits(fs.list(layout.COMMITS_DIR)):
        if revision >= latest.get(unit, (-1, ""))[0]:
            latest[unit] = (revision, name)
    return latest


def committed_units(fs: Filesystem) -> set[str]:
    """Names of the units that have a record, from the folder listing alone."""
    return {unit for unit, _, _ in layout.parse_commits(fs.list(layout.COMMITS_DIR))}


def lost_samples(record: CommitHead) -> frozenset[str]:
    """Ids of the samples that a repair dropped and nobody has captured again."""
    return frozenset(reject.id for reject in record.rejects if reject.reason == DAMAGED)


def engine_of(record: CommitHead, sample_id: str) -> Engine:
    """What captured one of the samples of a record."""
    return next((part.engine for part in record.recaptured if sample_id in part.samples), record.engine)


def read_commit(fs: Filesystem, name: str) -> Commit:
    """One record by its file name. Raises CorruptionError: its bytes, its name or its numbers do not hold together."""
    path = f"{layout.COMMITS_DIR}/{name}"
    return commit_of(read_bounded(fs, path), name, f"{fs.root}/{path}")


def commit_of(data: bytes, name: str, where: str) -> Commit:
    """The record in the bytes of a file; raises as ``read_commit``."""
    body, sha256 = opened(data, where)
    record = parsed(body, CommitRecord, where)
    _check_record(record, name, where)
    return Commit(name, sha256, record)


def publish_commit(fs: Filesystem, record: CommitRecord, revision: int = 0) -> bool:
    """Publish a record; True when it is the one that stands, False when another attempt was first.

    The segment must be durable already. After a lost reply the record is read back: if it names this attempt, this
    attempt won. Nothing is deleted here.
    """
    path = layout.commit_path(record.unit, revision)
    _check_record(record, path.rpartition("/")[2], path)
    try:
        if fs.put_if_absent(path, seal(record)):
            return True
    except StorageError as error:
        if error.kind != Kind.REPLY_LOST or fs.size(path) is None:
            raise
    return load(fs, path, CommitRecord).segment == record.segment


def frozen_mismatch(fs: Filesystem, snapshot: str, commit: Commit, expected: str) -> CorruptionError:
    """``snapshot-mismatch``: a record has other bytes than a snapshot froze."""
    path = f"{layout.COMMITS_DIR}/{commit.name}"
    return CorruptionError(
        f"{fs.root}/{path} is not the record that snapshot {snapshot} froze: expected sha256 {expected}, "
        f"found {commit.sha256}",
        kind=Kind.SNAPSHOT_MISMATCH,
        path=path,
        samples=tuple(sample.id for sample in commit.record.samples),
    )


def missing_commit(fs: Filesystem, name: str) -> CorruptionError:
    """``commit-missing``: a listing, an index or a snapshot names a record that is gone."""
    path = f"{layout.COMMITS_DIR}/{name}"
    message = f"{fs.root}/{path} does not exist, but a listing, index or snapshot names it"
    return CorruptionError(message, kind=Kind.COMMIT_MISSING, path=path)


def read_many(fs: Filesystem, names: Sequence[str]) -> list[Commit | HiddenstoreError]:
    """Records by file name; what is wrong with one stands in its place. Raises StorageError: the storage refused."""
    return in_parts(fs, names, lambda part: read_each(fs, part, read_commit))


def read_each(
    fs: Filesystem, names: Sequence[str], read_one: Callable[[Filesystem, str], C]
) -> list[C | HiddenstoreError]:
    """Records one after the other, as ``read_one`` gives them; otherwise as ``read_many``."""

    def read(name: str) -> C | HiddenstoreError:
        path = f"{layout.COMMITS_DIR}/{name}"
        try:
            return twice(fs, lambda: read_one(fs, name), path)
        except NotFoundError:
            return missing_commit(fs, name)
        except StorageError:
            raise
        except HiddenstoreError as error:
            return error

    return [read(name) for name in names]


def in_parts(fs: Filesystem, names: Sequence[str], read: Callable[[Sequence[str]], list[C]]) -> list[C]:
    """What ``read`` makes of names, a few at a time in threads; in the order of the names."""
    if len(names) <= READ_AT_ONCE:
        return read(names)
    parts = [names[start : start + READ_AT_ONCE] for start in range(0, len(names), READ_AT_ONCE)]
    with collector_paused(), Threads(reading_threads(fs.prefers_few_files)) as pool:
        return [item for items in pool.map(read, parts) for item in items]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Records hold no cycles, yet a million new objects would make Python look for some: half of the time to open."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_record(record: CommitRecord, name: str, where: str) -> None:
    ids = [*(entry.id for entry in record.samples), *(reject.id for reject in record.rejects)]
    problem = head_fault(record, name, len(record.samples), max(record.tokens, record.final_rows))
    if problem is None and not _SAMPLE_IDS.fullmatch("".join([f"{name}\n" for name in ids])):
        problem = "a sample id has characters other than letters, digits, - and _"
    if problem is not None:
        raise CorruptionError(
            f"{where} is damaged: {problem}",
            kind=Kind.COMMIT_INVALID,
            path=where,
            samples=tuple(name for name in ids if SAMPLE_ID.fullmatch(name)),
        )


def head_fault(head: CommitHead, name: str, samples: int, rows: int) -> str | None:
    """What the schema cannot say of a record under a name, with so many samples and at most so many rows: names agree,
    paths stay inside, no number is absurd."""
    parsed = layout.parse_commit(name)
    folder, _, segment = head.segment.partition("/")
    if parsed is None or parsed.unit != head.unit:
        return f"it holds the record of unit {head.unit!r}"
    if folder != layout.SEGMENTS_DIR or head.unit not in {claim.unit for claim in layout.segment_claims(segment)}:
        return f"its segment {head.segment!r} is not one of this unit"
    if any(not is_inside(file.path) for file in head.files):
        return "a file path leaves the segment"
    if len({file.path for file in head.files}) != len(head.files):
        return "a file is named twice"
    if max((*(file.size for file in head.files), rows)) > MAX_COUNT:
        return "a size is absurd"
    return "it has samples but no file" if samples and not head.files else None
