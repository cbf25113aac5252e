"""Peak memory does not grow with the depth of the target."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_peak_growth_is_equal_for_8_and_24_layers_of_one_width() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "trainer_memory.py")],
        capture_output=True, text=True, env=environment, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["difference"] < 0.02


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
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    limited, unlimited = (
        int(subprocess.run(
            [sys.executable, "-c", OF_MANY_SHAPES, word], capture_output=True, text=True, env=environment, check=True
        ).stdout)
        for word in ("limited", "unlimited")
    )  # fmt: skip
    if unlimited < 0:
        pytest.skip("this CPU multiplies by torch's own kernels, which keep nothing")
    assert limited < unlimited / 2
