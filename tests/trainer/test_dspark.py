"""DSpark against its plain restatement: logits, losses, gradients, and its use over text and live."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.records import TopK
from tests.trainer.conftest import VOCAB, make_batch
from tests.trainer.test_dflash import Case, as_lists, case_of, config, plain
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.dspark import DSPARK, DSpark, DSparkConfig, DSparkLoss
from trainer.losses.fused_head import StepLosses
from trainer.slots import candidate_anchors

RANK, BLOCK = 6, 4
LENGTHS = [17, 3, 12]
ANCHORS = [0, 2, 4, 9, 14, 16, 18, 21, 25, 31]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def dspark_case(lengths: list[int], known: int = VOCAB, dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    settings = {**config().model_dump(), "name": "dspark", "markov_rank": RANK, "block_size": BLOCK, **changes}
    return case_of(DSPARK, DSparkConfig.model_validate(settings), lengths, known, dtype)


def our_loss(case: Case, loss: DSparkLoss, anchors: list[int]) -> StepLosses:
    objective = DSPARK.objective(case.model, case.target, loss)
    work = objective.prepare_at(case.batch, torch.tensor(anchors))
    return objective.losses(work, objective.denominators(work))


def plain_loss(case: Case, loss: DSparkLoss, anchors: list[int], top: int = VOCAB) -> tuple[Tensor, list[float]]:
    """Slot by slot: the loss, and the sum of the tokens' own loss at each depth. ``top``: tokens that the target's
    distribution is of."""
    w, vocab, pack = dict(case.model.named_parameters()), case.target.vocab, as_lists(case.batch)
    known = vocab.target_ids.tolist()
    head = w.get("lm_head.weight", case.target.head.output_weight[vocab.target_ids])
    target_logits = case.target.head.logits(case.batch.final).double()
    least = target_logits.topk(top).values[:, -1:]
    target_logits = target_logits.masked_fill(target_logits < least, float("-inf"))
    first = 0 if case.model.config.sample_from_anchor else 1  # type: ignore[attr-defined]
    states, total, count, sums = plain(case, anchors)[:, first:], torch.zeros(()).double(), 0, [0.0] * (BLOCK - first)
    for n, anchor in enumerate(anchors):
        for k in range(BLOCK - first):
            row = anchor + 1 + k
            if row >= len(pack["ids"]) or pack["document"][row] != pack["document"][anchor] or not pack["mask"][row]:
                continue
            choice = int(target_logits[row - 1].argmax()) if loss.labels == "target" else pack["ids"][row]
            if choice not in known or not target_logits[row - 1][known].isfinite().any():
                continue
            before = w["markov_head.markov_w1.weight"][pack["ids"][anchor + k]]
            logits = head @ states[n, k] + w["markov_head.markov_w2.weight"] @ before
            p, q = logits.softmax(0), target_logits[row - 1][known].softmax(0)
            mass = target_logits[row - 1].softmax(0)[known].sum() if loss.overlap_mass == "whole" else 1
            overlap = torch.minimum(p, mass * q).sum()
            own = -loss.cross_entropy * p[known.index(choice)].log() + loss.overlap * (1 - overlap)
            more = torch.zeros(()).double()
            if "confidence_head.proj.weight" in w:
                joined = torch.cat([states[n, k], before])
                said = (w["confidence_head.proj.weight"] @ joined + w["confidence_head.proj.bias"])[0]
                more = loss.confidence * F.binary_cross_entropy_with_logits(said, overlap.detach())
            total = total + torch.exp(torch.tensor(-k / 4.0)) * (own + more)
            sums[k] += float(own.detach())
            count += 1
    return total / count, sums


@pytest.mark.parametrize("labels", ["target", "text"])
@pytest.mark.parametrize(
    ("known", "changes"),
    [
        *((VOCAB, {}), (25, {}), (25, {"train_head": True}), (VOCAB, {"confidence_head": False})),
        *((VOCAB, {"causal": True}), (VOCAB, {"sliding_window": 3, "sliding_causal": True})),
        *((VOCAB, {"sample_from_anchor": False}), (25, {"sample_from_anchor": False, "causal": True})),
    ],
)
def test_losses_and_gradients_agree_with_the_plain_restatement(labels: str, known: int, changes: Any) -> None:
    case = dspark_case(LENGTHS, known=known, **changes)
    for mass in ("draft", "whole"):
        assert_agrees(case, DSparkLoss.model_validate({"labels": labels, "gamma": 4.0, "overlap_mass": mass}))


def assert_agrees(case: Case, loss: DSparkLoss) -> None:
    result = our_loss(case, loss, ANCHORS)
    expected, sums = plain_loss(case, loss, ANCHORS)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert result.sums.tolist() == pytest.approx(sums, abs=1e-4)
    weights = dict(case.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(weights.values())) for x in (result.total, expected))
    for name, a, b in zip(weights, found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-2, float(b.abs().max())), name


def test_a_slot_whose_stored_top_tokens_are_all_off_the_draft_vocabulary_is_not_taught() -> None:
    case = dspark_case(LENGTHS, known=12)
    loss = DSparkLoss.model_validate({"labels": "text", "gamma": 4.0})
    expected, sums = plain_loss(case, loss, ANCHORS, top=2)
    every, _ = plain_loss(case, loss, ANCHORS)
    logits = case.target.head.logits(case.batch.final)
    log_probs, ids = logits.log_softmax(-1).topk(2)
    stored = TopK(ids, log_probs, logits.logsumexp(-1))
    result = our_loss(replace(case, batch=replace(case.batch, final=case.batch.final[:0], topk=stored)), loss, ANCHORS)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert result.sums.tolist() == pytest.approx(sums, abs=1e-4)
    assert float(expected.detach()) != pytest.approx(float(every.detach()), abs=1e-2)


@pytest.mark.parametrize("anchored", [True, False])
def test_a_live_draft_is_chosen_token_by_token_and_is_what_recorded_text_says(anchored: bool) -> None:
    case = dspark_case([24], sample_from_anchor=anchored)
    model = case.model
    assert isinstance(model, DSpark)
    longest = model.config.longest
    with torch.no_grad():
        model.markov_head.markov_w2.weight.mul_(8)
    case.batch.loss_mask[:] = True
    case.batch.aux[:] = case.batch.aux.float().double()
    use = DrafterInUse(DSPARK, model, case.target)
    live, seen, after_newest = use.live(), 0, set()
    for newest in (6, 9, 10, 15):
        ids = case.batch.input_ids[seen + 1 : newest + 1].tolist()
        proposed = live.propose(Verified(case.batch.aux[:, seen:newest], case.batch.final[seen:newest], ids), longest)
        text = make_batch([24], torch.ones(24, dtype=torch.bool), dtype=torch.float64)
        text.input_ids[:], text.aux[:] = case.batch.input_ids, case.batch.aux
        text.input_ids[newest + 1 : newest + 1 + longest] = torch.tensor(proposed)
        assert int(use.hits(text, longest)[newest]) == longest
        text.input_ids[newest + 2] = (proposed[1] + 1) % VOCAB
        assert int(use.hits(text, longest)[newest]) == 1
        after_newest.add(tuple(proposed))
        seen = newest
    assert len(after_newest) == 4


def test_the_confidence_head_says_a_probability_and_anchors_leave_room_for_every_proposal() -> None:
    case = dspark_case([30])
    assert isinstance(case.model, DSpark)
    said = case.model.confidence(torch.randn(5, 16 + RANK).double())
    assert said.shape == (5,)
    assert bool(((said > 0) & (said < 1)).all())
    case.batch.loss_mask[:] = True
    objective = DSPARK.objective(case.model, case.target, DSparkLoss(anchor_rule="whole"))
    assert objective.depths == BLOCK
    anchors = objective.prepare(case.batch).block_map.anchors
    assert torch.equal(anchors, candidate_anchors(case.batch, BLOCK + 1, "whole"))
    assert int(anchors.max()) == 30 - 1 - BLOCK


def test_what_dspark_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="dpace weighs by cross-entropies"):
        DSparkLoss(weighting="dpace")
