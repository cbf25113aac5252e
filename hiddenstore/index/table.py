"""The samples of many units as columns, sorted by id: no Python object a sample.

Shapes: N samples.
"""

import operator
import re
from binascii import hexlify
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from schemas.manifest import CommitRecord

SPLITS = ("train", "validation")
NUMBERS = ("record", "position", "tokens", "supervised", "final_rows")
COLUMNS = (*NUMBERS, "split")
"""int32, split uint8: place in ``SPLITS``."""
ID_BYTES = 16
_AT_ONCE = 1 << 20

_HEX_START = re.compile(rf"[0-9a-f]{{0,{2 * ID_BYTES}}}")
_HEX_ID = re.compile(rf"[0-9a-f]{{{2 * ID_BYTES}}}")


class Ids(Sequence[str]):
    """Sample ids, packed into 16 bytes each where all are 32 hex digits; their order is that of their text.

    values bytes [N] of numpy type S16 or, not packed, as wide as the longest id.
    """

    def __init__(self, values: np.ndarray, packed: bool) -> None:
        self.values, self.packed = values, packed

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Ids":
        if all(map(_HEX_ID.fullmatch, texts)):
            return cls.of_digits("".join(texts))
        return cls(np.array(texts, dtype=np.bytes_), False)

    @classmethod
    def of_digits(cls, digits: str) -> "Ids":
        """Of ids of 32 hex digits, end to end. Raises ValueError: that is not what ``digits`` are."""
        packed = bytes.fromhex(digits)
        # Capitals and blanks are digits for Python.
        if packed.hex() != digits:
            raise ValueError("an id has a character that is no hex digit")
        return cls(np.frombuffer(packed, dtype=f"S{ID_BYTES}"), True)

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, key: int) -> str: ...

    @overload
    def __getitem__(self, key: slice) -> list[str]: ...

    def __getitem__(self, key: int | slice) -> str | list[str]:
        if isinstance(key, slice):
            return self.texts(self.values[key])
        try:
            row = operator.index(key)
        except TypeError:
            raise TypeError(
                f"one number or a slice names samples here, not {type(key).__name__}: take those of a list one by one, "
                "as a DataLoader does with batch_sampler="
            ) from None
        return self.texts(self.values[[row]])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 65_536):
            yield from self[start : start + 65_536]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids) and other.packed == self.packed:
            return bool(np.array_equal(self.values, other.values))
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __repr__(self) -> str:
        shown = [*self[:3], *(["…"] if len(self) > 3 else [])]
        return f"[{', '.join(map(repr, shown[:3]))}{', …' if len(shown) > 3 else ''}]"

    def take(self, rows: np.ndarray) -> "Ids":
        """The ids at int [n] or bool [N]."""
        return Ids(self.values[rows], self.packed)

    def permuted(self, order: np.ndarray) -> "Ids":
        """These in the order int [N]; packed ones in their own memory, so that it holds half of them twice."""
        if not self.packed:
            return self.take(order)
        for half in self.values.view(np.uint64).reshape(-1, 2).T:
            half[:] = half[order]
        return self

    def texts(self, values: np.ndarray) -> list[str]:
        """Values of this array as text."""
        if not self.packed:
            return [value.decode() for value in values.tolist()]
        digits, width = values.tobytes().hex(), 2 * ID_BYTES
        return [digits[start : start + width] for start in range(0, len(digits), width)]

    def lines(self, rows: np.ndarray | slice = slice(None)) -> Iterator[bytes]:
        """The text of ids with a newline between each two, in pieces."""
        values = self.values[rows]
        for start in range(0, len(values), 65_536):
            part = values[start : start + 65_536]
            text = hexlify(part.tobytes(), "\n", ID_BYTES) if self.packed else b"\n".join(part.tolist())
            yield text if start == 0 else b"\n" + text

    def bounds(self, text: str) -> tuple[int, int]:
        """Where ids that start with ``text`` lie in ids that are sorted: first, and one behind the last."""
        if not self.packed:
            low, high = text.encode(), text.encode() + b"\x7f"
        elif _HEX_START.fullmatch(text):
            low, high = (bytes.fromhex(text.ljust(2 * ID_BYTES, digit)) for digit in "0f")
        else:
            return 0, 0
        return int(self.values.searchsorted(low)), int(self.values.searchsorted(high, side="right"))


@dataclass
class SampleTable:
    """``ids`` and columns [N] by name; ``record`` is a number that the owner of the table gives a meaning."""

    ids: Ids
    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.ids)

    def __getattr__(self, name: str) -> np.ndarray:
        try:
            return self.__dict__["columns"][name]
        except KeyError:
            raise AttributeError(name) from None

    def take(self, rows: np.ndarray) -> "SampleTable":
        """The samples at int [n] or bool [N]."""
        return SampleTable(self.ids.take(rows), {name: column[rows] for name, column in self.columns.items()})

    def order(self) -> np.ndarray:
        """int [N] that sorts by id, then record, then position."""
        return _order(self.ids, self.columns.__getitem__)

    @property
    def is_sorted(self) -> bool:
        """Whether every id comes behind the one before it, so that none is there twice."""
        values = self.ids.values
        return bool((values[1:] > values[:-1]).all())

    def repeats(self) -> np.ndarray:
        """bool [N] of a sorted table: whether the sample before has the same id."""
        repeats = np.zeros(len(self), dtype=bool)
        repeats[1:] = self.ids.values[1:] == self.ids.values[:-1]
        return repeats


def joined(tables: Sequence[SampleTable]) -> SampleTable:
    """All samples of tables with the same columns, sorted by id, then record, then position; they are
    emptied, so that memory holds little twice."""
    if not tables:
        return table_of(())
    if len(tables) == 1 and tables[0].is_sorted:
        return tables[0]
    packed = all(table.ids.packed for table in tables)
    values = [table.ids.values if packed else np.array(list(table.ids), dtype=np.bytes_) for table in tables]
    ids = Ids(np.concatenate(values), packed)
    del values
    for table in tables:
        table.ids = ids.take(np.zeros(0, dtype=np.int64))
    order = _order(ids, lambda name: np.concatenate([table.columns[name] for table in tables]))
    ids = ids.permuted(order)
    names = list(tables[0].columns)
    return SampleTable(ids, {name: np.concatenate([t.columns.pop(name) for t in tables])[order] for name in names})


def _order(ids: Ids, column: Callable[[str], np.ndarray]) -> np.ndarray:
    """int [N] that sorts by id, then record, then position."""
    if ids.packed:
        halves = ids.values.view(">u8").reshape(-1, 2)
        first = halves[:, 0].astype(np.uint64)
        # Index files are runs that are sorted already, which a stable sort merges.
        order = np.argsort(first, kind="stable")
        parts = (first[order[start : start + _AT_ONCE + 1]] for start in range(0, len(order), _AT_ONCE))
        if not any(bool((part[1:] == part[:-1]).any()) for part in parts):
            return order
        keys: tuple[np.ndarray, ...] = (halves[:, 1].astype(np.uint64), halves[:, 0].astype(np.uint64))
    else:
        keys = (ids.values,)
    return np.lexsort((column("position"), column("record"), *keys))


def table_of(records: Iterable[tuple[int, CommitRecord]]) -> SampleTable:
    """The samples of records, each with its number, in the order given."""
    numbered = list(records)
    entries = [entry for _, record in numbered for entry in record.samples]
    counts = [len(record.samples) for _, record in numbered]
    starts = np.cumsum([0, *counts[:-1]])
    columns = {
        "record": np.repeat(np.array([number for number, _ in numbered], dtype=np.int32), counts),
        "position": (np.arange(len(entries)) - np.repeat(starts[: len(counts)], counts)).astype(np.int32),
        "tokens": np.array([entry.tokens for entry in entries], dtype=np.int32),
        "supervised": np.array([entry.supervised for entry in entries], dtype=np.int32),
        "final_rows": np.array([entry.final_rows for entry in entries], dtype=np.int32),
        "split": np.array([entry.split == SPLITS[1] for entry in entries], dtype=np.uint8),
    }
    return SampleTable(Ids.of([entry.id for entry in entries]), columns)
