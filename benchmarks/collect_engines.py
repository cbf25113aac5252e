"""Collect throughput of each engine beside the same engine without us, in turn.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHONPATH=. \\
        VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=WARNING \\
        .venv-engines/bin/python benchmarks/collect_engines.py [--conversations 1700] [--random-tokens 60000]

Five processes, each with its own engine, run the same units in turn, so that whatever else the machine does costs all
of them alike: Hugging Face's backbone alone, collect with it, vLLM's ``generate`` alone, vLLM with its hidden-states
connector whose files are deleted unread, collect with vLLM. fp32, three aux layers and the final hidden at q8.
``tokens_per_s`` is by the clock; ``own_tokens_per_s`` leaves out the time in which the engine's thread waited for a
core that another program had. Two targets: the bundled one, and a random one of 55 M parameters.
"""

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
import vllm
from click.testing import CliRunner
from collect_overhead import random_data, random_target

from collectors.batching import plan_batches
from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from collectors.engines.assembly import Assembly
from collectors.engines.hf import _pad
from collectors.engines.scratch import PREFIX, default_root
from collectors.engines.vllm_files import AskedIds, StateFile, kv_transfer_config, speculative_config
from collectors.job import open_job
from collectors.job_open import CollectOptions
from collectors.layers import choose_layers
from collectors.target import load_target, open_target
from hiddenstore import inputs
from hiddenstore.cli import main as command
from hiddenstore.inputs import PreparedInput, Unit
from hiddenstore.rank import Drain, Rank

RESULTS = Path(__file__).parent / "results"
BATCH_TOKENS = 4096
UNITS_A_TURN = 3
RunUnits = Callable[[list[Unit]], Any]


@dataclass(frozen=True)
class Work:
    """What every process gets: DATA cut into units of so many tokens, a target, a folder for stores."""

    data: str
    target: str
    folder: Path
    unit_tokens: int

    def turns(self) -> list[list[Unit]]:
        """One unit to warm up, then whole turns."""
        inputs.UNIT_TOKENS = self.unit_tokens
        units = list(PreparedInput.open(self.data).units(self.unit_tokens))
        starts = range(1, len(units) - UNITS_A_TURN + 1, UNITS_A_TURN)
        return [units[:1], *(units[start : start + UNITS_A_TURN] for start in starts)]


@contextmanager
def hf_bare(work: Work) -> Iterator[RunUnits]:
    """The backbone over the batches that collect makes, no hooks."""
    loaded = load_target(work.target, "float32", "cpu")

    def run(units: list[Unit]) -> None:
        for unit in units:
            samples = [sample.input_ids for sample in unit.samples]
            for batch in plan_batches([len(ids) for ids in samples], BATCH_TOKENS):
                ids = torch.from_numpy(_pad([samples[i] for i in batch]))
                loaded.parts.backbone(input_ids=ids, use_cache=False)

    with torch.inference_mode():
        yield run


@contextmanager
def vllm_bare(work: Work, **settings: Any) -> Iterator[RunUnits]:
    """``LLM.generate`` for one token each."""
    engine = vllm.LLM(
        model=work.target,
        dtype="float32",
        max_model_len=PreparedInput.open(work.data).info.longest + 1,
        max_num_batched_tokens=BATCH_TOKENS,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **settings,
    )
    one = vllm.SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def run(units: list[Unit]) -> Any:
        samples = [sample.input_ids for unit in units for sample in unit.samples]
        return engine.generate([{"prompt_token_ids": ids.tolist()} for ids in samples], one, use_tqdm=False)

    yield run


@contextmanager
def vllm_connector(work: Work) -> Iterator[RunUnits]:
    """The same with vLLM's own hidden-states connector; nobody reads its files, they are deleted."""
    layers = open_target(work.target).num_layers
    asked = AskedIds.of(choose_layers("eagle3", None, layers).aux_layers, layers)
    with tempfile.TemporaryDirectory(dir=default_root()) as states:
        transfer = kv_transfer_config(states, on_cpu=True)
        with vllm_bare(work, speculative_config=speculative_config(asked), kv_transfer_config=transfer) as generate:

            def run(units: list[Unit]) -> None:
                for unit in units:
                    for answer in generate([unit]):
                        StateFile(answer.kv_transfer_params["hidden_states_path"]).remove()

            yield run


@contextmanager
def collecting(engine: str, work: Work) -> Iterator[RunUnits]:
    """The units of a turn as ``collect`` runs them, the last one until it is committed."""
    extra = {"enable_prefix_caching": False} if engine == "vllm" else {}
    options = CollectOptions(work.data, work.folder / engine, work.target, engine=engine, recipe="safe")
    options = replace(options, dtype="fp32", device="cpu", check="none", extra=extra)
    with open_job(options, Rank(), Drain(), lambda _text: None) as job:

        def run(units: list[Unit]) -> None:
            for unit in units:
                job.capture(unit)
            job.settle()

        yield run


RUNNERS = {
    "hf_bare": hf_bare,
    "hf_collect": partial(collecting, "hf"),
    "vllm_bare": vllm_bare,
    "vllm_connector": vllm_connector,
    "vllm_collect": partial(collecting, "vllm"),
}


def serve(name: str, work: Work, pipe: Connection) -> None:
    """A process of its own: runs the turns it is told, answers with the seconds of each; None ends it."""
    turns = work.turns()
    with RUNNERS[name](work) as run:
        pipe.send(len(turns))
        while (turn := pipe.recv()) is not None:
            began, waited = time.perf_counter(), _waited_for_a_core()
            run(turns[turn])
            clock_s = time.perf_counter() - began
            pipe.send((clock_s, clock_s - (_waited_for_a_core() - waited)))
    pipe.send(None)
    # Two engines end their own threads and groups in ways of their own; nothing is left to save.
    os._exit(0)


def _waited_for_a_core() -> float:
    """Seconds in which this thread could have run and another had the core (Linux)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def in_turn(work: Work) -> dict[str, dict[str, Any]]:
    """Tokens per second of every runner."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for name in RUNNERS:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, work, theirs), daemon=True).start()
        turns = pipes[name].recv()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNNERS}
    for turn in range(turns):
        for name, pipe in pipes.items():
            pipe.send(turn)
            seconds[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
        pipe.recv()
    tokens = sum(unit.tokens for units in work.turns()[1:] for unit in units)
    return {
        name: {
            "tokens_per_s": round(tokens / sum(clock for clock, _ in found[1:])),
            "own_tokens_per_s": round(tokens / sum(own for _, own in found[1:])),
            "turns_s": [[round(clock, 2), round(own, 2)] for clock, own in found[1:]],
        }
        for name, found in seconds.items()
    } | {"tokens": tokens}


def shares(found: dict[str, Any]) -> dict[str, float]:
    """How fast collect is beside each engine alone: the median over the turns, by each one's own time."""

    def share(name: str, of: str) -> float:
        turns = zip(found[of]["turns_s"], found[name]["turns_s"], strict=True)
        return round(median(bare / ours for (_, bare), (_, ours) in turns), 3)

    return {
        "hf_collect_of_bare": share("hf_collect", "hf_bare"),
        "vllm_connector_of_bare": share("vllm_connector", "vllm_bare"),
        "vllm_collect_of_bare": share("vllm_collect", "vllm_bare"),
        "vllm_collect_of_connector": share("vllm_collect", "vllm_connector"),
    }


def fullest_folder(work: Work) -> float:
    """The most megabytes in the scratch folder while vLLM captures, looked at whenever a file is read; not timed."""
    most, put = 0, Assembly.put

    def look(self: Assembly, *words: Any) -> None:
        nonlocal most
        files = list(default_root().glob(f"{PREFIX}*/*.safetensors"))
        most = max(most, sum(file.stat().st_size for file in files if file.exists()))
        put(self, *words)

    Assembly.put = look  # type: ignore[method-assign]
    elsewhere = replace(work, folder=work.folder / "again")
    elsewhere.folder.mkdir()
    with collecting("vllm", elsewhere) as run:
        run(work.turns()[0])
    return round(most / 1e6, 2)


def bundled(folder: Path, count: int) -> Work:
    rows, data = folder / "rows.jsonl", str(folder / "data")
    lines = [json.dumps(row) for row in islice(conversations(), count)]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["prepare", str(rows), "-o", data, "--target", str(TARGET_DIR), "--json"]
    CliRunner().invoke(command, words, catch_exceptions=False)
    return Work(data, str(TARGET_DIR), folder, 16_384)


def random(folder: Path, tokens: int) -> Work:
    target = str(random_target(folder / "target"))
    return Work(str(random_data(folder / "data", target, tokens)), target, folder, 8_192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=1700)
    parser.add_argument("--random-tokens", type=int, default=60_000)
    parser.add_argument("--no-result", action="store_true", help="print only")
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "collect_engines",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "vllm": vllm.__version__},
    }
    for name, make, size in (("bundled", bundled, asked.conversations), ("random", random, asked.random_tokens)):
        with tempfile.TemporaryDirectory() as folder:
            work = make(Path(folder), size)
            found = in_turn(work)
            parameters = sum(weight.numel() for weight in load_target(work.target).model.parameters())
            result[name] = {"parameters": parameters, **shares(found), **found}
            if name == "bundled":
                result[name]["scratch_peak_mb"] = fullest_folder(work)
        print(json.dumps({name: result[name]}, indent=2), flush=True)
    if not asked.no_result:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"collect_engines_{result['date']}.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
