"""The fused hard cross-entropy against the composed one of torch, in values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.objectives import hard_loss
from trainer.objectives.hard_loss import Adapt, Blend, hard_cross_entropy

STATES, WIDTH, VOCAB, DEPTHS = 60, 8, 31, 4


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven states at a time, so that chunks and groups do not line up by luck."""
    monkeypatch.setattr(hard_loss, "LOGIT_BUDGET", 7 * VOCAB)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    states = torch.randn(STATES, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(-1, VOCAB, (STATES,))
    labels[::5] = -1
    depth = torch.arange(STATES) % DEPTHS
    return states, weight, labels, depth, torch.rand(STATES)


def composed(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Loss of every state [S], 0 where nothing is taught."""
    loss = F.cross_entropy(states @ weight.T, labels, ignore_index=-1, reduction="none")
    return torch.where(labels >= 0, loss, 0.0)


def assert_same(found: Tensor, expected: Tensor, states: Tensor, weight: Tensor) -> None:
    assert torch.allclose(found, expected, rtol=1e-10)
    ours = torch.autograd.grad(found, [states, weight])
    theirs = torch.autograd.grad(expected, [states, weight])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_total_and_gradients_equal_the_composed_loss() -> None:
    states, weight, labels, depth, scales = inputs()
    result = hard_cross_entropy(states, weight, labels, depth, scales, DEPTHS)
    assert_same(result.total, (composed(states, weight, labels) * scales).sum(), states, weight)
    assert float(result.value) == pytest.approx(float(result.total.detach()), rel=1e-12)


def test_sums_hits_and_counts_are_kept_by_depth() -> None:
    states, weight, labels, depth, scales = inputs()
    with torch.no_grad():
        result = hard_cross_entropy(states, weight, labels, depth, scales, DEPTHS)
        loss, found = composed(states, weight, labels), (states @ weight.T).argmax(-1)
    for k in range(DEPTHS):
        here = (depth == k) & (labels >= 0)
        assert float(result.sums[k]) == pytest.approx(float(loss[here].sum()), rel=1e-12)
        assert int(result.counts[k]) == int(here.sum())
        assert int(result.hits[k]) == int((found[here] == labels[here]).sum())


def test_gradients_are_made_only_for_what_asks_for_them() -> None:
    states, weight, labels, depth, scales = inputs()
    frozen = weight.detach()
    result = hard_cross_entropy(states, frozen, labels, depth, scales, DEPTHS)
    result.total.backward()
    expected = torch.autograd.grad((composed(states, frozen, labels) * scales).sum(), states)[0]
    assert torch.allclose(states.grad, expected, rtol=1e-9)
    assert frozen.grad is None


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_blended_teacher_equals_soft_targets(share: float) -> None:
    states, weight, labels, depth, scales = inputs()
    q = torch.randn(STATES, VOCAB, dtype=torch.float64).softmax(-1)
    result = hard_cross_entropy(states, weight, labels, depth, scales, DEPTHS, blend=Blend(share, lambda at: q[at]))
    targets = (1 - share) * F.one_hot(labels.clamp(min=0), VOCAB).double() + share * q
    loss = -(targets * (states @ weight.T).log_softmax(-1)).sum(-1)
    assert_same(result.total, (torch.where(labels >= 0, loss, 0.0) * scales).sum(), states, weight)


def test_adapted_weights_see_whole_groups_and_carry_no_gradient() -> None:
    states, weight, labels, depth, scales = inputs()
    labels[12:16] = -1
    size = 4

    def weights(loss: Tensor, taught: Tensor) -> Tensor:
        return torch.where(taught, torch.exp(-loss), 1.0).cumprod(-1)

    result = hard_cross_entropy(states, weight, labels, depth, scales, DEPTHS, adapt=Adapt(size, weights))
    loss = composed(states, weight, labels)
    with torch.no_grad():
        factor = weights(loss.view(-1, size), (labels >= 0).view(-1, size)).flatten()
    assert_same(result.total, (loss * factor * scales).sum(), states, weight)


def test_nothing_taught_gives_a_zero_with_zero_gradients() -> None:
    states, weight, labels, depth, scales = inputs(torch.float32)
    result = hard_cross_entropy(states, weight, torch.full_like(labels, -1), depth, scales, DEPTHS)
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert not states.grad.any()
    assert not weight.grad.any()


def test_bf16_products_stay_near_the_fp32_loss() -> None:
    states, weight, labels, depth, scales = inputs(torch.float32)
    result = hard_cross_entropy(states, weight, labels, depth, scales, DEPTHS, compute_dtype=torch.bfloat16)
    expected = (composed(states, weight, labels) * scales).sum()
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=2e-2)
    result.total.backward()
    assert states.grad.dtype == weight.grad.dtype == torch.float32
