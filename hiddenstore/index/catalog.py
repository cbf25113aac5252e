"""The records of a store that count, and where each of its samples is: read once, kept as columns.

Records that an index file covers are not read to open a store; they are when somebody needs them, and must then be the
ones the index saw. Where an index file turns out damaged or gone, the records it covers are read in its place.
"""

import shlex
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, overload

import numpy as np

from hiddenstore.commit import (
    Commit,
    frozen_mismatch,
    latest_names,
    missing_commit,
    read_commit,
    read_many,
)
from hiddenstore.errors import CorruptionError, HiddenstoreError, Kind
from hiddenstore.files import layout
from hiddenstore.files.damage import DAMAGE, twice
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.file import IndexFile, live_indexes, renumbered
from hiddenstore.index.listed import Listed, list_records
from hiddenstore.index.table import SPLITS, Ids, SampleTable, joined, table_of
from hiddenstore.threads import Lock
from schemas.manifest import CommitRecord, Snapshot, SnapshotEntry

if TYPE_CHECKING:
    import pyarrow as pa

WORTH_AN_INDEX = 64
"""Up to so many records are read in the time that opening an index takes."""
BATCH = 512
KEPT_ENTRIES = 65_536
"""Records stay in memory while they name no more samples and files than this in all, of a kB each at most."""
LOOKUPS = 16
"""So many samples are looked up one by one before all columns are read."""
FACTS = ("samples", "tokens", "supervised", "bytes_stored", "rejects")

Visit = Callable[[Listed], None]


def _entries(commit: Commit) -> int:
    return len(commit.record.samples) + len(commit.record.files)


@dataclass(frozen=True)
class _Covered:
    """What an index file says of records that count: ``numbers`` int32, the unit of each of its records or -1."""

    file: IndexFile
    numbers: np.ndarray


@dataclass(eq=False)
class Catalog(Sequence[Commit]):
    """The records that count, in order, and their samples. Safe to use from many threads.

    ``facts`` int64 per record: samples, tokens, supervised tokens, bytes of the segment, rejects. ``snapshot`` is the
    name of the one that was opened. ``uncovered`` are names of records that no index file covers.
    """

    fs: Filesystem
    names: list[str]
    digests: list[str]
    facts: dict[str, np.ndarray]
    damaged: tuple[HiddenstoreError, ...] = ()
    snapshot: str | None = None
    uncovered: tuple[str, ...] = ()
    _indexed: list[_Covered] = field(default_factory=list, repr=False)
    _read: SampleTable = field(default_factory=lambda: table_of(()), repr=False)
    """Samples of the others, sorted."""

    def __post_init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[int, Commit] = OrderedDict()
        self._kept_entries = self._lookups = 0
        self._table: SampleTable | None = None
        self._dropped: SampleTable | None = None

    def __getstate__(self) -> dict[str, object]:
        own = ("_lock", "_kept", "_kept_entries", "_lookups")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__post_init__()
        vars(self).update(state)

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, key: int) -> Commit: ...

    @overload
    def __getitem__(self, key: slice) -> list[Commit]: ...

    def __getitem__(self, key: int | slice) -> Commit | list[Commit]:
        """Records as they are now on disk; raises what ``read_commit`` does, and ``index-stale``."""
        if isinstance(key, slice):
            return list(self._stream(range(len(self))[key]))
        number = range(len(self))[key]
        with self._lock:
            if (kept := self._kept.get(number)) is not None:
                self._kept.move_to_end(number)
                return kept
        (commit,) = self._stream([number])
        self._keep(number, commit)
        return commit

    def __iter__(self) -> Iterator[Commit]:
        return self._stream(range(len(self)))

    def _stream(self, numbers: Sequence[int]) -> Iterator[Commit]:
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            with self._lock:
                kept = {number: self._kept[number] for number in part if number in self._kept}
            absent = [number for number in part if number not in kept]
            read = dict(zip(absent, read_many(self.fs, [self.names[number] for number in absent]), strict=True))
            for number in part:
                yield kept[number] if number in kept else self._expected(number, read[number])

    def _expected(self, number: int, commit: Commit | HiddenstoreError) -> Commit:
        if not isinstance(commit, Commit):
            raise commit
        if commit.sha256 == self.digests[number]:
            return commit
        if self.snapshot is not None:
            raise frozen_mismatch(self.fs, self.snapshot, commit, self.digests[number])
        raise self.stale(f"{layout.COMMITS_DIR}/{commit.name} is not the record that an index file covers")

    def stale(self, reason: str) -> CorruptionError:
        """What an index says and its records do not, as an error."""
        return CorruptionError(
            f"{self.fs.root}: {reason}", kind=Kind.INDEX_STALE, hint=f"hiddenstore repair {shlex.quote(self.fs.root)}"
        )

    def _keep(self, number: int, commit: Commit) -> None:
        with self._lock:
            if number not in self._kept:
                self._kept[number] = commit
                self._kept_entries += _entries(commit)
            while self._kept_entries > KEPT_ENTRIES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_entries -= _entries(oldest)

    @property
    def index_files(self) -> list[IndexFile]:
        """The index files whose samples are still to be read."""
        return [part.file for part in self._indexed]

    @property
    def table(self) -> SampleTable:
        """Every sample that is read, once, sorted by id; ``record`` is the place of its record here."""
        with self._lock:
            if self._table is None:
                parts = [self._columns(part) for part in self._indexed]
                # ``joined`` empties what it gets; an interrupt before the end must leave everything to be read again.
                whole = joined([*parts, SampleTable(self._read.ids, dict(self._read.columns))])
                del parts
                repeats = whole.repeats()
                has_repeats = bool(repeats.any())
                self._dropped = whole.take(repeats if has_repeats else np.zeros(0, dtype=np.int64))
                self._table = whole.take(~repeats) if has_repeats else whole
                self._indexed, self._read = [], table_of(())
            return self._table

    @property
    def dropped(self) -> SampleTable:
        """Samples that an earlier record holds too, so that these are not read."""
        _ = self.table
        assert self._dropped is not None
        return self._dropped

    def _columns(self, part: _Covered, text: str = "") -> SampleTable:
        """The samples of a part whose id starts with ``text``."""
        with suppress(*DAMAGE):
            read = partial(part.file.starting, text) if text else part.file.read
            return renumbered(twice(self.fs, read, part.file.path), part.numbers)
        numbers = [int(number) for number in np.sort(part.numbers[part.numbers >= 0])]
        commits = zip(numbers, self._stream(numbers), strict=True)
        table = joined([table_of((number, commit.record) for number, commit in commits)])
        return table.take(np.arange(*table.ids.bounds(text))) if text else table

    def starting(self, text: str) -> SampleTable:
        """The samples whose id starts with ``text``, each once, sorted."""
        with self._lock:
            self._lookups += 1
            if self._table is None and (self._lookups > LOOKUPS or not self._indexed):
                _ = self.table
            if self._table is not None:
                return self._table.take(np.arange(*self._table.ids.bounds(text)))
            parts = [self._columns(part, text) for part in self._indexed]
            few = joined([*parts, self._read.take(np.arange(*self._read.ids.bounds(text)))])
            return few.take(~few.repeats())

    def locate(self, sample_id: str) -> tuple[int, int] | None:
        """The place of the record that holds a sample, and the sample's index in it; None where none does."""
        if not sample_id:
            return None
        if (table := self._table) is not None:
            row, stop = table.ids.bounds(sample_id)
            is_it = row < stop and table.ids[row] == sample_id
            return (int(table.record[row]), int(table.position[row])) if is_it else None
        few = self.starting(sample_id)
        if not len(few) or few.ids[0] != sample_id:
            return None
        return int(few.record[0]), int(few.position[0])

    def places_of(self, sample_ids: Sequence[str]) -> np.ndarray | None:
        """int64 [2, S]: ``locate`` of many at once; None where one is not there or has no packed id."""
        table, wanted = self.table, Ids.of(sample_ids if all(map(str.isascii, sample_ids)) else [])
        if not (len(table) and len(wanted) and table.ids.packed and wanted.packed):
            return None
        rows = np.searchsorted(table.ids.values, wanted.values).clip(max=len(table) - 1)
        are_there = np.array_equal(table.ids.values[rows], wanted.values)
        return np.stack([table.record[rows], table.position[rows]]).astype(np.int64) if are_there else None

    def record_of(self, number: int, positions: Sequence[int], sample_ids: Sequence[str]) -> CommitRecord:
        """The record at a place, which must hold these samples where an index says so."""
        record = self[number].record
        for position, sample_id in zip(positions, sample_ids, strict=True):
            if position >= len(record.samples) or record.samples[position].id != sample_id:
                raise self.stale(f"an index file says that {self.names[number]} holds sample {sample_id} at {position}")
        return record

    @property
    def repeats(self) -> int:
        """Samples that are not read because an earlier record holds them."""
        with self._lock:
            if self._table is None and len(self._indexed) == 1 and not len(self._read):
                (part,) = self._indexed
                if bool((part.numbers >= 0).all()):
                    return part.file.header.repeats
            return len(self.dropped)

    def place_of(self, number: int, position: int) -> int:
        """How many samples are read before one, in the order of the records."""
        before = int(self.facts["samples"][:number].sum()) + position
        if not self.repeats:
            return before
        at = self.dropped.record
        return before - int(((at < number) | ((at == number) & (self.dropped.position < position))).sum())

    def commit_order(self) -> np.ndarray:
        """int64 [N]: rows of ``table`` in the order of the records."""
        table = self.table
        starts = np.cumsum(self.facts["samples"]) - self.facts["samples"]
        place = np.full(int(self.facts["samples"].sum()), -1, dtype=np.int64)
        place[starts[table.record] + table.position] = np.arange(len(table))
        return place if len(place) == len(table) else place[place >= 0]


class Records(Sequence[CommitRecord]):
    """The records of a catalog, read as they are asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __len__(self) -> int:
        return len(self._catalog)

    @overload
    def __getitem__(self, key: int) -> CommitRecord: ...

    @overload
    def __getitem__(self, key: slice) -> list[CommitRecord]: ...

    def __getitem__(self, key: int | slice) -> CommitRecord | list[CommitRecord]:
        if isinstance(key, slice):
            return [commit.record for commit in self._catalog[key]]
        return self._catalog[key].record

    def __iter__(self) -> Iterator[CommitRecord]:
        return (commit.record for commit in self._catalog)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as a list's


def read_catalog(fs: Filesystem, use_index: bool = True, visit: Visit = lambda _: None) -> Catalog:
    """What ``commits/`` holds now: the record of the highest revision of each unit, sorted by unit.

    A record that cannot be read is listed in ``damaged``, never passed over. Without ``use_index`` every record is
    read, whatever an index says; ``visit`` is told of every record that was.
    """
    names = latest_names(fs)
    files = live_indexes(fs) if use_index and len(names) > WORTH_AN_INDEX else []
    return _Reading(fs, names, files, visit).catalog()


def read_frozen(fs: Filesystem, snapshot: Snapshot) -> Catalog:
    """The records that a snapshot names, in its order. Raises CorruptionError: ``commit-missing``,
    ``snapshot-mismatch`` when one is gone or has other bytes than were frozen."""
    names = [entry.record for entry in snapshot.commits]
    files = live_indexes(fs) if len(names) > WORTH_AN_INDEX else []
    gone = set(names) - set(fs.list(layout.COMMITS_DIR))
    if gone:
        raise missing_commit(fs, min(gone))
    reading = _Reading(fs, names, files, lambda _: None, {entry.record: entry.sha256 for entry in snapshot.commits})
    catalog = reading.catalog(snapshot.name)
    for name, digest in zip(catalog.names, catalog.digests, strict=True):
        if digest != reading.frozen[name]:
            raise frozen_mismatch(fs, snapshot.name, read_commit(fs, name), reading.frozen[name])
    if catalog.damaged:
        raise catalog.damaged[0]
    return catalog


def saved_snapshots(fs: Filesystem) -> list[str]:
    """Names of the snapshots that a store has, sorted; of files of another name, which nobody saved, none."""
    names = (layout.parse_snapshot(file) for file in fs.list(layout.SNAPSHOTS_DIR))
    return [name for name in names if name is not None]


def read_replaced(catalog: Catalog, snapshot: Snapshot) -> Catalog:
    """The records that a snapshot names and that count in ``catalog`` no more. Raises as ``read_frozen``, and what
    a damaged one raises."""
    digests = dict(zip(catalog.names, catalog.digests, strict=True))
    rest = tuple(entry for entry in snapshot.commits if digests.get(entry.record) != entry.sha256)
    return read_frozen(catalog.fs, snapshot.model_copy(update={"commits": rest}))


class _Reading:
    """A catalog in the making. Every record has the place of its name until those that cannot be read are left out."""

    def __init__(
        self,
        fs: Filesystem,
        names: list[str],
        files: Sequence[IndexFile],
        visit: Visit,
        frozen: dict[str, str] | None = None,
    ) -> None:
        self.fs, self.names, self.visit, self.frozen = fs, names, visit, frozen or {}
        self.digests: list[str | None] = [None] * len(names)
        self.facts = {name: np.zeros(len(names), dtype=np.int64) for name in FACTS}
        self.kept: dict[int, Commit] = {}
        self.indexed = self._cover(files)

    def _cover(self, files: Sequence[IndexFile]) -> list[_Covered]:
        """Which records each file answers for. One that two files know by different digests is read itself."""
        places = {name: place for place, name in enumerate(self.names)}
        digests: dict[str, str] = {}
        unsure: set[str] = set()
        for file in files:
            for name, digest in zip(file.header.records, file.header.sha256s, strict=True):
                if digests.setdefault(name, digest) != digest or self.frozen.get(name, digest) != digest:
                    unsure.add(name)
        covered = []
        for file in files:
            numbers = np.full(file.covered, -1, dtype=np.int32)
            for row, name in enumerate(file.header.records):
                place = places.get(name)
                if place is not None and self.digests[place] is None and name not in unsure:
                    self.digests[place], numbers[row] = digests[name], place
            rows = numbers >= 0
            for fact in FACTS:
                self.facts[fact][numbers[rows]] = np.array(getattr(file.header, fact), dtype=np.int64)[rows]
            covered.append(_Covered(file, numbers))
        return [part for part in covered if bool((part.numbers >= 0).any())]

    def catalog(self, snapshot: str | None = None) -> Catalog:
        absent = [place for place, digest in enumerate(self.digests) if digest is None]
        uncovered = tuple(self.names[place] for place in absent)
        damaged: list[HiddenstoreError] = []
        tables = []
        for start in range(0, len(absent), BATCH):
            part = absent[start : start + BATCH]
            items = self._read(part, len(absent))
            damaged += [item for item in items if not isinstance(item, Listed)]
            pairs = zip(part, items, strict=True)
            tables.append(joined([self._take(place, item) for place, item in pairs if isinstance(item, Listed)]))
        read, numbers = joined(tables), np.arange(len(self.names), dtype=np.int32)
        if damaged:
            counts = np.array([digest is not None for digest in self.digests], dtype=bool)
            numbers = np.where(counts, np.cumsum(counts) - 1, -1).astype(np.int32)
            read.columns["record"] = numbers[read.record]
            self.indexed = [
                _Covered(part.file, np.where(part.numbers >= 0, numbers[part.numbers], -1).astype(np.int32))
                for part in self.indexed
            ]
        catalog = Catalog(
            self.fs,
            [name for name, digest in zip(self.names, self.digests, strict=True) if digest is not None],
            [digest for digest in self.digests if digest is not None],
            {fact: column[numbers >= 0] for fact, column in self.facts.items()},
            tuple(damaged),
            snapshot,
            uncovered,
            self.indexed,
            read,
        )
        for place, commit in self.kept.items():
            catalog._keep(int(numbers[place]), commit)
        return catalog

    def _read(self, places: Sequence[int], in_all: int) -> list[Listed | HiddenstoreError]:
        """Records, of few in all whole: they are kept for whoever reads samples next."""
        names = [self.names[place] for place in places]
        if in_all > WORTH_AN_INDEX:
            return list_records(self.fs, names)
        items = read_many(self.fs, names)
        self.kept |= {place: item for place, item in zip(places, items, strict=True) if isinstance(item, Commit)}
        return [Listed.of(item) if isinstance(item, Commit) else item for item in items]

    def _take(self, place: int, item: Listed) -> SampleTable:
        self.digests[place], facts = item.sha256, item.facts
        for fact in FACTS:
            self.facts[fact][place] = facts[fact]
        self.visit(item)
        return item.numbered(place)


def _units(catalog: Catalog) -> list[str]:
    return [parsed.unit if (parsed := layout.parse_commit(name)) else name for name in catalog.names]


def make_snapshot(name: str, catalog: Catalog) -> Snapshot:
    """A frozen list of records with their digests, sorted by unit; a sample that is stored twice is counted once."""
    units = _units(catalog)
    order = sorted(range(len(units)), key=units.__getitem__)
    return Snapshot(
        name=name,
        commits=tuple(SnapshotEntry(record=catalog.names[place], sha256=catalog.digests[place]) for place in order),
        samples=int(catalog.facts["samples"].sum()) - catalog.repeats,
        tokens=int(catalog.facts["tokens"].sum()) - (int(catalog.dropped.tokens.sum()) if catalog.repeats else 0),
    )


def sample_table(catalog: Catalog) -> "pa.Table":
    """A row per sample that is read, in commit order: id and unit as text, split as a dictionary of text, tokens,
    supervised and final_rows int32."""
    import pyarrow as pa

    rows = catalog.commit_order()
    table = catalog.table.take(rows)
    units = pa.array(_units(catalog), pa.string())
    numbers = {name: pa.array(table.columns[name]) for name in ("tokens", "supervised", "final_rows")}
    columns = {
        "id": pa.array(list(table.ids), pa.string()),
        "split": pa.DictionaryArray.from_arrays(table.split.astype(np.int8), pa.array(SPLITS)),
        **numbers,
        "unit": units.take(pa.array(table.record)) if len(rows) else pa.array([], pa.string()),
    }
    return pa.table(columns)
