"""One format in a process of its own: requests as JSON lines on stdin, answers on stdout.

CPU seconds are those of every thread of this process and of children it waited for; memory the samples are read into is
one page-aligned buffer that exists before.
"""

import json
import mmap
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storage import ours, peers
from benchmarks.storage.states import RawStates


class Worker:
    """``request["op"]`` names a method; its answer goes back as it is."""

    def __init__(self, name: str, folder: Path, raw: RawStates) -> None:
        self.name, self.folder, self.raw = name, folder, raw
        shapes = [raw.shape(index) for index in range(len(raw.lengths))]
        maker: Any = getattr(peers, name, None) or getattr(ours, name)
        self.format: peers.Format = maker(folder, shapes)
        self.count = len(shapes)
        largest = max(int(np.prod(shape)) for shape in shapes)
        self.memory = np.frombuffer(mmap.mmap(-1, largest * 2), np.uint16)
        self.memory[:] = 0

    def out(self, index: int) -> np.ndarray:
        shape = self.raw.shape(index)
        return self.memory[: int(np.prod(shape))].reshape(shape)

    def samples(self) -> Iterator[np.ndarray]:
        return (self.raw.sample(index) for index in range(self.count))

    def write(self, keep: bool) -> dict[str, float]:
        """Write all samples from memory; without ``keep`` the files go again."""
        held = list(self.samples()) if not keep else None
        source: peers.Samples = self.samples if held is None else lambda: iter(held)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if hasattr(self.format, "prepare"):
            self.format.prepare(source)
        found = timed(lambda: self.format.write(source))
        found["stored_bytes"] = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        if not keep:
            shutil.rmtree(self.folder)
        return found

    def open(self) -> dict[str, float]:
        return timed(self.format.open)

    def check(self) -> dict[str, bool]:
        """Whether the first, the middle and the last sample come back bit-exactly; also the warm-up."""
        wanted = (0, self.count // 2, self.count - 1)
        held = {index: np.zeros(self.raw.shape(index), np.uint16) for index in wanted}
        if self.format.shuffles:
            for index, place in held.items():
                self.format.read(index, place)
        else:
            self.format.read_all(lambda index: held.get(index, self.out(index)))
        return {"same": all(np.array_equal(place, self.raw.sample(index)) for index, place in held.items())}

    def sequential(self) -> dict[str, float]:
        return timed(lambda: self.format.read_all(self.out))

    def random(self, seed: int) -> dict[str, float]:
        order = np.random.default_rng(seed).permutation(self.count).tolist()

        def work() -> None:
            for index in order:
                self.format.read(index, self.out(index))

        return timed(work)

    def layer(self, seed: int) -> dict[str, float]:
        order = np.random.default_rng(seed).permutation(self.count).tolist()

        def work() -> None:
            for index in order:
                self.format.read_layer(index, 1, self.out(index)[1])

        return timed(work)

    def memory_of_loader(self, budget: int, tokens: int) -> dict[str, float]:
        """Growth of resident memory while ``TokenBatches`` reads the store once, its budget in bytes."""
        from hiddenstore.data import TokenBatches
        from hiddenstore.store import Store

        batches = TokenBatches(Store.open(self.folder / "store"), batch_tokens=tokens, prefetch_bytes=budget, epochs=1)
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        count = sum(len(batch.packs) for batch in batches)
        return {"growth_bytes": resident("VmHWM") - before, "packs": count}

    def first_batch(self) -> dict[str, float]:
        """Seconds from opening the store to its first batch; imports are done."""
        from hiddenstore.data import TokenBatches
        from hiddenstore.store import Store

        started = time.perf_counter()
        batches = TokenBatches(Store.open(self.folder / "store"), batch_tokens=8192)
        next(iter(batches))
        return {"wall": time.perf_counter() - started, "samples": len(batches.sample_ids)}


def timed(work: Callable[[], Any]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), cpu_seconds()
    work()
    return {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}


def cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    name, folder, raw, lengths, width = sys.argv[1:]
    torch.set_num_threads(1)
    answers, sys.stdout = sys.stdout, sys.stderr
    states = RawStates(Path(raw), json.loads(lengths), int(width))
    worker = Worker(name, Path(folder), states)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(worker, request.pop("op"))(**request)
        except Exception as error:  # noqa: BLE001 - a peer's failure is a row of the results, whatever it is
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
