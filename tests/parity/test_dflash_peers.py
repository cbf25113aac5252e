"""DFlash of the installed speculators 0.9 and SpecForge 0.2 and ours: equal weights, tensors and anchors give equal
losses and gradients.

Both draw their anchors at random, so ours are put in their place. speculators teaches the target's most probable token
or its distribution and divides by the taught slots; over packed samples its labels run into the next sample, so blocks
end inside theirs here. SpecForge teaches the text, divides by the sum of the weights, and D-PACE by the sequences.
Needs the environment of `make test-parity`.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity import speculators_models
from tests.trainer.conftest import LAYERS, VOCAB, WIDTH
from tests.trainer.test_dflash import BLOCK, MASK_ID, Case, make_case, our_loss
from trainer.drafters.dflash import BlockLoss
from trainer.slots import candidate_anchors

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

GAMMA = 4.0


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def assert_equal(
    found: Tensor, case: Case, theirs: Any, loss: Tensor | None, their_name: Callable[[str], str] = str
) -> None:
    """Losses to 1e-5 and every gradient to 1e-4 of its largest entry. ``their_name``: of a parameter of ours."""
    if loss is not None:
        assert float(found.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    found.backward()  # type: ignore[no-untyped-call]
    gradients = dict(theirs.named_parameters())
    for name, parameter in case.model.named_parameters():
        expected = gradients[their_name(name)].grad
        assert parameter.grad is not None
        assert expected is not None, name
        assert float((parameter.grad - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), name


@pytest.fixture(scope="module", name="core")
def _core() -> ModuleType:
    return pytest.importorskip("speculators.models.dflash.core")


def speculators_model(core: ModuleType, case: Case, attention: str) -> Any:
    from speculators.models.dflash import DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig(
        transformer_layer_config=speculators_models.qwen3(case.model.config, attention),
        draft_vocab_size=case.target.vocab.size,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in case.model.config.aux_layers],
        mask_token_id=MASK_ID,
        sample_from_anchor=False,
        **speculators_models.members("dflash", BLOCK - 1),
    )
    vocab, head = case.target.vocab, case.target.head
    weights = case.model.state_dict() | {"lm_head.weight": head.output_weight[vocab.target_ids]}
    return speculators_models.fill(core.DFlashDraftModel(config), weights, head, vocab)


SPECULATORS = {
    "ce": ({"labels": "target", "gamma": GAMMA, "reduction": "kept"}, "fixed-exp-decay"),
    "kl_div": ({"labels": "target", "distil": 1.0, "gamma": GAMMA, "reduction": "kept"}, "fixed-exp-decay"),
    "ce with d-pace": ({"labels": "target", "weighting": "dpace"}, "dpace"),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("term", SPECULATORS)
@pytest.mark.parametrize(("lengths", "known"), [([40], VOCAB), ([23, 12, 30], VOCAB), ([23, 12, 30], 25)])
def test_speculators_losses_and_gradients_are_equal(
    core: ModuleType, monkeypatch: pytest.MonkeyPatch, attention: str, term: str, lengths: list[int], known: int
) -> None:
    from speculators.losses import resolve_loss_config

    case = make_case(lengths, known=known, dtype=torch.float32)
    # They drop no slot whose token is off the draft vocabulary; there are none here.
    token = case.target.head.logits(case.batch.final).argmax(-1)
    case.batch.loss_mask[1:] &= case.target.vocab.t2d[token[:-1]]
    anchors = candidate_anchors(case.batch, BLOCK, "whole")[::2]
    monkeypatch.setattr(
        core, "select_anchors", lambda mask, count, block: (anchors, torch.ones(count, dtype=torch.bool))
    )
    settings, weighting = SPECULATORS[term]
    theirs, batch = speculators_model(core, case, attention), case.batch
    _, loss, _ = theirs(
        hidden_states=batch.aux.transpose(0, 1).reshape(1, batch.tokens, LAYERS * WIDTH),
        input_ids=batch.input_ids[None],
        loss_mask=batch.loss_mask[None],
        verifier_last_hidden_states=batch.final[None],
        document_ids=batch.document[None],
        position_ids=batch.positions[None],
        loss_config=resolve_loss_config(term.split(maxsplit=1)[0], "eager"),
        gamma=GAMMA,
        max_anchors=len(anchors),
        per_position_loss_weight=weighting,
    )
    loss.backward()
    ours = our_loss(case, BlockLoss.model_validate(settings), anchors.tolist())
    # KL is the cross-entropy less the teacher's entropy: another value, the same gradient.
    assert_equal(ours.total, case, theirs, None if term == "kl_div" else loss)


def specforge_parts(case: Case, draft: type, attention: str, **more: Any) -> dict[str, Any]:
    """What SpecForge's trainers of blocks are made of: its drafter with our weights, and the target's tables."""
    ours = case.model.config
    model = draft(
        speculators_models.qwen3(
            ours,
            attention,
            block_size=BLOCK,
            num_target_layers=6,
            dflash_config={"mask_token_id": MASK_ID, "target_layer_ids": list(ours.aux_layers), **more},
        )
    )
    model.load_state_dict(case.model.state_dict())
    embed, head = torch.nn.Embedding(VOCAB, WIDTH), torch.nn.Linear(WIDTH, VOCAB, bias=False)
    embed.weight.data, head.weight.data = case.target.head.embed_tokens, case.target.head.output_weight
    how = {"block_size": BLOCK, "attention_backend": attention, "loss_decay_gamma": GAMMA}
    return {"draft_model": model, "target_lm_head": head, "target_embed_tokens": embed, "mask_token_id": MASK_ID, **how}


def two_rows(case: Case, room: int) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Seven anchors in either of two samples of 26, the same as SpecForge draws them, and the batch as it reads it."""
    anchors = candidate_anchors(case.batch, room, "next")
    anchors = torch.cat([rows[:7] for rows in (anchors[anchors < 26], anchors[anchors >= 26])])
    placed = (anchors.view(2, -1) - torch.tensor([[0], [26]]), torch.ones(2, 7, dtype=torch.bool))
    batch = case.batch
    rows = {
        "input_ids": batch.input_ids.view(2, 26),
        "hidden_states": batch.aux.transpose(0, 1).reshape(2, 26, LAYERS * WIDTH),
        "loss_mask": batch.loss_mask.view(2, 26).float(),
    }
    return anchors, placed, rows


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["dflash", "dpace"])
def test_specforge_losses_and_gradients_are_equal(monkeypatch: pytest.MonkeyPatch, attention: str, kind: str) -> None:
    draft = pytest.importorskip("specforge.modeling.draft.dflash")
    family = pytest.importorskip("specforge.algorithms.common.dflash_family_model")
    case = make_case([26, 26], dtype=torch.float32)
    anchors, placed, rows = two_rows(case, BLOCK)
    peer = family.OnlineDFlashModel(**specforge_parts(case, draft.DFlashDraftModel, attention), loss_type=kind)
    monkeypatch.setattr(peer, "_sample_anchor_positions", lambda *_: placed)
    loss, _, _ = peer(**rows)
    loss.backward()
    settings = {"gamma": GAMMA} if kind == "dflash" else {"weighting": "dpace"}
    result = our_loss(case, BlockLoss.model_validate(settings), anchors.tolist())
    ours = result.total if kind == "dflash" else result.total * result.counts.sum() / 2
    assert_equal(ours, case, peer.draft_model, loss)
