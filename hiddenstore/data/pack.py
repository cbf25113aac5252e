"""Which samples share a global batch, and which share a pack.

Both are functions of the lengths in reading order alone, so they are the same under every world size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BatchPlan:
    """One global batch. ``start`` and ``stop`` are positions in the order; a pack lists such positions, ascending."""

    start: int
    stop: int
    packs: tuple[tuple[int, ...], ...]

    def packs_of(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Packs rank, rank + world_size, …: possibly none."""
        return self.packs[rank::world_size]


def global_batches(
    lengths: Sequence[int] | np.ndarray,
    order: np.ndarray,
    batch_tokens: int,
    pack_tokens: int,
    start: int = 0,
) -> Iterator[BatchPlan]:
    """Global batches from position ``start`` of ``order`` on.

    A batch takes consecutive samples while their sum is at most ``batch_tokens``; inside it, packs are filled first-fit
    up to ``pack_tokens``. Starting at any batch's ``stop`` continues exactly as if never interrupted.

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
        yield BatchPlan(
            start, stop, tuple(tuple(start + i for i in pack) for pack in first_fit(ordered[start:stop], pack_tokens))
        )
        start = stop


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
