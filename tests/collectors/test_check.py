"""Each sickness of captured states has its own reject reason; healthy states have none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from collectors.checks.capture import CheckSpec, RejectBudget, check_unit
from collectors.engines import Captured, CaptureRequest, EngineOptions
from collectors.engines.assembly import capture_samples, records_of
from collectors.engines.hf import HfEngine
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import CaptureError
from hiddenstore.records import Sample
from hiddenstore.testing.builders import make_samples
from schemas.manifest import ImageEntry, Reject
from tests.collectors.tiny import tiny_target

LAYERS = (-1, 1, 3)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return tiny_target("llama")


@pytest.fixture
def samples() -> list[Sample]:
    return make_samples(4, seed=3)


@pytest.fixture
def rows(samples: list[Sample]) -> list[np.ndarray]:
    return [np.arange(1, sample.tokens, 2, dtype=np.int32) for sample in samples]


@pytest.fixture
def captured(target: LoadedTarget, samples: list[Sample], rows: list[np.ndarray]) -> Captured:
    requests = [CaptureRequest(sample.input_ids, r) for sample, r in zip(samples, rows, strict=True)]
    return HfEngine(target, EngineOptions(LAYERS, 256)).capture(requests)


@pytest.fixture
def spec(captured: Captured) -> CheckSpec:
    typical = captured.aux.float().norm(dim=-1).median(dim=1).values
    return CheckSpec(LAYERS, "pre_norm", tuple(typical.tolist()))


def reasons(
    target: LoadedTarget, samples: list[Sample], captured: Captured, rows: list[np.ndarray], spec: CheckSpec
) -> list[str]:
    return [reject.reason for reject in check_unit(samples, captured, rows, target.head, spec)]


def test_healthy_states_pass(
    target: LoadedTarget, samples: list[Sample], captured: Captured, rows: list[np.ndarray], spec: CheckSpec
) -> None:
    assert reasons(target, samples, captured, rows, spec) == []


@pytest.mark.parametrize(
    ("reason", "layer", "change"),
    [
        ("non-finite", "layer_1", lambda c: c.aux[1, 2, 5].fill_(float("nan"))),
        ("non-finite", "layer_3", lambda c: c.aux[2, 2, 5].fill_(float("-inf"))),
        ("non-finite", "final", lambda c: c.final[1, 0].fill_(float("nan"))),
        ("zero-rows", "layer_1", lambda c: c.aux[1, 3].zero_()),
        ("repeated-rows", "layer_3", lambda c: c.aux[2, 4].copy_(c.aux[2, 3])),
        ("norm-profile", "layer_1", lambda c: c.aux[1, :8].mul_(100)),
    ],
)
def test_a_sick_layer_is_rejected_and_named(
    target: LoadedTarget,
    samples: list[Sample],
    captured: Captured,
    rows: list[np.ndarray],
    spec: CheckSpec,
    reason: str,
    layer: str,
    change: object,
) -> None:
    samples = [replace(samples[0], input_ids=np.arange(samples[0].tokens, dtype=np.int32) + 3), *samples[1:]]
    ids = np.concatenate([sample.input_ids for sample in samples])
    captured = replace(captured, token_ids=ids)
    if reason == "norm-profile":
        captured.aux[1, : samples[0].tokens].mul_(100)
    else:
        change(captured)  # type: ignore[operator]
    (reject,) = check_unit(samples, captured, rows, target.head, spec)
    assert (reject.id, reject.reason) == (samples[0].id, reason)
    assert reject.detail.startswith(layer)


@pytest.mark.parametrize("magnitude", [2.0**-133, 1e-25, 1e20, 3e38])
def test_a_row_whose_squares_vanish_or_overflow_is_neither_zero_nor_infinite(
    target: LoadedTarget,
    samples: list[Sample],
    captured: Captured,
    rows: list[np.ndarray],
    spec: CheckSpec,
    magnitude: float,
) -> None:
    captured.aux[1, 3].fill_(magnitude)
    assert reasons(target, samples, captured, rows, spec) == []


def test_the_profile_is_of_text_and_says_nothing_of_the_rows_of_an_image(
    target: LoadedTarget, captured: Captured, samples: list[Sample], rows: list[np.ndarray], spec: CheckSpec
) -> None:
    number = max(range(len(samples)), key=lambda i: samples[i].tokens)
    place, first = sum(sample.tokens for sample in samples[:number]), samples[number].tokens - 8
    image = ImageEntry(sha256="0" * 64, start=0, height=1, width=first)
    assert first > 8
    samples[number] = replace(samples[number], images=(image,))
    captured.aux[1, place : place + first].mul_(100)
    assert reasons(target, samples, captured, rows, spec) == []
    captured.aux[1, place + first : place + first + 8].mul_(100)
    assert reasons(target, samples, captured, rows, spec) == ["norm-profile"]


def test_equal_tokens_may_have_equal_rows(
    target: LoadedTarget, captured: Captured, samples: list[Sample], rows: list[np.ndarray], spec: CheckSpec
) -> None:
    ids = samples[0].input_ids.copy()
    ids[4] = ids[3]
    samples = [replace(samples[0], input_ids=ids), *samples[1:]]
    captured = replace(captured, token_ids=np.concatenate([sample.input_ids for sample in samples]))
    captured.aux[2, 4].copy_(captured.aux[2, 3])
    assert reasons(target, samples, captured, rows, spec) == []


def test_another_samples_final_rows_are_rejected(
    target: LoadedTarget, samples: list[Sample], captured: Captured, rows: list[np.ndarray], spec: CheckSpec
) -> None:
    swapped = replace(captured, final=captured.final.flip(0))
    assert "wrong-next-token" in reasons(target, samples, swapped, rows, spec)


def test_an_engine_that_ran_other_tokens_stops_the_run(
    target: LoadedTarget, samples: list[Sample], captured: Captured, rows: list[np.ndarray], spec: CheckSpec
) -> None:
    other = replace(captured, token_ids=captured.token_ids[::-1])
    with pytest.raises(CaptureError) as caught:
        check_unit(samples, other, rows, target.head, spec)
    assert caught.value.kind == "engine-tokens"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: {"aux": whole.aux.float()}, r"aux states .* of torch.float32, expected .* of torch.bfloat16"),
        (lambda whole: {"final": whole.final.half()}, r"final states .* of torch.float16"),
        (lambda whole: {"aux": whole.aux[..., :-1]}, r"aux states \[3, \d+, 63\] .*, expected \[3, \d+, 64\]"),
        (lambda whole: {"final": whole.final[:, :-1]}, r"final states \[\d+, 63\]"),
        (lambda whole: {"aux": whole.aux[:, :, None]}, r"aux states \[3, \d+, 1, 64\]"),
    ],
)
def test_states_of_another_type_or_width_stop_the_run(
    target: LoadedTarget,
    samples: list[Sample],
    captured: Captured,
    rows: list[np.ndarray],
    spec: CheckSpec,
    change: Callable[[Captured], dict[str, Any]],
    said: str,
) -> None:
    with pytest.raises(CaptureError, match=said) as caught:
        check_unit(samples, replace(captured, **change(captured)), rows, target.head, spec)
    assert caught.value.kind == "engine-shape"


def test_states_that_still_know_how_they_were_made_are_taken_as_they_are(
    target: LoadedTarget, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HfEngine(target, EngineOptions(LAYERS, 256))
    usual = capture_samples(engine, samples, "all", lambda: False)
    whole = replace(usual.captured, aux=usual.captured.aux.clone().requires_grad_(), final=usual.captured.final.clone())
    monkeypatch.setattr(engine, "capture", lambda *_: whole)
    for one, other in zip(
        records_of(capture_samples(engine, samples, "all", lambda: False), "all"), records_of(usual, "all"), strict=True
    ):
        assert not one.aux.requires_grad
        assert torch.equal(one.aux, other.aux)


def rejects(count: int, reason: str = "non-finite") -> list[Reject]:
    return [Reject(id=f"{i:032x}", tokens=5, reason=reason, detail=f"layer_{i}") for i in range(count)]


@pytest.mark.parametrize(("samples", "allowed"), [(10, 1), (999, 1), (2000, 2), (1_000_000, 1000)])
def test_the_budget_is_a_thousandth_and_at_least_one(samples: int, allowed: int) -> None:
    budget = RejectBudget(samples)
    budget.spend(rejects(allowed))
    with pytest.raises(CaptureError, match=rf"{allowed + 1} samples rejected .* more than the {allowed} allowed"):
        budget.spend(rejects(1, "zero-rows"))


def test_rejects_of_an_earlier_run_count() -> None:
    with pytest.raises(CaptureError, match="1 non-finite, 1 zero-rows"):
        RejectBudget(100, rejects(1)).spend(rejects(1, "zero-rows"))
