"""The trainer's peak memory does not depend on how deep the target is: growth for 8 and 24 layers of one width.

Each depth trains in a process of its own on a store of random states; growth is peak resident memory less that after
the imports. Usage: python benchmarks/trainer_memory.py [--repeat N]
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.workers import resident

WIDTH, SAMPLES, TOKENS = 256, 48, 512
DEPTHS = {8: (1, 3, 4), 24: (1, 11, 20)}
WORDS = [
    "data.batch_tokens=2048", "data.pack_tokens=2048", "data.prefetch_mb=8", "drafter.num_heads=4",
    "drafter.num_kv_heads=2", "drafter.head_dim=64", "drafter.intermediate_size=512", "loss.steps=3",
    "train.max_steps=8", "train.validate_every=0",
]  # fmt: skip


def make_store(folder: Path, depth: int) -> str:
    """A store of random states, as if captured from a target of ``depth`` layers."""
    import numpy as np

    from hiddenstore.inputs import input_digest
    from hiddenstore.records import Sample, sample_id
    from hiddenstore.testing import builders
    from hiddenstore.writer import create_store, write_unit

    capture = builders.capture_spec(width=WIDTH)
    target = capture.target.model_copy(update={"num_layers": depth})
    capture = capture.model_copy(update={"target": target, "aux_layers": DEPTHS[depth]})
    store = create_store(folder / f"store-{depth}", capture, builders.HEAD, "safe", builders.target_files(WIDTH))
    rng = np.random.default_rng(0)
    samples = []
    for index in range(SAMPLES):
        ids = rng.integers(0, builders.VOCAB, TOKENS).astype(np.int32)
        mask = (np.arange(TOKENS) >= 128).astype(np.uint8)
        spans = np.array([[2, 128, TOKENS]], np.int32)
        samples.append(Sample(sample_id(ids, mask), ids, mask, spans, "train", f"random:{index}"))
    digest = input_digest((sample.id, sample.split) for sample in samples)
    for begin in range(0, SAMPLES, 16):
        records = builders.random_records(samples[begin : begin + 16], capture)
        write_unit(store, f"{digest[:12]}-{begin:06d}", digest, records, (), builders.ENGINE)
    return str(store.path)


def growth(store: str, run: str) -> int:
    """Bytes a short training run adds to a process that has imported everything."""
    import torch
    import torch._dynamo  # the first optimizer step would import it

    from trainer.drafters import eagle3  # noqa: F401
    from trainer.train import loop

    torch.set_num_threads(1)
    before = resident("VmRSS")
    with contextlib.redirect_stdout(sys.stderr):
        loop.train(store, run, words=WORDS)
    return resident("VmHWM") - before


def measure(repeat: int) -> dict[str, Any]:
    """Growth per depth and how far apart their medians are."""
    values: dict[int, list[int]] = {depth: [] for depth in DEPTHS}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh,
    ):
        stores = {depth: make_store(Path(folder), depth) for depth in DEPTHS}
        for turn in range(repeat):
            for depth, store in stores.items():
                values[depth].append(fresh.submit(growth, store, f"{folder}/run-{depth}-{turn}").result())
    shallow, deep = (statistics.median_low(values[depth]) for depth in DEPTHS)
    return {"growth_bytes": values, "difference": abs(deep - shallow) / shallow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    print(json.dumps(measure(parser.parse_args().repeat)))


if __name__ == "__main__":
    main()
