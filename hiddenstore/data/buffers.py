"""Memory of packs, used again: fresh pages cost as much CPU as reading the bytes that go into them."""

import math
import weakref
from collections import deque
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

PAGE_BYTES = 4096

_LINE_BYTES = 64

Members = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class Buffers:
    """Lends flat uint8 tensors and takes their memory back once no tensor over it is left.

    What is lent and what lies free is at most ``limit_bytes`` together, unless more is lent. Pinned memory comes from
    torch's allocator instead, which reuses it too and knows which copies to the device are still under way.
    """

    def __init__(self, limit_bytes: int, pinned: bool = False) -> None:
        self.pinned = pinned
        self._limit = limit_bytes
        # Given back from whatever thread drops the last tensor; appending to a deque needs no lock.
        self._returned: deque[np.ndarray] = deque()
        self._free: list[np.ndarray] = []
        self._total = 0

    def take(self, size: int) -> Tensor:
        """uint8 [size] that starts on a page; one thread at a time may ask."""
        if self.pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        memory = self._reused(size)
        if memory is None:
            memory = _pages(size)
            self._total += memory.size
        lent = memory[:size]
        # ``from_numpy`` holds this very array for as long as the storage lives.
        weakref.finalize(lent, self._returned.append, memory).atexit = False
        return torch.from_numpy(lent)

    def _reused(self, size: int) -> np.ndarray | None:
        """The smallest free memory that fits; the rest goes while there is more than the limit allows."""
        while self._returned:
            self._free.append(self._returned.popleft())
        self._free.sort(key=lambda memory: memory.size)
        fitting = next((place for place, memory in enumerate(self._free) if memory.size >= size), None)
        found = None if fitting is None else self._free.pop(fitting)
        needed = 0 if found is not None else size
        while self._free and self._total + needed > self._limit:
            self._total -= self._free.pop().size
        return found


def room_bytes(members: Members) -> int:
    """Bytes that ``carve`` needs."""
    return sum(_lines(_size(shape, dtype)) for shape, dtype in members.values())


def carve(flat: Tensor, members: Members) -> dict[str, Tensor]:
    """Tensors of the given shapes over one flat uint8 tensor, each at a multiple of 64 bytes."""
    tensors, start = {}, 0
    for name, (shape, dtype) in members.items():
        size = _size(shape, dtype)
        tensors[name] = flat[start : start + size].view(dtype).view(shape)
        start += _lines(size)
    return tensors


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _lines(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES


def _pages(size: int) -> np.ndarray:
    """uint8 of at least ``size``, a little more so that the next pack fits too, from the start of a page on."""
    wanted = -(-(size + size // 16) // PAGE_BYTES) * PAGE_BYTES
    memory = np.empty(wanted + PAGE_BYTES, dtype=np.uint8)
    first = -memory.ctypes.data % PAGE_BYTES
    return memory[first : first + wanted]
