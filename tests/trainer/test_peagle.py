"""P-EAGLE against its plain restatement, in values and gradients; its draws, its use, its refusals."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hiddenstore.errors import ConfigError
from tests.trainer.conftest import VOCAB, Setting, drafter_config, make_batch, make_head, make_setting
from tests.trainer.eagle3_plain import PlainEagle3
from tests.trainer.peagle_plain import as_chains, log_probabilities, mean, plain_loss
from trainer.drafters.base import Verified
from trainer.drafters.eagle3 import TttLoss, TttObjective
from trainer.drafters.live import recurrent_hits
from trainer.drafters.peagle import PEAGLE, ChainObjective, LiveChain, PEagle, PEagleConfig, PEagleLoss
from trainer.losses.teacher import TargetInterface, Teacher
from trainer.slots import chain_lengths, teacher_rows
from trainer.vocab import DraftVocab

MASK_ID = 5


def peagle_setting(lengths: list[int], known: int = 24, dtype: torch.dtype = torch.float32, **changes: Any) -> Setting:
    base = make_setting(lengths, known=known, dtype=dtype)
    settings = drafter_config().model_dump() | {"name": "peagle", "mask_token_id": MASK_ID, "num_layers": 1, **changes}
    model = PEagle.build(PEagleConfig.model_validate(settings), base.head, base.vocab).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 0.25
            parameter.copy_(torch.randn_like(parameter) * spread + (1.0 if "norm" in name else 0.0))
    return Setting(base.head, base.vocab, model, base.batch)


def objective_of(setting: Setting, loss: PEagleLoss) -> ChainObjective:
    assert isinstance(setting.model, PEagle)
    return ChainObjective(
        setting.model, Teacher(TargetInterface(setting.head, setting.vocab), drop_off_vocab=loss.drop_off_vocab), loss
    )


def plain_of(setting: Setting, loss: PEagleLoss, chains: Tensor) -> tuple[list[Tensor], list[int]]:
    """Losses of all slots of all documents, and their depths."""
    weights = dict(setting.model.named_parameters())
    weights.setdefault("embed_tokens.weight", setting.head.embed_tokens)
    config, batch = setting.model.config, setting.batch
    model = PlainEagle3(weights, heads=config.num_heads, kv_heads=config.num_kv_heads, eps=config.rms_norm_eps)
    logits, known = setting.head.logits(batch.final).to(batch.final.dtype), setting.vocab.target_ids.tolist()
    losses: list[Tensor] = []
    depths: list[int] = []
    for index in range(len(batch.sample_ids)):
        rows = torch.nonzero(batch.document == index)[:, 0]
        tokens = batch.input_ids[rows].tolist()
        found = log_probabilities(
            model, MASK_ID, tokens, batch.aux[:, rows], as_chains(chains[rows]), config.norm_before_residual
        )
        gates = range(1, len(tokens) - loss.mask_offset)
        taught = {p for p in gates if bool(batch.loss_mask[rows[p + loss.mask_offset]])}
        if loss.drop_off_vocab:
            taught = {p for p in taught if int(logits[rows[p]].argmax()) in known}
        more, at = plain_loss(found, logits[rows], taught, known)
        losses, depths = losses + more, depths + at
    return losses, depths


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"fc_norm": True}, {"norm_before_residual": True}])
@pytest.mark.parametrize("mask_offset", [0, 1])
def test_losses_and_gradients_agree_with_the_plain_restatement(options: dict[str, Any], mask_offset: int) -> None:
    setting = peagle_setting([13, 2, 9], dtype=torch.float64, **options)
    loss = PEagleLoss(steps=4, mask_offset=mask_offset, drop_off_vocab=mask_offset == 1)
    objective = objective_of(setting, loss)
    rows = teacher_rows(setting.batch.loss_mask, setting.batch.document, mask_offset)
    chains = chain_lengths(setting.batch, rows, 4, (0.9, 0.2, None), (0, 0))
    assert set(chains.tolist()) >= {0, 1, 2}
    inputs = objective.prepare_at(setting.batch, chains)
    result = objective.losses(inputs, objective.denominators(inputs))
    losses, depths = plain_of(setting, loss, chains)
    assert inputs.counts.tolist() == [depths.count(d) for d in range(4)]
    expected = mean(losses)
    assert float(result.value) == pytest.approx(float(expected.detach()), abs=1e-5)
    parameters = dict(setting.model.named_parameters())
    found, wanted = (torch.autograd.grad(x, list(parameters.values())) for x in (result.total, expected))
    # The teacher is fp32 in ours, hence not closer.
    for name, a, b in zip(parameters, found, wanted, strict=True):
        assert torch.allclose(a, b, atol=2e-6), name
    assert float(found[list(parameters).index("mask_hidden")].abs().max()) > 0


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_made_again_in_the_backward_change_no_gradient(layers: int) -> None:
    setting = peagle_setting([13, 9], num_layers=layers)
    objective, weights = objective_of(setting, PEagleLoss(steps=4)), list(setting.model.parameters())
    inputs = objective.prepare(setting.batch)
    found = []
    for recompute in (False, True):
        setting.model.recompute = recompute
        result = objective.losses(inputs, objective.denominators(inputs))
        found.append(torch.autograd.grad(result.total, weights))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_pack_without_mask_slots_teaches_what_eagle_3_s_first_step_is_taught() -> None:
    setting = peagle_setting([15])
    objective = objective_of(setting, PEagleLoss(steps=4))
    none = torch.zeros(15, dtype=torch.int64)
    inputs = objective.prepare_at(setting.batch, none)
    found = objective.losses(inputs, objective.denominators(inputs))
    first = TttObjective(setting.model, objective.teacher, TttLoss(steps=1))
    work = first.prepare(setting.batch)
    assert float(found.value) == pytest.approx(float(first.losses(work, first.denominators(work)).value), rel=1e-6)
    assert found.counts.tolist()[1:] == [0, 0, 0]


def test_chains_shrink_as_asked_start_before_taught_rows_and_follow_from_the_key_alone() -> None:
    lengths = [120, 60]
    batch = make_batch(lengths, torch.cat([torch.arange(n) >= 20 for n in lengths]))
    rows = teacher_rows(batch.loss_mask, batch.document, 1)
    drawn = chain_lengths(batch, rows, 8, (0.7, 0.2, None), (3, 9))
    assert torch.equal(drawn, chain_lengths(batch, rows, 8, (0.7, 0.2, None), (3, 9)))
    assert not torch.equal(drawn, chain_lengths(batch, rows, 8, (0.7, 0.2, None), (3, 10)))
    for index, begin in ((0, 0), (1, 120)):
        own = drawn[batch.document == index]
        count = int((batch.document[rows] == index).sum())
        reach = [int((own >= d).sum()) for d in range(1, 8)]
        asked = [int(max(0, count - d) * max(0.7**d, 0.2)) for d in range(1, 8)]
        # A chain that meets the end of the text falls out, so that a depth may lack a few of its share.
        assert all(asked[d] - 7 <= reach[d] <= asked[d] for d in range(7))
        assert reach == sorted(reach, reverse=True)
        for token, length in as_chains(own).items():
            assert all(bool(torch.isin(torch.tensor(begin + token + 1 + d), rows)) for d in range(1, length + 1))
    capped = chain_lengths(batch, rows, 8, (0.7, 0.2, 10), (3, 9))
    assert [int((capped[batch.document == i] > 0).sum()) for i in (0, 1)] == [6, 6]


def test_a_sample_s_chains_do_not_depend_on_its_pack() -> None:
    batch = make_batch([30, 40], torch.ones(70, dtype=torch.bool))
    both = chain_lengths(batch, teacher_rows(batch.loss_mask, batch.document, 1), 6, (0.7, 0.2, None), (1, 2))
    rows = torch.arange(30, 70)
    alone = make_batch([40], torch.ones(40, dtype=torch.bool))
    alone.sample_ids[:] = batch.sample_ids[1:]
    own = chain_lengths(alone, teacher_rows(alone.loss_mask, alone.document, 1), 6, (0.7, 0.2, None), (1, 2))
    assert torch.equal(both[rows], own)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_live_draft_of_one_forward_is_what_recorded_text_says_and_costs_no_cache(layers: int) -> None:
    setting = peagle_setting([24], known=VOCAB, num_layers=layers)
    model, batch = setting.model, setting.batch
    assert isinstance(model, PEagle)
    batch.loss_mask[:] = True
    live, seen = LiveChain(model, setting.vocab), 0
    proposals: dict[int, list[int]] = {}
    for newest in (6, 9, 10, 15):
        ids = batch.input_ids[seen + 1 : newest + 1].tolist()
        verified = Verified(batch.aux[:, seen:newest], batch.final[seen:newest], ids)
        proposals[newest] = live.propose(verified, 4)
        seen = newest
    for newest, proposed in proposals.items():
        changed = batch.input_ids.clone()
        changed[newest + 1 : newest + 5] = torch.tensor(proposed)
        text = make_batch([24], torch.ones(24, dtype=torch.bool))
        text.input_ids[:], text.aux[:] = changed, batch.aux
        hits = recurrent_hits(partial(model.unroll, text), model.lm_head.weight, setting.vocab, text, 4)
        assert int(hits[newest]) == 4
    assert live.propose(Verified(batch.aux[:, 15:16], batch.final[15:16], batch.input_ids[16:17].tolist()), 1)


def test_what_p_eagle_cannot_be_is_refused() -> None:
    settings = drafter_config().model_dump() | {"name": "peagle", "mask_token_id": 5}
    with pytest.raises(ValueError, match="feeds nothing back"):
        PEagleConfig.model_validate({**settings, "norm_output": True})
    with pytest.raises(ValueError, match="aux_layers is empty"):
        PEagleConfig.model_validate({**settings, "aux_layers": ()})
    config = PEagleConfig.model_validate({**settings, "mask_token_id": VOCAB})
    head = make_head()
    target = TargetInterface(head, DraftVocab.full(VOCAB))
    with pytest.raises(ConfigError, match=f"mask_token_id {VOCAB} has no embedding"):
        PEAGLE.build(config, target, 0)
    model = PEAGLE.build(PEagleConfig.model_validate(settings), target, 0)
    with pytest.raises(ConfigError, match="peagle drafts no trees"):
        PEAGLE.tree(model, target, 4)
