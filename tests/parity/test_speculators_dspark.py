"""DSpark of the installed speculators 0.9 and ours: equal weights, tensors and anchors give equal losses and gradients.

They draw their anchors at random, so ours are put in their place; they gate a slot by the mask at its own position, we
by that of the token it proposes, so masks here say the same of both. Needs the environment of `make test-parity`.
"""

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.parity import speculators_models
from tests.parity.test_dflash_peers import GAMMA, assert_equal
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH
from tests.trainer.test_dflash import MASK_ID, Case
from tests.trainer.test_dspark import BLOCK, RANK, dspark_case, our_loss
from trainer.drafters.dspark import DSPARK, DSparkConfig, DSparkLoss
from trainer.losses.teacher import TargetInterface
from trainer.slots import candidate_anchors
from trainer.vocab import DraftVocab

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.dspark.core")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def peer_model(core: ModuleType, case: Case, attention: str) -> Any:
    from speculators.models.dspark import DSparkSpeculatorConfig

    config = DSparkSpeculatorConfig(
        transformer_layer_config=speculators_models.qwen3(case.model.config, attention),
        draft_vocab_size=case.target.vocab.size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.model.config.aux_layers],
        mask_token_id=MASK_ID,
        markov_rank=RANK,
        sample_from_anchor=case.model.config.sample_from_anchor,
        **speculators_models.members("dspark", BLOCK),
    )
    vocab, head = case.target.vocab, case.target.head
    weights = case.model.state_dict() | {"lm_head.weight": head.output_weight[vocab.target_ids]}
    return speculators_models.fill(core.DSparkDraftModel(config), weights, head, vocab)


def with_the_tokens_it_chooses(case: Case) -> Case:
    """The same weights where they fit, with a draft vocabulary of the target's own choices: they drop no slot."""
    choices = torch.unique(case.target.head.logits(case.batch.final).argmax(-1))
    target = TargetInterface(case.target.head, DraftVocab.of_ids(choices, VOCAB))
    settings = {**case.model.config.model_dump(), "vocab_size": len(choices)}
    model = DSPARK.build(DSparkConfig.model_validate(settings), target, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if parameter.ndim == 1 else 0.0))
    return Case(target, model, case.batch)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("terms", "settings"),
    [
        ('{"ce": 0.1, "tv": 0.9}', {}),
        ("tv", {"cross_entropy": 0.0, "overlap": 1.0}),
        ("ce", {"cross_entropy": 1.0, "overlap": 0.0, "confidence": 0.5}),
    ],
)
@pytest.mark.parametrize(
    ("lengths", "is_small", "anchored"),
    [([40], False, True), ([23, 12, 30], False, True), ([23, 12, 30], True, True), ([23, 12, 30], False, False)],
)
def test_losses_and_gradients_are_equal(
    core: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    terms: str,
    settings: dict[str, float],
    lengths: list[int],
    is_small: bool,
    anchored: bool,
) -> None:
    from speculators.losses import resolve_loss_config

    case = dspark_case(lengths, dtype=torch.float32, sample_from_anchor=anchored)
    case = with_the_tokens_it_chooses(case) if is_small else case
    batch = case.batch
    batch.loss_mask[:] = torch.cat([torch.arange(n) >= 3 for n in lengths])
    anchors = candidate_anchors(batch, BLOCK + 1, "whole")[::2]
    monkeypatch.setattr(
        "speculators.models.dflash.core.select_anchors",
        lambda mask, count, block: (anchors, torch.ones(count, dtype=torch.bool)),
    )
    theirs = peer_model(core, case, attention)
    _, loss, _ = theirs(
        hidden_states=batch.aux.transpose(0, 1).reshape(1, batch.tokens, LAYERS * WIDTH),
        input_ids=batch.input_ids[None],
        loss_mask=batch.loss_mask[None],
        verifier_last_hidden_states=batch.final[None],
        document_ids=batch.document[None],
        position_ids=batch.positions[None],
        loss_config=resolve_loss_config(terms, "eager"),
        tv_loss_fn=resolve_loss_config("tv", "eager")["tv"][0],
        gamma=GAMMA,
        max_anchors=len(anchors),
        confidence_head_alpha=settings.get("confidence", 1.0),
    )
    loss.backward()
    ours = our_loss(case, DSparkLoss.model_validate({"gamma": GAMMA, **settings}), anchors.tolist())
    assert_equal(ours.total, case, theirs, loss)
