"""The order of samples as arithmetic: a permutation keyed by (which samples, seed, epoch).

No random generator of a library is used, so the order of a release is the order of every later one; golden tests hold
it. The key names the set of sample ids, so one capture in two recipes, or cut into other units, trains in one order.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hiddenstore.index.table import Ids


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
        share = balanced(self.lengths, world_size)[rank]
        packs = first_fit([self.lengths[i] for i in share], self.pack_tokens)
        return tuple(tuple(self.start + share[i] for i in pack) for pack in packs)


def global_batches(
    lengths: Sequence[int] | np.ndarray,
    order: np.ndarray,
    batch_tokens: int,
    pack_tokens: int,
    start: int = 0,
) -> Iterator[BatchPlan]:
    """Global batches from position ``start`` of ``order`` on.

    A batch takes consecutive samples while their sum is at most ``batch_tokens``; inside it, each rank fills packs
    first-fit up to ``pack_tokens``. A longer sample than a batch is one alone, so that it alone pays for its length.
    Starting at any batch's ``stop`` continues exactly as if never interrupted.

    lengths int64 [N] tokens per sample; order int64 [N] indices into ``lengths``. Raises ValueError: a sample is longer
    than ``pack_tokens``, or a budget is none."""
    if min(pack_tokens, batch_tokens) < 1:
        raise ValueError(f"pack_tokens {pack_tokens} and batch_tokens {batch_tokens} must be 1 at least")
    ordered = np.asarray(lengths)[order]
    if len(ordered) and int(ordered.max()) > pack_tokens:
        raise ValueError(f"a sample of {int(ordered.max())} tokens does not fit into a pack of {pack_tokens}")
    room = 64
    while start < len(ordered):
        following = ordered[start : start + room]
        ends = np.cumsum(following, dtype=np.int64)
        if int(ends[-1]) <= batch_tokens and start + room < len(ordered):
            room *= 2
            continue
        count = max(1, int(np.searchsorted(ends, batch_tokens, side="right")))
        yield BatchPlan(start, start + count, tuple(following[:count].tolist()), pack_tokens)
        start += count


def balanced(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices into ``lengths`` per rank, ascending: the longest first, each to the rank with the fewest tokens so far.

    No rank exceeds the mean by more than the longest item, and none is idle while another has two.
    """
    if ranks == 1:
        return [list(range(len(lengths)))]
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
    for index, length in enumerate(np.asarray(lengths).tolist()):
        home = 0
        while home < len(room) and room[home] < length:
            home += 1
        if home == len(room):
            packs.append([])
            room.append(capacity)
        packs[home].append(index)
        room[home] -= length
    return packs


_AT_ONCE = 1 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014) on uint64 states; arithmetic is modulo 2**64."""
    z = x + _GOLDEN
    z ^= z >> np.uint64(30)
    z *= _MIX_1
    z ^= z >> np.uint64(27)
    z *= _MIX_2
    z ^= z >> np.uint64(31)
    return z


class Order:
    """The permutations of one set of samples, one per (seed, epoch).

    Ids of a store's table are sorted already; sorting others takes about 1 s for a million and is done once.
    """

    def __init__(self, sample_ids: Sequence[str]) -> None:
        ids = sample_ids if isinstance(sample_ids, Ids) else Ids.of(sample_ids)
        self._length = len(ids)
        self._sorted: np.ndarray | None = None
        if not bool((ids.values[1:] > ids.values[:-1]).all()):
            self._sorted = np.argsort(ids.values, kind="stable")
            ids = ids.take(self._sorted)
            if bool((ids.values[1:] == ids.values[:-1]).any()):
                raise ValueError("sample ids must be distinct")
        digest = hashlib.blake2b(digest_size=16)
        for lines in ids.lines():
            digest.update(lines)
        self.digest = digest.hexdigest()

    def __len__(self) -> int:
        return self._length

    def permutation(self, seed: int, epoch: int) -> np.ndarray:
        """int64 [N] of indices into the ids given: sample ``result[i]`` is read i-th.

        Which id comes i-th does not depend on the order the ids were given in.
        """
        text = f"{self.digest}:{seed}:{epoch}".encode()
        key = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u8").astype(np.uint64)
        order = _by_hash(len(self), key)
        return order if self._sorted is None else self._sorted[order]


def _by_hash(count: int, key: np.ndarray) -> np.ndarray:
    """int64 [N]: ranks 0…N-1 in the order of their hashes.

    Numbers are sorted several times as fast as places of numbers, so the low bits of each hash give way to its rank;
    the few that are alike above those are put in order by their whole hashes.
    """
    low = np.uint64((1 << count.bit_length()) - 1)
    keys = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _AT_ONCE):
        ranks = np.arange(start, min(start + _AT_ONCE, count), dtype=np.uint64)
        keys[start : start + _AT_ONCE] = _hash(ranks, key) & ~low | ranks
    keys.sort()
    alike = np.flatnonzero(keys[1:] ^ keys[:-1] <= low)
    keys &= low
    if len(alike):
        rows = np.union1d(alike, alike + 1)
        keys[rows] = keys[rows][np.argsort(_hash(keys[rows], key))]
    return keys.view(np.int64)


def _hash(ranks: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A bijection of the rank, then a keyed mix: hashes are distinct and follow no pattern of the ranks."""
    return splitmix64(splitmix64(ranks) ^ key)


def permutation(sample_ids: Sequence[str], seed: int, epoch: int) -> np.ndarray:
    """int64 [N]: see ``Order.permutation``."""
    return Order(sample_ids).permutation(seed, epoch)
