"""Memory of states and codes, which is used again: a unit takes about what the one before it took, and every page that
is new costs a fault and zeros. Measurements: docs/design/003."""

import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

# From here on numpy asks the system for huge pages, and torch does not: faults of small ones cost four times a copy.
_HUGE_BYTES = 1 << 22
_LINE_BYTES = 64
_MOST_SPARE_BYTES = 1 << 29
# Blocks of one of eight sizes between two powers of two take each other's place.
_SIZES = 3


class _Spare:
    """Blocks uint8 [bytes] that nobody uses, the newest last."""

    def __init__(self) -> None:
        # A lease that ends may interrupt anything here, in this thread too, so there is no lock.
        self._blocks: deque[_Block] = deque()

    def take(self, size: int) -> "_Block":
        for block in reversed(list(self._blocks)):
            if len(block.memory) == size:
                try:
                    self._blocks.remove(block)
                except ValueError:
                    continue
                return block
        try:
            return _Block(np.empty(size, dtype=np.uint8))
        except MemoryError:
            self._blocks.clear()
            return _Block(np.empty(size, dtype=np.uint8))

    def give(self, block: "_Block") -> None:
        if len(block.memory) > _MOST_SPARE_BYTES:
            return
        self._blocks.append(block)
        # Another lease may end meanwhile and take blocks away too.
        with suppress(IndexError):
            while sum(len(block.memory) for block in list(self._blocks)) > _MOST_SPARE_BYTES:
                self._blocks.popleft()


class _Block:
    """Compared by identity."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory


class _Lease:
    """What arrays of a block keep alive: behind the last of them the block is spare."""

    def __init__(self, spare: _Spare, block: _Block) -> None:
        self._spare, self._block = spare, block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._block.memory.__array_interface__

    def __del__(self) -> None:
        self._spare.give(self._block)


_SPARE = _Spare()


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """A tensor whose memory nothing else uses, of any content; in huge pages where it is large and the system has
    them."""
    size = math.prod(shape) * dtype.itemsize
    if size < _HUGE_BYTES or torch.device(device).type != "cpu":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    step = 1 << ((size + _LINE_BYTES).bit_length() - 1 - _SIZES)
    memory = np.asarray(_Lease(_SPARE, _SPARE.take(-(-(size + _LINE_BYTES) // step) * step)))
    first = -memory.ctypes.data % _LINE_BYTES
    return torch.from_numpy(memory[first : first + size]).view(dtype).view(tuple(shape))
