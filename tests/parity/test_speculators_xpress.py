"""XPress of the installed speculators 0.9 and ours: equal weights, tensors and anchors give equal losses and gradients,
and what it saves is read here.

They draw their anchors at random, so ours are put in their place, and blocks end inside their sample, as in
`tests.parity.test_dflash_peers`. Their slot 0 is told the token before the newest one, where vLLM tells it the newest,
and so do we: here they do as we, or we as they. Needs the environment of `make test-parity`.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import speculators_models
from tests.parity.test_dflash_peers import GAMMA, assert_equal
from tests.trainer.conftest import LAYERS, WIDTH
from tests.trainer.test_dflash import MASK_ID, Case
from tests.trainer.test_xpress import BLOCK, RANK, loud, our_loss, xpress_case
from trainer.drafters.xpress import XPressLoss
from trainer.export.published import read_published
from trainer.formats.xpress import their_name
from trainer.slots import candidate_anchors

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.xpress.core")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, case: Case, attention: str) -> Any:
    from speculators.models.xpress import XPressSpeculatorConfig

    config = XPressSpeculatorConfig(
        transformer_layer_config=speculators_models.qwen3(case.model.config, attention),
        draft_vocab_size=case.target.vocab.size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.model.config.aux_layers],
        mask_token_id=MASK_ID,
        sample_from_anchor=False,
        xpress_rank=RANK,
        num_jacobi_passes=4,
        **speculators_models.members("xpress", BLOCK - 1),
    )
    head = case.target.head
    weights = {their_name(name): tensor for name, tensor in case.model.state_dict().items()}
    weights["lm_head.weight"] = head.output_weight
    return speculators_models.fill(core.XPressDraftModel(config), weights, head, case.target.vocab)


def told_the_newest(bias: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Their head, whose slot 0 reads what slot 1 does."""

    def block_bias(previous: Tensor, **more: Any) -> Tensor:
        return bias(torch.cat([previous[:, 1:2], previous[:, 1:]], 1), **more)

    return block_bias


@pytest.mark.parametrize(("attention", "told"), [("eager", "newest"), ("sdpa", "newest"), ("eager", "before")])
@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({}, {}),
        ({"labels": "text"}, {"ce_from_data": True}),
        ({"cross_entropy": 1.0, "overlap": 0.0, "rounds": 1, "base": 0.0}, {"terms": "ce"}),
        ({"cross_entropy": 0.0, "overlap": 1.0, "consistency": 0.0}, {"terms": "tv"}),
    ],
)
@pytest.mark.parametrize("lengths", [[40], [23, 12, 30]])
def test_losses_and_gradients_are_equal(
    core: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    told: str,
    settings: dict[str, Any],
    more: dict[str, Any],
    lengths: list[int],
) -> None:
    from speculators.losses import resolve_loss_config

    case = loud(xpress_case(lengths, dtype=torch.float32))
    batch, loss = case.batch, XPressLoss.model_validate({"gamma": GAMMA, **settings})
    anchors = candidate_anchors(batch, BLOCK, "whole")[::2]
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda mask, count, block: (anchors, torch.ones(count, dtype=torch.bool)),
    )
    theirs = peer_model(core, case, attention)
    if told == "newest":
        monkeypatch.setattr(theirs.refiner_head, "block_bias", told_the_newest(theirs.refiner_head.block_bias))
    else:
        head, first = case.model.xpress_head, batch.positions[anchors] == 0
        before, of_states = batch.input_ids[torch.where(first, anchors, anchors - 1)], head.of_states
        monkeypatch.setattr(head, "of_states", lambda states, newest: of_states(states, before))
    _, said, _ = theirs(
        hidden_states=batch.aux.transpose(0, 1).reshape(1, batch.tokens, LAYERS * WIDTH),
        input_ids=batch.input_ids[None],
        loss_mask=batch.loss_mask[None],
        verifier_last_hidden_states=batch.final[None],
        document_ids=batch.document[None],
        position_ids=batch.positions[None],
        loss_config=resolve_loss_config(more.get("terms", '{"ce": 0.1, "tv": 0.9}'), "eager"),
        gamma=GAMMA,
        max_anchors=len(anchors),
        consistency_weight=loss.consistency,
        consistency_passes=loss.rounds,
        base_anchor_weight=loss.base,
        ce_from_data=more.get("ce_from_data", False),
    )
    said.backward()
    assert_equal(our_loss(case, loss, anchors.tolist()).total, case, theirs, said, their_name)


def test_what_speculators_saves_is_read_as_the_same_drafter(core: ModuleType, tmp_path: Path) -> None:
    case = xpress_case([9], dtype=torch.float32, max_position=256)
    peer_model(core, case, "eager").save_pretrained(tmp_path)
    found = read_published(tmp_path, case.target.head, 6)
    assert found.config.model_dump() == {**case.model.config.model_dump(), "num_jacobi_passes": 4}
    ours = case.model.state_dict()
    assert found.weights.keys() == ours.keys()
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in ours.items())
