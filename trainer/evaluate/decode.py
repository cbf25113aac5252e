"""Real speculative decoding with the Hugging Face target over many prompts, beside the plain baseline.

Shapes: K drafted tokens per draft.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from hiddenstore.data import PackedBatch
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.repetition import LOOP_SHARE, repeated_share
from trainer.drafters.base import DrafterInUse
from trainer.evaluate.acceptance import AcceptanceTally, DraftShape
from trainer.evaluate.speculate import Generation, Rule, plain, speculative, speculative_tree
from trainer.evaluate.target import LiveTarget


@dataclass(frozen=True)
class Difference:
    """Where a decoded answer left the greedy one: prompt number, token index, the two tokens and their logit gap."""

    prompt: int
    index: int
    greedy: int
    decoded: int
    logit_gap: float


@dataclass
class ShapeResult:
    """Everything measured with one shape of draft. ``differences`` from the greedy answers; empty when sampling."""

    tally: AcceptanceTally
    answers: list[list[int]] = field(default_factory=list)
    target_forwards: int = 0
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all answers; the first of each comes from its prefill, the rest from drafts."""
        return sum(len(answer) for answer in self.answers)


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
    baseline_tokens: int = 0


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
    """Decode until ``limits.count`` prompts are done with every shape of draft, reading no further.

    A prompt whose plain answer loops is left out and counted. ``rule`` makes the sampling rule of the n-th prompt;
    without one decoding is greedy and every answer is compared with the plain one.

    Raises:
        ConfigError: no prompt could be decoded; the drafter cannot draft as long as a shape asks; a tree was asked for
            where there is none, or together with a ``rule``.
        CaptureError: nothing was drafted, or the target ran more often than drafts and prefills account for.
    """
    drafter.require_length(max(shape.length for shape in shapes))
    result = DecodeResult([ShapeResult(AcceptanceTally(shape.length, shape.width)) for shape in shapes])
    generators = [_generator(target, drafter, shape, limits.max_new_tokens) for shape in shapes]
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
        result.baseline_tokens += len(baseline.tokens)
        result.indices.append(index)
        result.prompts.append(prompt)
        for decoded, generate in zip(result.by_shape, generators, strict=True):
            before = target.forwards
            answer = generate(prompt, decoded.tally, rule(index) if rule else None)
            decoded.target_forwards += target.forwards - before
            decoded.seconds += answer.seconds
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
    """Each decoded text as capture would record it, one pack a text: one forward, the answer supervised.

    Simulated acceptance over these packs is `eval` on the very text that was decoded.
    """
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
    target: LiveTarget, drafter: DrafterInUse, shape: DraftShape, max_new_tokens: int
) -> Callable[[list[int], AcceptanceTally, Rule | None], Generation]:
    if shape.width > 1:
        tree = drafter.tree(shape.width)

        def generate(prompt: list[int], tally: AcceptanceTally, rule: Rule | None) -> Generation:
            if rule is not None:
                raise ConfigError("trees are drafted at temperature 0 only", kind=Kind.NO_TREE, hint="--draft-len 3")
            return speculative_tree(target, tree, prompt, max_new_tokens, tally)

        return generate
    live = drafter.live()
    return lambda prompt, tally, rule: speculative(target, live, prompt, max_new_tokens, tally, rule)


def _check(result: DecodeResult) -> None:
    prefills = len(result.prompts)
    if not prefills:
        raise ConfigError(
            f"none of {result.tried} prompts was decoded: {result.looping} greedy answers loop, "
            f"{result.too_long} prompts are too long",
            kind=Kind.NOTHING_DECODED,
            hint="give more prompts, or a smaller --max-new-tokens",
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
        return Difference(number, index, -1, -1, float("inf"))
    before = target.forwards
    text = [*prompt, *baseline.tokens[:index]]
    logits = target.forward(text, target.new_cache(), last_only=True).logits[-1]
    target.forwards = before
    one, other = baseline.tokens[index], answer[index]
    return Difference(number, index, one, other, float((logits[one] - logits[other]).abs()))
