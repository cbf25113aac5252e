"""Speculative decoding of one prompt: a draft, one target forward that checks it, and the rule of what is emitted.

State between drafts: the tokens so far end in x_n, which the target has not read yet; its KV cache holds n tokens and
the drafter's as many slots. One draft proposes K tokens, one target forward over [x_n, proposals] checks them, and the
states of that same forward are what the drafter reads next, so its guesses about accepted tokens are replaced by the
truth.

Shapes: K drafted tokens per draft, V target vocabulary, U draft vocabulary, n rows.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from trainer.drafters.base import DraftTree, Live, LiveTree, Verified, most_probable
from trainer.evaluate.acceptance import AcceptanceTally, answers
from trainer.evaluate.target import LiveTarget


@dataclass(frozen=True)
class Generation:
    """One answer (token ids, the stop token included) and the seconds it took, prefill included."""

    tokens: list[int]
    seconds: float


class Rule(Protocol):
    """How tokens are chosen: by the target alone, by the drafter, and of proposals by the target."""

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


class RejectionSampling:
    """Temperature > 0 by rejection (Leviathan et al. 2023, Chen et al. 2023): what is emitted is distributed as the
    target's own samples, whatever the drafter proposes.

    Proposal d drawn from q is accepted with probability min(1, p(d) / q(d)); at the first rejection the token comes
    from max(p - q, 0), normalised; after K acceptances from p. ``target_ids`` int64 [U] names the draft vocabulary.
    """

    def __init__(self, temperature: float, target_ids: Tensor, seed: int = 0) -> None:
        if temperature <= 0:
            raise ConfigError(f"temperature {temperature:g} cannot be sampled at", kind=Kind.OPTION_INVALID)
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
    tally: AcceptanceTally,
    rule: Rule | None = None,
) -> Generation:
    """An answer drafted and checked; adds every draft to ``tally``, whose ``draft_len`` is K.

    Without a ``rule`` every emitted token is the target's own greedy choice.
    """
    choice = rule or Greedy()

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
    return _generate(target, prompt, max_new_tokens, tally, Greedy(), step)


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
    states = prefill.states([*prompt[1:], tokens[0]])
    while len(tokens) < max_new_tokens and tokens[-1] not in stop:
        accepted, states = step(tokens[-1], states, cache)
        emitted = until_stop(accepted, stop)[: max_new_tokens - len(tokens)]
        tally.add_checked(len(accepted) - 1, len(emitted))
        tokens += emitted
    return Generation(tokens, time.perf_counter() - started)


def until_stop(tokens: Sequence[int], stop: frozenset[int]) -> list[int]:
    """``tokens`` up to and including the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stop), len(tokens) - 1)
    return list(tokens[: end + 1])


def replay(drafter: LiveTree, pack: PackedBatch, rows: slice, tally: AcceptanceTally) -> None:
    """Add one recorded sample to ``tally``, drafting where a server would; the slot average is not made.

    ``pack`` holds the final hidden at every row the drafter reads it at; rows it lacks are zero.
    """
    ids, mask = pack.input_ids[rows].tolist(), pack.loss_mask[rows].cpu().numpy()
    aux, final = pack.aux[:, rows], _final(pack, rows)
    drafter.reset()
    read = 0
    for start, end in answers(mask):
        n = max(start, 1)
        while n < end - 1:
            tree = drafter.grow(Verified(aux[:, read:n], final[read:n], ids[read + 1 : n + 1]), tally.draft_len)
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
