"""Simulated acceptance against a plain restatement: draft from one slot at a time with the drafter's own proposals."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, FormatError
from hiddenstore.targets.head import HeadBundle
from hiddenstore.testing.builders import make_store
from hiddenstore.verify.profile import target_differences
from schemas.capture import HeadSpec
from tests.trainer.conftest import VOCAB, make_batch
from trainer.drafters import refuse_target
from trainer.drafters.base import DrafterInUse, Verified
from trainer.drafters.eagle3 import EAGLE3, Eagle3, Eagle3Config
from trainer.drafters.live import text_hits
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, drafting_positions, walk
from trainer.evaluate.simulate import evaluate, floor, ngram_floor
from trainer.losses.teacher import TargetInterface
from trainer.vocab import DraftVocab

WIDTH = 32


def make_drafter(vocab_size, draft_ids=None, layers=(1, 3), seed=0, **flags):
    config = Eagle3Config(
        aux_layers=layers,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=vocab_size,
        **flags,
    )
    vocab = DraftVocab.full(vocab_size) if draft_ids is None else DraftVocab.of_ids(torch.tensor(draft_ids), vocab_size)
    generator = torch.Generator().manual_seed(seed)
    head = HeadBundle(
        HeadSpec(norm_flavour="rms", norm_eps=1e-5, tied=False),
        torch.randn(vocab_size, WIDTH, generator=generator),
        torch.randn(vocab_size, WIDTH, generator=generator),
        torch.rand(WIDTH, generator=generator) + 0.5,
    )
    model = Eagle3.build(config, head, vocab, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif "lm_head" not in name:
                parameter.mul_(2)
    return DrafterInUse(EAGLE3, model.eval(), TargetInterface(head, vocab))


def make_pack(lengths, vocab_size, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.8
    return PackedBatch(
        input_ids=torch.randint(vocab_size, (total,), generator=generator),
        loss_mask=mask,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        document=torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)]),
        aux=torch.randn(layers, total, WIDTH, generator=generator).bfloat16(),
        final=torch.zeros(0, WIDTH, dtype=torch.bfloat16),
        final_rows=torch.zeros(0, dtype=torch.int64),
        sample_ids=[str(i) for i in range(len(lengths))],
    )


def documents(pack):
    for index in range(len(pack.sample_ids)):
        rows = torch.nonzero(pack.document == index)[:, 0]
        yield int(rows[0]), int(rows[-1]) + 1


def seen(ids, aux, start, end):
    return Verified(aux[:, start:end], torch.zeros(end - start, WIDTH).bfloat16(), ids[start + 1 : end + 1].tolist())


def drafted(drafter, ids, aux, n, draft_len):
    """Proposals after token n of one text, from a chain that has seen nothing before."""
    return drafter.live().propose(seen(ids, aux, 0, n), draft_len)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_residual": True}, {"train_embeddings": True}]
)
@pytest.mark.parametrize("draft_ids", [None, [0, 2]])
def test_the_hits_of_every_slot_are_those_of_drafting_from_it_alone(flags, draft_ids):
    vocab_size, draft_len = 3, 4
    drafter = make_drafter(vocab_size, draft_ids, **flags)
    pack = make_pack([63, 2, 51, 9], vocab_size)
    hits = drafter.hits(pack, draft_len)
    found = []
    for start, end in documents(pack):
        ids, mask, aux = pack.input_ids[start:end], pack.loss_mask[start:end], pack.aux[:, start:end]
        allowed = set(drafting_positions(mask.numpy()).tolist())
        for n in range(end - start):
            expected = 0
            if n in allowed:
                proposals = drafted(drafter, ids, aux, n, draft_len)
                truth = ids[n + 1 : n + 1 + draft_len].tolist()
                while expected < len(truth) and proposals[expected] == truth[expected]:
                    expected += 1
            assert int(hits[start + n]) == expected
            found.append(expected)
    assert len(set(found)) >= 3


def test_a_live_chain_proposes_the_same_after_many_calls_as_after_one():
    """True features replace the drafter's own guesses: nothing of a rejected draft is left in its cache."""
    drafter = make_drafter(7)
    pack = make_pack([40], 7)
    ids, aux, chain = pack.input_ids, pack.aux, make_drafter(7).live()
    n = 0
    for step in (5, 1, 3, 1, 2, 4, 1, 7):
        proposals = chain.propose(seen(ids, aux, n, n + step), 3)
        n += step
        assert proposals == drafted(drafter, ids, aux, n, 3)


def test_a_token_off_the_draft_vocabulary_is_a_miss():
    drafter = make_drafter(6, [1, 4])
    pack = make_pack([60], 6)
    hits = drafter.hits(pack, 3)
    for n in torch.nonzero(hits)[:, 0].tolist():
        assert all(int(pack.input_ids[n + 1 + i]) in (1, 4) for i in range(int(hits[n])))
    assert int(hits.sum()) > 0


def test_hits_end_at_the_first_miss_and_with_the_document_and_only_what_is_left_is_asked_for():
    batch = make_batch([5, 3], torch.ones(8, dtype=torch.bool))
    start, asked = torch.tensor([1, 2, 5]), []

    def propose(depth, left):
        asked.append(left.tolist())
        text = batch.input_ids[(start[left] + 1 + depth).clamp(max=7)]
        return torch.where(start[left] == 2, (text + depth) % VOCAB, text)

    assert text_hits(batch, start, 4, propose).tolist() == [0, 3, 1, 0, 0, 2, 0, 0]
    assert asked == [[0, 1, 2], [0, 1, 2], [0, 2], [0]]


def test_evaluate_walks_every_sample_of_the_split_as_a_plain_loop_would(tmp_path):
    store = make_store(tmp_path, samples=21, codec="bf16")
    drafter = make_drafter(64)
    (result,) = evaluate([drafter], store, "train", [DraftShape(3)])
    expected, texts = AcceptanceTally(3), []
    for sample_id in store.sample_ids:
        record = store[sample_id]
        if store.locate(sample_id)[0].samples[store.locate(sample_id)[1]].split != "train":
            continue
        ids, mask = torch.from_numpy(record.sample.input_ids).long(), record.sample.loss_mask
        hits = np.zeros(len(ids), dtype=np.int64)
        for n in drafting_positions(mask):
            proposals = drafted(drafter, ids, record.aux, int(n), 3)
            truth = ids[n + 1 : n + 4].tolist()
            while hits[n] < len(truth) and proposals[hits[n]] == truth[hits[n]]:
                hits[n] += 1
        walk(hits, mask, expected)
        texts.append((record.sample.input_ids, mask))
    assert result.tally == expected
    assert len(result.texts) == len(texts)
    assert result.tally.accepted_length == pytest.approx(result.tally.tokens / result.tally.drafts)
    assert floor(store, result.texts, 3).per_order == ngram_floor(iter(texts), texts, 3).per_order


def test_the_floor_over_training_text_is_of_tables_that_have_not_seen_it(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=60)
    samples = [store.sample(entry.id) for _, entry in store.entries if entry.split == "train"]
    texts = [(one.input_ids, one.loss_mask) for one in samples]
    seen, unseen = floor(store, texts, 3), floor(store, texts, 3, "train")
    assert float(seen.accepted_length or 0) > 1.5 > 1.2 > float(unseen.accepted_length or 9)
    assert 0 < unseen.training_tokens < seen.training_tokens


def test_tables_that_saw_no_training_text_are_no_floor(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=1)
    (sample,) = (store.sample(name) for name in store.sample_ids)
    unseen = floor(store, [(sample.input_ids, sample.loss_mask)], 3, "train")
    assert (unseen.training_tokens, unseen.accepted_length, unseen.order) == (0, None, None)


def test_two_drafters_are_walked_over_the_same_text(tmp_path):
    store = make_store(tmp_path, samples=6)
    first, second = evaluate([make_drafter(64), make_drafter(64, seed=1)], store, "train", [DraftShape(2)])
    assert [a[0].tolist() for a in first.texts] == [b[0].tolist() for b in second.texts]
    assert first.tally.slots == second.tally.slots


def test_an_empty_split_and_a_draft_of_nothing_are_refused(tmp_path):
    store = make_store(tmp_path, samples=3)
    with pytest.raises(ConfigError) as caught:
        evaluate([make_drafter(64)], store, "validation", [DraftShape(3)])
    assert caught.value.kind == "split-empty"
    with pytest.raises(ConfigError):
        evaluate([make_drafter(64)], store, "train", [DraftShape(0)])


def test_a_store_of_another_target_is_refused(tmp_path):
    store = make_store(tmp_path)
    identity = store.capture.target
    assert target_differences(identity.model_copy(update={"name": "renamed", "dtype": "float32"}), store, None) == []
    with pytest.raises(FormatError, match="weights_sha256"):
        refuse_target(
            target_differences(identity.model_copy(update={"weights_sha256": "f" * 64}), store, None), "other"
        )
