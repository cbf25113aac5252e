"""Capture with a real vLLM in this process: states are Hugging Face's, and pass through no file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_world import hiddenstore
from torch import Tensor

from collectors.demo import TARGET_DIR
from collectors.demo.corpus import conversations
from collectors.engines import CaptureRequest, EngineOptions, assembly
from collectors.engines.vllm import VllmProcess
from collectors.targets.load import EngineTarget, LoadedTarget, load_target, probe_states
from hiddenstore.errors import ConfigError, InterruptError
from hiddenstore.store import Store
from hiddenstore.targets.folder import open_target

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

BATCH_TOKENS = 256
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 100, 300, 400] * 3
TOLERANCE = 1e-4
CONVERSATIONS = 40


@dataclass
class RawStates:
    """What vLLM's worker handed over, before it is rounded to bf16: aux [L, T, D], final [T, D] by request."""

    aux: dict[int, Tensor]
    final: dict[int, Tensor]


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> RawStates:
    kept, put = RawStates({}, {}), assembly.Assembly.put

    def keep(self: assembly.Assembly, index: int, ids: np.ndarray, aux: Tensor, final: Tensor) -> None:
        kept.aux[index], kept.final[index] = aux.clone(), final.clone()
        put(self, index, ids, aux, final)

    monkeypatch.setattr(assembly.Assembly, "put", keep)
    return kept


@pytest.fixture(scope="module")
def reference() -> LoadedTarget:
    return load_target(str(TARGET_DIR), "float32", "cpu")


@pytest.fixture(scope="module")
def engine(reference: LoadedTarget) -> Iterator[VllmProcess]:
    layers = tuple(range(-1, reference.folder.num_layers))
    options = EngineOptions(layers, BATCH_TOKENS, longest=max(LENGTHS), dtype="float32")
    started = VllmProcess(EngineTarget(open_target(str(TARGET_DIR)), "float32"), options)
    yield started
    started.close()


def random_requests(vocab: int, seed: int) -> list[CaptureRequest]:
    rng = np.random.default_rng(seed)
    rows = [rng.integers(3, vocab, length).astype(np.int32) for length in LENGTHS]
    return [CaptureRequest(ids, np.arange(len(ids) // 2, len(ids), dtype=np.int32)) for ids in rows]


def alike_requests(vocab: int) -> list[CaptureRequest]:
    """Samples that begin alike or are the same, as a prefix cache meets them."""
    rng = np.random.default_rng(7)
    common = rng.integers(3, vocab, 160).astype(np.int32)
    rows = [np.concatenate([common, rng.integers(3, vocab, 20 + 9 * k).astype(np.int32)]) for k in range(8)]
    return [CaptureRequest(ids, np.arange(len(ids), dtype=np.int32)) for ids in [*rows, *rows]]


def worst_difference(raw: RawStates, requests: list[CaptureRequest], reference: LoadedTarget) -> float:
    worst = 0.0
    for index, request in enumerate(requests):
        ids = torch.from_numpy(request.input_ids.astype(np.int64))[None]
        expected = probe_states(reference.parts, ids, "llama").states
        found = torch.cat([raw.aux[index], raw.final[index][None]])
        worst = max(worst, float((found - torch.cat([expected, expected[-1:]])).abs().max()))
    return worst


@pytest.mark.parametrize("kind", ["random", "alike"])
def test_every_layer_equals_hugging_face(
    engine: VllmProcess, reference: LoadedTarget, raw: RawStates, kind: str
) -> None:
    vocab = reference.head.vocab_size
    requests = random_requests(vocab, 0) if kind == "random" else alike_requests(vocab)
    captured = engine.capture(requests)
    assert worst_difference(raw, requests, reference) < TOLERANCE
    rows, logits = captured.next_rows, reference.head.logits(captured.final)
    assert len(rows) == len(requests)
    assert torch.equal(logits[rows].argmax(-1), captured.next_tokens)
    ids = np.concatenate([request.input_ids for request in requests])
    assert np.array_equal(captured.token_ids, ids)


def test_samples_longer_than_a_batch_are_run_in_chunks(engine: VllmProcess) -> None:
    settings = engine.describe().settings
    assert max(LENGTHS) > BATCH_TOKENS == int(settings["batched_tokens"])
    assert (settings["chunked_prefill"], settings["prefix_caching"], settings["dtype"]) == ("true", "true", "float32")


def written_bytes() -> int:
    """What this process, vLLM's core and worker in it, gave to the system to write so far."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["wchar"])


def test_no_states_are_written_to_any_file(engine: VllmProcess, reference: LoadedTarget) -> None:
    requests = random_requests(reference.head.vocab_size, 1) * 4
    before = written_bytes()
    captured = engine.capture(requests)
    assert captured.aux.nbytes > 40e6
    assert written_bytes() - before < captured.aux.nbytes / 50


def test_an_interrupted_unit_leaves_the_engine_fit_for_the_next(
    engine: VllmProcess, reference: LoadedTarget, raw: RawStates
) -> None:
    asked, requests = iter(range(100)), random_requests(reference.head.vocab_size, 2)
    with pytest.raises(InterruptError):
        engine.capture(requests, lambda: next(asked) > 3)
    raw.aux.clear()
    engine.capture(requests)
    assert worst_difference(raw, requests, reference) < TOLERANCE


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    rows = [json.dumps(row) for row in islice(conversations(), CONVERSATIONS)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    hiddenstore("prepare", str(folder / "rows.jsonl"), "-o", str(folder / "data"), "--target", str(TARGET_DIR))
    return str(folder / "data")


def collect(data: str, store: Path, *words: str) -> dict[str, object]:
    asked = ("--target", str(TARGET_DIR), "--dtype", "fp32", "--layers", "all-drafters", "--recipe", "lossless")
    return hiddenstore("collect", data, "-o", str(store), *asked, *words)


def test_a_store_collected_by_vllm_is_the_one_collected_by_hugging_face(data: str, tmp_path: Path) -> None:
    collect(data, tmp_path / "hf", "--engine", "hf")
    document = collect(data, tmp_path / "vllm", "--engine", "vllm", "--check", "hf=4")
    assert document["samples_compared"] == 4
    store, expected = Store.open(tmp_path / "vllm"), Store.open(tmp_path / "hf")
    assert store.sample_ids == expected.sample_ids
    assert {record.engine.name for record in store.commits()} == {"vllm"}
    for sample_id in store.sample_ids:
        one, other = store[sample_id], expected[sample_id]
        for found, wanted in ((one.aux, other.aux), (one.final, other.final)):
            # One step of bf16 where fp32 values 1e-5 apart round to either side.
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-7, atol=TOLERANCE)
    assert hiddenstore("verify", str(tmp_path / "vllm"), "--meaning")["ok"]


def test_a_setting_that_vllm_does_not_have_is_named() -> None:
    options = EngineOptions((1,), BATCH_TOKENS, longest=64, extra={"max_num_seq": 4})
    with pytest.raises(ConfigError, match=r"does not start for target target: .*max_num_seq") as caught:
        VllmProcess(EngineTarget(open_target(str(TARGET_DIR)), "float32"), options)
    assert caught.value.kind == "engine-start"
    with pytest.raises(ConfigError, match="--engine-arg dtype is set by collect itself"):
        VllmProcess(
            EngineTarget(open_target(str(TARGET_DIR)), "float32"), EngineOptions((1,), 64, extra={"dtype": "x"})
        )
