"""DFlash2 against its plain restatement: states, losses, gradients, its start, and its use over text and live."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.testing.builders import make_store
from tests.trainer.conftest import VOCAB, WIDTH, make_batch
from tests.trainer.test_dflash import ANCHORS, BLOCK, LENGTHS, Case, as_lists, case_of, config, expected_loss, plain
from trainer.drafters.base import DrafterInUse, TargetFacts, Verified
from trainer.drafters.dflash import DFLASH, DFlashConfig
from trainer.drafters.dflash2 import DFLASH2, DFlash2, DFlash2Config, DFlash2Loss
from trainer.losses.fused_head import StepLosses
from trainer.slots import map_blocks
from trainer.train.loop import train

CANDIDATES = 5
SIZES: dict[str, Any] = {"conv_group_size": 4, "selector_rank": 6, "selector_top_k": CANDIDATES}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def dflash2_case(lengths: list[int], dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    settings = {**config().model_dump(), "name": "dflash2", **SIZES, **changes}
    return case_of(DFLASH2, DFlash2Config.model_validate(settings), lengths, VOCAB, dtype)


def our_loss(case: Case, loss: DFlash2Loss, anchors: list[int]) -> StepLosses:
    objective = DFLASH2.objective(case.model, case.target, loss)
    work = objective.prepare_at(case.batch, torch.tensor(anchors))
    return objective.losses(work, objective.denominators(work))


def slots_of(case: Case, loss: DFlash2Loss, anchors: list[int]) -> list[dict[int, tuple[int, int]]]:
    """Of every block, by slot: the row that is taught and its label."""
    pack, target = as_lists(case.batch), case.target.head.logits(case.batch.final)
    blocks = []
    for anchor in anchors:
        rows = {k: anchor + k for k in range(1, BLOCK) if anchor + k < len(pack["ids"])}
        blocks.append({
            k: (row, int(target[row - 1].argmax()) if loss.labels == "target" else pack["ids"][row])
            for k, row in rows.items()
            if pack["document"][row] == pack["document"][anchor] and pack["mask"][row]
        })  # fmt: skip
    return blocks


def plain_selector(case: Case, loss: DFlash2Loss, anchors: list[int]) -> tuple[Tensor, list[int]]:
    """Slot by slot: the selector's share of the loss, and how often it chooses the label at each depth."""
    w, ids = dict(case.model.named_parameters()), case.batch.input_ids
    head, states = w.get("lm_head.weight", case.target.head.output_weight), plain(case, anchors)
    weighted, weights, hits = [], [], [0] * (BLOCK - 1)
    for n, block in enumerate(slots_of(case, loss, anchors)):
        losses = {}
        for k, (row, label) in block.items():
            unary = head @ states[n, k]
            best = unary.topk(CANDIDATES).indices.tolist()
            found = best if label in best else [*best[:-1], label]
            gate = w["candidate_selector.hidden_projection.weight"] @ states[n, k]
            before = w["candidate_selector.predecessor_codebook"][ids[row - 1]] * gate
            scores = unary[found] + w["candidate_selector.successor_codebook"][found] @ before
            losses[k] = -scores.log_softmax(0)[found.index(label)]
            hits[k - 1] += label in best and found[int(scores.argmax())] == label
        chance = {
            k: math.exp(-float(x.detach())) * (1 - loss.dpace_alpha) + loss.dpace_alpha for k, x in losses.items()
        }
        for k, one in losses.items():
            decayed = math.exp(-(k - 1) / 4)
            reached = sum(math.prod(chance[i] for i in losses if i <= m) for m in losses if m >= k)
            weighted.append(one * (reached if loss.weighting == "dpace" else decayed))
            weights.append(decayed)
    total = sum(weights) if loss.reduction == "weights" else len(weights)
    return loss.selector * torch.stack(weighted).sum() / total, hits


LOSSES: dict[str, dict[str, Any]] = {
    "the target's distribution": {},
    "labels alone": {"distil": 0.0, "selector": 0.5},
    "the text, divided by weights": {"labels": "text", "distil": 0.3, "reduction": "weights"},
    "d-pace": {"weighting": "dpace", "distil": 0.0, "dpace_alpha": 0.3},
}


@pytest.mark.parametrize("settings", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("changes", [{}, {"train_head": True, "conv_kernel_size": 3, "num_layers": 1}])
def test_losses_gradients_and_hits_equal_the_plain_restatement(settings: Any, changes: Any) -> None:
    case, loss = dflash2_case(LENGTHS, **changes), DFlash2Loss.model_validate(settings)
    result = our_loss(case, loss, ANCHORS)
    unary, sums = expected_loss(case, loss, ANCHORS)
    selector, hits = plain_selector(case, loss, ANCHORS)
    expected = unary + selector
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.allclose(result.sums, torch.stack(sums), rtol=1e-5)
    assert result.hits.tolist() == hits
    weights = dict(case.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(weights.values())) for x in (result.total, expected))
    for name, a, b in zip(weights, found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-2, float(b.abs().max())), name


@pytest.mark.parametrize("changes", [{"conv_kernel_size": 4}, {"sliding_window": 3, "sliding_causal": True}])
def test_however_few_slots_are_drafted_they_hold_what_a_block_that_ends_with_them_does(changes: Any) -> None:
    case = dflash2_case(LENGTHS, num_layers=3, **changes)
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document, case.model.window)
    context = case.model.context(case.batch.aux, case.batch.positions, plan.context)
    opening = case.batch.input_ids[plan.anchors], case.batch.positions[plan.anchors]
    for first, last in ((1, BLOCK), (1, 2), (2, 3)):
        found = case.model.fill(*opening, context, plan.blocks, (first, last)).view(len(ANCHORS), -1, WIDTH)
        assert torch.allclose(found, plain(case, ANCHORS, last)[:, first:last], rtol=1e-5, atol=2e-6)


def test_a_fresh_drafter_fills_its_blocks_as_dflash_of_the_same_weights() -> None:
    case = dflash2_case(LENGTHS)
    fresh = DFLASH2.build(case.model.config, case.target, 1).double()
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            if "_conv" not in name:
                parameter.copy_(dict(case.model.named_parameters())[name])
    settings = {key: value for key, value in config().model_dump().items() if key not in SIZES}
    dflash = DFLASH.build(DFlashConfig.model_validate(settings), case.target, 0).double()
    dflash.load_state_dict({name: fresh.state_dict()[name] for name in dflash.state_dict()})
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document)
    assert torch.allclose(fresh.block_states(case.batch, plan), dflash.block_states(case.batch, plan), atol=1e-12)


def test_a_live_draft_is_chosen_token_by_token_and_is_what_recorded_text_says() -> None:
    case, longest = dflash2_case([24]), BLOCK - 1
    model = case.model
    assert isinstance(model, DFlash2)
    with torch.no_grad():
        model.candidate_selector.successor_codebook.mul_(8)
    case.batch.aux[:] = case.batch.aux.float().double()
    use = DrafterInUse(DFLASH2, model, case.target)
    live, seen, chosen = use.live(), 0, 0
    for newest in (6, 9, 10, 15):
        ids = case.batch.input_ids[seen + 1 : newest + 1].tolist()
        proposed = live.propose(Verified(case.batch.aux[:, seen:newest], case.batch.final[seen:newest], ids), longest)
        text = text_of(case.batch)
        text.input_ids[newest + 1 : newest + 1 + longest] = torch.tensor(proposed)
        assert int(use.hits(text, longest)[newest]) == longest
        text.input_ids[newest + 2] = (proposed[1] + 1) % VOCAB
        assert int(use.hits(text, longest)[newest]) == 1
        states = model.block_states(text, map_blocks(torch.tensor([newest]), text.document))
        chosen += (states @ model.head_weight().T).argmax(-1).tolist() != proposed
        seen = newest
    assert chosen


def text_of(batch: PackedBatch) -> PackedBatch:
    """The same states and tokens, every token supervised."""
    text = make_batch([24], torch.ones(24, dtype=torch.bool), dtype=torch.float64)
    text.input_ids[:], text.aux[:] = batch.input_ids, batch.aux
    return text


def test_tokens_that_are_no_candidates_are_never_drawn() -> None:
    case = dflash2_case([24])
    states, previous = torch.randn(7, WIDTH).double(), torch.arange(7)
    logits = case.model.logits(states, previous)
    best = (states @ case.target.head.output_weight.T).topk(CANDIDATES).indices
    assert torch.isfinite(logits).sum(1).tolist() == [CANDIDATES] * 7
    assert bool(torch.isfinite(logits.gather(1, best)).all())


def test_a_pack_without_anchors_has_no_loss_and_no_gradient() -> None:
    case = dflash2_case([9], dtype=torch.float32)
    case.batch.loss_mask[:] = False
    objective = DFLASH2.objective(case.model, case.target, DFlash2Loss())
    work = objective.prepare(case.batch)
    result = objective.losses(work, objective.denominators(work))
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert all(p.grad is None or not p.grad.any() for p in case.model.parameters())


def test_products_in_bf16_change_the_loss_by_rounding_only() -> None:
    case, loss = dflash2_case([19, 11], dtype=torch.float32), DFlash2Loss()
    exact = our_loss(case, loss, [2, 7, 21, 25])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = our_loss(case, loss, [2, 7, 21, 25])
    rounded.total.backward()
    torch.testing.assert_close(rounded.total.float(), exact.total, rtol=3e-2, atol=0)


@pytest.mark.parametrize(("width", "candidates", "group"), [(4096, 16, 16), (272, 16, 16), (264, 15, 8), (32, 5, 16)])
def test_defaults_fit_narrow_targets_and_llama_cpp_s_row_of_candidates(width: int, candidates: int, group: int) -> None:
    found = DFLASH2.derive(TargetFacts(width, 8, 1000, {}, (1, 2, 3, 4, 5)))["drafter"]
    assert (found["selector_top_k"], found["conv_group_size"]) == (candidates, group)
    assert found["selector_top_k"] * (found["selector_top_k"] + 1) <= width


def test_what_dflash2_cannot_be_is_refused() -> None:
    for changes, text in (
        ({"conv_group_size": 5}, "does not divide hidden_size"),
        ({"conv_kernel_size": BLOCK + 1}, "more than block_size"),
        ({"selector_top_k": VOCAB + 1}, "more than vocab_size"),
    ):
        with pytest.raises(ValueError, match=text):
            dflash2_case([9], **changes)
    settings = DFlash2Config.model_validate({**config().model_dump(), "name": "dflash2", **SIZES})
    with pytest.raises(ConfigError, match="selects among all tokens") as refused:
        case_of(DFLASH2, settings, [9], 25, torch.float32)
    assert refused.value.hint == f"drafter.vocab_size={VOCAB}"


def test_it_learns_a_few_samples_by_heart(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=6, layers=(1, 3, 4))
    words = ["drafter.mask_token_id=0", "drafter.block_size=4", "drafter.num_layers=1", "loss.labels=text"]
    words += ["loss.distil=0", "train.max_steps=60", "train.validate_every=0", "data.batch_tokens=400"]
    train(store.path, tmp_path / "run", drafter="dflash2", words=words)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    first, last = (next(line for line in part if "acc" in line) for part in (lines, lines[::-1]))
    assert max(first["acc"]) < 0.2
    assert min(last["acc"]) == 1.0
