"""Kernels of ours that stand in for torch where they can be had: triton's on a GPU, numba's on a CPU. Their bits are
those of torch, so that a store does not tell who wrote it."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from hiddenstore.console import output as console
from hiddenstore.threads import Lock, Threads

T = TypeVar("T")

# torch's passages over these cost about what compiling a kernel does, a CPU second or two; whoever takes longer for as
# many saves less than a hundredth of its time, for 120 MB that the compiler keeps.
_WORTH_COMPILING, _WITHIN_S = 1 << 29, 60.0
# A block is a millisecond or less, and a thread has a few dozen of a layer.
_BLOCK_VALUES = 1 << 20


@cache
def gpu_kernels(device: torch.device) -> Any:
    """The module of the kernels that run on a GPU; None without. Why not is said once."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    try:
        from hiddenstore.codecs import gpu_kernels as kernels
    except ImportError as error:
        # A triton of another torch, say: what it lacks is for it to tell.
        failure: str | None = str(error)
    else:
        failure = kernels.failure_on(device)
        if failure is None:
            return kernels
    console.output().warn(f"packs are decoded on {device} without our kernel, many times slower: {failure}")
    return None


class _Tally:
    """Values that this process has left to torch in a minute, counted until they are enough."""

    def __init__(self) -> None:
        self.values, self._since, self._lock = 0, monotonic(), Lock()

    def passes(self, values: int, limit: int) -> bool:
        """Whether they came to ``limit``; if not, these are left to torch too."""
        with self._lock:
            if self.values >= limit:
                return True
            now = monotonic()
            if now - self._since > _WITHIN_S:
                self.values, self._since = 0, now
            self.values += values
            return False


_LEFT = _Tally()


def cpu_kernels(values: int) -> Any:
    """The module of the kernels that run on a CPU, for so many values of states; None where torch is to compute them:
    without numba, and until a process has had as many in a minute as pay for compiling."""
    return _numba_kernels() if _LEFT.passes(values, _WORTH_COMPILING) else None


def compile_cpu_kernels() -> None:
    """Have this process compile what it can now, and not when it pays: for benchmarks of what comes after."""
    _LEFT.values = _WORTH_COMPILING
    if (kernels := cpu_kernels(0)) is not None:
        kernels.compile_all()


@cache
def _numba_kernels() -> Any:
    if find_spec("numba") is None:
        return None
    try:
        from hiddenstore.codecs import cpu_kernels as kernels

        kernels.measure(np.zeros((1, 8), np.uint16), np.empty(1, np.float32))
    except Exception as error:  # noqa: BLE001 - a compiler of another numpy, or for another machine, says so its own way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        console.output().warn(f"numba compiles nothing here, so that codecs take two to four times as long: {reason}")
        return None
    return kernels


def in_blocks(lengths: Sequence[int], width: int, work: Callable[[int, slice], T]) -> list[tuple[int, slice, T]]:
    """``work`` of every block of rows of ``width`` values, by the number of its part and its rows in it, on as many
    threads as torch uses; ``lengths``: rows of each part. In their order."""
    step = max(1, _BLOCK_VALUES // max(1, width))
    blocks = [
        (number, slice(start, min(start + step, rows)))
        for number, rows in enumerate(lengths)
        for start in range(0, rows, step)
    ]
    threads = min(torch.get_num_threads(), len(blocks), -(-sum(lengths) // step))
    if threads < 2:
        return [(*block, work(*block)) for block in blocks]
    with Threads(threads) as pool:
        results = pool.map(work, *zip(*blocks, strict=True))
        return [(*block, result) for block, result in zip(blocks, results, strict=True)]
