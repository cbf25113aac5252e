"""The same step at the shapes of 8B and 70B targets on a device: tokens a second, MFU, peak memory.

Every token supervised, bf16 products over fp32 master weights on a GPU, fp32 on a CPU; once with the batch in memory
and once read from a q8 store at every step. MFU counts what torch's counter sees in a step, a recomputation included.
Cases are drawn on the CPU and lie on disk first: 6 GB for the largest.
"""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import progress
from benchmarks.train.case import Case
from benchmarks.workers import ONE_THREAD, Answer, Row, WorkerProcess, running
from schemas.layers import default_aux_layers

PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0}
"""Dense bf16 of the vendor's sheets."""
ROWS = (Row("in memory", "OursInMemory"), Row("reading", "OursQ8"))
WARM_STEPS = 2


def _eight(drafter: Any, tokens: int, **dimensions: int) -> Case:
    """At the shape of an 8B target."""
    shape = {"width": 4096, "wider": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128_256}
    shape["draft"] = 32_000 if drafter == "eagle3" else shape["vocab"]
    blocks = {"layers": 5, "block": 16, "anchors": 512}
    return Case(drafter, tokens, aux=tuple(default_aux_layers(drafter, 32)), **shape | blocks | dimensions)


CASES = {
    **{f"eagle3-8b-{tokens}": _eight("eagle3", tokens) for tokens in (2048, 4096, 8192, 16384, 32768)},
    **{f"dflash-8b-{tokens}": _eight("dflash", tokens) for tokens in (2048, 8192, 32768)},
    "eagle3-70b-8192": _eight("eagle3", 8192, width=8192, wider=28672, heads=64),
}


def measure(row: Row, case: Case, folder: Path, count: int, **train: Any) -> Answer:
    """Seconds and FLOP a step, tokens a second, and the peak of the device's memory; ``train`` as in its section."""

    def start(row: Row) -> WorkerProcess:
        return WorkerProcess(row, "benchmarks.train.worker", [row.kind], folder.with_suffix(".log"), ONE_THREAD)

    with running(start, [row]) as (worker,):
        try:
            worker.demand("open", folder=str(folder), prefetch_mb=case.two_packs_mb, **train)
            worker.demand("steps", count=WARM_STEPS)
            answer = worker.demand("steps", count=count)
            return {
                **answer,
                "tokens_per_s": case.tokens / answer["wall"],
                "peak_bytes": worker.demand("memory", count=0)["device_bytes"],
                "flop": worker.demand("flop")["flop"],
            }
        except RuntimeError as error:
            return {"failed": str(error)}


def every_case(root: Path, only: Sequence[str], shrink: dict[str, int], count: int, **train: Any) -> dict[str, Any]:
    """Each case whose name begins with one of ``only``, its dimensions replaced by those of ``shrink``."""
    name = torch.cuda.get_device_name(train["device"]) if train["device"].startswith("cuda") else "cpu"
    peak = next((peak for word, peak in PEAK_TFLOPS.items() if word in name), None)
    result: dict[str, Any] = {"device": name, "peak_tflops": peak}
    cases = {label: replace(case, **shrink) for label, case in CASES.items() if label.startswith(tuple(only or [""]))}
    with ThreadPoolExecutor() as pool:
        # Each is drawn on one thread, for ten seconds.
        list(pool.map(lambda label: cases[label].save(root / label), cases))
    for label, case in cases.items():
        progress(label)
        folder = root / label
        result[label] = {row.label: measure(row, case, folder, count, **train) for row in ROWS}
        for answer in result[label].values():
            if peak and "failed" not in answer:
                answer["mfu"] = answer["flop"] / 1e12 / answer["wall"] / peak
        shutil.rmtree(folder)
    return result
