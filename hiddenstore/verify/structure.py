"""Is everything there: documents, target files, commits, their files in their sizes, units of the inputs; do indexes
say what the records say; and what is there that nothing names.

Reads metadata only, never a segment's bytes.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hiddenstore.codecs import FITTED, kind_of
from hiddenstore.commit import committed_units, lost_samples, missing_commit, read_commit
from hiddenstore.console.text import plural
from hiddenstore.errors import CorruptionError, Kind, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, drop_caches, require_absent, twice
from hiddenstore.files.documents import load
from hiddenstore.files.layout import CommitName
from hiddenstore.fs.seam import Filesystem, is_temporary
from hiddenstore.index.catalog import Catalog, read_catalog, read_replaced, saved_snapshots
from hiddenstore.index.file import IndexFile, index_numbers, renumbered
from hiddenstore.index.listed import Listed
from hiddenstore.index.publish import replaced_indexes
from hiddenstore.index.table import ID_BYTES, Ids, SampleTable, joined
from hiddenstore.inputs import RegisteredInput, registered_inputs, text_of
from hiddenstore.store import Store, load_snapshot
from hiddenstore.targets.calibration import SLICE_PATH, slice_document, unnamed_slices
from hiddenstore.threads import Threads, reading_threads
from hiddenstore.verify.report import Finding, Report
from schemas.manifest import CommitHead, Snapshot, StoreManifest

AT_ONCE = 512
PART = 16
SHOWN = 3
_FATES = {
    "orphan": "no commit names it, and none can: its writer was stopped or came second; hiddenstore gc removes it",
    "superseded": "a later record replaced the one that names it; hiddenstore gc removes it",
    "frozen": "a later record replaced the one that names it; a snapshot names that, so it stays",
    "unfinished": "no commit names it yet: its writer is at work or was stopped; gc --abandoned gives it up",
}


def check_structure(fs: Filesystem, report: Report) -> Store | None:
    """Add what is wrong to ``report``; returns the store with every commit that can be read, None without store.json.

    A damaged ``store.json`` is a finding, and what can be checked without it still is. Every commit record is read; no
    index is believed.
    """
    manifest = _manifest(fs, report)
    look = _Look(fs)
    catalog = read_catalog(fs, use_index=False, visit=look.record)
    report.findings += [Finding.of(error) for error in catalog.damaged]
    report.units, report.samples, report.files = len(catalog), int(catalog.facts["samples"].sum()), look.files
    look.finish()
    # Their memory is for the comparison of the indexes.
    look.inputs.clear()
    frozen = _Frozen(fs, catalog, look.inputs_of)
    indexes = check_indexes(fs, catalog)
    report.findings += [*look.size_findings, *look.input_findings, *frozen.findings]
    report.findings += [*_calibration(fs), *indexes.findings]
    for finding, is_error in _duplicates(catalog, look.inputs_of, look.segments):
        (report.findings if is_error else report.notes).append(finding)
    for finding, is_error in _unregistered(fs, look.inputs_of.values(), frozen.inputs | indexes.inputs):
        (report.findings if is_error else report.notes).append(finding)
    report.notes += [*look.pending, *_garbage(fs, look.segments)]
    return None if manifest is None else Store(fs, manifest, catalog)


def _manifest(fs: Filesystem, report: Report) -> StoreManifest | None:
    try:
        manifest = twice(fs, lambda: load(fs, layout.STORE_JSON, StoreManifest), layout.STORE_JSON)
    except DAMAGE as error:
        report.findings.append(Finding.of(error, layout.STORE_JSON))
        return None
    names, codec = [file.path for file in manifest.target_files], manifest.capture.codecs.aux
    if layout.HEAD_NAME not in names:
        detail = f"{layout.STORE_JSON} names no {layout.HEAD_PATH}: there is no way to logits"
        report.findings.append(Finding("head-missing", layout.STORE_JSON, (), detail))
    if manifest.capture.blocks and layout.BLOCKS_NAME not in names:
        detail = f"{layout.STORE_JSON} names no {layout.TARGET_DIR}/{layout.BLOCKS_NAME}: no state can be rebuilt"
        report.findings.append(Finding("blocks-missing", layout.STORE_JSON, (), detail))
    if (codec in FITTED or kind_of(codec) != codec) and layout.fitted_name(codec) not in names:
        detail = f"{layout.STORE_JSON} names no {layout.TARGET_DIR}/{layout.fitted_name(codec)}: nothing can be decoded"
        report.findings.append(Finding("codec-missing", layout.STORE_JSON, (), detail))
    for file in manifest.target_files:
        report.findings += _size(fs, f"{layout.TARGET_DIR}/{file.path}", file.size)
    return manifest


def _files_of(fs: Filesystem, record: CommitHead, samples: Iterable[str]) -> Iterator[Finding]:
    for file in record.files:
        path = f"{record.segment}/{file.path}"
        if fs.size(path) != file.size:
            yield from _size(fs, path, file.size, tuple(samples))


def require_files(store: Store) -> None:
    """Raise CorruptionError for the first file of ``store`` that is missing or has another size; one stat a file."""
    records, first = store.commits(), None
    with Threads(reading_threads(store.fs.prefers_few_files)) as pool:
        # A pool takes all it is given at once.
        for start in range(0, len(records), AT_ONCE):
            wrong = pool.map(
                lambda record: next(_files_of(store.fs, record, [sample.id for sample in record.samples]), None),
                records[start : start + AT_ONCE],
            )
            first = first or next((finding for finding in wrong if finding is not None), None)
    if first is not None:
        raise CorruptionError(
            f"{store.path}/{first.path} is damaged: {first.detail} (all {plural(len(first.samples), 'sample')} of its "
            "unit)",
            kind=Kind(first.kind),  # type: ignore[call-arg]  # mypy takes __new__ for the lookup
            hint=shlex.join(["hiddenstore", "repair", store.path]),
            path=first.path,
            samples=first.samples,
        )


def _size(fs: Filesystem, path: str, expected: int, samples: tuple[str, ...] = ()) -> list[Finding]:
    if fs.size(path) == expected:
        return []
    drop_caches(fs, [path])
    size = fs.size(path)
    if size is None:
        require_absent(fs, path)
        return [Finding("file-missing", path, samples, f"named with {expected:,} bytes, but it does not exist")]
    if size != expected:
        return [Finding("file-size", path, samples, f"expected {expected:,} bytes, found {size:,}")]
    return []


class _Look:
    """What the commit records say, one after the other; none is kept."""

    def __init__(self, fs: Filesystem) -> None:
        self._fs = fs
        self.files = 0
        self.segments: dict[str, str] = {}
        self.inputs_of: dict[str, str] = {}
        self.size_findings: list[Finding] = []
        self.input_findings: list[Finding] = []
        self.pending: list[Finding] = []
        self._waiting: list[Listed] = []
        self.inputs: list[_Members] = []
        for digest in registered_inputs(fs):
            path = layout.input_path(digest)
            try:
                members = twice(fs, partial(_Members, fs, digest), path)
                self._missing_units(members, path)
                self.inputs.append(members)
            except DAMAGE as error:
                self.input_findings.append(Finding.of(error, path))
            # Arrow would keep the memory of the table.
            pa.default_memory_pool().release_unused()

    def record(self, item: Listed) -> None:
        """One record."""
        head = item.head
        self.pending += _pending(item)
        self.files += len(head.files)
        self.segments[item.name], self.inputs_of[item.name] = head.segment, head.input
        for members in self.inputs:
            if expected := members.of(head.unit):
                self.input_findings += _membership(item, expected)
        self._waiting.append(item)
        if len(self._waiting) >= AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Look for the files of the records that still wait for it."""
        parts = [self._waiting[start : start + PART] for start in range(0, len(self._waiting), PART)]
        with Threads(reading_threads(self._fs.prefers_few_files)) as pool:
            for findings in pool.map(
                lambda part: [f for item in part for f in _files_of(self._fs, item.head, item.samples.ids)], parts
            ):
                self.size_findings += findings
        self._waiting = []

    def _missing_units(self, members: "_Members", path: str) -> None:
        named = committed_units(self._fs)
        missing = [unit for unit in members.places if unit not in named]
        if missing:
            lost = tuple(name for unit in missing for name in members.of(unit))
            detail = (
                f"{len(missing)} of {len(members.places)} units have no commit ({_some(missing)}): what made it "
                "(collect, copy, import) is not finished, and the same command goes on"
            )
            self.input_findings.append(Finding("incomplete", path, lost, detail))


class _Members:
    """The samples of an input by unit, without its table, which takes four times as much memory."""

    def __init__(self, fs: Filesystem, digest: str) -> None:
        registered = RegisteredInput(fs, digest)
        column, rows = registered.table["sample_id"].cast(pa.string()), registered.rows
        self.places = registered.places
        self._ids = _ids_of(column if rows is None else column.take(rows))

    def of(self, unit: str) -> Sequence[str]:
        """Those of one unit, in order; none of a unit that the input does not have."""
        start, stop = self.places.get(unit, (0, 0))
        return Ids(self._ids.values[start:stop], True) if isinstance(self._ids, Ids) else self._ids[start:stop]


def _ids_of(column: pa.ChunkedArray) -> Ids | list[str]:
    """A column of text, packed where every text is a digest."""
    if pc.all(pc.equal(pc.binary_length(column), 2 * ID_BYTES)).as_py():
        with suppress(ValueError):
            batches = pa.table([column], names=["id"]).to_batches(1 << 16)
            parts = [Ids.of_digits(str(text_of(batch.column(0)), "ascii")).values for batch in batches]
            return Ids(np.concatenate(parts), True)
    texts: list[str] = column.to_pylist()
    return texts


def _membership(item: Listed, members: Sequence[str]) -> Iterator[Finding]:
    """Samples and rejects of a unit must add up to what its input says."""
    if not item.head.rejects and item.samples.ids == members:
        return
    path, expected = f"{layout.COMMITS_DIR}/{item.name}", list(members)
    stored = [*item.samples.ids[:], *(reject.id for reject in item.head.rejects)]
    if stored == expected:
        return
    named = Counter(stored)
    if lost := tuple((Counter(expected) - named).elements()):
        detail = f"{len(lost)} samples of the input are neither stored nor rejected: {_some(lost)}"
        yield Finding("samples-missing", path, lost, detail)
    if extra := tuple((named - Counter(expected)).elements()):
        detail = f"{len(extra)} samples are not in the input: {_some(extra)}"
        yield Finding("samples-unexpected", path, extra, detail)


class _Frozen:
    """What the snapshots name: findings, and the inputs of their records."""

    def __init__(self, fs: Filesystem, catalog: Catalog, inputs_of: Mapping[str, str]) -> None:
        self.findings: list[Finding] = []
        self.inputs: set[str] = set()
        digests = dict(zip(catalog.names, catalog.digests, strict=True))
        for name in saved_snapshots(fs):
            path = layout.snapshot_path(name)
            try:
                snapshot = twice(fs, partial(load_snapshot, fs, name), path)
                live = [entry for entry in snapshot.commits if digests.get(entry.record) == entry.sha256]
                self.inputs.update(inputs_of[entry.record] for entry in live)
                self.inputs.update(commit.record.input for commit in read_replaced(catalog, snapshot))
            except DAMAGE as error:
                self.findings.append(Finding.of(error, path))


def _calibration(fs: Filesystem) -> list[Finding]:
    try:
        document = twice(fs, lambda: slice_document(fs), SLICE_PATH)
    except DAMAGE as error:
        return [Finding.of(error, SLICE_PATH)]
    return [] if document is None else _size(fs, layout.slice_path(document.file_sha256), document.size)


def _duplicates(
    catalog: Catalog, inputs_of: Mapping[str, str], segments: Mapping[str, str]
) -> Iterator[tuple[Finding, bool]]:
    """Twice in one input is an error (True); the same conversation in two inputs is read once and noted."""
    homes: dict[str, list[str]] = {}
    for sample_id, number in zip(catalog.dropped.ids, catalog.dropped.record.tolist(), strict=True):
        if sample_id not in homes:
            first = catalog.locate(sample_id)
            assert first is not None
            homes[sample_id] = [catalog.names[first[0]]]
        homes[sample_id].append(catalog.names[number])
    for sample_id, names in homes.items():
        units = [parsed.unit for name in names if (parsed := layout.parse_commit(name))]
        detail = f"sample {sample_id} is in units {', '.join(units)}; the first one is read"
        in_one_input = len({inputs_of[name] for name in names}) < len(names)
        yield Finding("duplicate", segments[names[1]], (sample_id,), detail), in_one_input


def _unregistered(fs: Filesystem, inputs: Iterable[str], named: Collection[str]) -> Iterator[tuple[Finding, bool]]:
    """``collect`` registers an input before its first unit, so one that is absent has been lost: an error (True) where
    an index or a snapshot names it."""
    units = Counter(inputs)
    for digest in sorted({*units, *named} - registered_inputs(fs).keys()):
        detail = (
            f"the input of {plural(units[digest], 'unit')} is not there, so that units still missing cannot be seen; "
            "collecting the same DATA again brings it back"
        )
        yield Finding("input-missing", layout.input_path(digest), (), detail), digest in named


def _pending(item: Listed) -> Iterator[Finding]:
    if lost := tuple(sorted(lost_samples(item.head))):
        detail = f"a repair dropped {plural(len(lost), 'sample')}; the same collect brings them back"
        yield Finding("pending", f"{layout.COMMITS_DIR}/{item.name}", lost, detail)


def _garbage(fs: Filesystem, segments: Mapping[str, str]) -> Iterator[Finding]:
    for path in unnamed_slices(fs):
        yield Finding("orphan", path, (), "calibration/slice.json does not name it: left by a writer that was stopped")
    # A snapshot that cannot be read is a finding; what it names is then unknown.
    with suppress(*DAMAGE):
        for path, fate in unnamed_segments(fs, segments).items():
            if fs.list(path):
                yield Finding("superseded" if fate == "frozen" else fate, path, (), _FATES[fate])
    for path in unnamed_transforms(fs):
        yield Finding("orphan", path, (), f"{layout.STORE_JSON} does not name it: left by a writer that was stopped")
    for path in replaced_indexes(fs):
        yield Finding("superseded", path, (), "another index file was made from it; hiddenstore gc removes it")
    for path in leftovers(fs):
        yield Finding("orphan", path, (), "a temporary file of a writer that was stopped")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


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

    Left out are all of a unit of which any record cannot be read: it may name any of them. Raises CorruptionError,
    FormatError: a snapshot cannot be read: it may name anything."""
    units = _units(fs, named)
    known, registered = frozenset(units), cache(partial(_registered_units, fs))
    fates: dict[str, Fate] = {}
    # Inputs are read after the listing: a unit is registered before it has a segment.
    for name in fs.list(layout.SEGMENTS_DIR):
        claims, path = _believable(layout.segment_claims(name), known, registered), f"{layout.SEGMENTS_DIR}/{name}"
        if not claims or not all(units[claim.unit].is_certain for claim in claims):
            continue
        fate = _fate(path, claims, units)
        if fate is not None:
            fates[path] = fate
    return fates


def _believable(
    claims: tuple[CommitName, ...], known: Collection[str], registered: Callable[[], Collection[str] | None]
) -> tuple[CommitName, ...]:
    """Of the two claims of ``X-rN-<8 hex>`` that for revision N of X alone where X is a unit and ``X-rN`` is none."""
    if len(claims) < 2 or claims[1].unit in known:
        return claims
    others = registered()
    if others is None or claims[1].unit in others or claims[0].unit not in {*known, *others}:
        return claims
    return claims[:1]


def _registered_units(fs: Filesystem) -> frozenset[str] | None:
    """The units of all inputs; None where an input cannot be read: it may have any."""
    try:
        parts = [
            twice(fs, partial(attrgetter("units"), registered), layout.input_path(digest))
            for digest, registered in registered_inputs(fs).items()
        ]
    except DAMAGE:
        return None
    return frozenset().union(*parts)


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
    for name in saved_snapshots(fs):
        path = layout.snapshot_path(name)
        try:
            snapshot = twice(fs, partial(load, fs, path, Snapshot), path)
        except NotFoundError:
            continue  # removed since it was listed
        parsed = (layout.parse_commit(entry.record) for entry in snapshot.commits)
        yield from (commit for commit in parsed if commit is not None)


def unnamed_transforms(fs: Filesystem) -> Iterator[str]:
    """Files of fitted codecs that the manifest does not name: their writer died, or another made the store first."""
    with suppress(*DAMAGE):
        named = {file.path for file in load(fs, layout.STORE_JSON, StoreManifest).target_files}
        for name in fs.list(layout.TARGET_DIR):
            codec = name.removesuffix(layout.fitted_name(""))
            if name not in named and codec != name and kind_of(codec) != codec:
                yield f"{layout.TARGET_DIR}/{name}"


def leftovers(fs: Filesystem) -> Iterator[str]:
    """Temporary files that an interrupted publication left."""
    for folder in _FOLDERS:
        for name in fs.list(folder):
            if is_temporary(name):
                yield f"{folder}/{name}".lstrip("/")


@dataclass
class IndexCheck:
    """What is wrong with the index files; ``inputs`` are those that they name."""

    findings: list[Finding] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)


def check_indexes(fs: Filesystem, catalog: Catalog) -> IndexCheck:
    """Compare every index file with ``catalog``, for which every record was read. Entries of a record that a later
    revision replaced are not looked at: no reader believes them."""
    check, look = IndexCheck(), _IndexLook(fs, catalog)
    done: set[int] = set()
    numbers = index_numbers(fs)
    while numbers:
        number = numbers.pop()
        path = layout.index_path(number)
        if number in done:
            continue
        done.add(number)
        try:
            file = twice(fs, partial(IndexFile.open, fs, number), path)
            done.update(file.header.replaces)
            check.inputs.update(file.header.inputs)
            check.findings += look.findings(file, twice(fs, file.read, path))
        except NotFoundError:
            # A writer merged it into a file that was not there when they were listed.
            numbers = index_numbers(fs)
        except DAMAGE as error:
            check.findings.append(Finding.of(error, path))
    return check


class _IndexLook:
    def __init__(self, fs: Filesystem, catalog: Catalog) -> None:
        self._fs = fs
        self._list()
        self._places = {name: place for place, name in enumerate(catalog.names)}
        self._digests = catalog.digests
        self._truth = catalog.table
        if len(catalog.dropped):
            self._truth = joined([part.take(np.arange(len(part))) for part in (catalog.table, catalog.dropped)])

    def _list(self) -> None:
        self._listed = set(self._fs.list(layout.COMMITS_DIR))
        self._last: dict[str, int] = {}
        for name in self._listed:
            if parsed := layout.parse_commit(name):
                self._last[parsed.unit] = max(parsed.revision, self._last.get(parsed.unit, 0))

    def findings(self, file: IndexFile, table: SampleTable) -> list[Finding]:
        findings, numbers = [], np.full(file.covered, -1, dtype=np.int32)
        other = 0
        if any(name not in self._places and self._is_gone(name) for name in file.header.records):
            # A record is there before an index names it, but maybe not when the folder was listed last.
            self._list()
        for row, (name, digest) in enumerate(zip(file.header.records, file.header.sha256s, strict=True)):
            place = self._places.get(name)
            if place is not None and self._digests[place] == digest:
                numbers[row] = place
            elif place is not None:
                other += 1
            elif self._is_gone(name):
                samples = table.take(table.record == row).ids[:]
                detail = (
                    f"{file.path} names it with {plural(len(samples), 'sample')}, but it is gone; the same collect "
                    "captures its unit again"
                )
                error = missing_commit(self._fs, name)
                findings.append(Finding(error.kind, error.path, tuple(samples), detail))
        if other:
            detail = f"{plural(other, 'commit record')} that it covers have another sha256 than it names"
            findings.append(Finding(Kind.INDEX_STALE, file.path, (), detail))
        elif not self._agrees(renumbered(table, numbers), numbers):
            findings.append(Finding(Kind.INDEX_STALE, file.path, (), "its samples are not those of the records"))
        return findings

    def _is_gone(self, name: str) -> bool:
        parsed = layout.parse_commit(name)
        return parsed is not None and name not in self._listed and self._last.get(parsed.unit, -1) < parsed.revision

    def _agrees(self, table: SampleTable, numbers: np.ndarray) -> bool:
        covers = np.zeros(len(self._places), dtype=bool)
        covers[numbers[numbers >= 0]] = True
        rows = np.flatnonzero(covers[self._truth.record])
        if len(table) != len(rows) or table.ids != self._truth.ids.take(rows):
            return False
        if bool(table.repeats().any()):
            table = table.take(table.order())
        return all(np.array_equal(column, self._truth.columns[name][rows]) for name, column in table.columns.items())
