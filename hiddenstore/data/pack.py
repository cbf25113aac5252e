"""Which samples share a global batch, and which share a pack.

A global batch is a function of the lengths in reading order alone, the same under every world size. Its split into
packs balances the ranks there are: the loss of a batch is a sum over its samples, so packs change nothing but rounding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchPlan:
    """One global batch: positions ``start…stop`` of the order, ``lengths`` the tokens at each of them."""

    start: int
    stop: int
    lengths: tuple[int, ...]
    pack_tokens: int

    @property
    def packs(self) -> tuple[tuple[int, ...], ...]:
        """The packs of one process that has the batch to itself; a pack lists positions, ascending."""
        return self.packs_of(0, 1)

    def packs_of(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Packs of one rank: possibly none, where there are fewer samples than ranks."""
        mine = balanced(self.lengths, world_size)[rank]
        packs = first_fit([self.lengths[i] for i in mine], self.pack_tokens)
        return tuple(tuple(self.start + mine[i] for i in pack) for pack in packs)


def global_batches(
    lengths: Sequence[int] | np.ndarray,
    order: np.ndarray,
    batch_tokens: int,
    pack_tokens: int,
    start: int = 0,
) -> Iterator[BatchPlan]:
    """Global batches from position ``start`` of ``order`` on.

    A batch takes consecutive samples while their sum is at most ``batch_tokens``; inside it, each rank fills packs
    first-fit up to ``pack_tokens``. Starting at any batch's ``stop`` continues exactly as if never interrupted.

    lengths int64 [N] tokens per sample; order int64 [N] indices into ``lengths``.

    Raises:
        ValueError: a sample is longer than ``pack_tokens``, or ``pack_tokens`` than ``batch_tokens``.
    """
    if not 0 < pack_tokens <= batch_tokens:
        raise ValueError(f"pack_tokens {pack_tokens} must lie in 1…batch_tokens ({batch_tokens})")
    ordered = np.asarray(lengths, dtype=np.int64)[order]
    if len(ordered) and int(ordered.max()) > pack_tokens:
        raise ValueError(f"a sample of {int(ordered.max())} tokens does not fit into a pack of {pack_tokens}")
    ends = np.cumsum(ordered)
    while start < len(ordered):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + batch_tokens, side="right"))
        yield BatchPlan(start, stop, tuple(ordered[start:stop].tolist()), pack_tokens)
        start = stop


def balanced(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices into ``lengths`` per rank, ascending: the longest first, each to the rank with the fewest tokens so far.

    No rank exceeds the mean by more than the longest item, and none is idle while another has two.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(ranks), key=tokens.__getitem__)
        shares[rank].append(index)
        tokens[rank] += lengths[index]
    return [sorted(share) for share in shares]


def first_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Indices into ``lengths`` per pack: each item goes into the first pack with room, in the order given."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index, length in enumerate(int(n) for n in lengths):
        home = next((p for p, free in enumerate(room) if free >= length), None)
        if home is None:
            packs.append([index])
            room.append(capacity - length)
        else:
            packs[home].append(index)
            room[home] -= length
    return packs
