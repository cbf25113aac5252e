"""The teacher: argmax over the whole vocabulary in chunks, probabilities over the draft vocabulary."""

from dataclasses import replace

import pytest
import torch

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError
from hiddenstore.records import TopK
from hiddenstore.targets.head import HeadBundle
from tests.trainer.conftest import VOCAB, make_batch, make_head
from trainer.losses import teacher as module
from trainer.losses.teacher import TargetInterface, Teacher
from trainer.vocab import DraftVocab


@pytest.mark.parametrize("chunk", [7, 8192])
def test_token_is_the_argmax_over_the_whole_vocabulary(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCAB_CHUNK", chunk)
    monkeypatch.setattr(module, "ROW_CHUNK", 5)
    head, batch = make_head(), make_batch([20])
    vocab = DraftVocab.of_ids(torch.tensor([3, 5, 8, 30, 31, 39]), VOCAB)
    rows = torch.arange(1, 19)
    found = Teacher(TargetInterface(head, vocab)).read(batch, rows)
    logits = head.logits(batch.final[rows])
    assert torch.equal(found.token, logits.argmax(-1))
    assert torch.equal(found.usable, torch.isin(found.token, vocab.target_ids))
    probabilities = Teacher(TargetInterface(head, vocab)).probabilities(found.normed)
    assert torch.allclose(probabilities, logits[:, vocab.target_ids].softmax(-1), atol=1e-6)


@pytest.mark.parametrize("final_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("most", [0, 64])
@pytest.mark.parametrize("directions", [5, 16, 25])
def test_a_token_looked_for_in_bf16_is_that_of_fp32(
    directions: int, final_dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_IN_QUESTION", most)
    monkeypatch.setattr(module, "ROW_CHUNK", 7)
    torch.manual_seed(0)
    # Eight tokens a direction, so close together that bf16 takes a wrong one, or the first of equal ones.
    base, tokens = torch.randn(directions, 64).repeat_interleave(8, 0), 8 * directions
    weight = (base + 0.01 * torch.randn_like(base)).bfloat16()
    head = HeadBundle(make_head().spec.model_copy(update={"tied": True}), weight, None, torch.ones(64))
    states = (3 * base[torch.randint(0, tokens, (60,))] + 0.3 * torch.randn(60, 64)).to(final_dtype)
    batch = replace(make_batch([60]), final=states)
    rows, vocab = torch.arange(60), DraftVocab.of_ids(torch.arange(20), tokens)
    roughly, exactly = (
        Teacher(TargetInterface(head, vocab, "post_norm", bf16=bf16)).read(batch, rows) for bf16 in (True, False)
    )
    assert torch.equal(roughly.token, exactly.token)
    assert torch.equal(roughly.usable, exactly.usable)
    in_bf16 = (states.bfloat16() @ weight.T).argmax(-1)
    assert (in_bf16 != exactly.token).sum() > 5


@pytest.mark.parametrize("rule", [True, False])
def test_a_row_that_is_not_finite_has_a_token_that_exists(rule: bool) -> None:
    weight = torch.randn(VOCAB, 64).bfloat16()
    head = HeadBundle(make_head().spec.model_copy(update={"tied": True}), weight, None, torch.ones(64))
    states = torch.randn(6, 64).bfloat16()
    states[2, 5], states[4] = float("nan"), float("inf")
    batch, vocab = replace(make_batch([6]), final=states), DraftVocab.of_ids(torch.arange(20), VOCAB)
    found = Teacher(TargetInterface(head, vocab, "post_norm", bf16=rule)).read(batch, torch.arange(6))
    assert found.token is not None
    assert ((found.token >= 0) & (found.token < VOCAB)).all()
    assert torch.equal(found.token[[0, 1, 3, 5]], head.logits(states, norm_state="post_norm")[[0, 1, 3, 5]].argmax(-1))


def test_a_token_is_the_same_however_few_products_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(VOCAB, 64).bfloat16()
    head = HeadBundle(make_head().spec.model_copy(update={"tied": True}), weight, None, torch.ones(64))
    batch, vocab = replace(make_batch([30]), final=torch.randn(30, 64).bfloat16()), DraftVocab.full(VOCAB)
    teacher = Teacher(TargetInterface(head, vocab, "post_norm", bf16=True))
    at_once = teacher.read(batch, torch.arange(30)).token
    monkeypatch.setattr(module, "PAIR_ELEMENTS", 3 * 64)
    assert torch.equal(teacher.read(batch, torch.arange(30)).token, at_once)


def test_rows_that_repeat_are_taught_as_each_alone() -> None:
    head, batch = make_head(), make_batch([20])
    teacher = Teacher(TargetInterface(head, DraftVocab.of_ids(torch.arange(0, VOCAB, 3), VOCAB)))
    found, which = teacher.read(batch, torch.arange(19)), torch.tensor([3, 3, 0, 18, 3, 0])
    torch.testing.assert_close(teacher.distribution_of(found, which), teacher.distribution(found.pick(which)))


def test_post_norm_states_are_not_normed_again() -> None:
    head, batch = make_head(), make_batch([8])
    rows = torch.arange(8)
    found = Teacher(TargetInterface(head, DraftVocab.full(VOCAB), "post_norm")).read(batch, rows)
    assert torch.equal(found.normed, batch.final)


def test_soft_cap_and_bias_reach_the_teacher() -> None:
    head = make_head()
    head = replace(
        head,
        spec=head.spec.model_copy(update={"final_logit_softcap": 3.0, "logit_scale": 0.5}),
        lm_head_bias=torch.randn(VOCAB),
    )
    batch, vocab = make_batch([8]), DraftVocab.of_ids(torch.arange(0, VOCAB, 3), VOCAB)
    teacher = Teacher(TargetInterface(head, vocab))
    found = teacher.read(batch, torch.arange(8))
    logits = head.logits(batch.final)
    assert torch.equal(found.token, logits.argmax(-1))
    assert torch.allclose(teacher.probabilities(found.normed), logits[:, vocab.target_ids].softmax(-1), atol=1e-6)


def top_tokens(batch: PackedBatch, head: HeadBundle, k: int) -> PackedBatch:
    """The pack as a store of top tokens gives it."""
    logits = head.logits(batch.final)
    log_probs, ids = logits.log_softmax(-1).topk(k)
    topk = TopK(ids, log_probs, logits.logsumexp(-1))
    return replace(batch, final=batch.final[:0], topk=topk)


@pytest.mark.parametrize("drop", [True, False])
def test_all_top_tokens_teach_what_the_final_hidden_does(drop: bool) -> None:
    head, batch = make_head(), make_batch([12, 9])
    vocab = DraftVocab.of_ids(torch.randperm(VOCAB)[:15], VOCAB)
    teacher, rows = Teacher(TargetInterface(head, vocab), drop_off_vocab=drop), torch.arange(1, 20)
    hidden = teacher.read(batch, rows, mass=True)
    tokens = teacher.read(top_tokens(batch, head, VOCAB), rows)
    assert hidden.token is not None
    assert tokens.token is not None
    assert torch.equal(tokens.token, hidden.token)
    assert torch.equal(tokens.usable, hidden.usable)
    assert torch.allclose(teacher.distribution(tokens), teacher.distribution(hidden), atol=1e-6)
    assert hidden.mass is not None
    assert tokens.mass is not None
    assert torch.allclose(tokens.mass, hidden.mass, atol=1e-6)
    every = head.logits(batch.final[rows]).softmax(-1)
    assert torch.allclose(hidden.mass, every[:, vocab.target_ids].sum(-1), atol=1e-6)


def test_few_top_tokens_are_scaled_up_to_one_over_those_the_drafter_knows() -> None:
    head, batch = make_head(), make_batch([12])
    vocab = DraftVocab.of_ids(torch.randperm(VOCAB)[:15], VOCAB)
    teacher = Teacher(TargetInterface(head, vocab), drop_off_vocab=False)
    found = teacher.read(top_tokens(batch, head, 6), torch.arange(12))
    every = head.logits(batch.final).softmax(-1)
    for row in range(12):
        known = [int(t) for t in every[row].topk(6).indices if int(t) in vocab.target_ids]
        assert bool(found.usable[row]) == bool(known)
        if known:
            expected = torch.zeros(VOCAB)
            expected[known] = every[row, known] / every[row, known].sum()
            one = teacher.distribution(found.pick(torch.tensor([row])))
            assert torch.allclose(one[0], expected[vocab.target_ids], atol=1e-6)


def test_the_pass_over_the_vocabulary_is_spared_where_nothing_can_be_dropped() -> None:
    head, batch = make_head(), make_batch([8])
    teacher = Teacher(TargetInterface(head, DraftVocab.full(VOCAB)))
    found = teacher.read(batch, torch.arange(8), token=False)
    assert found.token is None
    assert bool(found.usable.all())
    assert torch.equal(teacher.distribution(found).argmax(-1), head.logits(batch.final).argmax(-1))


def test_missing_final_row_is_refused_and_names_the_sample() -> None:
    batch = make_batch([6, 6])
    batch = replace(batch, final=batch.final[:9], final_rows=batch.final_rows[:9])
    with pytest.raises(FormatError, match=batch.sample_ids[1]):
        Teacher(TargetInterface(make_head(), DraftVocab.full(VOCAB))).read(batch, torch.tensor([2, 10]))
