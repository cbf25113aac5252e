"""Memory that a thread uses again and again for what it reads only to copy, decompress or check it."""

import threading

import numpy as np

_ALIGNMENT = 64
_KEPT_BYTES = 1 << 23
_KEPT = 4


class _Pool(threading.local):
    """Free memory of one thread, each with its address."""

    def __init__(self) -> None:
        self.free: list[tuple[np.ndarray, int]] = []


_POOL = _Pool()


class Scratch:
    """uint8 [size] of reused memory of this thread while the block lasts; fresh pages would cost as much as the copy.

    It lies in memory as byte ``offset`` lies in its file, modulo 64: a copy by the kernel to a place a few bytes ahead
    of that is up to five times slower.
    """

    def __init__(self, size: int, offset: int = 0) -> None:
        self._size, self._offset = size, offset

    def __enter__(self) -> np.ndarray:
        memory, address = _POOL.free.pop() if _POOL.free else (np.empty(0, dtype=np.uint8), 0)
        if memory.size < self._size + _ALIGNMENT:
            memory = np.empty(self._size + _ALIGNMENT, dtype=np.uint8)
            address = memory.ctypes.data
        self._lent = memory, address
        first = (self._offset - address) % _ALIGNMENT
        return memory[first : first + self._size]

    def __exit__(self, *_: object) -> None:
        if self._lent[0].size <= _KEPT_BYTES and len(_POOL.free) < _KEPT:
            _POOL.free.append(self._lent)
