"""Commit records whose samples are columns from the start, no Python object each: for what reads every record.

A record is mostly its samples, which are regular text as this package writes them. That text of several records is
taken apart at once, by where its commas are; every byte of it is accounted for, and checked as the schema does. Any
other record is read as every document is, which says what is wrong with it.

Shapes: R records, N samples of all of them, B bytes of their text.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from hiddenstore.commit import Commit, commit_of, head_fault, in_parts, read_each
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError
from hiddenstore.files import layout
from hiddenstore.files.documents import opened, parsed, read_bounded
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index.table import ID_BYTES, SPLITS, Ids, SampleTable, table_of
from schemas.manifest import MAX_TOKENS, CommitHead

_OPENING, _CLOSING = b'"samples":[', b'],"segment":'
_COMMAS = 7
"""Of a sample: six inside, one behind it."""
_SPLIT_BYTES = (16, 21)
"""From the comma before a split to the one behind it, as in ``SPLITS``."""
_SUMMED = ("tokens", "final_rows", "supervised")
_MOST_DIGITS = 15
_PADDING = bytes(64)
"""What stands behind the text, so that no look from inside leaves the memory."""


@dataclass(frozen=True)
class Listed:
    """A record as it lies on disk: file name under ``commits/``, sha256 of its bytes, what it says beside its samples,
    the samples in its order, and how many of their tokens there are and are supervised; their ``record`` is 0."""

    name: str
    sha256: str
    head: CommitHead
    samples: SampleTable
    tokens: int
    supervised: int

    @classmethod
    def of(cls, commit: Commit) -> "Listed":
        """The same of a record that was read."""
        record, samples = commit.record, table_of([(0, commit.record)])
        supervised = int(samples.supervised.sum(dtype=np.int64))
        return cls(commit.name, commit.sha256, record, samples, record.tokens, supervised)

    @property
    def facts(self) -> dict[str, int]:
        """The numbers of a record that a catalog and an index keep, by name."""
        return {
            "samples": len(self.samples),
            "tokens": self.tokens,
            "supervised": self.supervised,
            "bytes_stored": self.head.bytes_stored,
            "rejects": len(self.head.rejects),
        }

    def numbered(self, number: int) -> SampleTable:
        """The samples with ``record`` a number."""
        record = np.full(len(self.samples), number, dtype=np.int32)
        return SampleTable(self.samples.ids, {**self.samples.columns, "record": record})


@dataclass(frozen=True)
class _Apart:
    """A record whose samples nobody has looked at: ``entries`` is the text between their brackets."""

    name: str
    sha256: str
    data: bytes
    head: CommitHead
    entries: bytes


def list_records(fs: Filesystem, names: Sequence[str]) -> list[Listed | HiddenstoreError]:
    """``read_many`` of records as ``Listed``."""
    return in_parts(fs, names, partial(_listed, fs))


def _listed(fs: Filesystem, names: Sequence[str]) -> list[Listed | HiddenstoreError]:
    items = read_each(fs, names, _apart)
    apart = [item for item in items if isinstance(item, _Apart)]
    known: dict[str, Listed | HiddenstoreError] = {item.name: item for item in _regular(apart)}
    at_hand = {item.name: item.data for item in apart if item.name not in known}
    others = list(at_hand)

    def whole(fs: Filesystem, name: str) -> Listed:
        path = f"{layout.COMMITS_DIR}/{name}"
        # A second look is one at the storage.
        data = at_hand.pop(name, None) or read_bounded(fs, path)
        return Listed.of(commit_of(data, name, f"{fs.root}/{path}"))

    known |= zip(others, read_each(fs, others, whole), strict=True)
    return [known[item.name] if isinstance(item, _Apart) else item for item in items]


def _apart(fs: Filesystem, name: str) -> _Apart | Listed:
    path = f"{layout.COMMITS_DIR}/{name}"
    data, where = read_bounded(fs, path), f"{fs.root}/{path}"
    body, sha256 = opened(data, where)
    before, _, rest = body.partition(_OPENING)
    entries, closing, after = rest.partition(_CLOSING)
    if entries and closing:
        with suppress(CorruptionError, FormatError):
            head = parsed(b'%s"segment":%s' % (before, after), CommitHead, where)
            # Ids of rejects may be anything: the other reader looks at them.
            if not head.rejects:
                return _Apart(name, sha256, data, head, entries)
    return Listed.of(commit_of(data, name, where))


def _regular(records: Sequence[_Apart]) -> Iterator[Listed]:
    """Those of the records whose samples are as a writer of this package writes them, and that hold together."""
    columns = _columns([record.entries for record in records]) if records else None
    if columns is None:
        for record in records if len(records) > 1 else ():
            yield from _regular([record])
        return
    table, borders = columns
    totals = [np.add.reduceat(table.columns[name], borders[:-1], dtype=np.int64).tolist() for name in _SUMMED]
    for record, (start, stop), tokens, final_rows, supervised in zip(
        records, pairwise(borders.tolist()), *totals, strict=True
    ):
        if head_fault(record.head, record.name, stop - start, max(tokens, final_rows)) is None:
            rows = slice(start, stop)
            samples = SampleTable(Ids(table.ids.values[rows], True), {n: c[rows] for n, c in table.columns.items()})
            yield Listed(record.name, record.sha256, record.head, samples, tokens, supervised)


def _columns(texts: Sequence[bytes]) -> tuple[SampleTable, np.ndarray] | None:
    """The samples in the texts between the brackets of records, none empty, and the borders int64 [R + 1] between
    records; None for all that a writer of this package does not write."""
    text = b",".join([*texts, _PADDING])
    ends = np.cumsum([len(text) + 1 for text in texts]) - 1
    commas = np.flatnonzero(np.frombuffer(text, np.uint8, ends[-1] + 1) == ord(","))
    if len(commas) % _COMMAS:
        return None
    places = np.ascontiguousarray(commas.reshape(-1, _COMMAS).T)
    borders = np.searchsorted(places[-1], ends)
    # The text of a record ends where one of a sample does.
    if not np.array_equal(places[-1][borders], ends):
        return None
    borders = np.concatenate([[0], borders + 1])
    if not _has_names(text, places) or (ids := _ids(text, places)) is None:
        return None
    numbers = _numbers(text, places)
    if numbers is None or not _lie_end_to_end(numbers, borders):
        return None
    counts = np.diff(borders)
    columns: dict[str, np.ndarray] = {
        "record": np.zeros(len(ids), dtype=np.int32),
        "position": (np.arange(len(ids)) - np.repeat(borders[:-1], counts)).astype(np.int32),
        **{name: numbers[name].astype(np.int32) for name in ("tokens", "supervised", "final_rows")},
        "split": (places[3] - places[2] == _SPLIT_BYTES[1]).astype(np.uint8),
    }
    return SampleTable(ids, columns), borders


def _at(text: bytes, places: np.ndarray, width: int) -> np.ndarray:
    """bytes [N] of numpy type S<width>: what stands in a text from places int64 [N] on."""
    return np.ndarray(len(text) - width + 1, f"S{width}", text, strides=(1,))[places]


def _has_names(text: bytes, places: np.ndarray) -> bool:
    """Whether what is neither number nor id is as it must be around commas int64 [7, N], and every split is one."""
    begin = np.concatenate([[0], places[-1][:-1] + 1])
    words = (
        (begin, b'{"final_rows":'), (places[0], b',"final_start":'), (places[1], b',"id":"'),
        (places[2] - 1, b'","split":"'), (places[3] - 1, b'","start":'), (places[4], b',"supervised":'),
        (places[5], b',"tokens":'), (places[6] - 1, b"},"),
    )  # fmt: skip
    if not all(bool((_at(text, place, len(word)) == word).all()) for place, word in words):
        return False
    is_split = np.zeros(len(begin), dtype=bool)
    for size, split in zip(_SPLIT_BYTES, SPLITS, strict=True):
        is_split |= (places[3] - places[2] == size) & (_at(text, places[2] + 10, len(split)) == split.encode())
    return bool(is_split.all())


def _ids(text: bytes, places: np.ndarray) -> Ids | None:
    """The ids, where all are 32 digits."""
    if not bool((places[2] - places[1] == 40).all()):
        return None
    with suppress(ValueError):
        return Ids.of_digits(_at(text, places[1] + 7, 2 * ID_BYTES).tobytes().decode("ascii"))
    return None


def _numbers(text: bytes, places: np.ndarray) -> dict[str, np.ndarray] | None:
    """int64 [N] by name; None where one is not as JSON writes a whole number below 10^15."""
    begin = np.concatenate([[0], places[-1][:-1] + 1])
    spans = {
        "final_rows": (begin + 14, places[0]),
        "final_start": (places[0] + 15, places[1]),
        "start": (places[3] + 9, places[4]),
        "supervised": (places[4] + 14, places[5]),
        "tokens": (places[5] + 10, places[6] - 1),
    }
    data, numbers = np.frombuffer(text, np.uint8), {}
    for name, (start, stop) in spans.items():
        size = stop - start
        longest, number = int(size.max()), np.zeros(len(size), dtype=np.int64)
        if size.min() < 1 or longest > _MOST_DIGITS:
            return None
        for place in range(longest):
            digit, is_inside = data[start + place] - 48, size > place
            if bool((is_inside & (digit > 9)).any()) or (place == 0 and bool(((size > 1) & (digit == 0)).any())):
                return None
            number = np.where(is_inside, 10 * number + digit, number)
        numbers[name] = number
    return numbers


def _lie_end_to_end(numbers: dict[str, np.ndarray], borders: np.ndarray) -> bool:
    """Whether the samples of each record do, and are as long as samples may be."""
    if max(numbers[name].max() for name in _SUMMED) >= MAX_TOKENS or not numbers["tokens"].all():
        return False
    for name, start in (("tokens", "start"), ("final_rows", "final_start")):
        before = np.cumsum(numbers[name]) - numbers[name]
        if not np.array_equal(before - np.repeat(before[borders[:-1]], np.diff(borders)), numbers[start]):
            return False
    return True
