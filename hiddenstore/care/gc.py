"""``gc``: sweep what can no longer be of use. It plans first and acts when told to."""

from dataclasses import dataclass, field
from pathlib import Path

from hiddenstore.files import layout
from hiddenstore.files.damage import reading_only
from hiddenstore.files.layout import missing
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import read_catalog
from hiddenstore.index.listed import Listed
from hiddenstore.index.publish import replaced_indexes
from hiddenstore.targets.calibration import SLICE_PATH, unnamed_slices
from hiddenstore.verify.structure import leftovers, unnamed_segments

GRACE_S = 24 * 3600.0


@dataclass(frozen=True)
class Garbage:
    """A path that no reader needs.

    ``reason``: ``orphan`` can never be committed, ``superseded`` was replaced, ``unfinished`` no record names yet,
    ``temporary``.
    """

    path: str
    reason: str
    size_bytes: int
    age_s: float


@dataclass
class Sweep:
    """``remove`` is old enough to go; ``wait`` is younger; ``unfinished`` can still be committed and stays.

    With ``abandoned``, what is unfinished counts as the rest does.
    """

    remove: list[Garbage] = field(default_factory=list)
    wait: list[Garbage] = field(default_factory=list)
    unfinished: list[Garbage] = field(default_factory=list)
    done: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(item.size_bytes for item in self.remove)


def gc(
    location: "str | Path | Filesystem", dry_run: bool = True, older_than_s: float = GRACE_S, abandoned: bool = False
) -> Sweep:
    """Remove segments that can no longer win, index files that another was merged from, and temporary files.

    A segment that a saved snapshot names stays, so does every one of a unit of which a record cannot be read, and so
    does everything touched in the last ``older_than_s`` seconds. Segments that no record names yet, but one could, go
    with ``abandoned`` only: a writer that was stopped and goes on then loses its unit, and captures it again. Raises
    CorruptionError: a snapshot is damaged: it may name anything; StorageError: the storage refused to read; nothing is
    removed."""
    fs = open_filesystem(location)
    if fs.size(layout.STORE_JSON) is None:
        raise missing("store", fs.root)
    sweep = Sweep()
    with reading_only():
        fates = unnamed_segments(fs, _segments(fs))
        reasons: dict[str, str] = {path: fate for path, fate in fates.items() if fate != "frozen"}
        # States of a slice come before their document: without one, its writer may have been stopped in between.
        reasons |= dict.fromkeys(unnamed_slices(fs), "unfinished" if fs.size(SLICE_PATH) is None else "orphan")
        reasons |= dict.fromkeys(leftovers(fs), "temporary") | dict.fromkeys(replaced_indexes(fs), "superseded")
        for path, reason in reasons.items():
            if fs.size(path) is not None or fs.list(path):
                item = Garbage(path, reason, *fs.usage(path))
                if reason == "unfinished" and not abandoned:
                    sweep.unfinished.append(item)
                else:
                    (sweep.remove if item.age_s >= older_than_s else sweep.wait).append(item)
    if not dry_run:
        for item in sweep.remove:
            fs.remove_tree(item.path)
        sweep.done = True
    return sweep


def _segments(fs: Filesystem) -> dict[str, str]:
    """The segment that each record names which counts, by its file name; an index is not asked."""
    segments: dict[str, str] = {}

    def visit(record: Listed) -> None:
        segments[record.name] = record.head.segment

    read_catalog(fs, use_index=False, visit=visit)
    return segments
