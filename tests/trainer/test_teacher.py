"""The teacher: argmax over the whole vocabulary in chunks, probabilities over the draft vocabulary."""

from dataclasses import replace

import pytest
import torch

from hiddenstore.errors import FormatError
from tests.trainer.conftest import VOCAB, make_batch, make_head
from trainer import teacher as module
from trainer.teacher import Teacher
from trainer.vocab import DraftVocab


@pytest.mark.parametrize("chunk", [7, 8192])
def test_token_is_the_argmax_over_the_whole_vocabulary(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "VOCAB_CHUNK", chunk)
    monkeypatch.setattr(module, "ROW_CHUNK", 5)
    head, batch = make_head(), make_batch([20])
    vocab = DraftVocab.of_ids(torch.tensor([3, 5, 8, 30, 31, 39]), VOCAB)
    rows = torch.arange(1, 19)
    found = Teacher(head, vocab).read(batch, rows)
    logits = head.logits(batch.final[rows])
    assert torch.equal(found.token, logits.argmax(-1))
    assert torch.equal(found.kept, torch.isin(found.token, vocab.target_ids))
    probabilities = Teacher(head, vocab).probabilities(found.normed)
    assert torch.allclose(probabilities, logits[:, vocab.target_ids].softmax(-1), atol=1e-6)


def test_post_norm_states_are_not_normed_again() -> None:
    head, batch = make_head(), make_batch([8])
    rows = torch.arange(8)
    found = Teacher(head, DraftVocab.full(VOCAB), "post_norm").read(batch, rows)
    assert torch.equal(found.normed, batch.final)


def test_soft_cap_and_bias_reach_the_teacher() -> None:
    head = make_head()
    head = replace(
        head,
        spec=head.spec.model_copy(update={"final_logit_softcap": 3.0, "logit_scale": 0.5}),
        lm_head_bias=torch.randn(VOCAB),
    )
    batch, vocab = make_batch([8]), DraftVocab.of_ids(torch.arange(0, VOCAB, 3), VOCAB)
    teacher = Teacher(head, vocab)
    found = teacher.read(batch, torch.arange(8))
    logits = head.logits(batch.final)
    assert torch.equal(found.token, logits.argmax(-1))
    assert torch.allclose(teacher.probabilities(found.normed), logits[:, vocab.target_ids].softmax(-1), atol=1e-6)


def test_missing_final_row_is_refused_and_names_the_sample() -> None:
    batch = make_batch([6, 6])
    batch = replace(batch, final=batch.final[:9], final_rows=batch.final_rows[:9])
    with pytest.raises(FormatError, match=batch.sample_ids[1]):
        Teacher(make_head(), DraftVocab.full(VOCAB)).read(batch, torch.tensor([2, 10]))
