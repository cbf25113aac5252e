"""Which paths of a store nobody needs: segments that can no longer win, temporary files, slices that nothing names.

A segment's name states the revision it competes for. It can no longer win once the record of that revision names
another, or a record of a higher revision counts. Until then a writer that was stopped may go on and commit it.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from hiddenstore import layout
from hiddenstore.commit import read_commit
from hiddenstore.damage import DAMAGE, twice
from hiddenstore.documents import load
from hiddenstore.fs.seam import Filesystem, is_temporary
from hiddenstore.layout import CommitName
from schemas.manifest import Snapshot

Fate = Literal["orphan", "superseded", "frozen", "unfinished"]
"""``orphan`` lost its race, ``superseded`` was replaced by a later revision, ``frozen`` too but a snapshot names it,
``unfinished`` can still be committed."""

_FOLDERS = (
    "",
    layout.COMMITS_DIR,
    layout.INPUTS_DIR,
    layout.TARGET_DIR,
    layout.SNAPSHOTS_DIR,
    layout.CALIBRATION_DIR,
    layout.ADVICE_DIR,
    layout.INDEX_DIR,
)


@dataclass
class _Unit:
    """What is known of a unit: segments by revision; ``is_certain`` False where a record cannot be read."""

    segments: dict[int, str] = field(default_factory=dict)
    is_certain: bool = True
    frozen: set[int] = field(default_factory=set)

    @property
    def last(self) -> int:
        return max(self.segments, default=-1)


def unnamed_segments(fs: Filesystem, named: Mapping[str, str]) -> dict[str, Fate]:
    """Segments that no record names which counts, with what became of them; ``named`` are those that do, by the file
    name of the record, as the record itself says.

    Left out are all of a unit of which any record cannot be read: it may name any of them.

    Raises:
        CorruptionError, FormatError: a snapshot cannot be read: it may name anything.
    """
    units = _units(fs, named)
    fates: dict[str, Fate] = {}
    for name in fs.list(layout.SEGMENTS_DIR):
        claims, path = layout.segment_claims(name), f"{layout.SEGMENTS_DIR}/{name}"
        if not claims or not all(units[claim.unit].is_certain for claim in claims):
            continue
        fate = _fate(path, claims, units)
        if fate is not None:
            fates[path] = fate
    return fates


def _fate(path: str, claims: tuple[CommitName, ...], units: "dict[str, _Unit]") -> Fate | None:
    for unit in (units[claim.unit] for claim in claims):
        revisions = {revision for revision, segment in unit.segments.items() if segment == path}
        if unit.last in revisions:
            return None
        if revisions:
            return "frozen" if unit.frozen & revisions else "superseded"
    if all(claim.revision in units[claim.unit].segments or claim.revision < units[claim.unit].last for claim in claims):
        return "orphan"
    return "unfinished"


def _units(fs: Filesystem, named: Mapping[str, str]) -> "dict[str, _Unit]":
    units: dict[str, _Unit] = defaultdict(_Unit)
    for name in fs.list(layout.COMMITS_DIR):
        parsed = layout.parse_commit(name)
        if parsed is not None:
            segment = named.get(name) or _segment(fs, name)
            if segment is None:
                units[parsed.unit].is_certain = False
            else:
                units[parsed.unit].segments[parsed.revision] = segment
    for parsed in _frozen(fs):
        unit = units[parsed.unit]
        unit.frozen.add(parsed.revision)
        unit.is_certain &= parsed.revision in unit.segments
    return units


def _segment(fs: Filesystem, name: str) -> str | None:
    try:
        return twice(fs, lambda: read_commit(fs, name), f"{layout.COMMITS_DIR}/{name}").record.segment
    except DAMAGE:
        return None


def _frozen(fs: Filesystem) -> Iterator[CommitName]:
    """The records that saved snapshots name."""
    for name in fs.list(layout.SNAPSHOTS_DIR):
        if name.endswith(".json") and not is_temporary(name):
            path = f"{layout.SNAPSHOTS_DIR}/{name}"
            snapshot = twice(fs, partial(load, fs, path, Snapshot), path)
            parsed = (layout.parse_commit(entry.record) for entry in snapshot.commits)
            yield from (commit for commit in parsed if commit is not None)


def leftovers(fs: Filesystem) -> Iterator[str]:
    """Temporary files that an interrupted publication left."""
    for folder in _FOLDERS:
        for name in fs.list(folder):
            if is_temporary(name):
                yield f"{folder}/{name}".lstrip("/")
