"""EAGLE-3 of the installed speculators 0.9 and ours: equal weights and tensors give equal losses and gradients.

speculators gates on mask[p] (our offset 0), drops no slot and scales the teacher up to one on the draft vocabulary. It
slides whole packs, so its slots may reach into the next sample; there the mask of that sample's prompt excludes them,
as long as the prompt is longer than the TTT length. Needs the environment of `make test-parity`
(tests/parity/requirements.txt).
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import speculators_models
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH, Setting, make_batch, make_setting
from trainer.drafters.eagle3 import TttLoss, TttObjective
from trainer.losses.teacher import TargetInterface, Teacher

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

STEPS = 4


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.eagle3.core")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, setting: Setting, attention: str) -> Any:
    """speculators' module with our weights; everything it freezes trains, as ours does."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    ours = setting.model.config
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=speculators_models.llama(ours, attention),
        draft_vocab_size=setting.vocab.size,
        norm_before_residual=ours.norm_before_residual,
        fc_norm=ours.fc_norm,
        norm_output=ours.norm_output,
        eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in ours.aux_layers],
        **speculators_models.members("eagle3", STEPS),
    )
    weights = {peer_name(name): tensor for name, tensor in setting.model.state_dict().items()}
    model = speculators_models.fill(core.Eagle3DraftModel(config), weights, setting.head, setting.vocab)
    model.lm_head.weight.requires_grad_(True)
    return model


def peer_name(name: str) -> str:
    return name.replace("midlayer.", "layers.0.")


def peer_batch(setting: Setting) -> dict[str, Tensor]:
    """The pack as speculators lays it out: each sample shifted by one and a row shorter."""
    batch = setting.batch
    rows = [torch.nonzero(batch.document == i)[:, 0] for i in range(len(batch.sample_ids))]
    first, last = torch.cat([r[:-1] for r in rows]), torch.cat([r[1:] for r in rows])
    return {
        "hidden_states": batch.aux[:, first].permute(1, 0, 2).reshape(1, len(first), LAYERS * WIDTH),
        "input_ids": batch.input_ids[last][None],
        "document_ids": batch.document[first][None],
        "loss_mask": batch.loss_mask[last][None],
        "position_ids": batch.positions[last][None],
        "verifier_last_hidden_states": batch.final[last][None],
    }


def our_losses(setting: Setting, kind: str) -> tuple[Tensor, Tensor]:
    """Per-step means and the total."""
    loss = TttLoss(steps=STEPS, kind=kind, step_decay=1.0, mask_offset=0, drop_off_vocab=False, overlap_mass="draft")
    objective = TttObjective(
        setting.model, Teacher(TargetInterface(setting.head, setting.vocab), drop_off_vocab=False), loss
    )
    work = objective.prepare(setting.batch)
    result = objective.losses(work, objective.denominators(work))
    return result.sums / result.counts, result.total


def packed_setting(lengths: list[int], known: int, **options: object) -> Setting:
    """Every sample opens with a prompt longer than the TTT length."""
    setting = make_setting(lengths, known=known, **options)
    mask = torch.cat([torch.arange(n) >= STEPS + 1 for n in lengths]) & (torch.rand(sum(lengths)) < 0.8)
    setting.batch = make_batch(lengths, mask)
    return setting


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("option", [None, "fc_norm", "norm_output", "norm_before_residual"])
@pytest.mark.parametrize(("lengths", "known"), [([40], VOCAB), ([40], 17), ([23, 12, 30], 17), ([23, 12, 30], VOCAB)])
def test_losses_and_gradients_are_equal(
    core: ModuleType, attention: str, option: str | None, lengths: list[int], known: int
) -> None:
    assert_equal(core, packed_setting(lengths, known, **({option: True} if option else {})), attention)


@pytest.mark.parametrize("option", [None, "norm_output", "norm_before_residual"])
@pytest.mark.parametrize("layers", [2, 3])
def test_several_layers_are_equal(core: ModuleType, layers: int, option: str | None) -> None:
    options: dict[str, object] = {"num_layers": layers, "intermediate_size": 40, **({option: True} if option else {})}
    assert_equal(core, packed_setting([23, 12, 30], 17, **options), "eager")


@pytest.mark.parametrize(
    ("ours", "theirs", "known"),
    [("tv", "tv", 17), ("lk_alpha", "nla", 17), ("lk_lambda", "lk_hybrid", 17), ("target_ce", "ce", VOCAB)],
)
def test_its_other_losses_are_equal(core: ModuleType, ours: str, theirs: str, known: int) -> None:
    assert_equal(core, packed_setting([23, 30], known), "eager", ours, theirs)


def assert_equal(core: ModuleType, setting: Setting, attention: str, ours: str = "kl", theirs: str = "kl_div") -> None:
    from speculators.losses import resolve_loss_config

    model = peer_model(core, setting, attention)
    _, total, metrics = model(
        **peer_batch(setting),
        ttt_steps=STEPS,
        ttt_step_loss_decay=1.0,
        loss_config=resolve_loss_config(theirs, "eager"),
    )
    expected = torch.stack([metrics[f"loss_{i}_sum"].double() for i in range(STEPS)])
    losses, objective = our_losses(setting, ours)
    assert torch.allclose(losses, expected, atol=1e-5, rtol=1e-5)
    total.backward()
    objective.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in setting.model.named_parameters():
        reference = gradients[peer_name(name)]
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, reference, atol=2e-5 * float(reference.abs().max())), name
