"""Drafters that feed on their own output, in use: over recorded text, every slot at once, and live, a chain at a time.

Both read slot t = n-1 (hidden of token n-1, embedding of token n) to propose token n+1, and then feed the drafter its
own output and its own proposal.

Shapes: T tokens of a pack, L aux layers, D target width, H drafter width, U draft vocabulary, N drafting positions,
A active slots, K drafted tokens per draft.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.drafters.base import Pick, Seen, most_probable
from trainer.drafters.blocks import KVCache
from trainer.objectives.shift import SlotPlan, plan_slots
from trainer.vocab import DraftVocab

LOGIT_BUDGET = 1 << 24
"""Logits alive at a time, as elements."""


class Recurrent(Protocol):
    """A drafter whose next step reads what the last one returned."""

    def begin(self, seen: Seen) -> Tensor:
        """What the first step reads for T verified tokens: g [T, H]."""

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode n slots after those in ``cache``: what the next step reads as g [n, H], and logits [n, U], or those of
        the ``last`` slots only."""


@torch.no_grad()
def recurrent_hits(
    unroll: Callable[[SlotPlan, int], Tensor], head: Tensor, vocab: DraftVocab, pack: PackedBatch, draft_len: int
) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.

    ``unroll(plan, K)`` gives the states after the final norm [K*A, H] of a plan over ``pack``, ``head`` [U, H] their
    logits. Up to its first miss a drafter proposes the text itself, so one unroll fed with the text gives the hit
    prefix of every slot. Zero where no draft may start (`drafting_positions`). A token off the draft
    vocabulary is never proposed, so it is a miss.
    """
    hits = torch.zeros_like(pack.input_ids)
    start = pack_drafting_positions(pack)
    if not len(start):
        return hits
    plan = plan_slots(start, pack.document, 1)
    states = unroll(plan, draft_len).view(draft_len, plan.active.shape[0], -1)
    target_ids = vocab.target_ids.to(states.device)
    slot, last = plan.slots[:, 0], pack.input_ids.shape[0] - 1
    for depth in range(draft_len):
        if not len(start):
            break
        wanted = start + 1 + depth
        inside = wanted.clamp(max=last)
        there = (wanted <= last) & (pack.document[inside] == pack.document[start])
        proposed = target_ids[_tokens(head, states[depth, slot])]
        alive = there & (proposed == pack.input_ids[inside])
        start, slot = start[alive], slot[alive]
        hits[start] += 1
    return hits


def pack_drafting_positions(pack: PackedBatch) -> Tensor:
    """``drafting_positions`` of every document of a pack, as pack rows: int64 [N], ascending."""
    held, document = pack.loss_mask, pack.document
    both = held[:-1] & held[1:] & (document[:-1] == document[1:]) & (pack.positions[:-1] >= 1)
    return torch.nonzero(both)[:, 0]


def _tokens(weight: Tensor, states: Tensor) -> Tensor:
    """Most probable draft ids int64 [N] of states after the final norm [N, H]; few rows of logits exist at a time."""
    rows = max(1, LOGIT_BUDGET // weight.shape[0])
    found = [(states[i : i + rows] @ weight.T).argmax(-1) for i in range(0, states.shape[0], rows)]
    return torch.cat(found)


class LiveChain:
    """The drafter beside a live target; a `trainer.drafters.base.Live`."""

    def __init__(self, model: Recurrent, vocab: DraftVocab) -> None:
        self._model = model
        self._target_ids = vocab.target_ids
        self._cache = KVCache()

    def reset(self) -> None:
        """Forget the text."""
        self._cache = KVCache()

    @torch.inference_mode()
    def propose(self, seen: Seen, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """K target ids; the keys and values kept are those of true features only."""
        device = self._target_ids.device
        kept = self._cache.length + len(seen.next_ids)
        positions = torch.arange(self._cache.length, kept, device=device)
        g, ids, proposals = self._model.begin(seen), torch.tensor(list(seen.next_ids), device=device), []
        for _ in range(draft_len):
            g, logits = self._model.step(g, ids, positions, self._cache, last=1)
            ids = self._target_ids[pick(logits[-1:])]
            proposals.append(ids)
            g, positions = g[-1:], positions[-1:] + 1
        self._cache.crop(kept)
        return [int(token) for token in torch.cat(proposals).tolist()]
