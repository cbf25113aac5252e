"""The same 500 conversations through Hugging Face, a real vLLM and the TensorRT-LLM double: equal stores, no mistakes.

The double stands for what TensorRT-LLM documents; it is no TensorRT-LLM.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_world import hiddenstore
from torch import Tensor

from collectors.capture import job
from collectors.capture.options import CollectOptions
from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from collectors.engines import Captured, CaptureRequest, EngineOptions, hf
from collectors.engines.hf import HfEngine
from collectors.engines.vllm import VllmProcess
from collectors.engines.vllm_server import LayerIds
from collectors.targets.load import EngineTarget, LoadedTarget, load_target
from hiddenstore.errors import CaptureError
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

DOUBLE = Path(__file__).parents[1] / "collectors" / "double_trtllm"
ENGINES = ("hf", "vllm", "trtllm")
CONVERSATIONS, FEW = 500, 16
SHORT = 400
"""Characters. Long samples, run in chunks, are those of ``test_capture.py``."""
LAYERS = (1, 3, 4)
SAME_TOP = 0.995
"""Share of rows with the same next token: rounded to bf16 before or after the norm, a near tie falls either way."""

BLOCK = 16
"""Tokens that a prefix cache keeps or drops together."""

ONE_STEP = 2.0**-7
"""The spacing of bf16 values, relative to them at most.

A store holds bf16: fp32 values of two engines that lie 1e-5 apart round to either side of a step, and no row is
further off even when all of its values do. A wrong layer is tens of times as far.
"""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """JSONL of the conversations."""
    return list(islice((line for line in map(json.dumps, conversations()) if len(line) < SHORT), CONVERSATIONS))


def prepared(folder: Path, lines: list[str]) -> str:
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    hiddenstore("prepare", str(rows), "-o", str(folder / "data"), "--target", str(TARGET_DIR))
    return str(folder / "data")


@pytest.fixture(scope="module")
def stores(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One store per engine, in fp32 at ``lossless``, each collected by the command in a process of its own."""
    folder = tmp_path_factory.mktemp("three")
    data = prepared(folder, lines)

    def collected(engine: str) -> str:
        words = ["collect", data, "-o", str(folder / engine), "--target", str(TARGET_DIR), "--engine", engine]
        words += ["--dtype", "fp32", "--layers", ",".join(map(str, LAYERS)), "--recipe", "lossless", "--json"]
        path = os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "hiddenstore.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["samples"] == CONVERSATIONS
        return str(folder / engine)

    with ThreadPoolExecutor(len(ENGINES)) as pool:
        return dict(zip(ENGINES, pool.map(collected, ENGINES), strict=True))


@pytest.mark.parametrize(("one", "other"), [("hf", "vllm"), ("hf", "trtllm"), ("vllm", "trtllm")])
def test_two_engines_give_the_same_store_within_one_step_of_bf16(stores: dict[str, str], one: str, other: str) -> None:
    found = hiddenstore("diff", stores[one], stores[other], "--samples", "0", "--tolerance", str(ONE_STEP))
    assert found["beyond_tolerance"] == []
    assert found["coverage"] == {"only_a": 0, "both": CONVERSATIONS, "only_b": 0}
    assert found["compared_samples"] == CONVERSATIONS
    assert [field["field"] for field in found["fields"]] == [*(f"layer_{layer}" for layer in LAYERS), "final"]
    assert found["final_normed"] == ("trtllm" in (one, other))
    assert found["top1_agreement"] > SAME_TOP


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_captured_means_what_it_says(stores: dict[str, str], engine: str) -> None:
    assert hiddenstore("verify", stores[engine], "--meaning")["ok"]
    store = Store.open(stores[engine])
    assert {record.engine.name for record in store.commits()} == {engine}
    assert store.capture.final_norm == ("post_norm" if engine == "trtllm" else "pre_norm")


Spoil = Callable[[Tensor], Tensor]
"""Takes the states [T, n, D] of one request, layers ascending and the final hidden last, to wrong ones."""


def normed(reference: LoadedTarget) -> Spoil:
    """The final hidden after its norm, handed out as the one before it."""

    def spoil(states: Tensor) -> Tensor:
        final = reference.head.norm(states[:, -1]).to(states.dtype)
        return torch.cat([states[:, :-1], final[:, None]], dim=1)

    return spoil


def of_another_request(_reference: LoadedTarget) -> Spoil:
    """Each request gets the states of the one before it, as many rows as it has tokens."""
    before: list[Tensor] = []

    def spoil(states: Tensor) -> Tensor:
        before.append(states)
        other = before[max(0, len(before) - 2)]
        return other.repeat(-(-len(states) // len(other)), 1, 1)[: len(states)]

    return spoil


def block_left_out(_reference: LoadedTarget) -> Spoil:
    """A cached block was not run: the rest moved up, old rows stand behind it."""
    return lambda states: torch.cat([states[BLOCK:], states[:BLOCK]])


def block_zero(_reference: LoadedTarget) -> Spoil:
    return lambda states: torch.cat([torch.zeros_like(states[:BLOCK]), states[BLOCK:]])


def cut_short(_reference: LoadedTarget) -> Spoil:
    return lambda states: states[BLOCK:]


def never_filled(_reference: LoadedTarget) -> Spoil:
    return torch.zeros_like


def spoil_hugging_face(patch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """The transformers engine hands out spoiled states."""
    right = HfEngine.capture

    def capture(self: HfEngine, requests: Sequence[CaptureRequest], *watched: Any) -> Captured:
        captured = right(self, requests, *watched)
        whole = torch.cat([captured.aux, captured.final[None]]).transpose(0, 1)
        lengths = [len(request.input_ids) for request in requests]
        spoiled = torch.cat([spoil(states) for states in whole.split(lengths)]).transpose(0, 1)
        return replace(captured, aux=spoiled[:-1], final=spoiled[-1])

    patch.setattr(HfEngine, "capture", capture)


def spoil_vllm(patch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    """vLLM's worker hands over spoiled states; everything around it is as it is."""
    from collectors.engines.vllm_connector import HiddenStoreConnector as Connector

    right = Connector._write_tensors

    def write(self: Connector, tensors: dict[str, Tensor], *rest: Any) -> None:
        right(self, tensors | {"hidden_states": spoil(tensors["hidden_states"]).contiguous()}, *rest)

    patch.setattr(Connector, "_write_tensors", write)


def ask_one_on(patch: pytest.MonkeyPatch) -> None:
    """Both engines are asked for the layers above those that collect wants."""
    tap, asked = hf.StateTap, LayerIds.of
    patch.setattr(hf, "StateTap", lambda parts, aux, *rest: tap(parts, above(aux), *rest))
    patch.setattr(LayerIds, "of", lambda aux, count: asked(above(aux), count))


def above(layers: Sequence[int]) -> tuple[int, ...]:
    return tuple(layer + 1 for layer in layers)


@dataclass(frozen=True)
class Mistake:
    """What goes wrong, in the double by its own ``trap``, and how each engine's capture is refused: kind, words."""

    name: str
    spoil: Callable[[LoadedTarget], Spoil] | None
    trap: dict[str, object]
    refused: dict[str, tuple[str, str]]


ONE_ON = ("cross-check", r"layer_1 of .* matches layer_2, so layer ids are off by \+1")
NORMED = ("cross-check", "final of .* is the final hidden after the final norm, stored as the one before it")
NOT_NORMED = ("norm-state", r"misses the unit scale of the final norm by \d")
OTHERS = ("cross-check", r"matches request \d+, so answers were paired with the wrong requests")
MOVED_UP = ("cross-check", f"the first {BLOCK} positions are missing and the rest moved up, as where a prefix cache")
ZERO_BLOCK = ("cross-check", f"{BLOCK} of \\d+ rows are zero, as where a prefix cache")
FEWER = ("engine-shape", "fewer positions than tokens are what a prefix cache")
NOT_SENT = ("engine-tokens", f"states of {BLOCK} tokens that nobody sent")
UNFILLED = ("cross-check", "every row is zero, so the engine never filled this layer")
ALL_OFF = ("norm-state", r"misses the unit scale of the final norm by 100\.0%")

MISTAKES = [
    Mistake("layers-one-on", None, {"shift": True}, {"hf": ONE_ON, "vllm": ONE_ON, "trtllm": ONE_ON}),
    Mistake("norm", normed, {"pre_norm": True}, {"hf": NORMED, "vllm": NORMED, "trtllm": NOT_NORMED}),
    Mistake("shuffled", of_another_request, {"swap": 2}, {"hf": OTHERS, "vllm": OTHERS, "trtllm": OTHERS}),
    Mistake("prefix-left-out", block_left_out, {"reuse": BLOCK}, {"vllm": MOVED_UP, "trtllm": MOVED_UP}),
    Mistake("prefix-zero", block_zero, {}, {"vllm": ZERO_BLOCK}),
    Mistake("cut", cut_short, {"cut": BLOCK}, {"vllm": FEWER, "trtllm": NOT_SENT}),
    Mistake("zero", never_filled, {"zero": True}, {"hf": UNFILLED, "vllm": UNFILLED, "trtllm": ALL_OFF}),
]
"""Hugging Face runs whole prompts without a cache, so nothing of them can be left out."""


@pytest.fixture(scope="module")
def few(lines: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("few"), lines[:FEW])


@pytest.fixture(scope="module")
def reference() -> LoadedTarget:
    return load_target(str(TARGET_DIR), "float32", "cpu")


@pytest.fixture(scope="module")
def running_vllm() -> Iterator[VllmProcess]:
    """One vLLM for every mistake that is made in its worker."""
    options = EngineOptions(LAYERS, 4096, longest=1024, dtype="float32")
    started = VllmProcess(EngineTarget(open_target(str(TARGET_DIR)), "float32"), options)
    yield started
    started.close()


@pytest.fixture(scope="module")
def double() -> Iterator[None]:
    """``import tensorrt_llm`` finds the double."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOUBLE))
        import tensorrt_llm

        yield
        for worker in tensorrt_llm.llmapi._workers:
            worker.stop()
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("mistake", "engine"),
    [
        pytest.param(mistake, engine, id=f"{engine}-{mistake.name}")
        for mistake in MISTAKES
        for engine in mistake.refused
    ],
)
def test_a_planted_mistake_is_refused_before_anything_is_stored(
    request: pytest.FixtureRequest,
    few: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Mistake,
    engine: str,
) -> None:
    if engine == "trtllm":
        request.getfixturevalue("double")
        monkeypatch.setenv("DOUBLE_TRAPS", json.dumps(mistake.trap))
    elif mistake.spoil is None:
        ask_one_on(monkeypatch)
    else:
        spoil = mistake.spoil(request.getfixturevalue("reference"))
        if engine == "hf":
            spoil_hugging_face(monkeypatch, spoil)
        else:
            running = request.getfixturevalue("running_vllm")
            monkeypatch.setattr(job, "open_engine", lambda *_asked: running)
            monkeypatch.setattr(VllmProcess, "close", lambda _self: None)
            spoil_vllm(monkeypatch, spoil)
    kind, says = mistake.refused[engine]
    layers = ",".join(map(str, LAYERS))
    options = CollectOptions(few, tmp_path / "store", str(TARGET_DIR), engine=engine, recipe="raw", layers=layers)
    with pytest.raises(CaptureError, match=says) as caught:
        job.collect(replace(options, final="all", dtype="fp32", check="hf=4"), note=lambda _text: None)
    assert caught.value.kind == kind
    assert len(Store.open(options.store)) == 0
