"""Every planted mistake of an engine is refused before a unit is stored, and named."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from collectors.capture.job import collect
from collectors.capture.options import CollectOptions
from collectors.checks import crosscheck
from collectors.checks.capture import CheckSpec
from collectors.checks.crosscheck import CrossCheck, row_errors
from collectors.checks.reference import Check, parse_check
from collectors.engines import Captured, CaptureRequest, EngineOptions
from collectors.engines.assembly import requests_of
from collectors.engines.hf import HfEngine
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.records import Sample, sample_id
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import VOCAB, save_target, tiny_target

AUX = (-1, 0, 2)
TOKENS = 24
SPEC = CheckSpec(AUX, "pre_norm")

Capture = Callable[[HfEngine, Sequence[CaptureRequest]], Captured]


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target("llama")


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    mask = (np.arange(TOKENS) >= 6).astype(np.uint8)
    rows = rng.integers(3, VOCAB, (6, TOKENS)).astype(np.int32)
    rows[:, :3] = rows[0, :3]
    return [Sample(sample_id(ids, mask), ids, mask, np.zeros((0, 3), np.int32)) for ids in rows]


@pytest.fixture(scope="module")
def requests(samples: list[Sample]) -> list[CaptureRequest]:
    return requests_of(samples, "supervised")


def engine(target: LoadedTarget, layers: tuple[int, ...] = AUX) -> HfEngine:
    return HfEngine(target, EngineOptions(layers, 64))


def one_layer_on(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    return engine(hf.target, tuple(layer + 1 for layer in AUX)).capture(requests)


def normed(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    captured = hf.capture(requests)
    return replace(captured, final=hf.target.head.norm(captured.final).to(torch.bfloat16))


def neighbours_swapped(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    captured = hf.capture(requests)
    rows = np.arange(len(captured.token_ids)).reshape(-1, TOKENS)
    final = np.arange(len(captured.final)).reshape(len(requests), -1)
    order = [1, 0, 3, 2, 5, 4]
    aux = captured.aux[:, torch.from_numpy(rows[order].ravel())]
    return replace(captured, aux=aux, final=captured.final[torch.from_numpy(final[order].ravel())])


def first_block_missing(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    captured = hf.capture(requests)
    aux = captured.aux.reshape(len(AUX), -1, TOKENS, captured.aux.shape[-1]).roll(-8, dims=2)
    return replace(captured, aux=aux.reshape(captured.aux.shape))


def first_block_zero(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    captured = hf.capture(requests)
    captured.aux.reshape(len(AUX), -1, TOKENS, captured.aux.shape[-1])[:, :, :8] = 0
    return captured


def one_layer_zero(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    captured = hf.capture(requests)
    captured.aux[1].zero_()
    return captured


def other_weights(hf: HfEngine, requests: Sequence[CaptureRequest]) -> Captured:
    return engine(tiny_target("llama", seed=5)).capture(requests)


MISTAKES: list[tuple[Capture, str]] = [
    (one_layer_on, r"^embeddings of .* matches layer_0, so layer ids are off by \+1"),
    (normed, r"^final of .* final hidden after the final norm, stored as the one before it"),
    (neighbours_swapped, r"matches request \d, so answers were paired with the wrong requests"),
    (first_block_missing, r"the first 8 positions are missing and the rest moved up, as where a prefix cache"),
    (first_block_zero, r"8 of 24 rows are zero, as where a prefix cache"),
    (one_layer_zero, r"^layer_0 of .* every row is zero, so the engine never filled this layer"),
    (other_weights, r"matches no layer of this sample"),
]


@pytest.mark.parametrize(("wrong", "message"), MISTAKES, ids=[wrong.__name__ for wrong, _ in MISTAKES])
def test_a_planted_mistake_is_named(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest], wrong: Capture, message: str
) -> None:
    captured = wrong(engine(target), requests)
    with pytest.raises(CaptureError, match=message) as caught:
        CrossCheck(target, SPEC, 4).unit(samples, requests, captured)
    assert caught.value.kind == "cross-check"
    assert caught.value.hint


def test_a_final_hidden_before_the_norm_that_is_said_to_be_after_it_is_named(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest]
) -> None:
    captured = engine(target).capture(requests)
    with pytest.raises(CaptureError, match="before the final norm, stored as the one after it"):
        CrossCheck(target, CheckSpec(AUX, "post_norm"), 4).unit(samples, requests, captured)


@pytest.mark.parametrize("wrong", ["positions", "layers", "rows"])
def test_states_that_are_too_few_are_refused(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest], wrong: str
) -> None:
    whole = engine(target).capture(requests)
    cut = {
        "positions": replace(whole, aux=whole.aux[:, 8:]),
        "layers": replace(whole, aux=whole.aux[1:]),
        "rows": replace(whole, final=whole.final[1:]),
    }[wrong]
    with pytest.raises(CaptureError, match=r"the engine returned .* states .* of torch.bfloat16, expected") as caught:
        CrossCheck(target, SPEC, 4).unit(samples, requests, cut)
    assert caught.value.kind == "engine-shape"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_right_states_pass_in_batches_other_than_the_references_own(
    samples: list[Sample], requests: list[CaptureRequest], family: str, dtype: torch.dtype
) -> None:
    target = tiny_target(family, dtype=dtype)
    captured = engine(target).capture(requests)
    assert CrossCheck(target, SPEC, 4).unit(samples, requests, captured) == 4


def test_units_are_compared_less_and_less_often(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest]
) -> None:
    check, captured = CrossCheck(target, SPEC, 2), engine(target).capture(requests)
    compared = [check.unit(samples, requests, captured) for _ in range(9)]
    assert compared == [2, 2, 0, 2, 0, 0, 0, 2, 0]


def test_of_a_long_sample_its_first_tokens_are_compared_and_a_mistake_in_them_is_named(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    plain = crosscheck.probe_states
    monkeypatch.setattr(
        crosscheck, "probe_states", lambda parts, ids, *more: lengths.append(ids.shape[1]) or plain(parts, ids, *more)
    )
    whole = engine(target).capture(requests)
    assert CrossCheck(target, SPEC, 4, prefix=12).unit(samples, requests, whole) == 4
    assert lengths == [12] * 4
    lengths.clear()
    with monkeypatch.context() as patched:
        patched.setattr(
            crosscheck, "_MOST_PROBED_BYTES", 9 * 2 * (len(target.parts.blocks) + 2) * target.head.hidden_size
        )
        assert CrossCheck(target, SPEC, 4).unit(samples, requests, whole) == 4
        assert lengths == [9] * 4
    # The first five tokens have no final row, for the answer begins at the seventh.
    assert CrossCheck(target, SPEC, 4, prefix=5).unit(samples, requests, normed(engine(target), requests)) == 4
    for wrong, message in MISTAKES:
        with pytest.raises(CaptureError, match=message.replace("8 of 24", "8 of 16")):
            CrossCheck(target, SPEC, 4, prefix=16).unit(samples, requests, wrong(engine(target), requests))


def test_a_unit_is_passed_over_where_comparing_it_would_take_more_than_its_share_of_the_time(
    target: LoadedTarget, samples: list[Sample], requests: list[CaptureRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(crosscheck, "time", SimpleNamespace(monotonic=lambda: now[0]))
    captured = engine(target).capture(requests)
    check = CrossCheck(target, SPEC, 2, share=0.05)
    plain = check._compare

    def takes_a_minute(*words: Any) -> int:
        now[0] += 60
        return plain(*words)

    monkeypatch.setattr(check, "_compare", takes_a_minute)
    compared = []
    for _ in range(64):
        compared.append(check.unit(samples, requests, captured))
        now[0] += 100
    assert [number for number, count in enumerate(compared, 1) if count] == [1, 32, 64]
    assert check.seconds == 180 <= 0.05 * now[0]


def test_rounding_to_bf16_is_no_error_and_a_tenth_of_a_percent_is() -> None:
    rows = torch.randn(50, 64)
    assert float(row_errors(rows.to(torch.bfloat16), rows).max()) == 0
    assert float(row_errors(rows * 1.01, rows).min()) > 5e-3
    assert bool(torch.isnan(row_errors(rows * float("nan"), rows)).all())


@pytest.mark.parametrize("wrong", [wrong for wrong, _ in MISTAKES if wrong is not other_weights])
def test_collect_refuses_a_mistaken_engine_before_anything_is_committed(
    tmp_path: Path, model: str, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, wrong: Capture
) -> None:
    capture = HfEngine.capture

    def mistaken(self: HfEngine, requests: Sequence[CaptureRequest], *_watched: object) -> Captured:
        with monkeypatch.context() as real:
            real.setattr(HfEngine, "capture", capture)
            return wrong(self, requests)

    monkeypatch.setattr(HfEngine, "capture", mistaken)
    monkeypatch.setattr("hiddenstore.testing.builders.make_samples", lambda _count, _seed: samples)
    data = data_for_tiny(tmp_path / "data")
    options = CollectOptions(data, tmp_path / "store", model, layers="-1,0,2", check="hf=4")
    with pytest.raises(CaptureError) as caught:
        collect(options, note=lambda _text: None)
    assert caught.value.kind == "cross-check"
    assert len(Store.open(options.store)) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("target")))


def test_collect_counts_the_samples_that_agreed(tmp_path: Path, model: str) -> None:
    data = data_for_tiny(tmp_path / "data")
    report = collect(CollectOptions(data, tmp_path / "store", model, check="hf=3"), note=lambda _text: None)
    assert (report.samples, report.compared_samples) == (12, 3)


def test_check_is_read_as_it_is_written() -> None:
    assert parse_check("auto") == Check("auto")
    assert parse_check("none") == Check("none")
    assert parse_check("hf") == Check("hf", 4)
    assert parse_check("hf=16") == Check("hf", 16)
    for wrong in ("hf=0", "hf=-1", "hf=x", "vllm", ""):
        with pytest.raises(ConfigError, match="none of auto, hf, hf=N, none"):
            parse_check(wrong)
