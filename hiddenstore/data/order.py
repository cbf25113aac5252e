"""The order of samples as arithmetic: a permutation keyed by (which samples, seed, epoch).

No random generator of a library is used, so the order of a release is the order of every later one; golden tests hold
it. The key names the set of sample ids, so one capture in two recipes, or cut into other units, trains in one order.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014) on uint64 states; arithmetic is modulo 2**64."""
    z = x + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


class Order:
    """The permutations of one set of samples, one per (seed, epoch).

    Sorting the ids is the expensive part (about 1 s for a million) and is done once.
    """

    def __init__(self, sample_ids: Sequence[str]) -> None:
        ids = np.array(sample_ids, dtype=np.bytes_) if len(sample_ids) else np.zeros(0, dtype="S1")
        self._sorted = np.argsort(ids, kind="stable")
        ordered = ids[self._sorted]
        if len(ids) > 1 and bool((ordered[1:] == ordered[:-1]).any()):
            raise ValueError("sample ids must be distinct")
        self.digest = hashlib.blake2b(b"\n".join(ordered.tolist()), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return int(self._sorted.shape[0])

    def permutation(self, seed: int, epoch: int) -> np.ndarray:
        """int64 [N] of indices into the ids given: sample ``result[i]`` is read i-th.

        Which id comes i-th does not depend on the order the ids were given in.
        """
        text = f"{self.digest}:{seed}:{epoch}".encode()
        key = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), dtype="<u8").astype(np.uint64)
        ranks = np.arange(len(self), dtype=np.uint64)
        # A bijection of the rank, then a keyed mix: equal hashes cannot follow a pattern of the ranks.
        hashed = splitmix64(splitmix64(ranks) ^ key)
        return self._sorted[np.argsort(hashed, kind="stable")].astype(np.int64)


def permutation(sample_ids: Sequence[str], seed: int, epoch: int) -> np.ndarray:
    """int64 [N]: see ``Order.permutation``."""
    return Order(sample_ids).permutation(seed, epoch)
