"""Schedule and optimizer state."""

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hiddenstore.process import Rank, from_environment
from tests.forked import Forked
from tests.trainer.two_ranks import free_ports
from trainer.config import OptimConfig
from trainer.parallel.group import ProcessGroup, process_group
from trainer.train import optim
from trainer.train.optim import MARKOV_RATE, MUON_RATE, Muon, Optimizer, learning_rate


@pytest.mark.parametrize(("schedule", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_rate_rises_linearly_then_follows_the_schedule(schedule: str, middle: float) -> None:
    config = OptimConfig.model_validate({"lr": 1.0, "schedule": schedule, "warmup_ratio": 0.1, "min_lr_ratio": 0.1})
    rates = [learning_rate(config, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[55] == pytest.approx(middle)
    if schedule != "constant":
        assert rates[10:] == sorted(rates[10:], reverse=True)
        assert rates[-1] == pytest.approx(0.1, abs=0.02)


def test_a_warm_up_in_steps_wins_over_a_share_and_ends_with_the_run() -> None:
    config = OptimConfig.model_validate({"lr": 1.0, "warmup_ratio": 0.5, "warmup_steps": 4, "schedule": "constant"})
    assert [learning_rate(config, step, 100) for step in range(6)] == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert learning_rate(config, 1, 2) == 1.0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_saved_and_loaded_continues_bit_for_bit(kind: str) -> None:
    config = OptimConfig.model_validate({"kind": kind})

    def train(model: nn.Linear, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            model(x).square().sum().backward()
            optimizer.step(step)

    torch.manual_seed(0)
    straight = nn.Linear(4, 3)
    torch.manual_seed(0)
    first = nn.Linear(4, 3)
    train(straight, Optimizer(straight, config, 10), range(10))
    optimizer = Optimizer(first, config, 10)
    train(first, optimizer, range(4))
    second = nn.Linear(4, 3)
    second.load_state_dict(first.state_dict())
    resumed = Optimizer(second, config, 10)
    resumed.load(optimizer.tensors())
    train(second, resumed, range(4, 10))
    assert torch.equal(second.weight, straight.weight)
    assert torch.equal(second.bias, straight.bias)


def test_muon_moves_a_matrix_along_the_orthogonal_part_of_its_gradient_and_a_table_as_adamw() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.Linear(6, 4, bias=False), "lm_head": nn.Linear(6, 4, bias=False)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = OptimConfig.model_validate({"kind": "muon", "lr": 0.01, "schedule": "constant", "warmup_ratio": 0.0})
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    u, _, v = torch.linalg.svd(model["mlp"].weight.grad, full_matrices=False)
    sign = model["lm_head"].weight.grad.sign()
    Optimizer(model, config, 10).step(0)
    moved = {name: (parameter.detach() - before[name]) for name, parameter in model.named_parameters()}
    found, orthogonal = moved["mlp.weight"], u @ v
    alike = float((-found * orthogonal).sum() / found.norm() / orthogonal.norm())
    assert alike > 0.97
    # Newton-Schulz in five steps leaves singular values between about 0.7 and 1.2.
    assert float(found.square().mean().sqrt()) == pytest.approx(0.2 * MUON_RATE * 0.01, rel=0.3)
    torch.testing.assert_close(moved["lm_head.weight"], -0.01 * sign, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_tables_of_pairs_of_tokens_take_a_higher_rate_of_adamw_than_what_else_it_trains(kind: str) -> None:
    names = ("markov_w2", "xpress_head.w2", "lm_head")
    head = {name: nn.Linear(6, 4, bias=False) for name in names}
    model = nn.Module()
    model.markov_w2, model.lm_head = head["markov_w2"], head["lm_head"]
    model.xpress_head = nn.ModuleDict({"w2": head["xpress_head.w2"]})
    before = {name: layer.weight.detach().clone() for name, layer in head.items()}
    config = OptimConfig.model_validate({"kind": kind, "lr": 0.01, "schedule": "constant", "warmup_ratio": 0.0})
    for layer in head.values():
        layer.weight.grad = torch.randn_like(layer.weight)
    Optimizer(model, config, 10).step(0)
    moved = {name: float((layer.weight.detach() - before[name]).abs().mean()) for name, layer in head.items()}
    assert moved == pytest.approx(
        dict(zip(names, (0.01 * MARKOV_RATE, 0.01 * MARKOV_RATE, 0.01), strict=True)), rel=1e-3
    )


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    model(torch.tensor([[float("nan"), 1.0]])).sum().backward()
    _, norm = Optimizer(model, OptimConfig(), 10).step(0)
    assert math.isnan(norm)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_muon_takes_the_steps_of_torchs_own_up_to_its_bf16(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(shape) / 10) for _ in range(2))
    settings: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}
    mine = Muon([ours], **settings)
    reference = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **settings)
    for _ in range(4):
        gradient = torch.randn(shape)
        for parameter, optimizer in ((ours, mine), (theirs, reference)):
            parameter.grad = gradient.clone()
            optimizer.step()
    moved = (theirs.detach() - 0.1).norm()
    assert float((ours.detach() - theirs.detach()).norm()) < 0.02 * float(moved)


SHAPES = [(24, 40), (40, 24), (8, 8), (16, 60), (30, 30)]


def stepped(group: ProcessGroup) -> list[torch.Tensor]:
    """Matrices after three steps of Muon."""
    draws = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in SHAPES]
    muon = Muon(matrices, 0.05, 0.1, group=group)
    for _ in range(3):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=draws)
        muon.step()
    return [matrix.detach() for matrix in matrices]


def step_on_a_rank(folder: str, port: int) -> None:
    """The body of one rank: what it made orthogonal, and where its matrices came to."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    made, real = [], optim.orthogonal
    optim.orthogonal = lambda matrix, **options: (made.append(tuple(matrix.shape)), real(matrix, **options))[1]
    with process_group(from_environment()) as group:
        torch.save((made, stepped(group)), Path(folder) / f"{group.rank.rank}.pt")


def test_two_ranks_share_muons_work_and_move_as_one_process_to_the_last_bit(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    ranks = [
        Forked(step_on_a_rank, str(tmp_path), port, RANK=str(i), LOCAL_RANK=str(i), WORLD_SIZE="2") for i in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    made = [shapes for shapes, _ in found]
    assert sorted(made[0] + made[1]) == sorted(SHAPES * 3)
    work = [sum(optim._cost(torch.empty(shape)) for shape in shapes) for shapes in made]
    assert max(work) < 0.6 * sum(work)
    expected = stepped(ProcessGroup(Rank()))
    for _, matrices in found:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(matrices, expected, strict=True))
