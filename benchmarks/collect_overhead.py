"""Tokens per second of `collect` beside the target's bare forward over the same batches, and where the rest goes.

    python benchmarks/collect_overhead.py [--target DIR --data DIR] [--recipe safe] [--tokens 20000]

Goal: at least 90 % of the bare forward's tokens per second at q8 on a target of 50 M parameters or more. Without
--target a random one of 55 M is used (12 layers, width 640; 3 aux layers + final); without --data, random conversations
of 40 to 400 tokens. The bare forward runs before and after `collect`, and both count together: a machine changes its
clock. Rates are given per second of wall clock and, for a machine that others use too, per second of CPU, which adds up
the forward and the thread that encodes and writes beside it. The forward is timed by the CPU clock of its thread, less
the time inside the hooks; one thread, so that this clock holds all of its matrix products.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import argparse
import json
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

from collectors import job, job_open
from collectors.batching import plan_batches
from collectors.engines.hf import HfEngine, _pad
from collectors.hooks import StateTap
from collectors.target import load_target
from hiddenstore import layout
from hiddenstore.documents import seal, sha256_hex
from hiddenstore.identity import chat_template_sha256, tokenizer_sha256
from hiddenstore.inputs import PreparedInput
from hiddenstore.records import sample_id
from hiddenstore.registered import input_digest
from schemas.manifest import FileEntry
from schemas.prepared import PreparedData

RESULTS = Path(__file__).parent / "results"
WIDTH, LAYERS, VOCAB = 640, 12, 1024


class CpuClock:
    """CPU seconds by part, each measured on the thread that runs it; nested parts are taken out of the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = 0.0

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self.seconds[part] += spent - self._inner
                self._inner = outer + spent

        return timed

    def wrap_in_worker(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """For the worker thread, whose parts do not nest."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - began

        return timed


def random_target(folder: Path) -> Path:
    """A random Llama of 55 M parameters with a tokenizer of single characters."""
    from tests.collectors.tiny import tiny_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=1728,
        num_hidden_layers=LAYERS,
        num_attention_heads=10,
        num_key_value_heads=5,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_data(folder: Path, target: str, tokens: int) -> Path:
    """One parquet part of random conversations, the second half of each supervised."""
    tokenizer = load_target(target).tokenizer
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    total = 0
    while total < tokens:
        n = int(rng.integers(40, 400))
        ids, mask = rng.integers(3, VOCAB, n).astype(np.int32), (np.arange(n) >= n // 2).astype(np.uint8)
        spans = [{"role": 1, "start": 0, "end": n // 2}, {"role": 2, "start": n // 2, "end": n}]
        rows.append({"sample_id": sample_id(ids, mask), "input_ids": ids, "loss_mask": mask, "spans": spans})
        total += n
    for row in rows:
        row |= {"split": "train", "source": "random"}
    folder.mkdir()
    part = folder / layout.part_name(0)
    pq.write_table(pa.Table.from_pylist(rows), part)
    entry = FileEntry(path=part.name, size=part.stat().st_size, sha256=sha256_hex(part.read_bytes()))
    info = PreparedData(
        digest=input_digest((row["sample_id"], "train") for row in rows),
        target="random",
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=chat_template_sha256(tokenizer.chat_template),
        vocab_size=VOCAB,
        loss_on="assistant",
        mask_from="all",
        max_tokens=None,
        overlong="cut",
        validation_share=0.0,
        rows_read=len(rows),
        samples=len(rows),
        validation_samples=0,
        tokens=total,
        supervised_tokens=total // 2,
        longest=400,
        cut=0,
        duplicates=0,
        files=(entry,),
    )
    (folder / layout.DATA_JSON).write_bytes(seal(info))
    return folder


@dataclass(frozen=True)
class Bare:
    """The backbone over the batches that collect makes, no hooks: tokens, wall-clock and CPU seconds."""

    tokens: int
    wall_s: float
    cpu_s: float

    def __add__(self, other: "Bare") -> "Bare":
        return Bare(self.tokens + other.tokens, self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


def run_bare(options: job_open.CollectOptions) -> Bare:
    loaded = load_target(options.target, options.dtype, options.device)
    ran = Bare(0, 0.0, 0.0)
    for unit in PreparedInput.open(options.data).units():
        lengths = [sample.tokens for sample in unit.samples]
        for batch in plan_batches(lengths, options.batch_tokens):
            ids = torch.from_numpy(_pad([unit.samples[i].input_ids for i in batch])).to(loaded.device)
            began, cpu = time.perf_counter(), time.process_time()
            with torch.inference_mode():
                loaded.parts.backbone(input_ids=ids, use_cache=False).last_hidden_state.sum().item()
            spent = Bare(sum(lengths[i] for i in batch), time.perf_counter() - began, time.process_time() - cpu)
            ran = ran + spent
    return ran


def measure(options: job_open.CollectOptions) -> dict[str, Any]:
    """One collect run with its CPU seconds by part."""
    clock = CpuClock()
    HfEngine._forward = clock.wrap("forward", HfEngine._forward)  # type: ignore[method-assign]
    StateTap._take = clock.wrap("hooks", StateTap._take)  # type: ignore[method-assign]
    StateTap._take_final = clock.wrap("hooks", StateTap._take_final)  # type: ignore[method-assign]
    job.check_unit = clock.wrap_in_worker("check", job.check_unit)  # type: ignore[attr-defined]
    job.write_unit = clock.wrap_in_worker("encode and write", job.write_unit)  # type: ignore[attr-defined]
    run = job.CollectJob.run

    def timed_run(self: job.CollectJob) -> job.CollectReport:
        began = time.process_time()
        report = run(self)
        clock.seconds["capture"] = time.process_time() - began
        return report

    job.CollectJob.run = timed_run  # type: ignore[method-assign]
    began = time.process_time()
    report = job.collect(options)
    whole = time.process_time() - began
    parts = dict(clock.seconds)
    capture = parts.pop("capture")
    parts["rest"] = capture - sum(parts.values())
    return {
        "tokens": report.tokens,
        "bytes_stored": report.bytes_stored,
        "wall_s": round(report.seconds, 2),
        "tokens_per_s": round(report.tokens_per_s, 1),
        "cpu_s": {part: round(seconds, 3) for part, seconds in parts.items()},
        "capture_cpu_s": round(capture, 3),
        "start_cpu_s": round(whole - capture, 3),
        "outside_forward_share": round(1 - parts["forward"] / capture, 4),
        "outside_forward_share_with_start": round(1 - parts["forward"] / whole, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target")
    parser.add_argument("--data")
    parser.add_argument("--recipe", default="safe")
    parser.add_argument("--dtype")
    parser.add_argument("--layers", default="eagle3")
    parser.add_argument("--batch-tokens", type=int, default=job_open.CollectOptions.batch_tokens)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--no-result", action="store_true", help="print only")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        target = asked.target or str(random_target(place / "target"))
        data = asked.data or str(random_data(place / "data", target, asked.tokens))
        options = job_open.CollectOptions(
            data,
            place / "store",
            target,
            recipe=asked.recipe,
            layers=asked.layers,
            batch_tokens=asked.batch_tokens,
            dtype=asked.dtype,
        )
        bare = run_bare(options)
        found = measure(options)
        bare = bare + run_bare(options)
        parameters = sum(weight.numel() for weight in load_target(target).model.parameters())
    bare_rate, bare_cpu_rate = bare.tokens / bare.wall_s, bare.tokens / bare.cpu_s
    found = {
        "parameters": parameters,
        "bare_tokens_per_s": round(bare_rate, 1),
        "bare_tokens_per_cpu_s": round(bare_cpu_rate, 1),
        "share_of_bare_forward": round(found["tokens_per_s"] / bare_rate, 3),
        "share_of_bare_forward_cpu": round(found["tokens"] / found["capture_cpu_s"] / bare_cpu_rate, 3),
        **found,
    }
    result = {
        "benchmark": "collect_overhead",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "target": "random" if asked.target is None else Path(asked.target).name,
        "options": {key: getattr(asked, key) for key in ("recipe", "dtype", "layers", "batch_tokens")},
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": 1},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **found,
    }
    print(json.dumps(result, indent=2))
    if not asked.no_result:
        RESULTS.mkdir(exist_ok=True)
        name = f"collect_overhead_{asked.recipe}_{result['date']}.json"
        (RESULTS / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
