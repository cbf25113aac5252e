"""Care of a store: sweep what no commit names, and drop what cannot be read. Both plan first and act when told to."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from hiddenstore import layout
from hiddenstore.calibration import unnamed_slices
from hiddenstore.commit import Commit, publish_commit, read_commit, scan_commits
from hiddenstore.documents import load
from hiddenstore.errors import ConflictError, HiddenstoreError
from hiddenstore.fs import Filesystem, open_filesystem
from hiddenstore.quarantine import damaged_documents, set_aside
from hiddenstore.segment import write_encoded
from hiddenstore.store import Store, no_store
from hiddenstore.stored_unit import stored_unit
from hiddenstore.verify.content import damaged_files, unreadable_samples
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
class GcPlan:
    """``remove`` is old enough to go; ``wait`` may still belong to a running writer."""

    remove: list[Garbage] = field(default_factory=list)
    wait: list[Garbage] = field(default_factory=list)
    done: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.remove)


@dataclass(frozen=True)
class UnitRepair:
    """One unit: samples to drop with the reason, how many stay, and the record that would say so.

    ``forget`` moves a commit record that cannot be read to ``quarantine/``: its unit can then be collected again.
    """

    unit: str
    record: str
    dropped: dict[str, str]
    kept: int
    forget: bool = False


@dataclass
class RepairPlan:
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


def gc(location: "str | Path | Filesystem", dry_run: bool = True, older_than_s: float = GRACE_S) -> GcPlan:
    """Remove segments and temporary files that nothing names.

    A segment named by a saved snapshot stays, and so does everything touched in the last ``older_than_s`` seconds: a
    writer may be about to commit it. Segments of units whose record cannot be read are never garbage.
    """
    fs = _open(location)
    pinned = _pinned_segments(fs)
    found = [(path, "orphan") for path in orphan_segments(fs, [commit.record for commit in scan_commits(fs).commits])]
    found += [(path, "superseded") for path in superseded_segments(fs) if path not in pinned]
    found += [(path, "orphan") for path in unnamed_slices(fs)]
    found += [(path, "temporary") for path in leftovers(fs)]
    plan = GcPlan()
    for path, reason in found:
        size, age = _size_and_age(fs, path)
        if fs.size(path) is None and not fs.list(path):
            continue
        item = Garbage(path, reason, size, age)
        (plan.remove if age >= older_than_s else plan.wait).append(item)
    if not dry_run:
        for item in plan.remove:
            fs.remove_tree(item.path)
        plan.done = True
    return plan


def repair(location: "str | Path | Filesystem", dry_run: bool = True) -> RepairPlan:
    """Make a damaged store whole again by leaving out what cannot be read.

    Each damaged unit gets a new revision of its commit record, naming a new segment with the codes of the samples that
    still read, copied as they are, and the others as rejects. The old record and segment stay until ``gc``. Damaged
    files beside the units are moved to ``quarantine/``.
    """
    fs = _open(location)
    store = Store.open(fs, strict=False)
    plan = RepairPlan(aside=damaged_documents(store))
    for error in store.damaged:
        name = Path(getattr(error, "path", "")).name
        parsed = layout.parse_commit(name)
        if parsed is not None:
            plan.units.append(UnitRepair(parsed.unit, name, {}, 0, forget=True))
    for commit in store.commit_files:
        record = commit.record
        lost = unreadable_samples(store, record)
        if lost or damaged_files(fs, record):
            dropped = {name: error.message for name, error in lost.items()}
            plan.units.append(UnitRepair(record.unit, commit.name, dropped, len(record.samples) - len(lost)))
    if not dry_run:
        commits = {commit.name: commit for commit in store.commit_files}
        for unit in plan.units:
            if unit.forget:
                set_aside(fs, f"{layout.COMMITS_DIR}/{unit.record}")
            else:
                _rewrite(store, commits[unit.record], unit.dropped)
        for path in plan.aside:
            set_aside(fs, path)
        plan.done = True
    return plan


def _open(location: "str | Path | Filesystem") -> Filesystem:
    fs = open_filesystem(location)
    if fs.size(layout.STORE_JSON) is None:
        raise no_store(fs)
    return fs


def _pinned_segments(fs: Filesystem) -> set[str]:
    """Segments of every record a saved snapshot names; a damaged snapshot stops gc, for it may name anything."""
    pinned = set()
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if name.endswith(".json"):
            snapshot = load(fs, f"{layout.SNAPSHOTS_DIR}/{name}", Snapshot)
            for entry in snapshot.commits:
                try:
                    pinned.add(read_commit(fs, entry.record).record.segment)
                except HiddenstoreError:
                    continue
    return pinned


def _size_and_age(fs: Filesystem, path: str) -> tuple[int, float]:
    """Bytes below a path and seconds since anything in it changed; 0 seconds where the storage cannot say."""
    full = Path(fs.root) / path
    try:
        members = [full, *full.rglob("*")] if full.is_dir() else [full]
        states = [member.stat() for member in members]
    except OSError:
        return 0, 0.0
    size = sum(state.st_size for state, member in zip(states, members, strict=True) if member.is_file())
    return size, max(0.0, time.time() - max(state.st_mtime for state in states))


def _rewrite(store: Store, commit: Commit, dropped: dict[str, str]) -> None:
    record = commit.record
    parsed = layout.parse_commit(commit.name)
    assert parsed is not None
    path = layout.segment_path(record.unit, layout.new_attempt())
    kept = [index for index, sample in enumerate(record.samples) if sample.id not in dropped]
    rejects = tuple(
        Reject(id=sample.id, tokens=sample.tokens, reason=DAMAGED, detail=dropped[sample.id])
        for sample in record.samples
        if sample.id in dropped
    )
    changes: dict[str, object] = {"segment": path, "rejects": (*record.rejects, *rejects)}
    changes |= {"files": (), "samples": (), "stats": {}}
    if kept:
        written = write_encoded(
            store.fs, path, stored_unit(store, record, kept), store.capture, store.manifest.container
        )
        changes |= {"files": written.files, "samples": written.samples, "stats": written.stats}
    repaired = CommitRecord.model_validate({**dict(record), **changes})
    if not publish_commit(store.fs, repaired, parsed.revision + 1):
        raise ConflictError(
            f"unit {record.unit} was repaired by somebody else at the same time",
            kind="repair-raced",
            hint="run it again",
        )
