"""What samples of a unit have in common from their first token on, such as a system prompt, tools, or the turns before:
there a target of causal attention has the same states, so that one sample can have them for all.

Shapes: S samples of a unit, t tokens of one, D width.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import CodeLayout, MaskedCodec
from hiddenstore.records import Record
from schemas.manifest import ImageEntry

BLOCK = 16
"""Tokens of the shortest prefix that is shared: a read more costs more than fewer rows."""

Limit = Callable[[int, int], int]
"""Given a sample before and how many leading tokens it has in common: how many of these rows to share with it."""

_MOST_TRIED = 4
# Rounding in batches of other lengths moves a row by up to a few percent, another layer or token by most of it; where
# an expert is chosen otherwise, a single row by more.
_ALIKE, _SHARE_ALIKE = 0.1, 0.9
_ROWS_AT_ONCE = 512


def key_of(
    input_ids: np.ndarray, loss_mask: np.ndarray, images: Sequence[ImageEntry], layout: CodeLayout
) -> np.ndarray:
    """What decides over a sample's rows, int64 [n]: its tokens, and where a codec stores rows in two classes these;
    up to the first image, for which equal tokens may stand."""
    stop = min([len(input_ids), *(image.start for image in images)])
    key = 2 * input_ids[:stop].astype(np.int64)
    if isinstance(layout, MaskedCodec):
        key += layout.fine_rows(loss_mask, [len(loss_mask)])[:stop]
    return key


class PrefixTree:
    """The samples of a unit so far, by the blocks of ``BLOCK`` tokens that they begin with."""

    def __init__(self) -> None:
        self._keys: list[np.ndarray] = []
        self._nodes: dict[tuple[int, bytes], int] = {}
        # Samples at a node: the first, and those that could not share its rows.
        self._samples: list[list[int]] = []

    def add(self, key: np.ndarray, limit: Limit | None = None) -> tuple[int, int]:
        """Add the next sample. The one before it of which it shares the most rows, and how many; 0 and 0 without."""
        sample, path = len(self._keys), list(self._path(key))
        self._keys.append(key)
        owner, rows = self._best(key, path, limit)
        for node in path[rows // BLOCK :]:
            if len(self._samples[node]) < _MOST_TRIED:
                self._samples[node].append(sample)
        for start in range(len(path) * BLOCK, len(key) - BLOCK + 1, BLOCK):
            path.append(len(self._samples))
            self._nodes[path[-2] if start else -1, key[start : start + BLOCK].tobytes()] = path[-1]
            self._samples.append([sample])
        return owner, rows

    def _path(self, key: np.ndarray) -> Iterator[int]:
        """The nodes that are there of a sample's blocks; a block is known by those before it."""
        node = -1
        for start in range(0, len(key) - BLOCK + 1, BLOCK):
            step = node, key[start : start + BLOCK].tobytes()
            if step not in self._nodes:
                return
            node = self._nodes[step]
            yield node

    def _best(self, key: np.ndarray, path: Sequence[int], limit: Limit | None) -> tuple[int, int]:
        best, tried = (0, 0), set[int]()
        for depth in range(len(path), 0, -1):
            for sample in self._samples[path[depth - 1]]:
                if sample in tried or len(tried) == _MOST_TRIED:
                    continue
                tried.add(sample)
                rows = equal_rows(key, self._keys[sample])
                rows = rows if limit is None else limit(sample, rows)
                if rows >= max(BLOCK, best[1] + 1):
                    best = sample, rows
            if best[1] >= depth * BLOCK:
                break
        return best


def equal_rows(one: np.ndarray, other: np.ndarray) -> int:
    """How many of the first values, or rows, of two arrays are equal, before the first that is not."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    rows = differ.any(axis=tuple(range(1, differ.ndim)))
    return int(rows.argmax()) if rows.any() else size


Parts = list[tuple[int, int, int]]
"""Rows of a sample as runs: the number of a record, its first row and the end."""


def with_one_prefix(records: Sequence[Record], slots: Sequence[int], layout: CodeLayout) -> list[Parts]:
    """Of which record each sample takes its rows: the prefix of the first that has it, where the states captured with
    the sample are those to within what batches change them by; ``slots`` are the layers that are compared."""
    tree, parts = PrefixTree(), list[Parts]()
    for number, record in enumerate(records):
        sample = record.sample

        def alike(owner: int, rows: int, record: Record = record) -> int:
            same = np.ones(rows, dtype=bool)
            for slot in slots:
                for start, run in _rows_of(records, first_parts(parts[owner], rows), slot):
                    if start >= len(same):
                        break
                    stop = min(start + len(run), len(same))
                    near, finite = _compared(record.aux[slot, start:stop], run[: stop - start])
                    same[start:stop] &= near
                    # What is not finite in one sample stays in it.
                    same = same[: start + (int(finite.argmin()) if not finite.all() else len(same))]
            return _shared_by(same)

        key = key_of(sample.input_ids, sample.loss_mask, sample.images, layout)
        owner, rows = tree.add(key, alike) if slots else (0, 0)
        runs = (
            [*first_parts(parts[owner], rows), (number, rows, sample.tokens)] if rows else [(number, 0, sample.tokens)]
        )
        parts.append([run for run in runs if run[1] < run[2]])
    return parts


def first_parts(parts: Parts, rows: int) -> Parts:
    """The first ``rows`` of them."""
    first: Parts = []
    for number, start, stop in parts:
        if rows > 0:
            first.append((number, start, min(stop, start + rows)))
        rows -= stop - start
    return first


def _rows_of(records: Sequence[Record], parts: Parts, slot: int) -> Iterator[tuple[int, Tensor]]:
    """States of parts in a layer, bfloat16 [n, D] some rows at a time, and the place of the first of these."""
    place = 0
    for number, first, stop in parts:
        for start in range(first, stop, _ROWS_AT_ONCE):
            run = records[number].aux[slot, start : min(stop, start + _ROWS_AT_ONCE)]
            yield place, run
            place += len(run)


def _compared(one: Tensor, other: Tensor) -> np.ndarray:
    """bool [2, n]: rows bfloat16 [n, D] that are the same but for rounding; those of equal bits or finite in both."""
    first, second = one.float(), other.float()
    near = torch.linalg.vector_norm(first - second, dim=1) <= _ALIKE * torch.linalg.vector_norm(second, dim=1)
    equal = (one.view(torch.int16) == other.view(torch.int16)).all(dim=1)
    finite = torch.isfinite(first).all(dim=1) & torch.isfinite(second).all(dim=1)
    compared: np.ndarray = torch.stack([near | equal, finite | equal]).cpu().numpy()
    return compared


def _shared_by(same: np.ndarray) -> int:
    """How many of the first rows to share, by which of them are the same: nine in ten, and each of the last ``BLOCK``,
    since attention that reaches ahead shows there."""
    rows = len(same)
    while rows >= BLOCK and not same[rows - BLOCK : rows].all():
        rows -= BLOCK - int(np.flatnonzero(~same[rows - BLOCK : rows])[-1])
    return rows if rows >= BLOCK and same[:rows].mean() >= _SHARE_ALIKE else 0
