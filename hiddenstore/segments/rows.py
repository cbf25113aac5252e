"""Where rows of samples stand in the arrays of their unit.

Shapes: S samples of a unit, T tokens of all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def row_numbers(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The numbers of ranges end to end."""
    return np.repeat(starts - ends_of(lengths)[:-1], lengths) + np.arange(int(lengths.sum()))


def ends_of(lengths: np.ndarray | Sequence[int]) -> np.ndarray:
    """int64 [n + 1]: where ranges of these lengths start when they lie end to end, and the end."""
    ends = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=ends[1:])
    return ends


@dataclass(frozen=True, eq=False)
class SharedRows:
    """Which rows of the aux layers stand elsewhere: row r of sample s, r < ``rows[s]``, is row r of sample
    ``owners[s]``, which is before s; lengths, owners and rows int64 [S], in tokens."""

    lengths: np.ndarray
    owners: np.ndarray
    rows: np.ndarray

    @classmethod
    def read(cls, array: np.ndarray, lengths: np.ndarray) -> "SharedRows":
        """From int32 [S, 2] of owner and rows; ValueError where they are not those of samples before."""
        owners, rows = array.astype(np.int64).T
        numbers = np.arange(len(lengths))
        if (rows < 0).any() or (rows > lengths).any() or (owners < 0).any() or (owners > numbers).any():
            raise ValueError("it names rows that its samples do not have")
        shares = rows > 0
        if (owners[shares] == numbers[shares]).any() or (rows[shares] > lengths[owners[shares]]).any():
            raise ValueError("it names rows of samples that do not come before")
        return cls(np.asarray(lengths, dtype=np.int64), owners, rows)

    @property
    def array(self) -> np.ndarray:
        """int32 [S, 2] of owner and rows, as it is stored."""
        return np.stack([self.owners, self.rows], axis=1).astype(np.int32)

    @cached_property
    def stands(self) -> np.ndarray:
        """bool [T]: the rows that stand with their own sample."""
        ends = ends_of(self.lengths)
        stands = np.ones(ends[-1], dtype=bool)
        for first, rows in zip(ends.tolist(), self.rows.tolist(), strict=False):
            stands[first : first + rows] = False
        return stands

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [S + 1]: where the own rows of each sample start among all that stand, and the end."""
        return ends_of(self.lengths - self.rows)

    def runs(self, sample: int) -> list[range]:
        """Where the rows of a sample stand, in their order."""
        runs: list[range] = []
        stop, ends = int(self.lengths[sample]), self.ends
        while stop:
            first, shared = int(ends[sample]), min(stop, int(self.rows[sample]))
            if stop > shared:
                run = range(first, first + stop - shared)
                runs.append(range(run.start, runs.pop().stop) if runs and run.stop == runs[-1].start else run)
            stop, sample = shared, int(self.owners[sample])
        return runs[::-1]

    def unequal(self, input_ids: np.ndarray) -> int | None:
        """The first sample whose tokens, of all int32 [T], are not those of the rows it shares; None without one."""
        starts = ends_of(self.lengths)
        for sample in np.flatnonzero(self.rows).tolist():
            rows, of = int(self.rows[sample]), int(starts[self.owners[sample]])
            first = int(starts[sample])
            if not np.array_equal(input_ids[first : first + rows], input_ids[of : of + rows]):
                return sample
        return None
