"""The trainer's EAGLE-3 against the plain restatement, in values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hiddenstore.records import TopK
from tests.trainer.conftest import VOCAB, WIDTH, Setting, make_setting
from tests.trainer.eagle3_plain import PlainEagle3, plain_losses
from trainer.attention.ttt import KVCache
from trainer.drafters.eagle3 import TttLoss, TttObjective
from trainer.losses.fused_head import StepLosses
from trainer.losses.teacher import TargetInterface, Teacher


def ours(setting: Setting, loss: TttLoss) -> tuple[Tensor, StepLosses]:
    """Per-step mean losses and the result they come from."""
    teacher = Teacher(TargetInterface(setting.head, setting.vocab), drop_off_vocab=loss.drop_off_vocab)
    objective = TttObjective(setting.model, teacher, loss)
    work = objective.prepare(setting.batch)
    result = objective.losses(work, objective.denominators(work))
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


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "fc_norm": True}])
def test_step_losses_agree_with_several_layers(options: dict[str, bool]) -> None:
    setting = make_setting([17, 3, 12], num_layers=3, **options)
    setting.batch.loss_mask[:12] = False
    assert_agree(setting, TttLoss(steps=4))


def test_gradients_agree_with_several_layers_and_another_inner_width() -> None:
    assert_gradients_agree(make_setting([9, 6], known=20, dtype=torch.float64, num_layers=2, intermediate_size=40))


def test_whole_vocabulary_drops_nothing() -> None:
    setting = make_setting([12], known=VOCAB)
    setting.batch.loss_mask[:] = True
    assert_agree(setting, TttLoss(steps=3, mask_offset=0))
    assert ours(setting, TttLoss(steps=3, mask_offset=0))[1].counts.tolist() == [11, 10, 9]


def test_gradients_equal_those_of_the_plain_restatement() -> None:
    assert_gradients_agree(make_setting([9, 6], known=20, dtype=torch.float64, fc_norm=True, train_embeddings=True))


def assert_gradients_agree(setting: Setting) -> None:
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
    teacher = Teacher(TargetInterface(setting.head, setting.vocab))
    objective = TttObjective(setting.model, teacher, TttLoss(steps=2, reduction="slots"))
    assert objective.denominators(objective.prepare(setting.batch)).tolist() == [20.0, 20.0]
    both = objective.prepare(setting.batch)
    assert objective.denominators(both, both).tolist() == [40.0, 40.0]


@pytest.mark.parametrize(("norm_output", "num_layers"), [(False, 1), (True, 1), (False, 2)])
def test_decoding_slot_by_slot_repeats_the_unroll(norm_output: bool, num_layers: int) -> None:
    setting = make_setting([12], known=VOCAB, norm_output=norm_output, num_layers=num_layers)
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


def test_a_step_asked_for_its_last_slots_makes_their_logits_alone() -> None:
    setting = make_setting([12], known=VOCAB)
    g, ids = setting.model.start(setting.batch.aux)[:5], setting.batch.input_ids[1:6]
    with torch.no_grad():
        hidden, logits = setting.model.step(g, ids, torch.arange(5), KVCache())
        again, last = setting.model.step(g, ids, torch.arange(5), KVCache(), last=2)
    assert torch.equal(hidden, again)
    assert torch.allclose(last, logits[3:], atol=1e-6)


def test_hard_labels_of_the_text_need_no_final_hidden_and_stop_at_the_end_of_a_sample() -> None:
    setting = make_setting([9, 7], known=30)
    batch, known = setting.batch, setting.vocab.target_ids.tolist()
    loss = TttLoss(steps=2, kind="text_ce", mask_offset=0)
    setting.batch = replace(batch, final=batch.final[:0], final_rows=batch.final_rows[:0])
    found, result = ours(setting, loss)
    weights = dict(setting.model.named_parameters()) | {"embed_tokens.weight": setting.head.embed_tokens}
    sums: list[list[float]] = [[], []]
    for index in range(2):
        rows = torch.nonzero(batch.document == index)[:, 0]
        tokens, mask = batch.input_ids[rows].tolist(), batch.loss_mask[rows].tolist()
        predicted = PlainEagle3(weights, heads=4, kv_heads=2).log_probabilities(tokens, batch.aux[:, rows], 2)
        for i, row in enumerate(predicted):
            for t, log_p in enumerate(row):
                p = t + 1 + i
                if mask[p] and p + 1 < len(tokens) and tokens[p + 1] in known:
                    sums[i].append(-float(log_p[known.index(tokens[p + 1])].detach()))
    assert result.counts.tolist() == [len(s) for s in sums]
    assert torch.allclose(found, torch.tensor([sum(s) / len(s) for s in sums], dtype=torch.float64), atol=1e-5)


def test_hard_labels_of_the_target_are_its_most_probable_tokens() -> None:
    setting = make_setting([15], known=20)
    loss = TttLoss(steps=1, kind="target_ce", drop_off_vocab=False)
    found, result = ours(setting, loss)
    objective = TttObjective(
        setting.model, Teacher(TargetInterface(setting.head, setting.vocab), drop_off_vocab=False), loss
    )
    work = objective.prepare(setting.batch)
    states = setting.model.unroll(setting.batch, work.slot_map, 1)[work.slot_map.slots[:, 0]]
    best = setting.head.logits(setting.batch.final).argmax(-1)[work.slot_map.rows]
    labels = setting.vocab.draft_ids()[best]
    assert bool((labels >= 0).all())
    expected = torch.nn.functional.cross_entropy(states @ setting.model.lm_head.weight.T, labels)
    assert torch.allclose(found.float(), expected.detach(), atol=1e-5)
    assert result.counts.tolist() == [len(labels)]


@pytest.mark.parametrize("kind", ["kl", "tv", "lk_alpha", "lk_lambda"])
@pytest.mark.parametrize("overlap_mass", ["whole", "draft"])
def test_overlap_losses_take_the_mass_they_are_told_to(kind: str, overlap_mass: str) -> None:
    setting = make_setting([13, 6], known=18)
    loss = TttLoss.model_validate({"steps": 2, "kind": kind, "overlap_mass": overlap_mass})
    found, _ = ours(setting, loss)
    objective = TttObjective(setting.model, Teacher(TargetInterface(setting.head, setting.vocab)), loss)
    work = objective.prepare(setting.batch)
    states = setting.model.unroll(setting.batch, work.slot_map, 2).view(2, -1, WIDTH)
    whole = setting.head.logits(setting.batch.final)[work.slot_map.rows].softmax(-1)[:, setting.vocab.target_ids]
    q = whole / whole.sum(-1, keepdim=True)
    for i in range(2):
        there = work.slot_map.slots[:, i] >= 0
        log_p = (states[i, work.slot_map.slots[there, i]] @ setting.model.lm_head.weight.T).log_softmax(-1)
        divergence = (q[there] * (q[there].log() - log_p)).sum(-1)
        alpha = torch.minimum(whole[there] if overlap_mass == "whole" else q[there], log_p.exp()).sum(-1)
        share = torch.exp(-3 * alpha)
        expected = {
            "kl": divergence,
            "tv": 1 - alpha,
            "lk_alpha": -alpha.log(),
            "lk_lambda": share * divergence + (1 - share) * (1 - alpha),
        }[kind]
        assert torch.allclose(found[i].float(), expected.mean().detach(), atol=1e-5)


@pytest.mark.parametrize("kind", ["soft_ce", "lk_lambda"])
def test_a_pack_of_all_top_tokens_teaches_as_the_final_hidden_does(kind: str) -> None:
    setting = make_setting([14, 5], known=18)
    loss = TttLoss(steps=3, kind=kind)
    from_hidden = ours(setting, loss)[1]
    logits = setting.head.logits(setting.batch.final)
    log_probs, ids = logits.log_softmax(-1).topk(VOCAB)
    setting.batch = replace(
        setting.batch, final=setting.batch.final[:0], topk=TopK(ids, log_probs, logits.logsumexp(-1))
    )
    from_tokens = ours(setting, loss)[1]
    assert torch.equal(from_tokens.counts, from_hidden.counts)
    assert torch.equal(from_tokens.hits, from_hidden.hits)
    assert torch.allclose(from_tokens.sums, from_hidden.sums, atol=1e-4)


def test_an_unknown_loss_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(ValueError, match="lk_alpha"):
        TttLoss(kind="kll")


def test_checkpoint_names_are_those_engines_load() -> None:
    names = set(make_setting([4]).model.state_dict())
    assert names == {
        "fc.weight", "norm.weight", "lm_head.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight",
        "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight",
        "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
    }  # fmt: skip
    more = set(make_setting([4], num_layers=3).model.state_dict()) - names
    assert {n for n in more if n.startswith("layers.2.")} == {
        "layers.2.input_layernorm.weight", "layers.2.post_attention_layernorm.weight",
        "layers.2.self_attn.q_proj.weight", "layers.2.self_attn.k_proj.weight", "layers.2.self_attn.v_proj.weight",
        "layers.2.self_attn.o_proj.weight", "layers.2.mlp.gate_proj.weight", "layers.2.mlp.up_proj.weight",
        "layers.2.mlp.down_proj.weight",
    }  # fmt: skip
    assert len(more) == 18
    assert {n for n in make_setting([4], fc_norm=True).model.state_dict() if n.startswith("fc_norm")} == {
        "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"
    }  # fmt: skip
