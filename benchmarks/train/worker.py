"""One engine in a process of its own.

CPU seconds are those of all threads since the answer before, so that reading ahead between two turns is counted.
"""

import importlib
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# The first optimizer step imports it; memory growth is to be the training's.
import torch._dynamo
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.train.case import Case
from benchmarks.workers import Answer, reset_peak, resident, serve


def _attended(q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOP of causal attention of queries [A, N, E] over keys [S, G, E] of one document: two products, half of each."""
    return 2 * math.prod(q) * k[0]


def _attended_backward(_grad: Sequence[int], q: Sequence[int], k: Sequence[int], *_: Any, **__: Any) -> int:
    return _attended(q, k) * 5 // 2


FLASH_FLOP: dict[Any, Any] = {
    torch.ops.aten._flash_attention_forward: _attended,
    torch.ops.aten._flash_attention_backward: _attended_backward,
}
"""torch's own counts refuse queries that share keys."""


class Worker:
    """The requests of an engine: a class of ours, or ``MODULE.CLASS`` of a peer. Importing it imports all it needs."""

    def __init__(self, kind: str) -> None:
        module, _, self.name = kind.rpartition(".")
        self._kind: Any = getattr(importlib.import_module(f"benchmarks.train.{module or 'ours'}"), self.name)
        self._is_ours = not module
        self._resident = resident("VmRSS")
        self.engine: Any = None
        self.folder = Path()

    def open(self, folder: str, **options: Any) -> Answer:
        """Build the engine on the case of a folder."""
        self.folder, self.engine = Path(folder), None
        reset_peak()
        torch.manual_seed(0)
        if self._is_ours:
            options["root"] = Path(tempfile.mkdtemp(dir=self.folder)) / self.name
        self.engine = self._kind(*Case.load(self.folder), **options)
        self._cpu = time.process_time()
        return {"equal": getattr(self._kind, "equal", None)}

    def save_weights(self) -> Answer:
        self.engine.save_weights(self.folder)
        return {}

    def loss(self, **options: Any) -> Answer:
        return {"loss": self.engine.loss(**options)}

    def steps(self, count: int) -> Answer:
        """CPU and wall seconds of each of ``count`` steps."""
        wall = time.perf_counter()
        for _ in range(count):
            loss = self.engine.step()
        now = time.process_time()
        cpu, self._cpu = now - self._cpu, now
        return {"cpu": cpu / count, "wall": (time.perf_counter() - wall) / count, "loss": loss}

    def flop(self) -> Answer:
        """FLOP that torch counts in one step."""
        with FlopCounterMode(display=False, custom_mapping=FLASH_FLOP) as counter:
            self.engine.step()
        return {"flop": counter.get_total_flops()}

    def memory(self, count: int) -> Answer:
        """Bytes that opening and ``count`` steps added to the process that had imported everything, at their peak."""
        for _ in range(count):
            self.engine.step()
        on_device = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
        return {"growth_bytes": resident("VmHWM") - self._resident, "device_bytes": on_device}


def make() -> Worker:
    """Of the command line: the class."""
    torch.set_num_threads(1)
    return Worker(sys.argv[1])


if __name__ == "__main__":
    serve(make)
