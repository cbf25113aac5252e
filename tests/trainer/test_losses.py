"""The fused head and loss against log_softmax and autograd."""

import pytest
import torch
from torch.nn import functional as F

from trainer import losses as module
from trainer.losses import Taught, soft_cross_entropy, step_scales, step_weights

R, K, S, H, U = 11, 3, 20, 6, 9


def problem() -> tuple[torch.Tensor, torch.Tensor, Taught, torch.Tensor, torch.Tensor]:
    states = torch.randn(S, H, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(U, H, dtype=torch.float64, requires_grad=True)
    slots = torch.stack([torch.randperm(S)[:R] for _ in range(K)], 1)
    # A state is taught once.
    slots = torch.arange(R * K).view(R, K).where(torch.arange(R * K).view(R, K) < S, -1)
    teacher = torch.randn(R, U).softmax(-1)
    target = torch.where(torch.arange(R) % 4 == 0, -1, teacher.argmax(-1))
    taught = Taught(slots, target, lambda begin, end: teacher[begin:end])
    return states, weight, taught, teacher, torch.tensor([0.5, 0.2, 0.1])


@pytest.mark.parametrize("budget", [1, 70, 1 << 20])
def test_fused_loss_and_gradients_equal_autograd(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGIT_BUDGET", budget)
    states, weight, taught, teacher, scales = problem()
    found = soft_cross_entropy(states, weight, taught, scales)
    sums, hits = torch.zeros(K, dtype=torch.float64), [0] * K
    for r in range(R):
        for i in range(K):
            if taught.slots[r, i] >= 0:
                z = weight @ states[taught.slots[r, i]]
                sums[i] = sums[i] - (teacher[r] * F.log_softmax(z, -1)).sum()
                hits[i] += int(int(z.argmax()) == int(taught.target[r]))
    total = (sums * scales).sum()
    assert torch.allclose(found.sums, sums.detach(), atol=1e-5)
    assert found.hits.tolist() == hits
    assert found.counts.tolist() == (taught.slots >= 0).sum(0).tolist()
    for a, b in zip(
        torch.autograd.grad(3 * found.total, [states, weight]),
        torch.autograd.grad(3 * total, [states, weight]),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=2e-6)


def test_frozen_head_gets_no_gradient() -> None:
    states, weight, taught, _, scales = problem()
    weight = weight.detach()
    soft_cross_entropy(states, weight, taught, scales).total.backward()
    assert states.grad is not None
    assert weight.grad is None


def test_without_gradients_only_values_are_made() -> None:
    states, weight, taught, _, scales = problem()
    with torch.no_grad():
        result = soft_cross_entropy(states, weight, taught, scales)
    assert not result.total.requires_grad


def test_step_scales_are_zero_where_nothing_is_taught() -> None:
    assert step_scales(step_weights(3, 0.5), torch.tensor([4, 2, 0])).tolist() == [0.25, 0.25, 0.0]
    assert step_weights(2, 0.8, [3.0, 1.0]).tolist() == [3.0, 1.0]
