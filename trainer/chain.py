"""An EAGLE-3 drafter in use: over recorded text, every slot at once, and live, one chain at a time.

Both read slot t = n-1 (hidden of token n-1, embedding of token n) to propose token n+1, and then feed the drafter its
own output and its own proposal.

Shapes: T tokens of a pack, L aux layers, D target width, H drafter width, U draft vocabulary, N drafting positions,
A active slots, K drafted tokens per draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.drafters.blocks import KVCache
from trainer.drafters.eagle3 import Eagle3
from trainer.shift import plan_slots
from trainer.vocab import DraftVocab

LOGIT_BUDGET = 1 << 24
"""Logits alive at a time, as elements."""


@torch.no_grad()
def hit_prefixes(model: Eagle3, vocab: DraftVocab, pack: PackedBatch, draft_len: int) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.

    Up to its first miss a drafter proposes the text itself, so one unroll fed with the text gives the hit prefix of
    every slot. Zero where no draft may start (`trainer.acceptance.drafting_positions`). A token off the draft
    vocabulary is never proposed, so it is a miss.
    """
    hits = torch.zeros_like(pack.input_ids)
    start = pack_drafting_positions(pack)
    if not len(start):
        return hits
    plan = plan_slots(start, pack.document, 1)
    states = model.unroll(pack, plan, draft_len).view(draft_len, plan.active.shape[0], -1)
    target_ids = vocab.target_ids.to(states.device)
    slot, last = plan.slots[:, 0], pack.input_ids.shape[0] - 1
    for depth in range(draft_len):
        if not len(start):
            break
        wanted = start + 1 + depth
        inside = wanted.clamp(max=last)
        there = (wanted <= last) & (pack.document[inside] == pack.document[start])
        proposed = target_ids[_most_probable(model, states[depth, slot])]
        alive = there & (proposed == pack.input_ids[inside])
        start, slot = start[alive], slot[alive]
        hits[start] += 1
    return hits


def pack_drafting_positions(pack: PackedBatch) -> Tensor:
    """``drafting_positions`` of every document of a pack, as pack rows: int64 [N], ascending."""
    held, document = pack.loss_mask, pack.document
    both = held[:-1] & held[1:] & (document[:-1] == document[1:]) & (pack.positions[:-1] >= 1)
    return torch.nonzero(both)[:, 0]


def _most_probable(model: Eagle3, states: Tensor) -> Tensor:
    """Draft ids int64 [N] of states after the final norm [N, H]; logits exist for a few rows at a time."""
    weight = model.lm_head.weight
    rows = max(1, LOGIT_BUDGET // weight.shape[0])
    found = [(states[i : i + rows] @ weight.T).argmax(-1) for i in range(0, states.shape[0], rows)]
    return torch.cat(found)


class LiveChain:
    """The drafter beside a live target; satisfies `trainer.decode.Chain`."""

    def __init__(self, model: Eagle3, vocab: DraftVocab) -> None:
        self._model = model
        self._device = model.fc.weight.device
        self._target_ids = vocab.target_ids.to(self._device)
        self._cache = KVCache()

    def reset(self) -> None:
        """Forget the text."""
        self._cache = KVCache()

    @torch.inference_mode()
    def propose(self, aux: Tensor, next_ids: Sequence[int], draft_len: int) -> list[int]:
        """K target ids; the keys and values kept are those of true features only.

        aux bf16 [L, n, D]: states of the n tokens verified since the last call; ``next_ids`` the tokens after them.
        """
        kept = self._cache.length + len(next_ids)
        positions = torch.arange(self._cache.length, kept, device=self._device)
        g = self._model.start(aux.to(self._device))
        state, choice = self._step(g, torch.tensor(list(next_ids), device=self._device), positions)
        proposals = [choice]
        for depth in range(1, draft_len):
            state, choice = self._step(state, choice[None], positions[-1:] + depth)
            proposals.append(choice)
        self._cache.crop(kept)
        return [int(token) for token in torch.stack(proposals).tolist()]

    def _step(self, g: Tensor, next_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """State [1, H] and proposed target id (scalar tensor) after the last of n rows."""
        state, logits = self._model.step(g, next_ids, positions, self._cache)
        return state[-1:], self._target_ids[logits[-1].argmax()]
