"""Do index files say what the commit records say, and is every record there that one names.

Entries of a record that a later revision replaced are not looked at: no reader believes them.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hiddenstore import layout
from hiddenstore.commit import missing_commit
from hiddenstore.console.text import plural
from hiddenstore.damage import DAMAGE, twice
from hiddenstore.errors import Kind
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.catalog import Catalog
from hiddenstore.index.file import IndexFile, index_numbers, renumbered
from hiddenstore.index.table import SampleTable, joined
from hiddenstore.verify.report import Finding


@dataclass
class IndexCheck:
    """What is wrong with the index files; ``inputs`` are those that they name."""

    findings: list[Finding] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)


def check_indexes(fs: Filesystem, catalog: Catalog) -> IndexCheck:
    """Compare every index file with ``catalog``, for which every record was read."""
    check, look = IndexCheck(), _Look(fs, catalog)
    replaced: set[int] = set()
    for number in reversed(index_numbers(fs)):
        path = layout.index_path(number)
        if number in replaced:
            continue
        try:
            file = twice(fs, partial(IndexFile.open, fs, number), path)
            replaced.update(file.header.replaces)
            check.inputs.update(file.header.inputs)
            check.findings += look.findings(file, twice(fs, file.read, path))
        except DAMAGE as error:
            check.findings.append(Finding.of(error, path))
    return check


class _Look:
    def __init__(self, fs: Filesystem, catalog: Catalog) -> None:
        self._fs = fs
        self._listed = set(fs.list(layout.COMMITS_DIR))
        self._last: dict[str, int] = {}
        for name in self._listed:
            if parsed := layout.parse_commit(name):
                self._last[parsed.unit] = max(parsed.revision, self._last.get(parsed.unit, 0))
        self._places = {name: place for place, name in enumerate(catalog.names)}
        self._digests = catalog.digests
        self._truth = catalog.table
        if len(catalog.dropped):
            self._truth = joined([part.take(np.arange(len(part))) for part in (catalog.table, catalog.dropped)])

    def findings(self, file: IndexFile, table: SampleTable) -> list[Finding]:
        findings, numbers = [], np.full(file.covered, -1, dtype=np.int32)
        other = 0
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
        expected = self._truth.take(covers[self._truth.record])
        if bool(table.repeats().any()):
            table, expected = (part.take(part.order()) for part in (table, expected))
        if len(table) != len(expected) or table.ids != expected.ids:
            return False
        return all(np.array_equal(column, expected.columns[name]) for name, column in table.columns.items())
