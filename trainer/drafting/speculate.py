"""Speculative decoding of one prompt: a draft, one target forward that checks it, and the rule of what is emitted.

State between drafts: the tokens so far end in x_n, which the target has not read yet; its KV cache holds n tokens and
the drafter's as many slots. One draft proposes K tokens, one target forward over [x_n, proposals] checks them, and the
states of that same forward are what the drafter reads next, so its guesses about accepted tokens are replaced by the
truth.

Shapes: K drafted tokens per draft, V target vocabulary, U draft vocabulary, n rows.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hiddenstore.errors import ConfigError
from trainer.drafters.base import Live, most_probable
from trainer.drafting.acceptance import Tally
from trainer.drafting.target import LiveTarget


@dataclass(frozen=True)
class Generation:
    """One answer (token ids, the stop token included) and the seconds it took, prefill included."""

    tokens: list[int]
    seconds: float


class Rule(Protocol):
    """How tokens are chosen: by the target alone, by the drafter, and where the two meet."""

    def first(self, logits: Tensor) -> int:
        """The target's own choice from logits [V]."""

    def pick(self, logits: Tensor) -> Tensor:
        """A `trainer.drafters.base.Pick`: draft ids int64 [n] from draft logits [n, U]."""

    def check(self, proposals: Sequence[int], logits: Tensor) -> list[int]:
        """The accepted proposals, and after them one token of the target's own, from its logits [K+1, V]."""


class Greedy:
    """Temperature 0: a proposal is accepted where it is the target's most probable token."""

    def first(self, logits: Tensor) -> int:
        """The argmax."""
        return int(logits.argmax())

    def pick(self, logits: Tensor) -> Tensor:
        """The argmax of each row."""
        return most_probable(logits)

    def check(self, proposals: Sequence[int], logits: Tensor) -> list[int]:
        """The proposals up to the first that is not the target's choice, then that choice."""
        choices: list[int] = logits.argmax(-1).tolist()
        accepted = next((i for i, proposal in enumerate(proposals) if proposal != choices[i]), len(proposals))
        return [*proposals[:accepted], choices[accepted]]


class Sampling:
    """Temperature > 0 by rejection (Leviathan et al. 2023, Chen et al. 2023): what is emitted is distributed as the
    target's own samples, whatever the drafter proposes.

    Proposal d drawn from q is accepted with probability min(1, p(d) / q(d)); at the first rejection the token comes
    from max(p - q, 0), normalised; after K acceptances from p. ``target_ids`` int64 [U] names the draft vocabulary.
    """

    def __init__(self, temperature: float, target_ids: Tensor, seed: int = 0) -> None:
        if temperature <= 0:
            raise ConfigError(f"temperature {temperature:g} cannot be sampled at", kind="temperature")
        self.temperature = temperature
        self.target_ids = target_ids.cpu()
        self.dice = torch.Generator().manual_seed(seed)
        self._drawn: list[Tensor] = []

    def first(self, logits: Tensor) -> int:
        """A draw from softmax(logits / temperature)."""
        return self._draw(self._probabilities(logits))

    def pick(self, logits: Tensor) -> Tensor:
        """A draw from each row; the distributions are kept for the next ``check``."""
        q = self._probabilities(logits)
        self._drawn.extend(q)
        return torch.multinomial(q, 1, generator=self.dice)[:, 0].to(logits.device)

    def check(self, proposals: Sequence[int], logits: Tensor) -> list[int]:
        """Accepts and rejects the proposals drawn since the last call."""
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
        return torch.softmax(logits.cpu().double() / self.temperature, -1)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self.dice))


def plain(target: LiveTarget, prompt: Sequence[int], max_new_tokens: int, rule: Rule | None = None) -> Generation:
    """The baseline: one target forward per token, with a KV cache. Greedy without a ``rule``."""
    rule = rule or Greedy()
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    tokens = [rule.first(target.forward(prompt, cache, last_only=True).logits[-1])]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        tokens.append(rule.first(target.forward(tokens[-1:], cache).logits[-1]))
    return Generation(tokens, time.perf_counter() - started)


def speculative(
    target: LiveTarget,
    drafter: Live,
    prompt: Sequence[int],
    max_new_tokens: int,
    tally: Tally,
    rule: Rule | None = None,
) -> Generation:
    """An answer drafted and checked; adds every draft to ``tally``, whose ``draft_len`` is K.

    Without a ``rule`` every emitted token is the target's own greedy choice.
    """
    rule = rule or Greedy()
    started, stop = time.perf_counter(), target.stop_ids
    cache = target.new_cache()
    drafter.reset()
    prefill = target.forward(prompt, cache, last_only=True)
    tokens = [rule.first(prefill.logits[-1])]
    seen = prefill.seen([*prompt[1:], tokens[0]])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        proposals = drafter.propose(seen, tally.draft_len, rule.pick)
        forward = target.forward([tokens[-1], *proposals], cache)
        found = rule.check(proposals, forward.logits)
        target.drop_last(cache, len(proposals) + 1 - len(found))
        seen = forward.seen(found)
        emitted = until_stop(found, stop)[: max_new_tokens - len(tokens)]
        tally.add_checked(len(found) - 1, len(emitted))
        tokens += emitted
    return Generation(tokens, time.perf_counter() - started)


def until_stop(tokens: Sequence[int], stop: frozenset[int]) -> list[int]:
    """``tokens`` up to and including the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])
