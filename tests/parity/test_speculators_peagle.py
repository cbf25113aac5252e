"""P-EAGLE of the installed speculators 0.9 and ours: equal weights, tensors and chains give equal losses and gradients.

They draw their chains at random over a whole pack, so ours are put in their place. They gate on mask[p] (our offset 0),
drop no slot and scale the teacher up to one on the draft vocabulary. Needs the environment of `make test-parity`.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import speculators_models
from tests.parity.test_speculators_eagle3 import peer_batch, peer_name
from tests.trainer.conftest import VOCAB, Setting, make_batch
from tests.trainer.test_peagle import MASK_ID, objective_of, peagle_setting
from trainer.drafters.peagle import PEagleLoss
from trainer.slots import chain_lengths, teacher_rows

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

DEPTHS = 5


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.peagle.core")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, setting: Setting, attention: str) -> Any:
    """speculators' module with our weights; everything we train trains."""
    from speculators.models.peagle import PEagleSpeculatorConfig

    ours = setting.model.config
    config = PEagleSpeculatorConfig(
        transformer_layer_config=speculators_models.llama(ours, attention),
        draft_vocab_size=setting.vocab.size,
        norm_before_residual=ours.norm_before_residual,
        fc_norm=ours.fc_norm,
        eagle_aux_hidden_state_layer_ids=[layer + 1 for layer in ours.aux_layers],
        mask_token_id=MASK_ID,
        **speculators_models.members("peagle", DEPTHS),
    )
    weights = {peer_name(name): tensor for name, tensor in setting.model.state_dict().items()}
    model = speculators_models.fill(core.PEagleDraftModel(config), weights, setting.head, setting.vocab)
    model.lm_head.weight.requires_grad_(True)
    return model


def as_they_sample(setting: Setting, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Our chains as their anchors and depths, over the pack without each sample's last row."""
    document = setting.batch.document
    last = torch.ones_like(document, dtype=torch.bool)
    last[:-1] = document[1:] != document[:-1]
    place = torch.cumsum(~last, 0) - 1
    depths = [torch.arange(int((~last).sum()))]
    levels = [torch.zeros_like(depths[0])]
    for depth in range(1, DEPTHS):
        chosen = place[torch.nonzero(lengths >= depth)[:, 0]]
        depths.append(chosen)
        levels.append(torch.full_like(chosen, depth))
    return torch.cat(depths), torch.cat(levels)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"fc_norm": True}, {"train_embeddings": True}])
@pytest.mark.parametrize(("lengths", "known"), [([40], VOCAB), ([23, 12, 30], 17)])
def test_losses_and_gradients_are_equal(
    core: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    options: dict[str, Any],
    lengths: list[int],
    known: int,
) -> None:
    from speculators.losses import resolve_loss_config

    setting = peagle_setting(lengths, known, **options)
    mask = torch.cat([torch.arange(n) >= 3 for n in lengths]) & (torch.rand(sum(lengths)) < 0.9)
    setting.batch = make_batch(lengths, mask)
    rows = teacher_rows(mask, setting.batch.document, 0)
    chains = chain_lengths(setting.batch, rows, DEPTHS, (0.8, 0.2, None), (0, 0))
    assert int(chains.max()) >= 3
    anchors, depth = as_they_sample(setting, chains)
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depth))
    theirs = peer_model(core, setting, attention)
    _, total, _ = theirs(**peer_batch(setting), num_depths=DEPTHS, loss_config=resolve_loss_config("kl_div", "eager"))
    loss = PEagleLoss(steps=DEPTHS, kind="kl", mask_offset=0, drop_off_vocab=False, overlap_mass="draft")
    objective = objective_of(setting, loss)
    inputs = objective.prepare_at(setting.batch, chains)
    ours = objective.losses(inputs, objective.denominators(inputs))
    assert float(ours.value) == pytest.approx(float(total.detach()), rel=1e-5)
    total.backward()
    ours.total.backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    for name, parameter in setting.model.named_parameters():
        reference = gradients[peer_name(name)]
        assert parameter.grad is not None, name
        assert torch.allclose(parameter.grad, reference, atol=1e-4 * float(reference.abs().max())), name


def test_their_own_draw_keeps_as_many_chains_at_every_depth_as_ours(core: ModuleType) -> None:
    """Of one sample whose rows are all supervised but the first, which no slot is taught by."""
    batch = make_batch([200], torch.arange(200) >= 30)
    rows = teacher_rows(batch.loss_mask, batch.document, 0)
    ours = chain_lengths(batch, rows, 8, (0.7, 0.2, None), (0, 0))
    _, depth = core.generate_cod_sample_indices(
        seq_length=199, loss_mask=batch.loss_mask[1:][None].float(), num_depths=8
    )
    theirs = torch.bincount(depth, minlength=8).tolist()
    assert theirs[1:] == pytest.approx([int((ours >= d).sum()) for d in range(1, 8)], abs=8)
