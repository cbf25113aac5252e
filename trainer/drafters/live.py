"""Drafters in use, over recorded text, every slot at once, and live: chains, EAGLE-2's dynamic trees, and blocks.

A drafter that feeds on its own output reads slot t = n-1 (hidden of token n-1, embedding of token n) to propose token
n+1, and then its own output and proposal. In a tree (Li et al. 2024) the ``width`` most probable nodes of every depth,
by the product of draft probabilities from the root, get ``width`` children each, and the ``TREE_TOKENS`` most probable
of all are drafted: a node is never more probable than its parent, so they form a tree. A block opens with the newest
known token n at position n and sees the states of tokens before it; K slots, the first or the second of the block on,
propose tokens n+1…n+K. Only keys and values of verified states are kept, never a block's own.

Shapes: T tokens of a pack, L aux layers, D target width, H drafter width, U draft vocabulary, N drafting positions,
A active slots, K drafted tokens per draft, w tree width, B slots of a block, G key heads, E head width, n rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.attention.ttt import KVCache
from trainer.drafters.base import C, DrafterKind, DraftTree, M, Pick, S, Verified, most_probable
from trainer.losses.teacher import TargetInterface
from trainer.slots import Blocks, SlotMap, SlotRange, following_rows, map_blocks, map_slots
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
        the ``last`` slots only. g [n, H]: ``begin`` of verified rows, or what ``step`` returned for the slot before.
        next_ids int64 [n]: the token after each row. positions int64 [n] of the rows."""


@torch.no_grad()
def recurrent_hits(
    unroll: Callable[[SlotMap, int], Tensor], head: Tensor, vocab: DraftVocab, pack: PackedBatch, draft_len: int
) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.
    ``unroll(slot_map, K)`` gives the states after the final norm [K*A, H] of slots of ``pack``, ``head`` [U, H] their
    logits. Up to its first miss a drafter proposes the text itself, so one unroll fed with the text gives the hit
    prefix of every slot. Zero where no draft may start (`drafting_positions`). A token off the draft vocabulary is
    never proposed, so it is a miss."""
    start = pack_drafting_positions(pack)
    if not len(start):
        return torch.zeros_like(pack.input_ids)
    slot_map = map_slots(start, pack.document, 1)
    states = unroll(slot_map, draft_len).view(draft_len, slot_map.active.shape[0], -1)
    target_ids, slot = vocab.target_ids.to(states.device), slot_map.slots[:, 0]
    return text_hits(
        pack, start, draft_len, lambda depth, left: target_ids[draft_tokens(states[depth, slot[left]], head)]
    )


def text_hits(pack: PackedBatch, start: Tensor, draft_len: int, propose: Callable[[int, Tensor], Tensor]) -> Tensor:
    """How many proposals in a row equal the text after the rows ``start`` [N] of a pack: int64 [T], zero at other rows.
    ``propose(depth, left)`` gives target ids [n] at a depth for ``left`` [n], those of ``start`` without a miss yet."""
    hits = torch.zeros_like(pack.input_ids)
    ahead, inside = following_rows(pack.document, start, draft_len)
    left = torch.arange(len(start), device=start.device)
    for depth in range(draft_len):
        if not len(left):
            break
        is_hit = inside[left, depth] & (propose(depth, left) == pack.input_ids[ahead[left, depth]])
        left = left[is_hit]
        hits[start[left]] += 1
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


TREE_TOKENS = 60
"""Nodes a target forward checks at most (EAGLE-2's ``total_token``)."""


class LiveRecurrent:
    """The drafter beside a live target: a `trainer.drafters.base.Live`, and a `LiveTree` of ``width``. Its KV cache
    holds true features only between calls."""

    def __init__(self, model: Recurrent, vocab: DraftVocab, width: int = 1) -> None:
        self._model, self._width = model, min(width, vocab.size)
        self._target_ids, self._cache = vocab.target_ids, KVCache()

    def reset(self) -> None:
        self._cache = KVCache()

    @torch.inference_mode()
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
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

    @torch.inference_mode()
    def grow(self, verified: Verified, depth: int) -> DraftTree:
        cache, device = self._cache, self._target_ids.device
        verified_rows = cache.length + len(verified.next_ids)
        positions = torch.arange(cache.length, verified_rows, device=device)
        ids = torch.tensor(list(verified.next_ids), device=device)
        state, logits = self._model.step(self._model.begin(verified), ids, positions, cache, last=1)
        growing = _Growing(self._width, state[-1:], logits[-1:], self._target_ids)
        for level in range(1, depth):
            cache.visible = growing.visible(verified_rows)
            at = torch.full((growing.frontier.shape[0],), verified_rows + level - 1, device=device)
            state, logits = self._model.step(growing.states, growing.tokens[growing.frontier], at, cache)
            growing.add(state, logits)
        cache.visible = None
        cache.crop(verified_rows)
        return growing.best(TREE_TOKENS)


class RecurrentKind(DrafterKind[M, C, S]):
    """A kind of drafter whose model is `Recurrent` and unrolls itself over a text to states that its head reads."""

    def hits(self, model: Any, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        weight = model.lm_head.weight.to(model.fc.weight.dtype)
        return recurrent_hits(partial(model.unroll, pack), weight, target.vocab, pack, draft_len)

    def live(self, model: Any, target: TargetInterface) -> LiveRecurrent:
        return LiveRecurrent(model, target.vocab)

    def tree(self, model: Any, target: TargetInterface, width: int) -> LiveRecurrent:
        return LiveRecurrent(model, target.vocab, width)


class _Growing:
    """Nodes so far. tokens int64, parents int64, scores fp32: one entry a node. frontier int64 [w]: the nodes
    that get children next, read from ``states`` [w, H]; ``_rows`` bool [w, rows so far]: cached rows each follows."""

    def __init__(self, width: int, state: Tensor, logits: Tensor, target_ids: Tensor) -> None:
        self._width, self._target_ids = width, target_ids
        none = torch.empty(0, dtype=torch.int64, device=logits.device)
        self.tokens, self.parents, self.scores = none, none, logits.new_empty(0, dtype=torch.float32)
        self._rows = torch.zeros(1, 0, dtype=torch.bool, device=logits.device)
        self.frontier, self.states = none.new_full((1,), -1), state
        self._extend(state, logits, logits.new_zeros(1, dtype=torch.float32))

    def visible(self, verified_rows: int) -> Tensor:
        """For the frontier: every verified row, its ancestors' rows and itself: bool [w, rows]."""
        count = self.frontier.shape[0]
        eye = torch.eye(count, dtype=torch.bool, device=self._rows.device)
        self._rows = torch.cat([self._rows, eye], 1)
        return torch.cat([self._rows.new_ones(count, verified_rows), self._rows], 1)

    def add(self, states: Tensor, logits: Tensor) -> None:
        """The frontier was read: states [w, H] and logits [w, U] of its nodes."""
        self._extend(states, logits, self.scores[self.frontier])

    def best(self, count: int) -> DraftTree:
        """The ``count`` most probable nodes, in the order they were made."""
        order = torch.sort(self.scores, descending=True, stable=True).indices[:count].sort().values
        new_index = torch.full_like(self.parents, -1)
        new_index[order] = torch.arange(order.shape[0], device=order.device)
        parents = self.parents[order]
        parents = torch.where(parents < 0, parents, new_index[parents.clamp(min=0)])
        return DraftTree(self.tokens[order].tolist(), parents.tolist())

    def _extend(self, states: Tensor, logits: Tensor, scores: Tensor) -> None:
        best = torch.log_softmax(logits.float(), -1).topk(self._width)
        scores_below = (scores[:, None] + best.values).flatten()
        first = self.tokens.shape[0]
        self.tokens = torch.cat([self.tokens, self._target_ids[best.indices.flatten()]])
        self.parents = torch.cat([self.parents, self.frontier.repeat_interleave(self._width)])
        self.scores = torch.cat([self.scores, scores_below])
        frontier = torch.sort(scores_below, descending=True, stable=True).indices[: self._width].sort().values
        self.states, self._rows = states[frontier // self._width], self._rows[frontier // self._width]
        self.frontier = first + frontier


SLOT_BUDGET = 1 << 12
"""Slots of the blocks computed at a time over recorded text."""

KeyValues = tuple[Tensor, Tensor]
"""Keys and values [rows, G, E], ready to attend to."""


class BlockModel(Protocol):
    """A drafter that fills blocks."""

    chained: bool
    """Whether a proposal is chosen after the one before."""

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def first_slot(self) -> int:
        """The first slot that proposes."""

    @property
    def window(self) -> int | None:
        """How far a slot sees."""

    def head_weight(self) -> Tensor:
        """Of the draft vocabulary: [U, D]."""

    def guesses(self, states: Tensor, tokens: Tensor) -> Tensor:
        """The tokens int64 [N, K] that ``before`` reads where blocks of states [N*K, ...] are drafted, by those that
        are known, int64 [N, 1] or more, the newest one first."""

    def before(self, tokens: Tensor) -> Tensor:
        """What slots know of the tokens int64 [N, K] before them in their blocks, the newest one and then proposals:
        [N*K, ...], the first K slots of each."""

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        """Draft logits fp32 [n, U] of states [n, D], each with what it knows of the tokens before it."""

    def context(self, aux: Tensor, positions: Tensor, ranges: tuple[SlotRange, ...] | None = None) -> list[KeyValues]:
        """Keys and values of every layer for states [L, T, D] at positions int64 [T], or for ``ranges`` of them."""

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """States [N*S, D] of slots first…last of blocks that open with ``tokens`` int64 [N] at ``positions``."""


@torch.no_grad()
def block_hits(model: BlockModel, vocab: DraftVocab, pack: PackedBatch, draft_len: int) -> Tensor:
    """How many proposals drafted after each token of a pack equal the text: int64 [T], indexed by the newest token n.
    Zero where no draft may start (`drafting_positions`). A token off the draft vocabulary is never proposed, so it is a
    miss."""
    hits = torch.zeros_like(pack.input_ids)
    start = pack_drafting_positions(pack)
    if not len(start):
        return hits
    block_map = map_blocks(start, pack.document, model.window)
    context = model.context(pack.aux, pack.positions, block_map.context)
    step = max(1, SLOT_BUDGET // model.block_size)
    for at in range(0, len(start), step):
        rows, blocks = start[at : at + step], block_map.blocks.between(at, at + step)
        slots = (model.first_slot, model.first_slot + draft_len)
        states = model.fill(pack.input_ids[rows], pack.positions[rows], context, blocks, slots)
        ahead, inside = following_rows(pack.document, rows, draft_len)
        # Up to its first miss a draft is the text itself.
        text = pack.input_ids[torch.cat([rows[:, None], ahead[:, :-1]], 1)]
        best = block_tokens(model, states, model.guesses(states, text))
        proposed = vocab.target_ids.to(states.device)[best].view(-1, draft_len)
        hits[rows] = (inside & (proposed == pack.input_ids[ahead])).cumprod(1).sum(1)
    return hits


def block_tokens(model: BlockModel, states: Tensor, tokens: Tensor) -> Tensor:
    """Most probable draft ids int64 [N*K] of states [N*K, ...] whose blocks hold the tokens int64 [N, K] before them;
    few rows of logits exist at a time."""
    few = max(1, LOGIT_BUDGET // len(model.head_weight()))
    parts = zip(states.split(few), model.before(tokens).split(few), strict=True)
    return torch.cat([model.logits(*part).argmax(-1) for part in parts])


class LiveBlocks:
    """The drafter beside a live target; a `trainer.drafters.base.Live`."""

    def __init__(self, model: BlockModel, vocab: DraftVocab) -> None:
        self._model, self._target_ids, self._cache = model, vocab.target_ids, KVCache()

    def reset(self) -> None:
        self._cache = KVCache()

    @torch.inference_mode()
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """K target ids, all of one forward over the layers."""
        device = self._target_ids.device
        context = self._extended(verified.aux.to(device))
        position = context[0][0].shape[0]
        newest = torch.tensor([verified.next_ids[-1], position], device=device)
        blocks = Blocks.of([(0, position)], device)
        slots = (self._model.first_slot, self._model.first_slot + draft_len)
        states, tokens = self._model.fill(newest[:1], newest[1:], context, blocks, slots), newest[:1]
        for rows in states.split(1 if self._model.chained else draft_len):
            before = self._model.before(self._model.guesses(rows, tokens[None]))[-len(rows) :]
            tokens = torch.cat([tokens, self._target_ids[pick(self._model.logits(rows, before))]])
        return [int(token) for token in tokens[1:].tolist()]

    def _extended(self, aux: Tensor) -> list[KeyValues]:
        """Keys and values of everything verified, these states [L, T, D] included."""
        positions = torch.arange(self._cache.length, self._cache.length + aux.shape[1], device=aux.device)
        pairs = []
        for layer, pair in enumerate(self._model.context(aux, positions)):
            keys, values = self._cache.append(*pair, layer)
            pairs.append((keys[0].transpose(0, 1), values[0].transpose(0, 1)))
        return pairs
