"""``gc``: sweep what can no longer be of use. It plans first and acts when told to."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from hiddenstore.errors import ConfigError
from hiddenstore.files import layout
from hiddenstore.files.damage import reading_only
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import read_catalog
from hiddenstore.index.listed import Listed
from hiddenstore.index.publish import replaced_indexes
from hiddenstore.targets.calibration import SLICE_PATH, unnamed_slices
from hiddenstore.verify.structure import leftovers, unnamed_segments, unnamed_transforms

GRACE_S = 24 * 3600.0


@dataclass(frozen=True)
class Garbage:
    """A path that no reader needs.

    ``reason``: ``orphan`` can never be committed, ``superseded`` was replaced, ``unfinished`` no record names yet,
    ``temporary``. ``age_s``: seconds since it changed, or since it was replaced where that is less.
    """

    path: str
    reason: str
    size_bytes: int
    age_s: float


@dataclass
class Sweep:
    """``remove`` is old enough to go; ``wait`` is younger; ``unfinished`` can still be committed and stays;
    ``elsewhere`` lies behind a link out of the store, where it may be anybody's, and stays.

    With ``abandoned``, what is unfinished counts as the rest does.
    """

    remove: list[Garbage] = field(default_factory=list)
    wait: list[Garbage] = field(default_factory=list)
    unfinished: list[Garbage] = field(default_factory=list)
    elsewhere: list[Garbage] = field(default_factory=list)
    done: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.remove)


def gc(
    location: "str | Path | Filesystem", dry_run: bool = True, older_than_s: float = GRACE_S, abandoned: bool = False
) -> Sweep:
    """Remove segments that can no longer win, index files that another was merged from, files of codecs that the store
    does not name, and temporary files.

    A segment that a saved snapshot names stays, so does every one of a unit of which a record cannot be read, and so
    does everything touched or replaced in the last ``older_than_s`` seconds: who opened the store before may still read
    it, or save a snapshot of it. Segments that no record names yet, but one could, go
    with ``abandoned`` only: a writer that was stopped and goes on then loses its unit, and captures it again. Raises
    CorruptionError: a snapshot is damaged: it may name anything; StorageError: the storage refused to read; nothing is
    removed."""
    fs = open_filesystem(location)
    if fs.size(layout.STORE_JSON) is None:
        raise missing("store", fs.root)
    sweep = Sweep()
    with reading_only():
        replacing = cache(partial(_revisions, fs))
        fates = unnamed_segments(fs, _segments(fs))
        reasons: dict[str, str] = {path: fate for path, fate in fates.items() if fate != "frozen"}
        # States of a slice come before their document: without one, its writer may have been stopped in between.
        reasons |= dict.fromkeys(unnamed_slices(fs), "unfinished" if fs.size(SLICE_PATH) is None else "orphan")
        reasons |= dict.fromkeys(unnamed_transforms(fs), "orphan")
        reasons |= dict.fromkeys(leftovers(fs), "temporary") | dict.fromkeys(replaced_indexes(fs), "superseded")
        for path, reason in reasons.items():
            if fs.size(path) is not None or fs.list(path):
                size, age = fs.usage(path)
                if fates.get(path) == "superseded":
                    age = min(age, _replaced_for(fs, path, replacing()))
                item = Garbage(path, reason, size, age)
                if reason == "unfinished" and not abandoned:
                    sweep.unfinished.append(item)
                elif _is_elsewhere(fs, path):
                    sweep.elsewhere.append(item)
                else:
                    (sweep.remove if item.age_s >= older_than_s else sweep.wait).append(item)
    if not dry_run:
        # Planning takes as long as reading every record does: a writer may have gone on.
        sweep.remove = [item for item in sweep.remove if _remove(fs, item)]
        sweep.done = True
    return sweep


def _remove(fs: Filesystem, item: Garbage) -> bool:
    """Remove what is still garbage; whether it was."""
    if item.reason == "unfinished" and _is_named(fs, item.path):
        return False
    fs.remove_tree(item.path)
    return True


def _is_elsewhere(fs: Filesystem, path: str) -> bool:
    """Whether a link leads out of the store to the folder of a path; object storage has no links."""
    with suppress(ConfigError):
        return not fs.local_path(path).parent.resolve().is_relative_to(fs.address)
    return False


def _is_named(fs: Filesystem, path: str) -> bool:
    """Whether the record, or the document of slice states, is there that could still name an unfinished path."""
    claims = layout.segment_claims(path.rpartition("/")[2])
    if not claims:
        return path not in unnamed_slices(fs)
    return any(fs.size(layout.commit_path(unit, revision)) is not None for unit, revision in claims)


def _revisions(fs: Filesystem) -> dict[str, list[int]]:
    """The revisions of every unit that have a record, ascending."""
    revisions: dict[str, list[int]] = {}
    for unit, revision, _ in layout.parse_commits(fs.list(layout.COMMITS_DIR)):
        revisions.setdefault(unit, []).append(revision)
    return {unit: sorted(those) for unit, those in revisions.items()}


def _replaced_for(fs: Filesystem, path: str, revisions: Mapping[str, Sequence[int]]) -> float:
    """Seconds since the record came that replaced a segment's own; the least where its name may be of two units."""
    ages = []
    for unit, own in layout.segment_claims(path.rpartition("/")[2]):
        later = next((revision for revision in revisions.get(unit, ()) if revision > own), None)
        if later is not None:
            ages.append(fs.usage(layout.commit_path(unit, later))[1])
    return min(ages, default=0.0)


def _segments(fs: Filesystem) -> dict[str, str]:
    """The segment that each record names which counts, by its file name; an index is not asked."""
    segments: dict[str, str] = {}

    def visit(record: Listed) -> None:
        segments[record.name] = record.head.segment

    read_catalog(fs, use_index=False, visit=visit)
    return segments
