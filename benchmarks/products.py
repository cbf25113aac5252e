"""Products of rows with a weight: torch's BLAS beside what `hiddenstore.products` takes, on one thread and on all.

    python benchmarks/products.py

Shapes are those of a drafter's head and MLP: rows, columns, rows of the weight. Every product runs in turn with its
rival; figures are medians of wall time on an otherwise idle machine, as fp32 GFLOP a second.
"""

import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from hiddenstore.products import HAS_ONEDNN, Packed, linear
from trainer.scale.memory import keep_freed_memory

RESULTS = Path(__file__).parent / "results"
SHAPES = ((510, 256, 1024), (510, 1024, 256), (511, 256, 4096), (2048, 256, 8192), (512, 2048, 8192), (8, 2048, 8192))
SECONDS = 1.5
"""Time for every shape, at least five rounds."""


def race(rivals: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, in turn."""
    taken: dict[str, list[float]] = {name: [] for name in rivals}
    for call in rivals.values():
        call()
    began = time.perf_counter()
    while time.perf_counter() - began < SECONDS or len(next(iter(taken.values()))) < 5:
        for name, call in rivals.items():
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in taken.items()}


def measure(rows: int, width: int, out: int) -> dict[str, float]:
    """GFLOP a second of the forward product and of the one back to the rows."""
    x, weight, slope = torch.randn(rows, width), torch.randn(out, width), torch.randn(rows, out)
    packed = Packed(weight)
    seconds = race(
        {
            "forward, torch": lambda: F.linear(x, weight),
            "forward, ours": lambda: linear(x, weight),
            "forward, packed": lambda: packed(x),
            "back, torch": lambda: slope @ weight,
            "back, ours": lambda: linear(slope, weight.T),
        }
    )
    return {name: 2e-9 * rows * width * out / taken for name, taken in seconds.items()}


def main() -> None:
    keep_freed_memory()
    torch.manual_seed(0)
    threads, found = torch.get_num_threads(), []
    for count in dict.fromkeys((1, threads)):
        torch.set_num_threads(count)
        for rows, width, out in SHAPES:
            rates = measure(rows, width, out)
            found.append({"threads": count, "rows": rows, "width": width, "out": out, "gflops": rates})
            shown = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            print(f"{count} threads  {rows:>5} x {width:>5} x {out:>5}  {shown}")
    today = datetime.now(UTC).date().isoformat()
    machine = {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "onednn": HAS_ONEDNN,
        "cores": threads,
    }
    body = {"date": today, "machine": machine, "products": found}
    (RESULTS / f"products-{today}.json").write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
