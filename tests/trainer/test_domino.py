"""Domino against its plain restatement: the GRU, logits, losses, gradients, and its use over text and live."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.conftest import VOCAB, make_batch
from tests.trainer.test_dflash import Case, as_lists, case_of, config, plain
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.domino import DOMINO, Domino, DominoConfig, DominoLoss
from trainer.losses.fused_head import StepLosses
from trainer.slots import map_blocks

GRU, RANK, BLOCK = 7, 6, 4
K = BLOCK - 1
LENGTHS = [17, 3, 12]
ANCHORS = [0, 2, 4, 9, 14, 16, 18, 21, 25, 31]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def domino_case(lengths: list[int], known: int = VOCAB, dtype: torch.dtype = torch.float64, **changes: Any) -> Case:
    sizes = {"name": "domino", "gru_hidden_dim": GRU, "emb_dim": RANK, "block_size": BLOCK}
    settings = {**config().model_dump(), **sizes, **changes}
    return case_of(DOMINO, DominoConfig.model_validate(settings), lengths, known, dtype)


def our_loss(case: Case, loss: DominoLoss, anchors: list[int], progress: float) -> StepLosses:
    objective = DOMINO.objective(case.model, case.target, loss)
    case.model.progress = progress
    work = objective.prepare_at(case.batch, torch.tensor(anchors))
    return objective.losses(work, objective.denominators(work))


def torch_gru(case: Case) -> nn.GRU:
    """torch's own, with the weights of the drafter."""
    model = case.model
    assert isinstance(model, Domino)
    gru = nn.GRU(model.config.hidden_size, GRU, batch_first=True, bias=False, dtype=model.fc.weight.dtype)
    gru.load_state_dict(model.prefix_gru.state_dict())
    return gru


def plain_logits(case: Case, state: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of a slot with and without the head, from its state [D] and the tokens of its block before it."""
    w, vocab, table = dict(case.model.named_parameters()), case.target.vocab, case.target.head.embed_tokens
    head = w.get("lm_head.weight", case.target.head.output_weight[vocab.target_ids])
    base = head @ state
    if len(tokens) == 1:
        return base, base
    known = torch.zeros(GRU, dtype=state.dtype)
    for token in tokens:
        told, kept = w["prefix_gru.weight_ih_l0"] @ table[token], w["prefix_gru.weight_hh_l0"] @ known
        reset, keep = (torch.sigmoid(told[i : i + GRU] + kept[i : i + GRU]) for i in (0, GRU))
        new = torch.tanh(told[2 * GRU :] + reset * kept[2 * GRU :])
        known = (1 - keep) * new + keep * known
    narrow = w["embed_proj.0.weight"] @ torch.cat([state, known])
    return base + w["embed_proj.2.weight"] @ (narrow * torch.sigmoid(narrow)), base


def plain_loss(case: Case, anchors: list[int], share: float) -> tuple[Tensor, list[float]]:
    """Slot by slot: the loss, ``share`` of it without the head, and the sum of the losses with it at each depth."""
    pack, known = as_lists(case.batch), case.target.vocab.target_ids.tolist()
    first = 0 if case.model.config.shift_label else 1  # type: ignore[attr-defined]
    states, total, weights, sums = plain(case, anchors), torch.zeros(()).double(), 0.0, [0.0] * K
    for n, anchor in enumerate(anchors):
        for k in range(K):
            row = anchor + 1 + k
            if row >= len(pack["ids"]) or pack["document"][row] != pack["document"][anchor] or not pack["mask"][row]:
                continue
            weight = float(torch.exp(torch.tensor(-k / 4.0)))
            weights += weight * (pack["ids"][row] in known)
            if pack["ids"][row] not in known:
                continue
            both = plain_logits(case, states[n, first + k], pack["ids"][anchor:row])
            own, base = (-logits.log_softmax(0)[known.index(pack["ids"][row])] for logits in both)
            total = total + weight * ((1 - share) * own + share * base)
            sums[k] += float(own.detach())
    return total / weights, sums


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize(("known", "changes"), [(VOCAB, {}), (25, {}), (25, {"train_head": True})])
@pytest.mark.parametrize(("progress", "share"), [(0.0, 0.8), (0.1, 0.6), (0.4, 0.0), (1.0, 0.0)])
def test_losses_and_gradients_agree_with_the_plain_restatement(
    shifted: bool, known: int, changes: Any, progress: float, share: float
) -> None:
    case = domino_case(LENGTHS, known=known, shift_label=shifted, **changes)
    loss = DominoLoss.model_validate({"gamma": 4.0, "base": 0.8, "base_share": 0.4})
    result, (expected, sums) = our_loss(case, loss, ANCHORS, progress), plain_loss(case, ANCHORS, share)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert result.sums.tolist() == pytest.approx(sums, abs=1e-4)
    weights = dict(case.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(weights.values())) for x in (result.total, expected))
    for name, a, b in zip(weights, found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 1e-5 * max(1e-2, float(b.abs().max())), name


def test_what_slots_know_of_their_block_is_what_torchs_own_gru_says() -> None:
    case = domino_case([9])
    tokens = torch.randint(VOCAB, (5, K))
    found = case.model.before(tokens).view(5, K, GRU + 1)
    assert torch.allclose(found[..., :GRU], torch_gru(case)(case.target.head.embed_tokens[tokens])[0])
    assert found[..., GRU].tolist() == [[0.0, 1.0, 1.0]] * 5


def test_a_fresh_head_changes_nothing_and_every_slot_of_a_shifted_block_but_the_last_proposes() -> None:
    settings = {**config().model_dump(), "name": "domino", "gru_hidden_dim": GRU, "emb_dim": RANK}
    case = domino_case(LENGTHS)
    fresh = Domino.build(DominoConfig.model_validate(settings), case.target.head, case.target.vocab, 0).double()
    fresh.tie_weights(case.target.head)
    plan = map_blocks(torch.tensor(ANCHORS), case.batch.document, None)
    states = fresh.block_states(case.batch, plan)
    before = fresh.before(torch.randint(VOCAB, (len(ANCHORS), K)))
    assert torch.equal(fresh.logits(states, before), fresh.logits(states, torch.zeros_like(before)))
    found = case.model.block_states(case.batch, plan).view(len(ANCHORS), K, -1)
    assert torch.allclose(found, plain(case, ANCHORS)[:, :-1], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shifted", [True, False])
def test_a_live_draft_is_chosen_token_by_token_and_is_what_recorded_text_says(shifted: bool) -> None:
    case = domino_case([24], shift_label=shifted)
    model = case.model
    assert isinstance(model, Domino)
    with torch.no_grad():
        model.embed_proj[2].weight.mul_(8)
    case.batch.loss_mask[:] = True
    case.batch.aux[:] = case.batch.aux.float().double()
    use = DrafterInUse(DOMINO, model, case.target)
    live, seen, drafts, first = use.live(), 0, set(), 0 if shifted else 1
    for newest in (6, 9, 10, 15):
        ids = case.batch.input_ids[seen + 1 : newest + 1].tolist()
        proposed = live.propose(Verified(case.batch.aux[:, seen:newest], case.batch.final[seen:newest], ids), K)
        states = plain(case, [newest])[0, first:]
        before = [int(case.batch.input_ids[newest])]
        for state in states[:K]:
            before.append(int(plain_logits(case, state, before)[0].argmax()))
        assert proposed == before[1:]
        text = make_batch([24], torch.ones(24, dtype=torch.bool), dtype=torch.float64)
        text.input_ids[:], text.aux[:] = case.batch.input_ids, case.batch.aux
        text.input_ids[newest + 1 : newest + 1 + K] = torch.tensor(proposed)
        assert int(use.hits(text, K)[newest]) == K
        text.input_ids[newest + 2] = (proposed[1] + 1) % VOCAB
        assert int(use.hits(text, K)[newest]) == 1
        drafts.add(tuple(proposed))
        seen = newest
    assert len(drafts) > 2
