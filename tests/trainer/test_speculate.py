"""Rejection sampling: what is emitted has the target's distribution, whatever the drafter proposes."""

import itertools
from collections import Counter

import pytest
import torch
from tiny_target import make_model, make_tokenizer
from torch import Tensor

from hiddenstore.errors import ConfigError
from tests.trainer.live import identity_in_memory
from trainer.drafters.base import Pick, Verified
from trainer.evaluate.acceptance import AcceptanceTally
from trainer.evaluate.speculate import DraftSampleMethod, RejectionSampling, plain, speculative
from trainer.evaluate.target import LiveTarget

VOCAB = 5


def chi_square(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Sum of (found - expected)² / expected, outcomes expected less than 5 times taken together."""
    rare = [outcome for outcome, value in expected.items() if value < 5]
    cells = [(counts.get(one, 0), value) for one, value in expected.items() if value >= 5]
    if rare:
        cells.append((sum(counts.get(one, 0) for one in rare), sum(expected[one] for one in rare)))
    return sum((found - value) ** 2 / value for found, value in cells)


def limit(outcomes: int) -> float:
    """Above the 99.99 % point of the chi-square distribution (Wilson–Hilferty)."""
    freedom = outcomes - 1
    return float(freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("draft_ids", [[0, 1, 2, 3, 4], [1, 3]])
def test_the_first_emitted_tokens_are_distributed_as_the_target_samples(
    draft_ids: list[int], method: DraftSampleMethod
) -> None:
    generator = torch.Generator().manual_seed(1)
    after = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    first = torch.randn(VOCAB, generator=generator)
    drafted = torch.randn(2, len(draft_ids), generator=generator) * 1.5
    ids, rounds = torch.tensor(draft_ids), 4_000
    rule = RejectionSampling(0.7, ids, 3, method)
    found: Counter[tuple[int, ...]] = Counter()
    lengths: Counter[int] = Counter()
    for _ in range(rounds):
        proposals = ids[rule.pick(drafted)].tolist()
        emitted = rule.check(proposals, torch.stack([first, after[proposals[0]], after[proposals[1]]]))
        lengths[len(emitted)] += 1
        found[tuple((emitted if len(emitted) > 1 else [*emitted, rule.first(after[emitted[0]])])[:2])] += 1
    p, q = torch.softmax(first / 0.7, -1), torch.softmax(after / 0.7, -1)
    pairs = itertools.product(range(VOCAB), repeat=2)
    expected = {(a, b): float(p[a] * q[a, b]) * rounds for a, b in pairs}
    assert chi_square(found, expected) < limit(len(expected))
    assert min(lengths[1], lengths[2], lengths[3]) > 10


def test_accepting_every_proposal_would_not_pass_the_same_test() -> None:
    """Negative control: the drafter's own distribution is told from the target's."""
    rule, rounds = RejectionSampling(1.0, torch.arange(VOCAB), 0, "probabilistic"), 2_000
    target, draft = torch.tensor([0.0, 0.5, 1.0, 0.2, 0.1]), torch.zeros(1, VOCAB)
    found = Counter((int(rule.pick(draft)),) for _ in range(rounds))
    p = torch.softmax(target, -1)
    assert chi_square(found, {(i,): float(p[i]) * rounds for i in range(VOCAB)}) > limit(VOCAB)


class Drawing:
    """Draws from fixed logits, the same at every depth."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def reset(self) -> None:
        pass

    def propose(self, seen: Verified, draft_len: int, pick: Pick) -> list[int]:
        return [int(token) for token in pick(self.logits.expand(draft_len, -1)).tolist()]


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_two_sampled_tokens_of_a_real_target_are_distributed_as_without_a_drafter(method: DraftSampleMethod) -> None:
    model, tokenizer = make_model(vocab=VOCAB), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())
    rounds, prompt, logits = 250, [4, 2, 3], torch.tensor([0.5, 0.0, 1.0, -0.5, 0.0])
    found: Counter[tuple[int, ...]] = Counter()
    for seed in range(rounds):
        rule = RejectionSampling(3.0, torch.arange(VOCAB), seed, method)
        answer = speculative(target, Drawing(logits), prompt, 3, AcceptanceTally(2), rule).tokens
        found[tuple([*answer, -1, -1][:3])] += 1
    expected = dict.fromkeys(found, 0.0) | _exact(target, prompt, 3.0, rounds)
    assert chi_square(found, expected) < limit(len(expected))


def _exact(target: LiveTarget, prompt: list[int], temperature: float, rounds: int) -> dict[tuple[int, ...], float]:
    """Expected counts of three sampled tokens, -1 after a stop token, from one plain forward a prefix."""

    def after(text: list[int]) -> list[float]:
        logits = target.forward(text, target.new_cache(), last_only=True).logits[-1]
        return torch.softmax(logits / temperature, -1).tolist()

    found: dict[tuple[int, ...], float] = {}
    open_texts: list[tuple[list[int], float]] = [([], float(rounds))]
    while open_texts:
        text, weight = open_texts.pop()
        for token, share in enumerate(after([*prompt, *text])):
            longer = [*text, token]
            if token in target.stop_ids or len(longer) == 3:
                found[tuple([*longer, -1, -1][:3])] = weight * share
            else:
                open_texts.append((longer, weight * share))
    return found


def test_a_seed_repeats_a_sampled_answer_and_another_seed_does_not() -> None:
    model, tokenizer = make_model(vocab=VOCAB), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())
    answers = [
        plain(target, [4, 2], 24, RejectionSampling(2.0, torch.arange(VOCAB), seed)).tokens for seed in (5, 5, 6, 7, 8)
    ]
    assert answers[0] == answers[1]
    assert any(answer != answers[0] for answer in answers)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_the_smallest_temperature_gives_the_greedy_answer(method: DraftSampleMethod) -> None:
    model, tokenizer = make_model(vocab=VOCAB), make_tokenizer()
    target = LiveTarget(model, tokenizer, identity_in_memory(model, tokenizer), ())
    rule = RejectionSampling(5e-324, torch.arange(VOCAB), 0, method)
    drawing = Drawing(torch.tensor([0.5, 0.0, 1.0, -0.5, 0.0]))
    sampled = speculative(target, drawing, [4, 2, 3], 12, AcceptanceTally(2), rule)
    assert sampled.tokens == plain(target, [4, 2, 3], 12).tokens


def test_a_temperature_of_zero_is_not_sampled() -> None:
    with pytest.raises(ConfigError):
        RejectionSampling(0.0, torch.arange(VOCAB))
