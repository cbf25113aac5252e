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
from trainer.attention.cache import KVCache
from trainer.drafters.base import Pick, Verified, most_probable
from trainer.slots.shift import SlotMap, map_slots
from trainer.vocab import DraftVocab

LOGIT_BUDGET = 1 << 24
"""Logits alive at a time, as elements."""


class Recurrent(Protocol):
    """A drafter whose next step reads what the last one returned."""

    def begin(self, verified: Verified) -> Tensor:
        """What the first step reads for T verified tokens: g [T, H]."""

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode n slots after those in ``cache``: what the next step reads as g [n, H], and logits [n, U], or those of
        the ``last`` slots only."""


@torch.no_grad()
def recurrent_hits(
    unroll: Callable[[SlotMap, int], Tensor], head: Tensor, vocab: DraftVocab, pack: PackedBatch, draft_len: int
) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.

    ``unroll(slot_map, K)`` gives the states after the final norm [K*A, H] of slots of ``pack``, ``head`` [U, H] their
    logits. Up to its first miss a drafter proposes the text itself, so one unroll fed with the text gives the hit
    prefix of every slot. Zero where no draft may start (`drafting_positions`). A token off the draft
    vocabulary is never proposed, so it is a miss.
    """
    hits = torch.zeros_like(pack.input_ids)
    start = pack_drafting_positions(pack)
    if not len(start):
        return hits
    slot_map = map_slots(start, pack.document, 1)
    states = unroll(slot_map, draft_len).view(draft_len, slot_map.active.shape[0], -1)
    target_ids = vocab.target_ids.to(states.device)
    slot, last = slot_map.slots[:, 0], pack.input_ids.shape[0] - 1
    for depth in range(draft_len):
        if not len(start):
            break
        ahead = start + 1 + depth
        inside = ahead.clamp(max=last)
        same_document = (ahead <= last) & (pack.document[inside] == pack.document[start])
        proposed = target_ids[draft_tokens(states[depth, slot], head)]
        alive = same_document & (proposed == pack.input_ids[inside])
        start, slot = start[alive], slot[alive]
        hits[start] += 1
    return hits


def pack_drafting_positions(pack: PackedBatch) -> Tensor:
    """``drafting_positions`` of every document of a pack, as pack rows: int64 [N], ascending."""
    mask, document = pack.loss_mask, pack.document
    both = mask[:-1] & mask[1:] & (document[:-1] == document[1:]) & (pack.positions[:-1] >= 1)
    return torch.nonzero(both)[:, 0]


def draft_logits(states: Tensor, weight: Tensor) -> Tensor:
    """fp32 [n, U] of states [n, H] under a head weight [U, H]."""
    return (states.to(weight.dtype) @ weight.T).float()


def draft_tokens(states: Tensor, weight: Tensor) -> Tensor:
    """Most probable draft ids int64 [n] of states [n, H]; few rows of logits exist at a time."""
    chunks = states.split(max(1, LOGIT_BUDGET // weight.shape[0]))
    return torch.cat([draft_logits(rows, weight).argmax(-1) for rows in chunks])


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
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """K target ids; only keys and values of true features stay in the cache."""
        device = self._target_ids.device
        length = self._cache.length + len(verified.next_ids)
        positions = torch.arange(self._cache.length, length, device=device)
        g, ids, proposals = self._model.begin(verified), torch.tensor(list(verified.next_ids), device=device), []
        for _ in range(draft_len):
            g, logits = self._model.step(g, ids, positions, self._cache, last=1)
            ids = self._target_ids[pick(logits[-1:])]
            proposals.append(ids)
            g, positions = g[-1:], positions[-1:] + 1
        self._cache.crop(length)
        return [int(token) for token in torch.cat(proposals).tolist()]
