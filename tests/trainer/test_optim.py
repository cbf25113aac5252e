"""Schedule and optimizer state."""

import math

import pytest
import torch
from torch import nn

from trainer.config import OptimConfig
from trainer.run.optim import Optimizer, learning_rate


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_rate_rises_linearly_then_follows_the_schedule(schedule: str, middle: float) -> None:
    config = OptimConfig.model_validate({"lr": 1.0, "schedule": schedule, "warmup_ratio": 0.1, "min_lr_ratio": 0.1})
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[55] == pytest.approx(middle)
    if schedule != "constant":
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[-1] == pytest.approx(0.1, abs=0.02)


def test_state_saved_and_loaded_continues_bit_for_bit() -> None:
    def train(model: nn.Linear, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step(step)

    torch.manual_seed(0)
    straight = nn.Linear(4, 3)
    torch.manual_seed(0)
    first = nn.Linear(4, 3)
    train(straight, Optimizer(straight, OptimConfig(), 10), range(10))
    optimizer = Optimizer(first, OptimConfig(), 10)
    train(first, optimizer, range(4))
    second = nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, OptimConfig(), 10)
    resumed.load(optimizer.tensors())
    train(second, resumed, range(4, 10))
    assert torch.equal(second.weight, straight.weight)
    assert torch.equal(second.bias, straight.bias)


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    model(torch.tensor([[float("nan"), 1.0]])).sum().backward()
    _, norm = Optimizer(model, OptimConfig(), 10).step(0)
    assert math.isnan(norm)
    assert torch.equal(model.weight, before)
