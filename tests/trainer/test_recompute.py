"""Recomputing layers and compiling blocks change what is kept and how it is worked out, never the numbers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.conftest import Setting, make_setting
from tests.trainer.runs import WORDS, tiny_store
from trainer.drafters.blocks import compile_blocks
from trainer.drafters.eagle3 import TttLoss, TttObjective
from trainer.losses.teacher import TargetInterface, Teacher
from trainer.train.loop import train


def loss_and_gradients(setting: Setting) -> tuple[Tensor, list[Tensor]]:
    objective = TttObjective(setting.model, Teacher(TargetInterface(setting.head, setting.vocab)), TttLoss(steps=4))
    work = objective.prepare(setting.batch)
    total = objective.losses(work, objective.denominators(work)).total
    return total.detach(), list(torch.autograd.grad(total, [p for p in setting.model.parameters() if p.requires_grad]))


def saved_bytes(setting: Setting) -> int:
    """What the forward leaves for the backward, each storage once."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    objective = TttObjective(setting.model, Teacher(TargetInterface(setting.head, setting.vocab)), TttLoss(steps=4))
    work = objective.prepare(setting.batch)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        objective.losses(work, objective.denominators(work))
    return sum(kept.values())


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True}])
def test_recomputed_layers_give_the_same_loss_and_gradients(changes: dict[str, object]) -> None:
    setting = make_setting([37, 20], **changes)
    kept = loss_and_gradients(setting)
    setting.model.recompute = True
    made_again = loss_and_gradients(setting)
    torch.testing.assert_close(made_again, kept, rtol=1e-6, atol=1e-7)


def test_recomputing_keeps_less_for_the_backward() -> None:
    setting = make_setting([150, 150], intermediate_size=128)
    whole = saved_bytes(setting)
    setting.model.recompute = True
    assert saved_bytes(setting) < 0.7 * whole


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_blocks_give_the_same_loss_and_gradients() -> None:
    setting = make_setting([37, 20])
    names = list(setting.model.state_dict())
    plain = loss_and_gradients(setting)
    # Without the code generator, which takes a minute: what is traced, and that lengths do not matter.
    assert compile_blocks(setting.model, backend="aot_eager") >= 5
    torch.testing.assert_close(loss_and_gradients(setting), plain, rtol=1e-5, atol=1e-6)
    assert list(setting.model.state_dict()) == names


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_compiled_run_repeats_the_plain_one(tmp_path: Path) -> None:
    store = tiny_store(tmp_path).path
    words = [*WORDS, "train.validate_every=0"]
    plain = train(store, tmp_path / "plain", words=words)
    compiled = train(store, tmp_path / "compiled", words=[*words, "train.compile=true"])
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-5)
