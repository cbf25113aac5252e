"""One format in a process of its own.

CPU seconds are those of every thread of this process and of children it waited for, behind what numba takes to compile
our kernels, some seconds a process; memory the samples are read into is one page-aligned buffer that exists before.
"""

import json
import mmap
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storage import cold, formats, ours
from benchmarks.storage.states import RawStates
from benchmarks.workers import Answer, reset_peak, resident, serve, timed
from hiddenstore.codecs.compiled import compile_cpu_kernels
from hiddenstore.data import TokenBatches
from hiddenstore.store import Store


class Worker:
    """The requests of a format."""

    def __init__(self, kind: str, folder: Path, raw: RawStates) -> None:
        self.folder, self.raw, self.count = folder, raw, len(raw.lengths)
        shapes = [raw.shape(index) for index in range(self.count)]
        maker: Any = ours.FORMATS.get(kind) or getattr(formats, kind, formats.Format)
        self.format: Any = maker(folder, shapes)
        self.kind = kind
        largest = max(int(np.prod(shape)) for shape in shapes)
        self.memory = np.frombuffer(mmap.mmap(-1, largest * 2), np.uint16)
        self.memory[:] = 0
        self.states: list[np.ndarray] = []

    def out(self, index: int) -> np.ndarray:
        shape = self.raw.shape(index)
        return self.memory[: int(np.prod(shape))].reshape(shape)

    def samples(self) -> Iterator[np.ndarray]:
        return (self.raw.sample(index) for index in range(self.count))

    def write(self, keep: bool) -> Answer:
        """Write all samples, from memory unless ``keep``; without it the files go again."""
        if not keep and not self.states:
            # Once: memory that is taken anew every round is memory that the next files do without.
            self.states = list(self.samples())
        source: formats.Samples = self.samples if keep else lambda: iter(self.states)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        answer = timed(lambda: self.format.write(source))
        answer["stored_bytes"] = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if not keep:
            shutil.rmtree(self.folder)
        return answer

    def open(self) -> Answer:
        return timed(self.format.open)

    def check(self) -> Answer:
        """Whether the first, the middle and the last sample come back bit-exactly; also the warm-up."""
        copies = {i: np.zeros(self.raw.shape(i), np.uint16) for i in (0, self.count // 2, self.count - 1)}
        if self.format.shuffles:
            for index, copy in copies.items():
                self.format.read(index, copy)
        else:
            self.format.read_all(lambda index: copies.get(index, self.out(index)))
        return {"same": all(np.array_equal(copy, self.raw.sample(index)) for index, copy in copies.items())}

    def sequential(self) -> Answer:
        return timed(lambda: self.format.read_all(self.out))

    def random(self, seed: int) -> Answer:
        def work() -> None:
            for index in self._order(seed):
                self.format.read(index, self.out(index))

        return timed(work)

    def layer(self, seed: int) -> Answer:
        def work() -> None:
            for index in self._order(seed):
                self.format.read_layer(index, 1, self.out(index)[1])

        return timed(work)

    def cold(self, seed: int) -> Answer:
        """Every sample once, none of its bytes in the page cache; of the raw file, from its first byte on."""
        if isinstance(self.format, formats.Preadv):
            answer = cold.read_cold(self.folder, lambda: cold.read_in_order(self.raw.path))
            return {**answer, "stored_bytes": self.raw.path.stat().st_size}
        assert isinstance(self.format, ours.OursPack)
        filler, store = self.format.filler, self.format.store
        slots = [self.format.slots[store.sample_ids[index]] for index in self._order(seed)]
        answer = cold.read_cold(self.folder, lambda: cold.read_ahead(filler, slots))
        return {**answer, "stored_bytes": sum(record.bytes_stored for record in store.commits())}

    def _order(self, seed: int) -> list[int]:
        order: list[int] = np.random.default_rng(seed).permutation(self.count).tolist()
        return order

    def copy(self) -> Answer:
        """Copy the store that ``open`` made; the copy goes again."""
        answer = timed(self.format.copy)
        self.format.drop()
        return answer

    def load(self, device: str) -> Answer:
        """The codec that is this worker's kind, its states in memory."""
        self.codec = ours.Codec(self.kind, self.samples(), torch.device(device))
        return {}

    def encode(self) -> Answer:
        return timed(self.codec.encode)

    def decode(self) -> Answer:
        return timed(self.codec.decode)

    def memory_of_loader(self, budget: int, tokens: int) -> Answer:
        """Growth of resident memory while ``TokenBatches`` reads the store once, its budget in bytes."""
        batches = TokenBatches(Store.open(self.folder / "store"), batch_tokens=tokens, prefetch_bytes=budget, epochs=1)
        reset_peak()
        before = resident("VmRSS")
        count = sum(len(batch.packs) for batch in batches)
        return {"growth_bytes": resident("VmHWM") - before, "packs": count, "budget": budget}

    def first_batch(self) -> Answer:
        """Seconds from opening the store to its first batch; imports are done."""
        started = time.perf_counter()
        batches = TokenBatches(Store.open(self.folder / "store"), batch_tokens=8192)
        next(iter(batches))
        return {"wall": time.perf_counter() - started, "samples": len(batches.sample_ids)}


def make() -> Worker:
    """Of the command line: class, folder, raw file, lengths as JSON, width."""
    kind, folder, raw, lengths, width = sys.argv[1:]
    torch.set_num_threads(1)
    compile_cpu_kernels()
    return Worker(kind, Path(folder), RawStates(Path(raw), json.loads(lengths), int(width)))


if __name__ == "__main__":
    serve(make)
