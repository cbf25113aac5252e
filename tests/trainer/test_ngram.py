"""The n-gram floor and the walk against plain restatements."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.evaluate.acceptance import AcceptanceTally, drafting_positions, hits_of_next_token, walk
from trainer.evaluate.simulate import NgramTables, ngram_floor

ORDERS = range(1, 5)

texts = st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30), min_size=0, max_size=6)


def arrays(text):
    ids = np.array([token for token, _ in text], dtype=np.int32)
    return ids, np.array([held for _, held in text], dtype=np.uint8)


def plain_prediction(training, context, order):
    for length in range(min(order, len(context)), -1, -1):
        wanted = tuple(context[len(context) - length :])
        counts = Counter(
            int(ids[j])
            for ids, mask in training
            for j in range(1, len(ids))
            if mask[j] and j >= length and tuple(ids[j - length : j].tolist()) == wanted
        )
        if counts:
            return min(counts, key=lambda token: (-counts[token], token))
    return -1


def plain_walk(ids, mask, draft_len, propose):
    """Tokens and drafts of one sample, drafting token by token with the drafter's own proposals fed back."""
    drafts = tokens = 0
    accepted_at = [0] * draft_len
    n = 0
    while n < len(ids) - 1:
        if n < 1 or not mask[n] or not mask[n + 1]:
            n += 1
            continue
        end = n
        while end + 1 < len(ids) and mask[end + 1]:
            end += 1
        while n < end:
            context, accepted = ids[: n + 1].tolist(), 0
            for depth in range(draft_len):
                proposal = propose(context)
                if n + 1 + depth > end or proposal != ids[n + 1 + depth]:
                    break
                accepted += 1
                accepted_at[depth] += 1
                context.append(proposal)
            drafts += 1
            emitted = min(accepted + 1, end - n)
            tokens += emitted
            n += emitted
        n += 1
    return drafts, tokens, accepted_at


@settings(max_examples=60, deadline=None)
@given(texts, texts, st.integers(1, 4))
def test_the_floor_of_every_order_equals_a_plain_count_and_walk(training, validation, draft_len):
    training, validation = [arrays(text) for text in training], [arrays(text) for text in validation]
    floor = ngram_floor(training, validation, draft_len)
    expected = []
    for order in ORDERS:
        drafts = tokens = 0
        for ids, mask in validation:

            def propose(context, order=order):
                return plain_prediction(training, context, order)

            one_drafts, one_tokens, _ = plain_walk(ids, mask, draft_len, propose)
            drafts, tokens = drafts + one_drafts, tokens + one_tokens
        expected.append(tokens / drafts if drafts and training else None)
    assert list(floor.per_order) == expected
    assert floor.accepted_length == max((x for x in expected if x is not None), default=None)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40), st.integers(1, 5))
def test_the_walk_equals_a_plain_restatement_for_any_predictor(text, draft_len):
    correct = np.array([c for c, _ in text])
    mask = np.array([held for _, held in text], dtype=np.uint8)
    ids = np.arange(len(text))
    tally = AcceptanceTally(draft_len)
    walk(hits_of_next_token(correct, draft_len), mask, tally)
    drafts, tokens, accepted_at = plain_walk(
        ids, mask, draft_len, lambda context: context[-1] + 1 if correct[context[-1]] else -1
    )
    assert (tally.drafts, tally.tokens, tally.accepted_at) == (drafts, tokens, accepted_at)
    assert tally.slots == len(drafting_positions(mask))


def test_every_supervised_token_but_the_first_of_an_answer_is_emitted_by_exactly_one_draft():
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1], dtype=np.uint8)
    tally = AcceptanceTally(3)
    walk(np.array([3] * 11), mask, tally)
    assert tally.tokens == 3 + 1 + 0
    assert tally.drafts == 2


def test_a_context_without_supervised_continuation_is_no_entry():
    tables = NgramTables.fit([(np.array([1, 2, 3, 4]), np.array([0, 0, 1, 0]))])
    assert tables.predict(np.array([1, 2]))[0].tolist() == [3, 3]
    assert [len(contexts) for contexts in tables.contexts] == [1, 1, 1, 0, 0]


def test_training_text_beyond_the_bound_is_not_read_and_the_bound_is_told():
    text = (np.arange(10), np.ones(10, dtype=np.uint8))
    floor = ngram_floor([text] * 5, [text], draft_len=2, max_tokens=15)
    assert floor.training_tokens == 20
