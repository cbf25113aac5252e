"""Peak memory does not grow with the depth of the target."""

import os
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from benchmarks.workers import resident
from hiddenstore.inputs import input_digest
from hiddenstore.records import Sample, sample_id
from hiddenstore.testing import builders
from hiddenstore.writer import create_store, write_unit

ROOT = Path(__file__).parents[2]
WIDTH, SAMPLES, TOKENS = 256, 48, 512
DEPTHS = {8: (1, 3, 4), 24: (1, 11, 20)}
WORDS = [
    "data.batch_tokens=2048", "data.pack_tokens=2048", "data.prefetch_mb=8", "drafter.num_heads=4",
    "drafter.num_kv_heads=2", "drafter.head_dim=64", "drafter.intermediate_size=512", "loss.steps=3",
    "train.max_steps=8", "train.validate_every=0",
]  # fmt: skip


def make_store(folder: Path, depth: int) -> str:
    """A store of random states, as if captured from a target of ``depth`` layers."""
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
    """Bytes that a short training run adds to a process that has imported everything."""
    import torch
    import torch._dynamo  # the first optimizer step would import it

    from trainer.drafters import eagle3  # noqa: F401
    from trainer.train import loop

    torch.set_num_threads(1)
    before = resident("VmRSS")
    loop.train(store, run, words=WORDS)
    return resident("VmHWM") - before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_peak_growth_is_equal_for_8_and_24_layers_of_one_width(tmp_path: Path) -> None:
    stores = {depth: make_store(tmp_path, depth) for depth in DEPTHS}
    grown: dict[int, list[int]] = {depth: [] for depth in DEPTHS}
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as fresh:
        for turn in range(3):
            for depth, store in stores.items():
                grown[depth].append(fresh.submit(growth, store, str(tmp_path / f"run-{depth}-{turn}")).result())
    shallow, deep = (statistics.median_low(grown[depth]) for depth in DEPTHS)
    assert abs(deep - shallow) / shallow < 0.02


OF_MANY_SHAPES = """
import sys
import torch
from benchmarks.workers import resident
from hiddenstore.targets.matmul import HAS_ONEDNN, linear
from trainer.parallel.group import limit_kernel_caches

torch.set_num_threads(1)
if sys.argv[1] == "limited":
    limit_kernel_caches()
weight, rows = torch.randn(512, 256), torch.randn(400, 256)
linear(rows[:8], weight)
before = resident("VmRSS")
for count in range(9, 400, 2):
    linear(rows[:count], weight)
print(resident("VmRSS") - before if HAS_ONEDNN else -1)
"""


def test_products_of_ever_new_shapes_keep_few_kernels_in_memory() -> None:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    limited, unlimited = (
        int(subprocess.run(
            [sys.executable, "-c", OF_MANY_SHAPES, word], capture_output=True, text=True, env=environment, check=True
        ).stdout)
        for word in ("limited", "unlimited")
    )  # fmt: skip
    if unlimited < 0:
        pytest.skip("this CPU multiplies by torch's own kernels, which keep nothing")
    assert limited < unlimited / 2
