"""Storage benchmark: ``python -m benchmarks.storage [--gb 2] [--rounds 3] [--store GENUINE …] [--folder DIR]``.

Run it through ``make bench-storage``, whose environment has the peers. Needs about 7 bytes of disk and of page cache
per byte of ``--gb``; less cache makes reads from disk part of the figures. Twenty minutes on two idle cores.
"""

import argparse
import datetime
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.storage import report, sizes
from benchmarks.storage.ours import write_store
from benchmarks.storage.run import BUDGET, GROUPS, Bench
from benchmarks.storage.states import SEED, WIDTH, synthetic_sample

RESULTS = Path(__file__).parents[1] / "results"
SMALL_WIDTH, SMALL_SAMPLES = 64, 10_000
DATA = f"""Synthetic, seed {SEED}, generator `benchmarks/storage/states.py`: normal noise, AR(1) along tokens,
channel scales exp(0.6 n) with six channels x 60, token norms exp(0.3 n), one token in a thousand x 1500; samples of
lognormal length (median 700 tokens, sigma 0.7, 64 to 2,048), the last 60 % supervised. The formula is that of
`benchmarks/storage_codecs.py`, unchanged since before q4 and top-k existed; drawing it sample by sample, and the
lengths, came with this benchmark."""


def many_small(folder: Path, samples: int) -> None:
    """A q8 store of ``samples`` short samples at D=64."""
    lengths = np.random.default_rng(SEED).integers(32, 96, samples).tolist()

    def states() -> Iterator[np.ndarray]:
        for index, tokens in enumerate(lengths):
            yield synthetic_sample(index, 0, tokens, SMALL_WIDTH).view(torch.uint16).numpy()

    write_store(folder, "safe", states, lengths, SMALL_WIDTH)


def genuine_stores(folder: Path | None) -> list[Path]:
    """Every store in a folder, those of one target and the smallest recipe first."""
    return [] if folder is None else sorted(path.parent for path in folder.glob("*/store.json"))


def measure(arguments: argparse.Namespace, root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Everything of one run: the facts, and the rows by group."""
    bench = Bench(root, arguments.gb, arguments.rounds, arguments.width)
    say(f"generating {bench.raw.logical_bytes / 1e9:.2f} GB")
    bench.generate()
    say("stored bytes")
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "logical_bytes": bench.raw.logical_bytes,
        "width": arguments.width,
        "samples": len(bench.raw.lengths),
        "rounds": arguments.rounds,
        "data": DATA,
        "sizes": sizes.recipe_sizes(bench.raw, root / "sizes", min(12, len(bench.raw.lengths))),
        "peer_sizes": sizes.peer_sizes(bench.raw, root),
        "statistics": sizes.synthetic_statistics(bench.raw),
        "genuine": [sizes.store_sizes(path) for path in genuine_stores(arguments.genuine)],
    }
    bench.drop("sizes")
    groups = {}
    for name in GROUPS:
        say(f"measuring: {name}")
        groups[name] = bench.group(name)
        if name == "read":
            found["memory"] = {
                "budget": BUDGET,
                **bench.ask_alone("Ours", "raw-store", "memory_of_loader", budget=BUDGET, tokens=2048),
            }
            bench.drop("safetensors", "safe-store", "compact-store")
        if name == "loaders":
            bench.drop("mds", "litdata", "webdataset", "lance", "raw-store")
    say("first batch")
    many_small(root / "small", arguments.small_samples)
    found["first_batch"] = bench.ask_alone("Ours", "small", "first_batch")
    return found, groups


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def say(text: str) -> None:
    print(f"{datetime.datetime.now(datetime.UTC):%H:%M:%S}  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="logical GB of bf16 states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--small-samples", type=int, default=SMALL_SAMPLES)
    parser.add_argument("--genuine", type=Path, help="a folder of stores that benchmarks.storage.genuine wrote")
    parser.add_argument("--folder", type=Path, default=None, help="where to work (default: temporary)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--note", default="CPU seconds are the figure to use, wall seconds are in the JSON.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        found, groups = measure(arguments, Path(folder))
    found |= {"machine": machine(), "note": arguments.note}
    path = report.write(found, groups, arguments.results)
    print(report.page(found, groups))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
