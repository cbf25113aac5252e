"""Collect throughput of each engine beside its own bare forward, and how full the RAM-backed folder gets.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \\
        VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 \\
        .venv-engines/bin/python benchmarks/collect_engines.py [--conversations 500] [--target DIR]

The same conversations through Hugging Face and through vLLM in this process, in fp32, three aux layers and the final
hidden at q8. Bare forward: the engine over the same samples with nothing captured (vLLM: one sampled token, no
connector; Hugging Face: the backbone over the same batches, no hooks). Then both stores, captured once more without
rounding (lossless), are held against each other.
"""

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import vllm
from click.testing import CliRunner
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from collectors.batching import plan_batches
from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from collectors.engines.hf import _pad
from collectors.engines.scratch import PREFIX, default_root
from collectors.job import collect
from collectors.job_open import CollectOptions
from collectors.target import load_target
from hiddenstore.cli import main as command
from hiddenstore.inputs import PreparedInput

RESULTS = Path(__file__).parent / "results"
BATCH_TOKENS = 4096


def run(*words: str) -> dict[str, Any]:
    answer = CliRunner().invoke(command, [*words, "--json"], catch_exceptions=False)
    return dict(json.loads(answer.stdout)) | {"exit_code": answer.exit_code}


def bare_hugging_face(target: str, samples: list[np.ndarray]) -> float:
    """Tokens per second of the backbone alone."""
    loaded = load_target(target, "float32", "cpu")
    batches = plan_batches([len(ids) for ids in samples], BATCH_TOKENS)
    padded = [torch.from_numpy(_pad([samples[i] for i in batch])) for batch in batches]
    with torch.inference_mode():
        loaded.parts.backbone(input_ids=padded[0], use_cache=False)
        return _rate(samples, lambda: [loaded.parts.backbone(input_ids=ids, use_cache=False) for ids in padded])


def bare_vllm(target: str, samples: list[np.ndarray]) -> float:
    """Tokens per second of ``LLM.generate`` for one token each, nothing captured."""
    engine = vllm.LLM(
        model=target,
        dtype="float32",
        max_model_len=max(map(len, samples)) + 1,
        max_num_batched_tokens=BATCH_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in samples]
    one = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    engine.generate(prompts[:16], one, use_tqdm=False)
    rate = _rate(samples, partial(engine.generate, prompts, one, use_tqdm=False))
    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    return rate


def _rate(samples: list[np.ndarray], work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return sum(len(ids) for ids in samples) / (time.perf_counter() - began)


@contextmanager
def fullest_folder() -> Iterator[list[int]]:
    """The most bytes that this machine's scratch folders held at one time, looked at every few milliseconds."""
    most, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.003):
            size = 0
            for file in default_root().glob(f"{PREFIX}*/*.safetensors"):
                try:
                    size += file.stat().st_size
                except FileNotFoundError:
                    continue
            most[0] = max(most[0], size)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()


def measure(engine: str, data: str, target: str, store: Path, recipe: str, check: str) -> dict[str, Any]:
    extra = {"enable_prefix_caching": False} if engine == "vllm" else {}
    options = CollectOptions(
        data, store, target, engine=engine, recipe=recipe, dtype="fp32", extra=extra, check=check, device="cpu"
    )
    began = time.perf_counter()
    with fullest_folder() as most:
        report = collect(options, note=lambda _text: None)
    return {
        "tokens": report.tokens,
        "tokens_per_s": round(report.tokens_per_s),
        "capture_tokens_per_s": round(report.tokens / report.forward_s),
        "samples_compared": report.compared_samples,
        "seconds": round(report.seconds, 2),
        "seconds_with_start": round(time.perf_counter() - began, 2),
        "scratch_peak_mb": round(most[0] / 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--target", default=str(TARGET_DIR))
    parser.add_argument("--no-result", action="store_true", help="print only")
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows, data = place / "rows.jsonl", str(place / "data")
        lines = [json.dumps(row) for row in islice(conversations(), asked.conversations)]
        rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run("prepare", str(rows), "-o", data, "--target", asked.target)
        samples = [sample.input_ids for sample in PreparedInput.open(data).samples()]
        found["samples"] = len(samples)
        for engine, bare in (("hf", bare_hugging_face), ("vllm", bare_vllm)):
            found[engine] = {"bare_tokens_per_s": round(bare(asked.target, samples))}
        for engine in ("hf", "vllm"):
            found[engine] |= measure(engine, data, asked.target, place / engine, "safe", "none")
            exact = place / f"{engine}-exact"
            checked = measure(engine, data, asked.target, exact, "lossless", "hf=8")
            found[engine]["samples_compared"] = checked["samples_compared"]
            found[engine]["meaning_ok"] = run("verify", str(exact), "--meaning")["ok"]
        difference = run("diff", str(place / "hf-exact"), str(place / "vllm-exact"), "--samples", "0")
        found["diff"] = {key: difference[key] for key in ("coverage", "compared_samples", "fields", "top1_agreement")}
    result = {
        "benchmark": "collect_engines",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "target": Path(asked.target).name,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "vllm": vllm.__version__},
        **found,
    }
    print(json.dumps(result, indent=2))
    if not asked.no_result:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"collect_engines_{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
