"""Collect throughput of each engine beside the same engine without us, in turn.

    LD_PRELOAD=.venv-engines/lib/libiomp5.so OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHONPATH=. \\
        VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_LOGGING_LEVEL=WARNING \\
        .venv-engines/bin/python -m benchmarks.collect [--conversations 1700] [--random-tokens 60000]

Five processes, each with its own engine, run the same units in turn: Hugging Face's backbone alone, collect with it,
vLLM's ``generate`` alone, vLLM with its hidden-states connector whose files are deleted unread, collect with vLLM.
fp32, three aux layers and the final hidden at q8. ``wall`` is by the clock; ``cpu`` leaves out of it the time in which
the engine's thread waited for a core that another program had; ``process_cpu_s`` is of all threads of an engine that
runs in the worker, and says what collect spends beyond the bare forward. Two targets: the bundled one, and a random one
of 55 M parameters. ``--device cuda``: only Hugging Face's two, in bf16, at ``--recipe``, on a random target as wide as
an 8B with so many ``--layers``; its store is written to ``--folder``.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import report
from benchmarks.commands import demo_chats, prepare
from benchmarks.workers import Answer, Row, Timing, Turns, WorkerProcess, running, serve
from collectors.capture.job import open_job
from collectors.capture.options import CollectOptions
from collectors.demo import TARGET_DIR
from collectors.engines.hf import _pad, plan_batches
from collectors.engines.resources import default_root
from collectors.engines.vllm_server import LayerIds, StateFile, kv_transfer_config, speculative_config
from collectors.targets.layers import choose_layers
from collectors.targets.load import load_target
from hiddenstore import inputs
from hiddenstore.inputs import PreparedInput, Unit
from hiddenstore.process import Drain, Rank
from hiddenstore.targets.attention import any_length
from hiddenstore.targets.folder import open_target

BATCH_TOKENS = 4096
UNITS_A_TURN = 3
SMALL = {
    "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10,
    "num_key_value_heads": 5, "head_dim": 64,
}  # fmt: skip
"""55 M parameters."""
WIDE = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
"""Of an 8B, whose layers are a number to be named."""
RunUnits = Callable[[list[Unit]], Any]
OPEN = ExitStack()
"""The engine of a worker, until its requests end."""


class Worker:
    """One engine over DATA cut into units of so many tokens, stores in ``folder``: a unit to warm up, then turns."""

    def __init__(
        self, engine: str, data: str, target: str, folder: str, unit_tokens: str, device: str, recipe: str
    ) -> None:
        self.data, self.target, self.folder = data, target, Path(folder)
        self.device, self.recipe = device, recipe
        inputs.UNIT_TOKENS = int(unit_tokens)
        self.units = list(PreparedInput.open(data).units(inputs.UNIT_TOKENS))
        self.process_cpu_s = 0.0
        self.run: RunUnits = OPEN.enter_context(ENGINES[engine](self))

    def open(self) -> Answer:
        """Warm up; how many turns there are and the tokens of each."""
        self.run(self.units[:1])
        starts = range(1, len(self.units) - UNITS_A_TURN + 1, UNITS_A_TURN)
        return {"tokens": [sum(unit.tokens for unit in self._turn(number)) for number in range(len(starts))]}

    def turn(self, number: int) -> Answer:
        """Seconds of a turn, by the clock and without waiting for a core."""
        began, waited, spent = time.perf_counter(), _waited_for_a_core(), time.process_time()
        self.run(self._turn(number))
        if self.device != "cpu":
            torch.accelerator.synchronize()
        wall = time.perf_counter() - began
        self.process_cpu_s += time.process_time() - spent
        return {"wall": wall, "cpu": wall - (_waited_for_a_core() - waited)}

    def spent(self) -> Answer:
        """CPU seconds of all threads over the turns."""
        return {"process_cpu_s": round(self.process_cpu_s, 3)}

    def _turn(self, number: int) -> list[Unit]:
        return self.units[1 + number * UNITS_A_TURN :][:UNITS_A_TURN]


def _waited_for_a_core() -> float:
    """Seconds in which this thread could have run and another had the core (Linux)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@contextmanager
def hf_bare(worker: Worker) -> Iterator[RunUnits]:
    """The backbone over the batches that collect makes, no hooks."""
    loaded = load_target(worker.target, "float32" if worker.device == "cpu" else "bfloat16", worker.device)

    def run(units: list[Unit]) -> None:
        for unit in units:
            samples = [sample.input_ids for sample in unit.samples]
            for batch in plan_batches([len(ids) for ids in samples], BATCH_TOKENS):
                ids = torch.from_numpy(_pad([samples[i] for i in batch])).to(worker.device)
                with torch.inference_mode(), any_length():
                    loaded.parts.backbone(input_ids=ids, use_cache=False)

    yield run


@contextmanager
def vllm_bare(worker: Worker, **settings: Any) -> Iterator[RunUnits]:
    """``LLM.generate`` for one token each."""
    import vllm

    engine = vllm.LLM(
        model=worker.target,
        dtype="float32",
        max_model_len=PreparedInput.open(worker.data).info.longest + 1,
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
def vllm_connector(worker: Worker) -> Iterator[RunUnits]:
    """The same with vLLM's own hidden-states connector; nobody reads its files, they are deleted."""
    layers = open_target(worker.target).num_layers
    ids = LayerIds.of(choose_layers("eagle3", None, layers).aux_layers, layers)
    with tempfile.TemporaryDirectory(dir=default_root()) as states:
        transfer = kv_transfer_config(states, on_cpu=True)
        with vllm_bare(worker, speculative_config=speculative_config(ids), kv_transfer_config=transfer) as generate:

            def run(units: list[Unit]) -> None:
                for unit in units:
                    for answer in generate([unit]):
                        StateFile(answer.kv_transfer_params["hidden_states_path"]).remove()

            yield run


@contextmanager
def collecting(engine: str, worker: Worker) -> Iterator[RunUnits]:
    """The units of a turn as ``collect`` runs them, the last one until it is committed."""
    extra = {"enable_prefix_caching": False} if engine == "vllm" else {}
    options = CollectOptions(worker.data, worker.folder / engine, worker.target, engine=engine, recipe=worker.recipe)
    dtype = "fp32" if worker.device == "cpu" else "bf16"
    options = replace(options, dtype=dtype, device=worker.device, check="none", extra=extra)
    with open_job(options, Rank(), Drain(), lambda _text: None) as job:

        def run(units: list[Unit]) -> None:
            for unit in units:
                job.capture(unit)
            job.settle()

        yield run


ENGINES: dict[str, Any] = {
    "hf_bare": hf_bare,
    "hf_collect": partial(collecting, "hf"),
    "vllm_bare": vllm_bare,
    "vllm_connector": vllm_connector,
    "vllm_collect": partial(collecting, "vllm"),
}
SHARES = (
    ("hf_collect", "hf_bare"),
    ("vllm_connector", "vllm_bare"),
    ("vllm_collect", "vllm_bare"),
    ("vllm_collect", "vllm_connector"),
)


def in_turn(folder: Path, words: list[str], engines: list[str]) -> dict[str, Any]:
    """Tokens a second of every engine, and how fast collect is beside each alone: the median over the turns."""
    timings = [Timing(Row(name, name, ("turn",))) for name in engines]

    def start(row: Row) -> WorkerProcess:
        return WorkerProcess(row, "benchmarks.collect", ["worker", row.kind, *words], folder / "errors.log")

    with running(start, [timing.row for timing in timings]) as workers:
        (tokens, *_) = [worker.demand("open")["tokens"] for worker in workers]
        if not tokens:
            raise SystemExit("too few conversations for a turn")
        Turns(len(tokens), lambda number: {"turn": {"number": number}}).take(timings, workers)
        for timing, worker in zip(timings, workers, strict=True):
            timing.facts |= worker.ask("spent")
    names = {timing.row.kind: timing for timing in timings if timing.failed is None}
    shares = {
        f"{ours}_of_{bare}": round(names[ours].ratios(names[bare], "turn")[1], 3)
        for ours, bare in SHARES
        if {ours, bare} <= names.keys()
    }
    if {"hf_collect", "hf_bare"} <= names.keys():
        bare, whole = (names[name].facts["process_cpu_s"] for name in ("hf_bare", "hf_collect"))
        shares["hf_cpu_outside_forward"] = round(1 - bare / whole, 3)
    rates = {
        name: {
            "tokens_per_s": round(sum(tokens) / sum(timing.wall["turn"])),
            "own_tokens_per_s": round(sum(tokens) / sum(timing.cpu["turn"])),
        }
        for name, timing in names.items()
    }
    turns = [timing.document() for timing in timings]
    return {"tokens": sum(tokens), **shares, **rates, "turns": turns}


def random_target(folder: Path, dtype: str = "float32", device: str = "cpu", **shape: int) -> Path:
    """A random Llama with a tokenizer of single characters."""
    from tests.collectors.tiny import tiny_tokenizer

    config = transformers.LlamaConfig(
        vocab_size=1024, max_position_embeddings=2048, tie_word_embeddings=True, dtype=dtype, **shape
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model.to(config.dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def random_data(folder: Path, target: Path, tokens: int, halves: range = range(20, 200)) -> Path:
    """Random conversations of single characters, the second half of each supervised; the prepared data."""
    chance, rows = random.Random(0), []
    while tokens > 0:
        half = chance.choice(halves)
        texts = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=half)) for _ in range(2)]
        roles = zip(("user", "assistant"), texts, strict=True)
        rows.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in roles]}))
        tokens -= 2 * half
    folder.mkdir()
    chats, data = folder / "chats.jsonl", folder / "data"
    chats.write_text("\n".join(rows) + "\n", encoding="utf-8")
    prepare(chats, data, target)
    return data


def on_device(folder: Path, device: str, recipe: str, layers: int, tokens: int) -> dict[str, Any]:
    """Rates of the backbone alone and of collect, at the width of an 8B."""
    target = random_target(folder / "target", "bfloat16", device, num_hidden_layers=layers, **WIDE)
    data = random_data(folder / "random", target, tokens, range(200, 900))
    words = [str(data), str(target), str(folder / "stores"), str(inputs.UNIT_TOKENS), device, recipe]
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"device": name, "recipe": recipe, "layers": layers, **in_turn(folder, words, ["hf_bare", "hf_collect"])}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--conversations", type=int, default=1700)
    parser.add_argument("--random-tokens", type=int, default=60_000, help="0: the bundled target alone")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--device", help="cuda: only the wide target on it")
    parser.add_argument("--recipe", default="safe")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to work (default: temporary)")
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.device:
            of = (arguments.device, arguments.recipe, arguments.layers, arguments.random_tokens)
            report.publish("collect-device", on_device(folder, *of), arguments.results)
            return
        chats = demo_chats(folder / "chats.jsonl", arguments.conversations)
        prepare(chats, folder / "data")
        words = [str(folder / "data"), str(TARGET_DIR), str(folder / "stores"), "16384", "cpu", arguments.recipe]
        result["bundled"] = in_turn(folder, words, arguments.engines)
        if arguments.random_tokens:
            target = random_target(folder / "target", **SMALL)
            drawn = random_data(folder / "random", target, arguments.random_tokens)
            words = [str(drawn), str(target), str(folder / "random-stores"), "8192", "cpu", arguments.recipe]
            result["random"] = in_turn(folder, words, arguments.engines)
    report.publish("collect", result, arguments.results)


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        serve(lambda: Worker(*sys.argv[2:]))
        OPEN.close()
        # Two engines end their own threads and groups in ways of their own; nothing is left to save.
        os._exit(0)
    else:
        main()
