"""Commit records: the only truth about what a store holds.

``CommitRecord.segment`` is the path of its segment relative to the store (``segments/<unit>-<8 hex>``) and file entries
are relative to that. A record is published once by put-if-absent and never changed; a repair and a recapture publish
the next revision, and the highest revision of a unit counts. Anything under ``commits/`` that is no record is garbage.
"""

import gc
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from hiddenstore import layout
from hiddenstore.damage import twice
from hiddenstore.documents import load, read_bounded, seal, sha256_hex, unseal
from hiddenstore.errors import CorruptionError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.fs.seam import Filesystem, is_inside
from schemas.manifest import CommitRecord, Snapshot, SnapshotEntry

DAMAGED = "damaged-on-disk"
"""Reason of the rejects that a repair leaves. Their samples are pending; those of a capture never are."""

READ_THREADS = 8
MAX_COUNT = 1 << 48

_SAMPLE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Commit:
    """A record as it lies on disk: file name under ``commits/``, sha256 of its bytes, content."""

    name: str
    sha256: str
    record: CommitRecord


@dataclass(frozen=True)
class Scan:
    """Everything under ``commits/``: the records that count, sorted by unit, and what could not be read."""

    commits: tuple[Commit, ...]
    damaged: tuple[HiddenstoreError, ...]


def scan_commits(fs: Filesystem) -> Scan:
    """Read every commit record that counts; a damaged one is reported, never skipped in silence."""
    items = _read_many(fs, latest_names(fs))
    return Scan(
        tuple(item for item in items if isinstance(item, Commit)),
        tuple(item for item in items if not isinstance(item, Commit)),
    )


def latest_names(fs: Filesystem) -> list[str]:
    """Names of the records that count: the highest revision of each unit, sorted by unit."""
    latest: dict[str, tuple[int, str]] = {}
    for name in fs.list(layout.COMMITS_DIR):
        parsed = layout.parse_commit(name)
        if parsed is not None and parsed.revision >= latest.get(parsed.unit, (-1, ""))[0]:
            latest[parsed.unit] = (parsed.revision, name)
    return [latest[unit][1] for unit in sorted(latest)]


def committed_units(fs: Filesystem) -> set[str]:
    """Names of the units that have a record, from the folder listing alone."""
    parsed = (layout.parse_commit(name) for name in fs.list(layout.COMMITS_DIR))
    return {name.unit for name in parsed if name is not None}


def lost_samples(record: CommitRecord) -> frozenset[str]:
    """Ids of the samples that a repair dropped and nobody has captured again."""
    return frozenset(reject.id for reject in record.rejects if reject.reason == DAMAGED)


def read_commit(fs: Filesystem, name: str) -> Commit:
    """One record by its file name.

    Raises:
        CorruptionError: its bytes, its name or its numbers do not hold together.
    """
    path = f"{layout.COMMITS_DIR}/{name}"
    data, where = read_bounded(fs, path), f"{fs.root}/{path}"
    record = unseal(data, CommitRecord, where)
    _check_record(record, name, where)
    return Commit(name, sha256_hex(data), record)


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


def read_snapshot(fs: Filesystem, snapshot: Snapshot) -> Scan:
    """The records a snapshot names.

    Raises:
        CorruptionError: ``snapshot-mismatch`` when one is missing or has other bytes than were frozen.
    """
    commits = []
    for entry, commit in zip(snapshot.commits, _read_many(fs, [e.record for e in snapshot.commits]), strict=True):
        if not isinstance(commit, Commit):
            raise commit
        if commit.sha256 != entry.sha256:
            raise CorruptionError(
                f"{fs.root}/{layout.COMMITS_DIR}/{entry.record} is not the record that snapshot {snapshot.name} froze: "
                f"expected sha256 {entry.sha256}, found {commit.sha256}",
                kind=Kind.SNAPSHOT_MISMATCH,
                path=f"{layout.COMMITS_DIR}/{entry.record}",
                samples=tuple(sample.id for sample in commit.record.samples),
            )
        commits.append(commit)
    return Scan(tuple(commits), ())


def make_snapshot(name: str, commits: Iterable[Commit]) -> Snapshot:
    """A frozen list of commits with their digests."""
    commits = sorted(commits, key=lambda commit: commit.record.unit)
    return Snapshot(
        name=name,
        commits=tuple(SnapshotEntry(record=commit.name, sha256=commit.sha256) for commit in commits),
        samples=sum(len(commit.record.samples) for commit in commits),
        tokens=sum(commit.record.tokens for commit in commits),
    )


def _read_many(fs: Filesystem, names: list[str]) -> list[Commit | HiddenstoreError]:
    def read(name: str) -> Commit | HiddenstoreError:
        path = f"{layout.COMMITS_DIR}/{name}"
        try:
            return twice(fs, lambda: read_commit(fs, name), path)
        except NotFoundError as error:
            message = f"{error.message}, but a listing or snapshot names it"
            return CorruptionError(message, kind=Kind.COMMIT_MISSING, path=path)
        except StorageError:
            raise
        except HiddenstoreError as error:
            return error

    if len(names) < READ_THREADS:
        return [read(name) for name in names]
    with _collector_paused(), ThreadPoolExecutor(READ_THREADS) as pool:
        return list(pool.map(read, names))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Records hold no cycles, yet a million new objects would make Python look for some: half of the time to open."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_record(record: CommitRecord, name: str, where: str) -> None:
    """What the schema cannot say: names agree, paths stay inside, no number is absurd."""
    parsed = layout.parse_commit(name)
    folder, _, segment = record.segment.partition("/")
    problem = ""
    if parsed is None or parsed.unit != record.unit:
        problem = f"it holds the record of unit {record.unit!r}"
    elif folder != layout.SEGMENTS_DIR or record.unit not in {claim.unit for claim in layout.segment_claims(segment)}:
        problem = f"its segment {record.segment!r} is not one of this unit"
    elif any(not is_inside(file.path) for file in record.files):
        problem = "a file path leaves the segment"
    elif len({file.path for file in record.files}) != len(record.files):
        problem = "a file is named twice"
    elif not all(_SAMPLE_ID.fullmatch(name) for name in _sample_ids(record)):
        problem = "a sample id has characters other than letters, digits, - and _"
    elif max((*(file.size for file in record.files), record.tokens, record.final_rows)) > MAX_COUNT:
        problem = "a size is absurd"
    elif record.samples and not record.files:
        problem = "it has samples but no file"
    if problem:
        raise CorruptionError(
            f"{where} is damaged: {problem}",
            kind=Kind.COMMIT_INVALID,
            path=where,
            samples=tuple(name for name in _sample_ids(record) if _SAMPLE_ID.fullmatch(name)),
        )


def _sample_ids(record: CommitRecord) -> list[str]:
    return [entry.id for entry in record.samples] + [reject.id for reject in record.rejects]
