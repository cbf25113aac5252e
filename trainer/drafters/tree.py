"""Draft trees of drafters that feed on their own output: the dynamic tree of EAGLE-2 (Li et al. 2024).

At every depth the ``width`` most probable nodes, by the product of draft probabilities from the root, get ``width``
children each; of all nodes the ``TREE_TOKENS`` most probable are drafted. A node is never more probable than its
parent, so they form a tree.

Shapes: U draft vocabulary, H drafter width, w tree width, n rows.
"""

import torch
from torch import Tensor

from trainer.attention.cache import KVCache
from trainer.drafters.base import DraftTree, Verified
from trainer.drafters.chain import Recurrent
from trainer.vocab import DraftVocab

TREE_TOKENS = 60
"""Nodes a target forward checks at most (EAGLE-2's ``total_token``)."""


class DynamicTree:
    """A drafter beside a live target that drafts trees; holds its own KV cache, of true features only between calls."""

    def __init__(self, model: Recurrent, vocab: DraftVocab, width: int) -> None:
        self._model, self._width = model, min(width, vocab.size)
        self._target_ids = vocab.target_ids
        self._cache = KVCache()

    def reset(self) -> None:
        """Forget the text."""
        self._cache = KVCache()

    @torch.inference_mode()
    def grow(self, verified: Verified, depth: int) -> DraftTree:
        """The tree of at most ``depth`` levels below ``verified.next_ids[-1]``."""
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
