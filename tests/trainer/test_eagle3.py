"""The trainer's EAGLE-3 against the plain restatement, in values and gradients."""

import pytest
import torch
from torch import Tensor

from tests.trainer.conftest import VOCAB, Setting, make_setting
from tests.trainer.eagle3_plain import PlainEagle3, plain_losses
from trainer.losses import StepLosses
from trainer.teacher import Teacher
from trainer.ttt import TttLoss, TttObjective


def ours(setting: Setting, loss: TttLoss) -> tuple[Tensor, StepLosses]:
    """Per-step mean losses and the result they come from."""
    teacher = Teacher(setting.head, setting.vocab, drop_off_vocab=loss.drop_off_vocab)
    objective = TttObjective(setting.model, teacher, loss)
    work = objective.plan(setting.batch)
    result = objective.losses(work, objective.divisors(work))
    return result.sums / result.counts, result


def plain(setting: Setting, loss: TttLoss) -> tuple[list[Tensor], list[int]]:
    weights = dict(setting.model.named_parameters())
    weights.setdefault("embed_tokens.weight", setting.head.embed_tokens)
    config = setting.model.config
    model = PlainEagle3(weights, heads=config.num_heads, kv_heads=config.num_kv_heads, eps=config.rms_norm_eps)
    model.norm_output = config.norm_output
    batch = setting.batch
    logits = setting.head.logits(batch.final).to(batch.final.dtype)
    documents = []
    for index in range(len(batch.sample_ids)):
        rows = torch.nonzero(batch.document == index)[:, 0]
        documents.append(
            (batch.input_ids[rows].tolist(), batch.aux[:, rows], logits[rows], batch.loss_mask[rows].int().tolist())
        )
    known = setting.vocab.target_ids.tolist()
    return plain_losses(
        model, documents, known, steps=loss.steps, mask_offset=loss.mask_offset, drop=loss.drop_off_vocab
    )


def assert_agree(setting: Setting, loss: TttLoss) -> None:
    found, result = ours(setting, loss)
    expected, counts = plain(setting, loss)
    assert result.counts.tolist() == counts
    assert torch.allclose(found.float(), torch.stack(expected).float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("mask_offset", [-1, 0, 1])
@pytest.mark.parametrize("drop", [True, False])
def test_step_losses_agree_with_the_plain_restatement(mask_offset: int, drop: bool) -> None:
    assert_agree(make_setting([13, 2, 9], known=24), TttLoss(steps=4, mask_offset=mask_offset, drop_off_vocab=drop))


@pytest.mark.parametrize("option", ["fc_norm", "norm_output", "train_embeddings"])
def test_step_losses_agree_under_each_option(option: str) -> None:
    assert_agree(make_setting([11, 7], **{option: True}), TttLoss(steps=3))


def test_whole_vocabulary_drops_nothing() -> None:
    setting = make_setting([12], known=VOCAB)
    setting.batch.loss_mask[:] = True
    assert_agree(setting, TttLoss(steps=3, mask_offset=0))
    assert ours(setting, TttLoss(steps=3, mask_offset=0))[1].counts.tolist() == [11, 10, 9]


def test_gradients_equal_those_of_the_plain_restatement() -> None:
    setting = make_setting([9, 6], known=20, dtype=torch.float64, fc_norm=True, train_embeddings=True)
    loss = TttLoss(steps=3)
    parameters = dict(setting.model.named_parameters())
    result = ours(setting, loss)[1]
    found = torch.autograd.grad(result.total, list(parameters.values()))
    losses, _ = plain(setting, loss)
    total = sum(0.8**i * value for i, value in enumerate(losses))
    expected = torch.autograd.grad(total, list(parameters.values()))  # type: ignore[arg-type]
    # The teacher is fp32 in ours, hence not closer.
    for name, a, b in zip(parameters, found, expected, strict=True):
        assert torch.allclose(a, b, atol=2e-6), name


def test_packing_changes_nothing() -> None:
    setting = make_setting([10, 4, 7])
    together = ours(setting, TttLoss(steps=4))[1]
    batch, sums = setting.batch, torch.zeros(4, dtype=torch.float64)
    for index in range(3):
        rows = torch.nonzero(batch.document == index)[:, 0]
        alone = type(batch)(
            batch.input_ids[rows], batch.loss_mask[rows], batch.positions[rows], batch.document[rows] * 0,
            batch.aux[:, rows], batch.final[rows], torch.arange(len(rows)), [batch.sample_ids[index]],
        )  # fmt: skip
        sums += ours(Setting(setting.head, setting.vocab, setting.model, alone), TttLoss(steps=4))[1].sums
    assert torch.allclose(together.sums, sums, atol=1e-5)


def test_idle_slots_may_be_skipped_or_computed() -> None:
    setting = make_setting([60])
    setting.batch.loss_mask[:] = False
    setting.batch.loss_mask[5:9] = True
    setting.batch.loss_mask[40:52] = True
    assert_agree(setting, TttLoss(steps=4))


def test_hits_count_the_target_token() -> None:
    setting = make_setting([14], known=VOCAB)
    loss = TttLoss(steps=1, mask_offset=0)
    setting.batch.loss_mask[:] = True
    result = ours(setting, loss)[1]
    weights = dict(setting.model.named_parameters()) | {"embed_tokens.weight": setting.head.embed_tokens}
    rows = PlainEagle3(weights, heads=4, kv_heads=2).log_probabilities(
        setting.batch.input_ids.tolist(), setting.batch.aux, 1
    )[0]
    targets = setting.head.logits(setting.batch.final).argmax(-1)
    assert result.hits.tolist() == [sum(int(r.argmax()) == int(targets[t + 1]) for t, r in enumerate(rows))]


def test_slots_reduction_divides_by_every_token() -> None:
    setting = make_setting([14, 6])
    teacher = Teacher(setting.head, setting.vocab)
    objective = TttObjective(setting.model, teacher, TttLoss(steps=2, reduction="slots"))
    assert objective.divisors(objective.plan(setting.batch)).tolist() == [20.0, 20.0]
    both = objective.plan(setting.batch)
    assert objective.divisors(both, both).tolist() == [40.0, 40.0]


@pytest.mark.parametrize("norm_output", [False, True])
def test_decoding_slot_by_slot_repeats_the_unroll(norm_output: bool) -> None:
    from trainer.drafters.blocks import KVCache

    setting = make_setting([12], known=VOCAB, norm_output=norm_output)
    model, batch = setting.model, setting.batch
    batch.loss_mask[:] = True
    weights = dict(model.named_parameters()) | {"embed_tokens.weight": setting.head.embed_tokens}
    plain_model = PlainEagle3(weights, heads=4, kv_heads=2)
    plain_model.norm_output = norm_output
    expected = plain_model.log_probabilities(batch.input_ids.tolist(), batch.aux, 3)
    with torch.no_grad():
        g = model.start(batch.aux)
        for t in (0, 4, 8):
            cache = KVCache()
            hidden, logits = model.step(g[: t + 1], batch.input_ids[1 : t + 2], torch.arange(t + 1), cache)
            for s in range(t + 1):
                assert torch.allclose(logits[s].log_softmax(0), expected[0][s], atol=1e-4)
            last = hidden[-1:]
            for i in (1, 2):
                last, logits = model.step(last, batch.input_ids[t + 1 + i][None], torch.tensor([t + i]), cache)
                assert torch.allclose(logits[0].log_softmax(0), expected[i][t], atol=1e-4)
            cache.crop(t + 1)
            assert cache.length == t + 1


def test_checkpoint_names_are_those_engines_load() -> None:
    names = set(make_setting([4]).model.state_dict())
    assert names == {
        "fc.weight", "norm.weight", "lm_head.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    }  # fmt: skip
    assert {n for n in make_setting([4], fc_norm=True).model.state_dict() if n.startswith("fc_norm")} == {
        "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"
    }  # fmt: skip
