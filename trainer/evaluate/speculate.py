"""Speculative decoding with the live target: a draft, one target forward that checks it, and what is emitted.

State between drafts: the tokens so far end in x_n, which the target has not read yet; its KV cache holds n tokens and
the drafter's as many slots. One draft proposes K tokens, one target forward over [x_n, proposals] checks them, and the
states of that same forward are what the drafter reads next, so its guesses about accepted tokens are replaced by the
truth.

Shapes: K drafted tokens per draft, V target vocabulary, U draft vocabulary, n rows.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from hiddenstore.data import PackedBatch
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.records import LOOP_SHARE, repeated_share
from trainer.drafters.base import DrafterInUse, DraftTree, Live, LiveTree, Verified, most_probable
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape, answers
from trainer.evaluate.target import LiveTarget

DraftSampleMethod = Literal["greedy", "probabilistic"]


@dataclass(frozen=True)
class Generation:
    """One answer (token ids, the stop token included), the seconds it took, and those of its prefill among them."""

    tokens: list[int]
    seconds: float
    prefill_seconds: float


class Rule:
    """How tokens are chosen, by the target alone, by the drafter, and of proposals by the target: here at temperature
    0, where a proposal is accepted if it is the target's most probable token."""

    def first(self, logits: Tensor) -> int:
        """The target's own choice from logits [V]."""
        return int(logits.argmax())

    def pick(self, logits: Tensor) -> Tensor:
        """A `trainer.drafters.base.Pick`: draft ids int64 [n] from draft logits [n, U]."""
        return most_probable(logits)

    def check(self, proposals: Sequence[int], logits: Tensor) -> list[int]:
        """The accepted proposals, and after them one token of the target's own, from its logits [K+1, V]."""
        choices: list[int] = logits.argmax(-1).tolist()
        accepted = next((i for i, proposal in enumerate(proposals) if proposal != choices[i]), len(proposals))
        return [*proposals[:accepted], choices[accepted]]


class RejectionSampling(Rule):
    """Temperature > 0 by rejection (Leviathan et al. 2023, Chen et al. 2023): what is emitted is distributed as the
    target's own samples, whatever the drafter proposes. Proposal d of q is accepted with probability min(1, p(d) /
    q(d)); at the first rejection the token comes from max(p - q, 0), normalised; after K acceptances from p.

    ``method`` is vLLM's ``draft_sample_method``: ``greedy`` proposes the drafter's most probable token, so that q is
    one there, ``probabilistic`` draws from the drafter's distribution at the same temperature. ``target_ids`` int64 [U]
    names the draft vocabulary."""

    def __init__(
        self, temperature: float, target_ids: Tensor, seed: int = 0, method: DraftSampleMethod = "greedy"
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"temperature {temperature:g} cannot be sampled at", kind=Kind.OPTION_INVALID)
        self.temperature = temperature
        self.target_ids = target_ids.cpu()
        self.method = method
        self.dice = torch.Generator().manual_seed(seed)
        self._drawn: list[Tensor] = []

    def first(self, logits: Tensor) -> int:
        return self._draw(self._probabilities(logits))

    def pick(self, logits: Tensor) -> Tensor:
        """A token of each row; the distributions it is of are kept for the next ``check``."""
        if self.method == "greedy":
            ids = most_probable(logits)
            self._drawn.extend(F.one_hot(ids.cpu(), logits.shape[-1]).double())
            return ids
        q = self._probabilities(logits)
        self._drawn.extend(q)
        return torch.multinomial(q, 1, generator=self.dice)[:, 0].to(logits.device)

    def check(self, proposals: Sequence[int], logits: Tensor) -> list[int]:
        drawn, self._drawn = self._drawn, []
        if len(drawn) != len(proposals):
            raise ValueError(f"{len(proposals)} proposals, but {len(drawn)} were drawn")
        p = self._probabilities(logits)
        for i, proposal in enumerate(proposals):
            q = torch.zeros_like(p[i]).scatter_(0, self.target_ids, drawn[i])
            if float(torch.rand((), generator=self.dice, dtype=p.dtype)) * float(q[proposal]) > float(p[i, proposal]):
                return [*proposals[:i], self._draw((p[i] - q).clamp_(min=0))]
        return [*proposals, self._draw(p[len(proposals)])]

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits.cpu().double()
        # The highest is zero however small the temperature is.
        return torch.softmax((logits - logits.amax(-1, keepdim=True)) / self.temperature, -1)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.dice))


def plain(target: LiveTarget, prompt: Sequence[int], max_new_tokens: int, rule: Rule | None = None) -> Generation:
    """The baseline: one target forward per token, with a KV cache. Greedy without a ``rule``."""
    rule = rule or Rule()
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    tokens = [rule.first(target.forward(prompt, cache, last_only=True).logits[-1])]
    prefilled = time.perf_counter() - started
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        tokens.append(rule.first(target.forward(tokens[-1:], cache).logits[-1]))
    return Generation(tokens, time.perf_counter() - started, prefilled)


def speculative(
    target: LiveTarget,
    drafter: Live,
    prompt: Sequence[int],
    max_new_tokens: int,
    tally: AcceptanceTally,
    rule: Rule | None = None,
) -> Generation:
    """An answer drafted and checked; adds every draft to ``tally``, whose ``draft_len`` is K. Without a ``rule`` every
    emitted token is the target's own greedy choice."""
    choice = rule or Rule()

    def step(newest: int, states: Verified, cache: DynamicCache) -> tuple[list[int], Verified]:
        proposals = drafter.propose(states, tally.draft_len, choice.pick)
        forward = target.forward([newest, *proposals], cache)
        accepted = choice.check(proposals, forward.logits)
        target.drop_last(cache, len(proposals) + 1 - len(accepted))
        return accepted, forward.states(accepted)

    drafter.reset()
    return _generate(target, prompt, max_new_tokens, tally, choice, step)


def speculative_tree(
    target: LiveTarget, drafter: LiveTree, prompt: Sequence[int], max_new_tokens: int, tally: AcceptanceTally
) -> Generation:
    """The greedy answer drafted in trees of ``tally.draft_len`` levels; adds every draft to ``tally``."""

    def step(newest: int, states: Verified, cache: DynamicCache) -> tuple[list[int], Verified]:
        tree = drafter.grow(states, tally.draft_len)
        forward = target.forward_tree(newest, tree, cache)
        choices = forward.logits.argmax(-1).tolist()
        # Row 0 is the newest known token, row i + 1 is node i.
        path, accepted = [0], [choices[0]]
        while (node := tree.follow(path[-1] - 1, accepted[-1])) is not None:
            path.append(node + 1)
            accepted.append(choices[node + 1])
        target.keep_rows(cache, len(tree.tokens) + 1, path)
        return accepted, Verified(forward.aux[:, path], forward.final[path], accepted)

    drafter.reset()
    return _generate(target, prompt, max_new_tokens, tally, Rule(), step)


def _generate(
    target: LiveTarget,
    prompt: Sequence[int],
    max_new_tokens: int,
    tally: AcceptanceTally,
    rule: Rule,
    step: Callable[[int, Verified, DynamicCache], tuple[list[int], Verified]],
) -> Generation:
    """Prefill, then draft after draft. ``step`` turns newest token, states and cache into the accepted tokens, one of
    the target's own at their end, and the states to draft from next."""
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    prefill = target.forward(prompt, cache, last_only=True)
    tokens = [rule.first(prefill.logits[-1])]
    prefilled = time.perf_counter() - started
    states = prefill.states([*prompt[1:], tokens[0]])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        accepted, states = step(tokens[-1], states, cache)
        emitted = until_stop(accepted, stop)[: max_new_tokens - len(tokens)]
        tally.add_checked(len(accepted) - 1, len(emitted))
        tokens += emitted
    return Generation(tokens, time.perf_counter() - started, prefilled)


def until_stop(tokens: Sequence[int], stop: frozenset[int]) -> list[int]:
    """``tokens`` up to and including the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])


def replay(drafter: DrafterInUse, pack: PackedBatch, rows: slice, tally: AcceptanceTally) -> None:
    """Add one recorded sample to ``tally``, drafting trees where a server would; the slot average is not made. ``pack``
    holds the final hidden at every row the drafter reads it at; rows it lacks are zero."""
    ids, mask = pack.input_ids[rows].tolist(), pack.loss_mask[rows].cpu().numpy()
    aux, final = pack.aux[:, rows], _final(pack, rows)
    live, side, read = drafter.tree(tally.width), drafter.target.final_norm, 0
    for start, end in answers(mask):
        n = max(start, 1)
        while n < end - 1:
            tree = live.grow(Verified(aux[:, read:n], final[read:n], ids[read + 1 : n + 1], side), tally.draft_len)
            read = n
            remaining = end - 1 - n
            accepted = min(_matching_levels(tree, ids[n + 1 : end]), remaining)
            emitted = min(accepted + 1, remaining)
            tally.add_draft(accepted, emitted)
            n += emitted


def _matching_levels(tree: DraftTree, text: Sequence[int]) -> int:
    """Levels of the tree that hold the text, from the root down."""
    node, depth = -1, 0
    while depth < len(text) and (child := tree.follow(node, text[depth])) is not None:
        node, depth = child, depth + 1
    return depth


def _final(pack: PackedBatch, rows: slice) -> torch.Tensor:
    final = pack.aux.new_zeros(rows.stop - rows.start, pack.final.shape[-1], dtype=torch.bfloat16)
    if len(pack.final):
        first, last = np.searchsorted(pack.final_rows.cpu().numpy(), [rows.start, rows.stop])
        final[pack.final_rows[first:last] - rows.start] = pack.final[first:last].to(final.dtype)
    return final


@dataclass(frozen=True)
class Difference:
    """Where a decoded answer left the greedy one: prompt number, token index, the two tokens, the gap of their logits
    and the larger of these by size."""

    prompt: int
    index: int
    greedy: int
    decoded: int
    logit_gap: float
    logit: float


@dataclass
class ShapeResult:
    """Everything measured with one shape of draft. ``differences`` from the greedy answers; empty when sampling."""

    tally: AcceptanceTally
    answers: list[list[int]] = field(default_factory=list)
    target_forwards: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all answers; the first of each comes from its prefill, the rest from drafts."""
        return sum(len(answer) for answer in self.answers)

    @property
    def draft_seconds(self) -> float:
        """Mean time of a draft with its check."""
        return (self.seconds - self.prefill_seconds) / self.tally.drafts


@dataclass
class DecodeResult:
    """Everything measured over one set of prompts. ``prompts``: the decoded ones; ``indices``: theirs in the set."""

    by_shape: list[ShapeResult]
    indices: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    tried: int = 0
    looping: int = 0
    too_long: int = 0
    baseline_seconds: float = 0.0
    baseline_prefill_seconds: float = 0.0
    baseline_tokens: int = 0

    @property
    def token_seconds(self) -> float | None:
        """Mean time of a plain decoding step; None where every plain answer ended with its prefill."""
        steps = self.baseline_tokens - len(self.prompts)
        return (self.baseline_seconds - self.baseline_prefill_seconds) / steps if steps else None


@dataclass(frozen=True)
class DecodeLimits:
    """How much is decoded: ``count`` prompts, answers of at most ``max_new_tokens``."""

    count: int
    max_new_tokens: int


def decode(
    target: LiveTarget,
    drafter: DrafterInUse,
    prompts: Iterable[list[int]],
    shapes: Sequence[DraftShape],
    limits: DecodeLimits,
    *,
    rule: Callable[[int], Rule] | None = None,
    on_prompt: Callable[[DecodeResult], None] | None = None,
) -> DecodeResult:
    """Decode until ``limits.count`` prompts are done with every shape of draft, reading no further. A prompt whose
    plain answer loops is left out and counted. ``rule`` makes the sampling rule of the n-th prompt; without one
    decoding is greedy and every answer is compared with the plain one. Raises ConfigError: no prompt could be decoded;
    the drafter cannot draft as long as a shape asks; a tree was asked for where there is none, or together with a
    ``rule``; CaptureError: nothing was drafted, or the target ran more often than drafts and prefills account for."""
    drafter.require_length(max(shape.length for shape in shapes))
    result = DecodeResult([ShapeResult(AcceptanceTally(shape.length, shape.width)) for shape in shapes])
    generators = [_generator(target, drafter, shape, limits.max_new_tokens, rule is None) for shape in shapes]
    room = limits.max_new_tokens + max(shape.length for shape in shapes)
    for index, prompt in enumerate(prompts):
        result.tried += 1
        if target.max_positions is not None and len(prompt) + room > target.max_positions:
            result.too_long += 1
            continue
        baseline = plain(target, prompt, limits.max_new_tokens, rule(index) if rule else None)
        if repeated_share(baseline.tokens) > LOOP_SHARE:
            result.looping += 1
            continue
        result.baseline_seconds += baseline.seconds
        result.baseline_prefill_seconds += baseline.prefill_seconds
        result.baseline_tokens += len(baseline.tokens)
        result.indices.append(index)
        result.prompts.append(prompt)
        for decoded, generate in zip(result.by_shape, generators, strict=True):
            before = target.forwards
            answer = generate(prompt, decoded.tally, rule(index) if rule else None)
            decoded.target_forwards += target.forwards - before
            decoded.seconds += answer.seconds
            decoded.prefill_seconds += answer.prefill_seconds
            decoded.answers.append(answer.tokens)
            if rule is None and answer.tokens != baseline.tokens:
                decoded.differences.append(_difference(target, prompt, baseline, decoded))
        if on_prompt:
            on_prompt(result)
        if len(result.prompts) == limits.count:
            break
    _check(result)
    return result


def recorded_packs(target: LiveTarget, prompts: Sequence[list[int]], decoded: ShapeResult) -> Iterator[PackedBatch]:
    """Each decoded text as capture would record it, one pack a text: one forward, the answer supervised. Simulated
    acceptance over these packs is `eval` on the very text that was decoded."""
    for prompt, answer in zip(prompts, decoded.answers, strict=True):
        ids = torch.tensor([*prompt, *answer])
        positions, states = torch.arange(len(ids)), target.forward(ids.tolist(), target.new_cache(), last_only=True)
        yield PackedBatch(
            input_ids=ids,
            loss_mask=positions >= len(prompt),
            positions=positions,
            document=torch.zeros_like(positions),
            aux=states.aux.cpu(),
            final=states.final.cpu(),
            final_rows=positions,
            sample_ids=[""],
        )


def _generator(
    target: LiveTarget, drafter: DrafterInUse, shape: DraftShape, limit: int, is_greedy: bool
) -> Callable[[list[int], AcceptanceTally, Rule | None], Generation]:
    if shape.width == 1:
        live = drafter.live()
        return lambda prompt, tally, rule: speculative(target, live, prompt, limit, tally, rule)
    tree = drafter.tree(shape.width)
    if not is_greedy:
        raise ConfigError("trees are drafted at temperature 0 only", kind=Kind.NO_TREE, hint="--draft-len 3")
    return lambda prompt, tally, rule: speculative_tree(target, tree, prompt, limit, tally)


def _check(result: DecodeResult) -> None:
    prefills = len(result.prompts)
    if not prefills:
        raise ConfigError(
            f"none of {result.tried} prompts was decoded: {result.looping} greedy answers loop, "
            f"{result.too_long} prompts are too long",
            kind=Kind.NOTHING_DECODED,
            hint="give more prompts, or a smaller --max-new-tokens or --draft-len",
        )
    for decoded in result.by_shape:
        drafts = decoded.tally.drafts
        if not drafts:
            raise CaptureError(
                f"{prefills} answers were decoded and nothing was drafted: every answer ended with its first token",
                kind=Kind.NOTHING_DRAFTED,
            )
        if decoded.target_forwards != drafts + prefills:
            raise CaptureError(
                f"{decoded.target_forwards} target forwards, expected {drafts} drafts + {prefills} prefills",
                kind=Kind.FORWARD_COUNT,
            )


def _difference(target: LiveTarget, prompt: Sequence[int], baseline: Generation, decoded: ShapeResult) -> Difference:
    """Where the newest answer leaves the plain one, and the logit gap there: at rounding level a tie, else a defect."""
    answer, number = decoded.answers[-1], len(decoded.answers) - 1
    pairs = zip(baseline.tokens, answer, strict=False)
    shorter = min(len(baseline.tokens), len(answer))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if index == shorter:
        return Difference(number, index, -1, -1, float("inf"), 0.0)
    before = target.forwards
    text = [*prompt, *baseline.tokens[:index]]
    logits = target.forward(text, target.new_cache(), last_only=True).logits[-1]
    target.forwards = before
    tokens = baseline.tokens[index], answer[index]
    one, other = (float(logits[token]) for token in tokens)
    return Difference(number, index, *tokens, abs(one - other), max(one, other, key=abs))
