"""Real speculative decoding with the Hugging Face target: greedy, lossless, one prompt at a time, chain of K.

State between drafts: the tokens so far end in x_n, which the target has not read yet; its KV cache holds n tokens and
the drafter's as many slots. One draft proposes K tokens, one target forward over [x_n, proposals] checks them, and the
aux states of that same forward are what the drafter reads next, so its guesses about accepted tokens are replaced by
the truth. Every emitted token is the target's own greedy choice.

Shapes: T new tokens, L aux layers, D target width, K drafted tokens per draft.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.loops import LOOP_SHARE, repeated_share
from trainer.acceptance import Tally
from trainer.drafters.base import Live
from trainer.target import LiveTarget


@dataclass(frozen=True)
class Generation:
    """One answer (token ids, the stop token included) and the seconds it took, prefill included."""

    tokens: list[int]
    seconds: float


@dataclass(frozen=True)
class Difference:
    """Where a decoded answer left the greedy one: prompt number, token index, the two tokens and their logit gap."""

    prompt: int
    index: int
    greedy: int
    decoded: int
    logit_gap: float


@dataclass
class Decoded:
    """Everything measured over one set of prompts; ``chosen`` says which of them were decoded, by place."""

    tally: Tally
    chosen: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    tried: int = 0
    looping: int = 0
    too_long: int = 0
    target_forwards: int = 0
    seconds: float = 0.0
    baseline_seconds: float = 0.0
    baseline_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of all decoded answers; the first of each comes from its prefill, the rest from drafts."""
        return sum(len(answer) for answer in self.answers)


def greedy(target: LiveTarget, prompt: Sequence[int], max_new_tokens: int) -> Generation:
    """The plain baseline: one target forward per token, with a KV cache."""
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    tokens = [_argmax(target.forward(prompt, cache, last_only=True).logits)[-1]]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        tokens += _argmax(target.forward(tokens[-1:], cache).logits)
    return Generation(tokens, time.perf_counter() - started)


def speculative(
    target: LiveTarget, drafter: Live, prompt: Sequence[int], max_new_tokens: int, tally: Tally
) -> Generation:
    """The same answer with a drafter; adds every draft to ``tally``, whose ``draft_len`` is K."""
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    drafter.reset()
    prefill = target.forward(prompt, cache, last_only=True)
    tokens = [_argmax(prefill.logits)[-1]]
    seen = prefill.seen([*prompt[1:], tokens[0]])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        proposals = drafter.propose(seen, tally.draft_len)
        check = target.forward([tokens[-1], *proposals], cache)
        choices = _argmax(check.logits)
        accepted = next((i for i, proposal in enumerate(proposals) if proposal != choices[i]), len(proposals))
        target.drop_last(cache, len(proposals) - accepted)
        seen = check.seen([*proposals[:accepted], choices[accepted]])
        emitted = _until_stop(seen.next_ids, stop)[: max_new_tokens - len(tokens)]
        tally.add_draft(min(accepted, len(emitted)), len(emitted))
        tokens += emitted
    return Generation(tokens, time.perf_counter() - started)


def decode(
    target: LiveTarget,
    drafter: Live,
    prompts: Iterable[list[int]],
    *,
    count: int,
    draft_len: int,
    max_new_tokens: int,
    on_prompt: Callable[[Decoded], None] | None = None,
) -> Decoded:
    """Decode until ``count`` prompts are done, reading no further; a prompt whose greedy answer loops is left out and
    counted.

    Raises:
        ConfigError: no prompt could be decoded.
        CaptureError: nothing was drafted, or the target ran more often than drafts and prefills account for.
    """
    result = Decoded(Tally(draft_len))
    limit = target.max_positions
    for place, prompt in enumerate(prompts):
        result.tried += 1
        if limit is not None and len(prompt) + max_new_tokens + draft_len > limit:
            result.too_long += 1
            continue
        baseline = greedy(target, prompt, max_new_tokens)
        if repeated_share(baseline.tokens) > LOOP_SHARE:
            result.looping += 1
            continue
        before = target.forwards
        answer = speculative(target, drafter, prompt, max_new_tokens, result.tally)
        result.target_forwards += target.forwards - before
        result.seconds += answer.seconds
        result.baseline_seconds += baseline.seconds
        result.baseline_tokens += len(baseline.tokens)
        result.chosen.append(place)
        result.prompts.append(prompt)
        result.answers.append(answer.tokens)
        if answer.tokens != baseline.tokens:
            result.differences.append(_difference(target, len(result.answers) - 1, prompt, baseline, answer))
        if on_prompt:
            on_prompt(result)
        if len(result.answers) == count:
            break
    _require_sense(result)
    return result


def recorded_packs(target: LiveTarget, decoded: Decoded) -> Iterator[PackedBatch]:
    """Each decoded text as capture would record it, one pack a text: one forward, the answer supervised.

    Simulated acceptance over these packs is `eval` on the very text that was decoded.
    """
    for prompt, answer in zip(decoded.prompts, decoded.answers, strict=True):
        ids = torch.tensor([*prompt, *answer])
        at, run = torch.arange(len(ids)), target.forward(ids.tolist(), target.new_cache(), last_only=True)
        yield PackedBatch(
            input_ids=ids,
            loss_mask=at >= len(prompt),
            positions=at,
            document=torch.zeros_like(at),
            aux=run.aux.cpu(),
            final=run.final.cpu(),
            final_rows=at,
            sample_ids=[""],
        )


def _require_sense(result: Decoded) -> None:
    prefills = len(result.answers)
    if not prefills:
        raise ConfigError(
            f"none of {result.tried} prompts was decoded: {result.looping} greedy answers loop, "
            f"{result.too_long} prompts are too long",
            kind="nothing-decoded",
            hint="give more prompts, or a smaller --max-new-tokens",
        )
    if not result.tally.drafts:
        raise CaptureError(
            f"{prefills} answers were decoded and nothing was drafted: every answer ended with its first token",
            kind="nothing-drafted",
        )
    if result.target_forwards != result.tally.drafts + prefills:
        raise CaptureError(
            f"{result.target_forwards} target forwards, expected {result.tally.drafts} drafts + {prefills} prefills",
            kind="forward-count",
        )


def _difference(
    target: LiveTarget, number: int, prompt: Sequence[int], baseline: Generation, answer: Generation
) -> Difference:
    """Where and by how little two answers part: a gap at rounding level is a tie, a large one is a defect."""
    pairs = zip(baseline.tokens, answer.tokens, strict=False)
    shorter = min(len(baseline.tokens), len(answer.tokens))
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if index == shorter:
        return Difference(number, index, -1, -1, float("inf"))
    before = target.forwards
    text = [*prompt, *baseline.tokens[:index]]
    logits = target.forward(text, target.new_cache(), last_only=True).logits[-1]
    target.forwards = before
    one, other = baseline.tokens[index], answer.tokens[index]
    return Difference(number, index, one, other, float((logits[one] - logits[other]).abs()))


def _until_stop(tokens: Sequence[int], stop: frozenset[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])


def _argmax(logits: Tensor) -> list[int]:
    choices: list[int] = logits.argmax(-1).tolist()
    return choices
