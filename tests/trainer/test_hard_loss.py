"""Labels by the fused head against torch's composed cross-entropy, in values and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.losses import fused_head
from trainer.losses.fused_head import StepLosses, Supervision, Weigh, head_losses
from trainer.losses.kinds import LOSSES

ROWS, WIDTH, VOCAB, DEPTHS = 15, 8, 31, 4


@pytest.fixture(autouse=True, params=[31, 12])
def _small_blocks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Seven states at a time, so that blocks and rows do not line up by luck; the vocabulary whole and in spans."""
    monkeypatch.setattr(fused_head, "LOGIT_BUDGET", 7 * request.param)
    monkeypatch.setattr(fused_head, "WIDEST_BLOCK", 1)
    monkeypatch.setattr(fused_head, "FEWEST_STATES", 7)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = torch.randn(ROWS * DEPTHS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(-1, VOCAB, (ROWS * DEPTHS,))
    labels[::5] = -1
    return states, weight, labels.view(ROWS, DEPTHS), torch.rand(DEPTHS)


def losses_of(
    states: Tensor, weight: Tensor, supervision: Supervision, scales: Tensor, weigh: Weigh | None = None
) -> StepLosses:
    return head_losses(states, weight, supervision, scales, LOSSES["text_ce"], weigh=weigh)


def composed(states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Loss of every state [ROWS, DEPTHS], 0 where nothing is taught."""
    loss = F.cross_entropy(states @ weight.T, labels.flatten(), ignore_index=-1, reduction="none")
    return torch.where(labels >= 0, loss.view_as(labels), 0.0)


def assert_same(total: Tensor, expected: Tensor, states: Tensor, weight: Tensor) -> None:
    assert torch.allclose(total, expected, rtol=1e-10)
    ours = torch.autograd.grad(total, [states, weight])
    theirs = torch.autograd.grad(expected, [states, weight])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_total_and_gradients_equal_the_composed_loss() -> None:
    states, weight, labels, scales = inputs()
    result = losses_of(states, weight, Supervision.of_labels(labels), scales)
    assert_same(result.total, (composed(states, weight, labels) * scales).sum(), states, weight)
    assert float(result.value) == pytest.approx(float(result.total.detach()), rel=1e-12)


def test_sums_hits_and_counts_are_those_of_each_depth() -> None:
    states, weight, labels, scales = inputs()
    with torch.no_grad():
        result = losses_of(states, weight, Supervision.of_labels(labels), scales)
        loss, choice = composed(states, weight, labels), (states @ weight.T).argmax(-1).view_as(labels)
    for k in range(DEPTHS):
        taught = labels[:, k] >= 0
        assert float(result.sums[k]) == pytest.approx(float(loss[taught, k].sum()), rel=1e-12)
        assert int(result.counts[k]) == int(taught.sum())
        assert int(result.hits[k]) == int((choice[taught, k] == labels[taught, k]).sum())


def test_gradients_are_made_only_for_what_requires_them() -> None:
    states, weight, labels, scales = inputs()
    frozen = weight.detach()
    result = losses_of(states, frozen, Supervision.of_labels(labels), scales)
    result.total.backward()  # type: ignore[no-untyped-call]
    expected = torch.autograd.grad((composed(states, frozen, labels) * scales).sum(), states)[0]
    assert states.grad is not None
    assert torch.allclose(states.grad, expected, rtol=1e-9)
    assert frozen.grad is None


@pytest.mark.parametrize("complete", [False, True])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_blended_teacher_equals_soft_targets(share: float, complete: bool) -> None:
    states, weight, labels, scales = inputs()
    q = torch.randn(ROWS * DEPTHS, VOCAB, dtype=torch.float64).softmax(-1)
    supervision = Supervision.of_labels(labels, lambda index: q[index], share, complete=complete)
    result = losses_of(states, weight, supervision, scales)
    targets = (1 - share) * F.one_hot(labels.flatten().clamp(min=0), VOCAB).double() + share * q
    loss = -(targets * (states @ weight.T).log_softmax(-1)).sum(-1).view_as(labels)
    assert_same(result.total, (torch.where(labels >= 0, loss, 0.0) * scales).sum(), states, weight)


def test_weights_by_the_losses_see_complete_rows_and_carry_no_gradient() -> None:
    states, weight, labels, scales = inputs()
    labels[3] = -1

    def weights(loss: Tensor, taught: Tensor) -> Tensor:
        return torch.where(taught, torch.exp(-loss), 1.0).cumprod(-1)

    result = losses_of(states, weight, Supervision.of_labels(labels, complete=True), scales, weights)
    loss = composed(states, weight, labels)
    with torch.no_grad():
        factor = weights(loss, labels >= 0)
    assert_same(result.total, (loss * factor * scales).sum(), states, weight)


def test_nothing_taught_gives_a_zero_with_zero_gradients() -> None:
    states, weight, labels, scales = inputs(torch.float32)
    result = losses_of(states, weight, Supervision.of_labels(torch.full_like(labels, -1)), scales)
    result.total.backward()  # type: ignore[no-untyped-call]
    assert float(result.total.detach()) == 0.0
    assert states.grad is not None
    assert weight.grad is not None
    assert not states.grad.any()
    assert not weight.grad.any()


def test_bf16_products_stay_near_the_fp32_loss() -> None:
    states, weight, labels, scales = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = losses_of(states, weight, Supervision.of_labels(labels), scales)
    expected = (composed(states, weight, labels) * scales).sum()
    assert float(result.total.detach()) == pytest.approx(float(expected.detach()), rel=2e-2)
    result.total.backward()  # type: ignore[no-untyped-call]
    assert states.grad is not None
    assert weight.grad is not None
    assert states.grad.dtype == weight.grad.dtype == torch.float32
