"""DFlash2 of the installed speculators 0.9 and ours: equal weights, tensors and anchors give equal losses and
gradients.

They draw their anchors at random, so ours are put in their place, and blocks end inside their sample, as in
`tests.parity.test_dflash_peers`. Needs the environment of `make test-parity`.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.parity import speculators_models
from tests.parity.test_dflash_peers import GAMMA, assert_equal
from tests.trainer.conftest import LAYERS, WIDTH
from tests.trainer.test_dflash import BLOCK, MASK_ID, Case
from tests.trainer.test_dflash2 import dflash2_case, our_loss
from trainer.drafters.dflash2 import DFlash2Loss
from trainer.formats.dflash2 import SIZES
from trainer.slots import candidate_anchors

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.dflash2.core")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, case: Case, attention: str) -> Any:
    from speculators.models.dflash2 import DFlash2SpeculatorConfig

    config = DFlash2SpeculatorConfig(
        transformer_layer_config=speculators_models.qwen3(case.model.config, attention),
        draft_vocab_size=case.target.vocab.size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.model.config.aux_layers],
        mask_token_id=MASK_ID,
        sample_from_anchor=False,
        **{name: getattr(case.model.config, name) for name in SIZES},
        **speculators_models.members("dflash2", BLOCK - 1),
    )
    head = case.target.head
    weights = case.model.state_dict() | {"lm_head.weight": head.output_weight}
    return speculators_models.fill(core.DFlash2DraftModel(config), weights, head, case.target.vocab)


TERMS: dict[str, tuple[dict[str, Any], str]] = {
    "ce": ({"distil": 0.0}, "fixed-exp-decay"),
    "kl_div": ({"selector": 0.5}, "fixed-exp-decay"),
    "ce with d-pace": ({"distil": 0.0, "weighting": "dpace"}, "dpace"),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("lengths", "changes"), [([40], {}), ([23, 12, 30], {"conv_kernel_size": 3})])
def test_losses_and_gradients_are_equal(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, attention: str, term: str, lengths: list[int], changes: Any
) -> None:
    from speculators.losses import resolve_loss_config

    case = dflash2_case(lengths, dtype=torch.float32, **changes)
    anchors = candidate_anchors(case.batch, BLOCK, "whole")[::2]
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda mask, count, block: (anchors, torch.ones(count, dtype=torch.bool)),
    )
    settings, weighting = TERMS[term]
    loss = DFlash2Loss.model_validate({"gamma": GAMMA, **settings})
    theirs, batch = peer_model(core, case, attention), case.batch
    _, said, metrics = theirs(
        hidden_states=batch.aux.transpose(0, 1).reshape(1, batch.tokens, LAYERS * WIDTH),
        input_ids=batch.input_ids[None],
        loss_mask=batch.loss_mask[None],
        verifier_last_hidden_states=batch.final[None],
        document_ids=batch.document[None],
        position_ids=batch.positions[None],
        loss_config=resolve_loss_config(term.split(maxsplit=1)[0], "eager"),
        tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        gamma=GAMMA,
        max_anchors=len(anchors),
        selector_loss_alpha=loss.selector,
        per_position_loss_weight=weighting,
    )
    said.backward()
    ours = our_loss(case, loss, anchors.tolist())
    assert int(ours.hits.sum()) == int(metrics["teacher_forced_selector_acc_sum"])
    # KL is the cross-entropy less the teacher's entropy: another value, the same gradient.
    assert_equal(ours.total, case, theirs, None if term == "kl_div" else said)
