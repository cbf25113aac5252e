"""The fused head and losses against log_softmax and autograd, for every loss of the table."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.losses import fused_head as module
from trainer.losses.fused_head import Supervision, head_losses, step_scales, step_weights
from trainer.losses.kinds import LOSSES

R, K, S, H, U = 11, 3, 20, 6, 9

Problem = tuple[Tensor, Tensor, Supervision, Tensor, Tensor]


def problem(mass: Tensor | None = None) -> Problem:
    states = torch.randn(S, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(U, H, dtype=torch.float64, requires_grad=True)
    # A state is taught once.
    slots = torch.arange(R * K).view(R, K).where(torch.arange(R * K).view(R, K) < S, -1)
    teacher = torch.randn(R, U).softmax(-1)
    target = torch.where(torch.arange(R) % 4 == 0, -1, teacher.argmax(-1))
    supervision = Supervision(slots, target, lambda begin, end: teacher[begin:end], mass=mass)
    return states, weight, supervision, teacher, torch.tensor([0.5, 0.2, 0.1])


def kl(q: Tensor, log_p: Tensor) -> Tensor:
    return (q * (q.log() - log_p)).sum()


def overlap(q: Tensor, log_p: Tensor) -> Tensor:
    return torch.minimum(q, log_p.exp()).sum()


def blended(q: Tensor, log_p: Tensor, mass: Tensor) -> Tensor:
    alpha = overlap(mass * q, log_p)
    share = math.exp(-3 * float(alpha.detach()))
    return share * kl(q, log_p) + (1 - share) * (1 - alpha)


PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "soft_ce": lambda q, log_p, mass: -(q * log_p).sum(),
    "kl": lambda q, log_p, mass: kl(q, log_p),
    "target_ce": lambda q, log_p, mass: -(q * log_p).sum(),
    "text_ce": lambda q, log_p, mass: -(q * log_p).sum(),
    "tv": lambda q, log_p, mass: 0.5 * (log_p.exp() - mass * q).abs().sum() + 0.5 * (1 - mass),
    "lk_alpha": lambda q, log_p, mass: -overlap(mass * q, log_p).log(),
    "lk_lambda": lambda q, log_p, mass: blended(q, log_p, mass),
}


def assert_equals_autograd(given: Problem, name: str, scales: Tensor) -> None:
    states, weight, supervision, teacher, _ = given
    found = head_losses(states, weight, supervision, scales, LOSSES[name])
    sums, hits, total = torch.zeros(K, dtype=torch.float64), [0] * K, torch.zeros((), dtype=torch.float64)
    for r in range(R):
        for i in range(K):
            if supervision.slots[r, i] >= 0:
                z = weight @ states[supervision.slots[r, i]]
                mass = torch.ones(()) if supervision.mass is None else supervision.mass[r]
                loss = PLAIN[name](teacher[r].double(), F.log_softmax(z, -1), mass.double())
                sums[i] += loss.detach()
                total = total + loss * scales[i].double()
                hits[i] += int(int(z.argmax()) == int(supervision.labels[r]))  # type: ignore[index]
    assert torch.allclose(found.sums, sums, atol=1e-5)
    assert math.isclose(float(found.value), float(total.detach()), abs_tol=1e-5)
    assert found.hits.tolist() == hits
    assert found.counts.tolist() == (supervision.slots >= 0).sum(0).tolist()
    for a, b in zip(
        torch.autograd.grad(3 * found.total, [states, weight]),
        torch.autograd.grad(3 * total, [states, weight]),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=2e-6)


def test_the_table_and_the_restatement_name_the_same_losses() -> None:
    assert set(PLAIN) == set(LOSSES)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize(("budget", "widest"), [(1, 1), (1, 4 * K), (70, 8), (1 << 20, 8)])
def test_losses_and_gradients_equal_autograd_however_rows_and_vocabulary_are_cut(
    name: str, budget: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_BUDGET", budget)
    monkeypatch.setattr(module, "WIDEST_BLOCK", widest)
    monkeypatch.setattr(module, "FEWEST_STATES", 1)
    given = problem()
    assert_equals_autograd(given, name, given[-1])


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].overlap])
@pytest.mark.parametrize("widest", [2 * K, 1 << 10])
def test_the_overlap_takes_the_target_s_mass_on_the_draft_vocabulary(
    name: str, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOGIT_BUDGET", 1)
    monkeypatch.setattr(module, "WIDEST_BLOCK", widest)
    given = problem(mass=torch.rand(R) * 0.5 + 0.4)
    assert_equals_autograd(given, name, given[-1])


def test_blending_by_step_takes_the_mean_overlap_of_the_step() -> None:
    states, weight, supervision, teacher, scales = problem()
    found = head_losses(states, weight, supervision, scales, LOSSES["lk_lambda"], by_step=True)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(K):
        rows = torch.nonzero(supervision.slots[:, i] >= 0)[:, 0]
        log_p = F.log_softmax(states[supervision.slots[rows, i]] @ weight.T, -1)
        q = teacher[rows].double()
        alpha = torch.stack([overlap(a, b) for a, b in zip(q, log_p, strict=True)])
        share = torch.exp(-3 * alpha.mean().detach())
        each = torch.stack([kl(a, b) for a, b in zip(q, log_p, strict=True)])
        total = total + scales[i].double() * (share * each + (1 - share) * (1 - alpha)).sum()
    assert math.isclose(float(found.value), float(total.detach()), abs_tol=1e-6)
    expected = torch.autograd.grad(total, [states, weight])
    for a, b in zip(torch.autograd.grad(found.total, [states, weight]), expected, strict=True):
        assert torch.allclose(a, b, atol=2e-6)


def test_blocks_stay_within_the_budget_at_a_large_vocabulary() -> None:
    steps, width, vocab = 7, 8, 1 << 19
    slots = torch.arange(64 * steps).view(64, steps)
    supervision = Supervision(slots, None, lambda begin, end: torch.full((1, vocab), 1 / vocab).expand(end - begin, -1))
    states, weight = torch.randn(64 * steps, width), torch.randn(vocab, width)
    options = module._Options(LOSSES["kl"], torch.float32, True, True, None, None)
    walk = module._Walk(states, weight, supervision, torch.ones(steps), options)
    assert walk.rows * steps >= module.FEWEST_STATES - steps
    assert walk.span < vocab
    assert walk.rows * steps * walk.span <= module.WIDEST_BLOCK * module.LOGIT_BUDGET


def test_frozen_head_gets_no_gradient() -> None:
    states, weight, supervision, _, scales = problem()
    weight = weight.detach()
    head_losses(states, weight, supervision, scales).total.backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None
    assert weight.grad is None


def test_without_gradients_only_values_are_made() -> None:
    states, weight, supervision, _, scales = problem()
    with torch.no_grad():
        result = head_losses(states, weight, supervision, scales)
    assert not result.total.requires_grad


def test_step_scales_are_zero_where_nothing_is_taught() -> None:
    assert step_scales(step_weights(3, 0.5), torch.tensor([4, 2, 0])).tolist() == [0.25, 0.25, 0.0]
    assert step_weights(2, 0.8, [3.0, 1.0]).tolist() == [3.0, 1.0]
