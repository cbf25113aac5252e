"""The states of one unit in memory that two processes share: the collector lays it out, the engine's worker fills it.

The memory has no name in any folder, so that nothing of it stays when both end, however they end. Whoever fills it
finds it as a descriptor of the collector's process.

Shapes: N tokens of the unit, R final rows of the unit, L aux layers, D target width, n requests, T tokens of one.
"""

import itertools
import json
import mmap
import os
import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectors.engines import CaptureRequest, Done, nobody
from collectors.engines.assembly import Assembly
from hiddenstore.errors import CaptureError, HiddenstoreError, Kind

PLACE = "hiddenstore_place"
"""The parameter of a request that says where its states go."""

_NAME = "hiddenstore-unit"
# Of the process: its engines, one after the other or side by side, may share a connector and its memory of a unit.
_NUMBERS = itertools.count(1)
_LINE_BYTES = 64
_REASON_BYTES = 4096
_PLACED, _FAILED = 1, 2
_PLACE = re.compile(r"(/proc/\d+/fd/\d+)#(\d+)\.(\d+)")


@dataclass(frozen=True)
class Place:
    """Where the states of one request go: ``path`` of the memory, ``number`` of the unit it has to be, ``index``."""

    path: str
    number: int
    index: int

    def __str__(self) -> str:
        return f"{self.path}#{self.number}.{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """
        >>> Place.parse("/proc/7/fd/31#2.5")
        Place(path='/proc/7/fd/31', number=2, index=5)
        """
        match = _PLACE.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no place in the memory of a unit")
        return cls(match[1], int(match[2]), int(match[3]))


class UnitMemory:
    """One unit's memory as one process maps it; ``assembly`` is over it, ``number`` the unit's in its process."""

    def __init__(self, descriptor: int, done: Done = nobody) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, 0)
        self._end = 0
        self.number, layers, self._columns, width, count = self._take(np.int64, 5).tolist()
        lengths, rows = self._take(np.int64, count).tolist(), self._take(np.int64, count).tolist()
        input_ids, final_rows = self._take(np.int32, sum(lengths)), self._take(np.int32, sum(rows))
        starts, row_starts = np.cumsum(lengths)[:-1], np.cumsum(rows)[:-1]
        parts = zip(np.split(input_ids, starts), np.split(final_rows, row_starts), strict=True)
        requests = [CaptureRequest(ids, positions) for ids, positions in parts]
        self._count, self._status = count, self._skip(count)
        self._reason = self._skip(_REASON_BYTES)
        token_ids, tokens = self._take(np.int32, sum(lengths)), sum(lengths)
        tensors = token_ids, self._states((layers, tokens, width)), self._states((sum(rows), width))
        self._layers, self.assembly = layers, Assembly(requests, layers, width, tensors, done)

    @classmethod
    def create(
        cls, requests: Sequence[CaptureRequest], layers: int, columns: int, width: int, done: Done = nobody
    ) -> "UnitMemory":
        """Memory for the states of these requests, filled from ``columns`` states a token; ``done`` as in Assembly."""
        lengths = [len(request.input_ids) for request in requests]
        rows = [len(request.final_rows) for request in requests]
        plan = [np.array([next(_NUMBERS), layers, columns, width, len(requests)]), np.array(lengths), np.array(rows)]
        texts = [
            np.concatenate([getattr(request, name) for request in requests]) for name in ("input_ids", "final_rows")
        ]
        head = [part.astype(np.int64).tobytes() for part in plan] + [part.astype(np.int32).tobytes() for part in texts]
        states = 2 * width * (layers * sum(lengths) + sum(rows))
        sizes = [*map(len, head), len(requests), _REASON_BYTES, 4 * sum(lengths), states]
        descriptor = os.memfd_create(_NAME)
        os.ftruncate(descriptor, sum(sizes) + _LINE_BYTES * (len(sizes) + 1))
        end = 0
        for part in head:
            os.pwrite(descriptor, part, end)
            end = _aligned(end + len(part))
        return cls(descriptor, done)

    @classmethod
    def open(cls, place: Place) -> "UnitMemory":
        """The memory a place is in. ValueError: it is gone, or another unit's by now."""
        try:
            if not os.readlink(place.path).startswith(f"/memfd:{_NAME}"):
                raise ValueError(f"{place} is not the memory of a unit")
            memory = cls(os.open(place.path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise ValueError(f"{place} is gone: {error.strerror}") from error
        if memory.number != place.number:
            raise ValueError(f"{place} holds unit {memory.number} by now")
        return memory

    def place(self, index: int) -> Place:
        """Where another process puts the states of request ``index``."""
        return Place(f"/proc/{os.getpid()}/fd/{self._descriptor}", self.number, index)

    def put(self, index: int, token_ids: np.ndarray, states: Tensor) -> None:
        """Fill in request ``index``: token_ids int [T] as run, states [T, columns, D], the final hidden last.

        What is wrong with them is left for the collector to raise, and raised here too.
        """
        try:
            if states.ndim != 3 or states.shape[1] != self._columns:
                raise CaptureError(
                    f"the engine gave states {list(states.shape)}, expected [tokens, {self._columns}, width]",
                    kind=Kind.ENGINE_SHAPE,
                )
            self.assembly.put(index, token_ids, states[:, : self._layers].transpose(0, 1), states[:, -1])
        except Exception as error:
            kind = error.kind if isinstance(error, HiddenstoreError) else Kind.ENGINE_FILE
            reason = json.dumps({"kind": kind.name, "message": f"{error}"[: _REASON_BYTES // 8]}).encode()
            os.pwrite(self._descriptor, reason.ljust(_REASON_BYTES), self._reason)
            os.pwrite(self._descriptor, bytes([_FAILED]), self._status + index)
            raise
        # A system call: the states are seen before the word that they are there, whatever the processor's order.
        os.pwrite(self._descriptor, bytes([_PLACED]), self._status + index)

    def placed(self) -> set[int]:
        """Requests whose states are here. Raises CaptureError, of the kind that ``put`` met in the other process."""
        statuses = os.pread(self._descriptor, self._count, self._status)
        if _FAILED in statuses:
            reason: dict[str, Any] = json.loads(os.pread(self._descriptor, _REASON_BYTES, self._reason))
            raise CaptureError(str(reason["message"]), kind=Kind[reason["kind"]])
        return {index for index, status in enumerate(statuses) if status == _PLACED}

    def _skip(self, size: int) -> int:
        """Where the next ``size`` bytes begin."""
        start, self._end = self._end, _aligned(self._end + size)
        return start

    def _take(self, dtype: type[np.generic], count: int) -> np.ndarray:
        return np.frombuffer(self._map, dtype, count, self._skip(count * np.dtype(dtype).itemsize))

    def _states(self, shape: tuple[int, ...]) -> Tensor:
        bits = self._take(np.int16, int(np.prod(shape)))
        return torch.from_numpy(bits).view(torch.bfloat16).view(shape)


def _aligned(size: int) -> int:
    return -(-size // _LINE_BYTES) * _LINE_BYTES
