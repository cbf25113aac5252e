"""XPress against its plain restatement: the head, losses, gradients, and its use over text and live."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.errors import ConfigError
from tests.trainer.conftest import VOCAB, make_batch
from tests.trainer.test_dflash import Case, as_lists, case_of, config, plain
from trainer.drafters.base import DrafterInUse, TargetFacts, Verified
from trainer.drafters.xpress import XPRESS, XPress, XPressConfig, XPressLoss
from trainer.losses.fused_head import StepLosses

RANK, BLOCK = 6, 5
K = BLOCK - 1
LENGTHS = [17, 3, 12]
ANCHORS = [0, 2, 4, 9, 14, 16, 18, 21, 25, 31]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def xpress_case(lengths: list[int], known: int = VOCAB, dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    sizes = {"name": "xpress", "xpress_rank": RANK, "block_size": BLOCK}
    settings = {**config().model_dump(), **sizes, **changes}
    return case_of(XPRESS, XPressConfig.model_validate(settings), lengths, known, dtype)


def loud(case: Case) -> Case:
    """The same with a head that says much of the tokens before a slot."""
    assert isinstance(case.model, XPress)
    with torch.no_grad():
        case.model.xpress_head.w1.weight.mul_(8)
    return case


def our_loss(case: Case, loss: XPressLoss, anchors: list[int]) -> StepLosses:
    objective = XPRESS.objective(case.model, case.target, loss)
    work = objective.prepare_at(case.batch, torch.tensor(anchors))
    return objective.losses(work, objective.denominators(work))


def head_of(case: Case) -> Tensor:
    return dict(case.model.named_parameters()).get("lm_head.weight", case.target.head.output_weight)


def plain_logits(case: Case, states: Tensor, tokens: list[int]) -> list[Tensor]:
    """Logits [V] of slots 1 ... of a block of states [S, D], after the newest token and those that follow it, a slot
    and a channel at a time."""
    w = {name.removeprefix("xpress_head."): tensor for name, tensor in case.model.named_parameters()}
    mean, channels = sum(states) / len(states), w["in_proj.weight"]
    entering = []
    for slot, state in enumerate(states):
        token = tokens[max(slot - 1, 0)]
        parts = [w["down_h.weight"] @ state, w["down_g.weight"] @ mean, w["w1.weight"][token]]
        entering.append(channels @ torch.cat(parts))
    logits = []
    for slot in range(1, len(states)):
        mixed = entering[slot]
        for earlier in range(slot + 1):
            mixed = mixed + w["mix.L"][:, slot, earlier] * entering[earlier]
        gate = w["mlp.gate_proj.weight"] @ mixed
        inner = gate * torch.sigmoid(gate) * (w["mlp.up_proj.weight"] @ mixed)
        known = mixed + w["mlp.down_proj.weight"] @ inner
        logits.append(head_of(case) @ states[slot] + w["w2.weight"] @ known)
    return logits


def plain_draft(case: Case, states: Tensor, newest: int, passes: int) -> list[int]:
    """The tokens of a block of states [S, D] after so many passes."""
    draft = [int((head_of(case) @ state).argmax()) for state in states[1:]]
    for _ in range(passes):
        draft = [int(logits.argmax()) for logits in plain_logits(case, states, [newest, *draft])]
    return draft


def plain_loss(case: Case, loss: XPressLoss, anchors: list[int]) -> tuple[Tensor, list[float]]:
    """Slot by slot: the loss, and the sum of the losses after the text's own tokens at each depth."""
    pack, states = as_lists(case.batch), plain(case, anchors)
    target_logits = case.target.head.logits(case.batch.final).double()
    total, count, sums = torch.zeros(()).double(), 0, [0.0] * K

    def own(logits: Tensor, row: int) -> Tensor:
        p, q = logits.softmax(0), target_logits[row - 1].softmax(0)
        choice = int(q.argmax()) if loss.labels == "target" else pack["ids"][row]
        return -loss.cross_entropy * p[choice].log() + loss.overlap * (1 - torch.minimum(p, q).sum())

    for n, anchor in enumerate(anchors):
        text = [pack["ids"][min(anchor + k, len(pack["ids"]) - 1)] for k in range(K)]
        after_text = plain_logits(case, states[n], text)
        alone = [head_of(case) @ state for state in states[n, 1:]]
        drafts = [plain_draft(case, states[n].detach(), text[0], passes) for passes in range(loss.rounds)]
        rounds = [plain_logits(case, states[n], [text[0], *draft]) for draft in drafts]
        for k in range(K):
            row = anchor + 1 + k
            if row >= len(pack["ids"]) or pack["document"][row] != pack["document"][anchor] or not pack["mask"][row]:
                continue
            here = own(after_text[k], row)
            sums[k] += float(here.detach())
            if rounds:
                here = here + loss.consistency * sum(own(logits[k], row) for logits in rounds) / len(rounds)
            here = here + loss.base * own(alone[k], row)
            total = total + torch.exp(torch.tensor(-k / 4.0)) * here
            count += 1
    return total / count, sums


@pytest.mark.parametrize("labels", ["target", "text"])
@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({}, {"train_head": True, "xpress_mlp_ratio": 3}),
        ({"rounds": 1, "base": 0.0, "cross_entropy": 1.0, "overlap": 0.0}, {}),
        ({"rounds": 0, "base": 1.5}, {"sliding_window": 5, "sliding_causal": True}),
    ],
)
def test_losses_and_gradients_agree_with_the_plain_restatement(
    labels: str, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    case = xpress_case(LENGTHS, **changes)
    loss = XPressLoss.model_validate({"labels": labels, "gamma": 4.0, **settings})
    result, (expected, sums) = our_loss(case, loss, ANCHORS), plain_loss(case, loss, ANCHORS)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert result.sums.tolist() == pytest.approx(sums, abs=1e-4)
    weights = dict(case.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(weights.values())) for x in (result.total, expected))
    for name, a, b in zip(weights, found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-2, float(b.abs().max())), name


def test_after_as_many_passes_as_slots_a_draft_is_what_choosing_in_turn_gives() -> None:
    case = loud(xpress_case([24], num_jacobi_passes=K))
    states = plain(case, [9])[0].detach()
    newest, chosen = int(case.batch.input_ids[9]), []
    for slot in range(K):
        # Later slots do not matter to it, whatever stands there.
        tokens = [newest, *chosen, *[0] * (K - 1 - slot)]
        chosen.append(int(plain_logits(case, states, tokens)[slot].argmax()))
    drafts = [plain_draft(case, states, newest, passes) for passes in range(K + 1)]
    assert drafts[-1] == chosen
    assert len(set(map(tuple, drafts))) > 2
    assert all(draft[:passes] == chosen[:passes] for passes, draft in enumerate(drafts))


@pytest.mark.parametrize(("passes", "settled"), [(1, 1), (2, 2), (6, 6), (1 << 60, K)])
@pytest.mark.parametrize("length", [K, 2])
def test_a_live_draft_is_made_in_passes_over_its_block_and_is_what_recorded_text_says(
    passes: int, settled: int, length: int
) -> None:
    case = loud(xpress_case([24], num_jacobi_passes=passes))
    case.batch.loss_mask[:] = True
    case.batch.aux[:] = case.batch.aux.float().double()
    use = DrafterInUse(XPRESS, case.model, case.target)
    live, seen, drafts = use.live(), 0, set()
    for newest in (6, 9, 10, 15):
        ids = case.batch.input_ids[seen + 1 : newest + 1].tolist()
        proposed = live.propose(Verified(case.batch.aux[:, seen:newest], case.batch.final[seen:newest], ids), length)
        states = plain(case, [newest], block=1 + length)[0].detach()
        assert proposed == plain_draft(case, states, int(case.batch.input_ids[newest]), settled)
        text = make_batch([24], torch.ones(24, dtype=torch.bool), dtype=torch.float64)
        text.input_ids[:], text.aux[:] = case.batch.input_ids, case.batch.aux
        text.input_ids[newest + 1 : newest + 1 + length] = torch.tensor(proposed)
        assert int(use.hits(text, length)[newest]) == length
        # What stands in the text where a draft goes does not matter to it.
        text.input_ids[newest + 1] = (proposed[0] + 1) % VOCAB
        assert int(use.hits(text, length)[newest]) == 0
        text.input_ids[newest + 1], text.input_ids[newest + 2] = proposed[0], (proposed[1] + 1) % VOCAB
        assert int(use.hits(text, length)[newest]) == 1
        drafts.add(tuple(proposed))
        seen = newest
    assert len(drafts) > 2


def test_a_shorter_draft_is_another_block_and_the_head_starts_without_mixing() -> None:
    case = xpress_case([24])
    assert XPRESS.depends_on_length(case.model.config)
    fresh = XPress.build(case.model.config, case.target.head, case.target.vocab, 0)
    assert not bool(fresh.xpress_head.mix["L"].any())
    assert 0.015 < float(fresh.xpress_head.w2.weight.detach().std()) < 0.025


def test_what_xpress_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="corrects the logits of all tokens of the target") as raised:
        xpress_case([9], known=25)
    assert raised.value.hint == f"drafter.vocab_size={VOCAB}"
    with pytest.raises(ValueError, match="dpace weighs by cross-entropies"):
        XPressLoss(weighting="dpace")
    with pytest.raises(ValueError, match="cross_entropy and overlap are both 0"):
        XPressLoss(cross_entropy=0, overlap=0)


@pytest.mark.parametrize(("width", "rank"), [(16, 32), (576, 256), (100, 64), (4096, 256)])
def test_the_head_is_as_wide_as_vllm_s_kernels_take_it(width: int, rank: int) -> None:
    facts = TargetFacts(width, 12, VOCAB, {}, (1, 3, 5, 7, 9))
    assert XPRESS.derive(facts)["drafter"]["xpress_rank"] == rank
