"""Care of a store: sweep what no commit names, and drop what cannot be read. Both plan first and act when told to."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from stat import S_ISREG

from hiddenstore import layout
from hiddenstore.care.stored_unit import stored_unit
from hiddenstore.commit import Commit, publish_commit, read_commit, scan_commits
from hiddenstore.documents import load
from hiddenstore.errors import ConflictError, CorruptionError, HiddenstoreError, Kind
from hiddenstore.folders import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.segment import write_encoded
from hiddenstore.store import Store, load_snapshot
from hiddenstore.targets.calibration import SLICE_PATH, slice_bytes, slice_document, unnamed_slices
from hiddenstore.verify.bytes import damaged_files, rarely_read_documents, unreadable_samples
from hiddenstore.verify.structure import leftovers, orphan_segments, superseded_segments
from schemas.manifest import CommitRecord, Reject, Snapshot

GRACE_S = 24 * 3600.0
DAMAGED = "damaged-on-disk"


@dataclass(frozen=True)
class Garbage:
    """A path that no reader needs: ``orphan``, ``superseded`` by a repair, or ``temporary``."""

    path: str
    reason: str
    size_bytes: int
    age_s: float


@dataclass
class Sweep:
    """``remove`` is old enough to go; ``wait`` may still belong to a running writer."""

    remove: list[Garbage] = field(default_factory=list)
    wait: list[Garbage] = field(default_factory=list)
    done: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.remove)


@dataclass(frozen=True)
class UnitRepair:
    """One unit: samples to drop with the reason, how many stay (``kept``), and its commit record.

    ``forget`` moves a commit record that cannot be read to ``quarantine/``: its unit can then be collected again.
    """

    unit: str
    record: str
    dropped: dict[str, str]
    kept: int
    forget: bool = False


@dataclass
class Repair:
    """What ``repair`` would do, or did.

    ``aside``: damaged files beside the units with the reason, moved to ``quarantine/``; the same collect writes those
    of target and inputs again.
    """

    units: list[UnitRepair] = field(default_factory=list)
    aside: dict[str, str] = field(default_factory=dict)
    done: bool = False

    @property
    def dropped(self) -> int:
        return sum(len(unit.dropped) for unit in self.units)


def gc(location: "str | Path | Filesystem", dry_run: bool = True, older_than_s: float = GRACE_S) -> Sweep:
    """Remove segments and temporary files that nothing names.

    A segment named by a saved snapshot stays, and so does everything touched in the last ``older_than_s`` seconds: a
    writer may be about to commit it. Segments of units whose record cannot be read are never garbage.
    """
    fs = _open(location)
    pinned = _pinned_segments(fs)
    orphans = orphan_segments(fs, [commit.record for commit in scan_commits(fs).commits])
    reasons = dict.fromkeys([*orphans, *unnamed_slices(fs)], "orphan")
    reasons |= {path: "superseded" for path in superseded_segments(fs) if path not in pinned}
    reasons |= dict.fromkeys(leftovers(fs), "temporary")
    sweep = Sweep()
    for path, reason in reasons.items():
        if fs.size(path) is not None or fs.list(path):
            item = Garbage(path, reason, *_size_and_age(fs, path))
            (sweep.remove if item.age_s >= older_than_s else sweep.wait).append(item)
    if not dry_run:
        for item in sweep.remove:
            fs.remove_tree(item.path)
        sweep.done = True
    return sweep


def _open(location: "str | Path | Filesystem") -> Filesystem:
    fs = open_filesystem(location)
    if fs.size(layout.STORE_JSON) is None:
        raise missing("store", fs.root)
    return fs


def _pinned_segments(fs: Filesystem) -> set[str]:
    """Segments of every record a saved snapshot names; a damaged snapshot stops gc, for it may name anything."""
    pinned = set()
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if name.endswith(".json"):
            for entry in load(fs, f"{layout.SNAPSHOTS_DIR}/{name}", Snapshot).commits:
                with suppress(HiddenstoreError):
                    pinned.add(read_commit(fs, entry.record).record.segment)
    return pinned


def _size_and_age(fs: Filesystem, path: str) -> tuple[int, float]:
    """Bytes below a path and seconds since anything in it changed; 0 seconds where the storage cannot say."""
    root = Path(fs.root) / path
    try:
        members = [root, *root.rglob("*")] if root.is_dir() else [root]
        states = [member.stat() for member in members]
    except OSError:
        return 0, 0.0
    size = sum(state.st_size for state in states if S_ISREG(state.st_mode))
    return size, max(0.0, time.time() - max(state.st_mtime for state in states))


def repair(location: "str | Path | Filesystem", dry_run: bool = True) -> Repair:
    """Make a damaged store whole again by leaving out what cannot be read.

    Each damaged unit gets a new revision of its commit record, naming a new segment with the codes of the samples that
    still read, copied as they are, and the others as rejects. The old record and segment stay until ``gc``. Damaged
    files beside the units are moved to ``quarantine/``.
    """
    fs = _open(location)
    store = Store.open(fs, strict=False)
    result = Repair(aside=damaged_documents(store))
    for error in store.damaged:
        name = Path(getattr(error, "path", "")).name
        parsed = layout.parse_commit(name)
        if parsed is not None:
            result.units.append(UnitRepair(parsed.unit, name, {}, 0, forget=True))
    commits = {commit.name: commit for commit in store.commit_files}
    for name, commit in commits.items():
        record = commit.record
        lost = {sample: error.message for sample, error in unreadable_samples(store, record).items()}
        if lost or damaged_files(fs, record):
            result.units.append(UnitRepair(record.unit, name, lost, len(record.samples) - len(lost)))
    if not dry_run:
        for unit in result.units:
            if unit.forget:
                _set_aside(fs, f"{layout.COMMITS_DIR}/{unit.record}")
            else:
                _rewrite(store, commits[unit.record], unit.dropped)
        for path in result.aside:
            _set_aside(fs, path)
        result.done = True
    return result


def _set_aside(fs: Filesystem, path: str) -> None:
    """Move a file to ``quarantine/``, under its own path."""
    fs.put_if_absent(f"{layout.QUARANTINE_DIR}/{path}", fs.read(path))
    fs.remove_tree(path)


def _rewrite(store: Store, commit: Commit, dropped: dict[str, str]) -> None:
    record = commit.record
    parsed = layout.parse_commit(commit.name)
    assert parsed is not None
    path = layout.segment_path(record.unit, layout.new_attempt())
    intact = [index for index, sample in enumerate(record.samples) if sample.id not in dropped]
    rejects = tuple(
        Reject(id=sample.id, tokens=sample.tokens, reason=DAMAGED, detail=dropped[sample.id])
        for sample in record.samples
        if sample.id in dropped
    )
    changes: dict[str, object] = {"segment": path, "rejects": (*record.rejects, *rejects)}
    changes |= {"files": (), "samples": (), "stats": {}}
    if intact:
        unit = stored_unit(store, record, intact)
        files = write_encoded(store.fs, path, unit, store.capture, store.manifest.container)
        changes |= {"files": files, "samples": unit.samples, "stats": unit.stats}
    repaired = CommitRecord.model_validate({**dict(record), **changes})
    if not publish_commit(store.fs, repaired, parsed.revision + 1):
        raise ConflictError(
            f"unit {record.unit} was repaired by somebody else at the same time",
            kind=Kind.REPAIR_RACED,
            hint="run it again",
        )


def damaged_documents(store: Store) -> dict[str, str]:
    """Files of the target, inputs, snapshots, replaced commit records, calibration and advice that cannot be read.

    Path and reason of each. The segments and the records that count are the business of ``repair``.
    """
    damaged: dict[str, str] = {}
    for path, read in _readers(store):
        try:
            if store.fs.size(path) is not None:
                read()
        except CorruptionError as error:
            damaged[path] = error.message.partition(" is damaged: ")[2] or error.message
    return damaged


def _readers(store: Store) -> Iterator[tuple[str, Callable[[], object]]]:
    fs = store.fs
    for file in store.manifest.target_files:
        yield f"{layout.TARGET_DIR}/{file.path}", partial(store.target_file, file.path)
    for digest, registered in store.inputs().items():
        yield layout.input_path(digest), registered.unit_samples
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if name.endswith(".json"):
            yield f"{layout.SNAPSHOTS_DIR}/{name}", partial(load_snapshot, fs, name.removesuffix(".json"))
    yield from rarely_read_documents(fs)
    yield SLICE_PATH, partial(_read_slice, fs)
    with suppress(CorruptionError):
        document = slice_document(fs)
        if document is not None:
            # Damaged states go with their document: a new slice may need their name.
            yield layout.slice_path(document.file_sha256), partial(slice_bytes, fs, document)


def _read_slice(fs: Filesystem) -> None:
    document = slice_document(fs)
    if document is not None:
        slice_bytes(fs, document)
