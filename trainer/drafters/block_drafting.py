"""Drafters that fill a block in one forward, in use: over recorded text, many blocks at once, and live, one a step.

With n the newest known token, the block opens with token n at position n and sees the states of tokens before it;
slots 1…K propose tokens n+1…n+K. Only keys and values of verified states are kept, never a block's own.

Shapes: T tokens of a pack, L aux layers, D target width, N drafting positions, B slots of a block, G key heads, E head
width, K drafted tokens per draft, U draft vocabulary.
"""

from typing import Protocol

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.attention.cache import KVCache
from trainer.drafters.base import Pick, Verified, most_probable
from trainer.drafters.chain import draft_logits, draft_tokens, pack_drafting_positions
from trainer.slots.anchors import Blocks, Piece, map_blocks
from trainer.slots.shift import following_rows
from trainer.vocab import DraftVocab

SLOT_BUDGET = 1 << 12
"""Slots of the blocks computed at a time over recorded text."""

KeyValues = tuple[Tensor, Tensor]
"""Keys and values [rows, G, E], ready to attend to."""


class BlockModel(Protocol):
    """A drafter that fills blocks."""

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def window(self) -> int | None:
        """How far a slot sees."""

    def head_weight(self) -> Tensor:
        """Draft logits are its product with states: [U, D]."""

    def context(self, aux: Tensor, positions: Tensor, pieces: tuple[Piece, ...] | None = None) -> list[KeyValues]:
        """Keys and values of every layer for states [L, T, D] at positions int64 [T], or for ``pieces`` of them."""

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """States [N*S, D] of slots first…last of blocks that open with ``tokens`` int64 [N] at ``positions``."""


@torch.no_grad()
def block_hits(model: BlockModel, vocab: DraftVocab, pack: PackedBatch, draft_len: int) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.

    Zero where no draft may start (`drafting_positions`). A token off the draft vocabulary is never
    proposed, so it is a miss.
    """
    hits = torch.zeros_like(pack.input_ids)
    start = pack_drafting_positions(pack)
    if not len(start):
        return hits
    block_map = map_blocks(start, pack.document, model.window)
    context = model.context(pack.aux, pack.positions, block_map.context)
    step = max(1, SLOT_BUDGET // model.block_size)
    for at in range(0, len(start), step):
        rows, blocks = start[at : at + step], block_map.blocks.between(at, at + step)
        states = model.fill(pack.input_ids[rows], pack.positions[rows], context, blocks, (1, draft_len + 1))
        proposed = vocab.target_ids.to(states.device)[draft_tokens(states, model.head_weight())].view(-1, draft_len)
        ahead, inside = following_rows(pack.document, rows, draft_len)
        hits[rows] = (inside & (proposed == pack.input_ids[ahead])).cumprod(1).sum(1)
    return hits


class LiveBlocks:
    """The drafter beside a live target; a `trainer.drafters.base.Live`."""

    def __init__(self, model: BlockModel, vocab: DraftVocab) -> None:
        self._model = model
        self._target_ids = vocab.target_ids
        self._caches: list[KVCache] = []

    def reset(self) -> None:
        """Forget the text."""
        self._caches = []

    @torch.inference_mode()
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """K target ids, all of one forward."""
        device = self._target_ids.device
        context = self._extended(verified.aux.to(device))
        position = context[0][0].shape[0]
        newest = torch.tensor([verified.next_ids[-1], position], device=device)
        blocks = Blocks.of([(0, position)], device)
        states = self._model.fill(newest[:1], newest[1:], context, blocks, (1, draft_len + 1))
        ids = self._target_ids[pick(draft_logits(states, self._model.head_weight()))]
        return [int(token) for token in ids.tolist()]

    def _extended(self, aux: Tensor) -> list[KeyValues]:
        """Keys and values of everything verified, these states [L, T, D] included."""
        position = self._caches[0].length if self._caches else 0
        positions = torch.arange(position, position + aux.shape[1], device=aux.device)
        fresh = self._model.context(aux, positions)
        self._caches = self._caches or [KVCache() for _ in fresh]
        pairs = []
        for cache, pair in zip(self._caches, fresh, strict=True):
            keys, values = cache.append(*pair)
            pairs.append((keys[0].transpose(0, 1), values[0].transpose(0, 1)))
        return pairs
