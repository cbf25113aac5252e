"""Writing index files: every writer covers its records now and then and at its end; small files are merged.

Nothing depends on it. A writer that dies before leaves records that the next one to open the store reads, and covers.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from hiddenstore.errors import CorruptionError, FormatError, NotFoundError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.damage import twice
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import FACTS, WORTH_AN_INDEX, Catalog
from hiddenstore.index.file import IndexFile, encode_index, index_numbers, live_indexes, renumbered
from hiddenstore.index.listed import Listed, list_records
from hiddenstore.index.table import SampleTable, joined
from schemas.manifest import IndexHeader

EVERY = 256
"""Records that a writer covers at once."""
MERGED = 16
"""So many index files of about one size become one."""
AT_ONCE = 4_096
_NAMED_BY_VERIFY = (CorruptionError, FormatError)
SMALLEST_BYTES = 1 << 20
"""All index files below this count as of one size."""
MAX_SAMPLES = 1 << 24
"""An index file of more samples is merged no further: it takes about a gigabyte of memory."""


class IndexWriter:
    """Covers what one writer commits, and what nobody had covered when it opened the store."""

    def __init__(self, fs: Filesystem, catalog: Catalog) -> None:
        self._fs = fs
        self._names: list[str] = []
        self._inherited = list(catalog.uncovered)
        self._records = len(catalog)

    def add(self, unit: str, revision: int = 0) -> None:
        """A record was published."""
        self._records += 1
        self._names.append(layout.commit_path(unit, revision).rpartition("/")[2])
        if len(self._names) >= EVERY:
            self._publish(self._names)
            self._names = []

    def close(self) -> None:
        """Cover the rest, unless the store is so small that nobody would read it.

        A disk that refuses costs the next to open the store some time, and nothing else.
        """
        if self._records <= WORTH_AN_INDEX:
            return
        if len(self._inherited) > EVERY:
            # Many writers that open a store without an index would each cover all of it.
            with suppress(StorageError):
                covered = {name for file in live_indexes(self._fs) for name in file.header.records}
                self._inherited = [name for name in self._inherited if name not in covered]
        names = [*self._inherited, *self._names]
        for start in range(0, len(names), AT_ONCE):
            self._publish(names[start : start + AT_ONCE])
        self._names, self._inherited = [], []

    def _publish(self, names: Sequence[str]) -> None:
        with suppress(StorageError):
            publish_index(self._fs, names)


def publish_index(fs: Filesystem, names: Iterable[str]) -> int | None:
    """Cover records by a new index file, and merge where there are many; its number, None where none can be read."""
    items = list_records(fs, sorted(set(names)))
    records = [item for item in items if isinstance(item, Listed)]
    number = None
    if records:
        table = joined([record.numbered(row) for row, record in enumerate(records)])
        number = _put(fs, _header(records), table)
    if _same_size(fs):
        # To know them every header is read, half a second at ten million samples: not for each file that is added.
        for path in replaced_indexes(fs):
            # Of a merge that was stopped: merged again, they would be covered twice.
            fs.remove_tree(path)
    while (files := _same_size(fs)) and _merge(fs, files):
        pass
    return number


def indexed_revisions(fs: Filesystem, opened: Iterable[IndexFile] = ()) -> dict[str, int]:
    """The highest revision of each unit that an index file names, or whose record a repair has set aside: another one
    that slept since it looked sets aside that name. ``opened`` as for ``live_indexes``."""
    revisions: dict[str, int] = {}
    aside = fs.list(f"{layout.QUARANTINE_DIR}/{layout.COMMITS_DIR}")
    for names in (aside, *(file.header.records for file in live_indexes(fs, opened))):
        for unit, revision, _ in layout.parse_commits(names):
            revisions[unit] = max(revision, revisions.get(unit, 0))
    return revisions


def replaced_indexes(fs: Filesystem) -> list[str]:
    """Paths of index files that another was merged from: left by a writer that was stopped."""
    live = live_indexes(fs)
    merged = {number for file in live for number in file.header.replaces}
    return [layout.index_path(number) for number in index_numbers(fs) if number in merged]


def _header(records: Sequence[Listed]) -> IndexHeader:
    inputs = sorted({record.head.input for record in records})
    places = {digest: place for place, digest in enumerate(inputs)}
    facts = [record.facts for record in records]
    columns: dict[str, Any] = {name: tuple(fact[name] for fact in facts) for name in FACTS}
    return IndexHeader.model_construct(
        records=tuple(record.name for record in records),
        sha256s=tuple(record.sha256 for record in records),
        input=tuple(places[record.head.input] for record in records),
        inputs=tuple(inputs),
        **columns,
    )


def _put(fs: Filesystem, header: IndexHeader, table: SampleTable) -> int:
    data = encode_index(header, table)
    number = max([*index_numbers(fs), *header.replaces], default=0) + 1
    while not fs.put_if_absent(layout.index_path(number), data):
        number += 1
    return number


def _same_size(fs: Filesystem) -> list[int]:
    """Numbers of the smallest index files of about one size, where there are enough to merge."""
    sizes: dict[int, list[int]] = {}
    for number in index_numbers(fs):
        size = fs.size(layout.index_path(number)) or 0
        tier = 0
        while size >= SMALLEST_BYTES * MERGED**tier:
            tier += 1
        sizes.setdefault(tier, []).append(number)
    return next((sizes[tier] for tier in sorted(sizes) if len(sizes[tier]) >= MERGED), [])


def _merge(fs: Filesystem, numbers: Sequence[int]) -> bool:
    """One file of several, which are then removed; False where that cannot be, or another writer is at it.

    Until they are, the new file says which it replaces. Records known by two digests are left out: they are read.
    """
    files: list[IndexFile] = []
    parts: list[tuple[IndexFile, SampleTable]] = []
    try:
        for number in numbers:
            with suppress(*_NAMED_BY_VERIFY):
                files.append(twice(fs, partial(IndexFile.open, fs, number), layout.index_path(number)))
        if sum(file.header.rows for file in files) > MAX_SAMPLES:
            return False
        for file in files:
            with suppress(*_NAMED_BY_VERIFY):
                parts.append((file, twice(fs, file.read, file.path)))
    except NotFoundError:
        return False
    if len(parts) < 2:
        return False
    header, places = _merged_header(fs, [file for file, _ in parts])
    table = joined([renumbered(table, rows) for (_, table), rows in zip(parts, places, strict=True)])
    _put(fs, header, table)
    for file, _ in parts:
        fs.remove_tree(file.path)
    return True


def _merged_header(fs: Filesystem, files: Sequence[IndexFile]) -> tuple[IndexHeader, list[np.ndarray]]:
    """The header of all records, and for each file int32: the places of its records in it, -1 for one left out."""
    digests: dict[str, str] = {}
    unsure: set[str] = set()
    for file in files:
        for name, digest in zip(file.header.records, file.header.sha256s, strict=True):
            if digests.setdefault(name, digest) != digest:
                unsure.add(name)
    inputs = sorted({digest for file in files for digest in file.header.inputs})
    columns: dict[str, Any] = {name: [] for name in ("records", "sha256s", "input", *FACTS)}
    taken, places = set(unsure), []
    for file in files:
        rows = np.full(file.covered, -1, dtype=np.int32)
        for row, name in enumerate(file.header.records):
            if name not in taken:
                taken.add(name)
                rows[row] = len(columns["records"])
                columns["input"].append(inputs.index(file.header.inputs[file.header.input[row]]))
                for column in ("records", "sha256s", *FACTS):
                    columns[column].append(getattr(file.header, column)[row])
        places.append(rows)
    replaces = {file.number for file in files} | {number for file in files for number in file.header.replaces}
    kept = tuple(sorted(replaces & set(index_numbers(fs))))
    return IndexHeader.model_construct(inputs=tuple(inputs), replaces=kept, **columns), places
