"""Draft trees of drafters that feed on their own output: the dynamic tree of EAGLE-2 (Li et al. 2024).

At every depth the ``width`` most probable nodes, by the product of draft probabilities from the root, get ``width``
children each; of all nodes the ``TREE_TOKENS`` most probable are drafted. A node is never more probable than its
parent, so what is kept is a tree.

Shapes: U draft vocabulary, H drafter width, w tree width, n rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.drafters.base import Seen
from trainer.drafters.blocks import KVCache
from trainer.drafting.chain import Recurrent
from trainer.vocab import DraftVocab

TREE_TOKENS = 60
"""Nodes a target forward checks at most (EAGLE-2's ``total_token``)."""


@dataclass(frozen=True)
class DraftTree:
    """Proposed target ids and the index of each one's parent, -1 for the root, which is the newest known token; parents
    come before their children."""

    tokens: list[int]
    parents: list[int]

    def depths(self) -> list[int]:
        """Distance of each node from the root, 1 for its children."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent < 0 else found[parent] + 1)
        return found

    def visible(self) -> Tensor:
        """Which nodes each node follows, itself included: bool [nodes, nodes]."""
        seen = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                seen[node] |= seen[parent]
        return seen

    def follow(self, parent: int, token: int) -> int | None:
        """The child of ``parent`` that proposes ``token``."""
        pairs = zip(self.tokens, self.parents, strict=True)
        return next((node for node, found in enumerate(pairs) if found == (token, parent)), None)


class LiveTree:
    """A drafter beside a live target that drafts trees; holds its own KV cache, of true features only between calls."""

    def __init__(self, model: Recurrent, vocab: DraftVocab, width: int) -> None:
        self._model, self._width = model, min(width, vocab.size)
        self._target_ids = vocab.target_ids
        self._cache = KVCache()

    def reset(self) -> None:
        """Forget the text."""
        self._cache = KVCache()

    @torch.inference_mode()
    def grow(self, seen: Seen, depth: int) -> DraftTree:
        """The tree of at most ``depth`` levels below ``seen.next_ids[-1]``."""
        cache, device = self._cache, self._target_ids.device
        kept = cache.length + len(seen.next_ids)
        positions = torch.arange(cache.length, kept, device=device)
        ids = torch.tensor(list(seen.next_ids), device=device)
        state, logits = self._model.step(self._model.begin(seen), ids, positions, cache, last=1)
        growing = _Growing(self._width, state[-1:], logits[-1:], self._target_ids)
        for level in range(1, depth):
            cache.visible = growing.visible(kept)
            at = torch.full((growing.frontier.shape[0],), kept + level - 1, device=device)
            state, logits = self._model.step(growing.states, growing.tokens[growing.frontier], at, cache)
            growing.add(state, logits)
        cache.visible = None
        cache.crop(kept)
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

    def visible(self, kept: int) -> Tensor:
        """For the frontier: every true row, its ancestors' rows and itself: bool [w, kept + rows so far + w]."""
        count = self.frontier.shape[0]
        eye = torch.eye(count, dtype=torch.bool, device=self._rows.device)
        self._rows = torch.cat([self._rows, eye], 1)
        return torch.cat([self._rows.new_ones(count, kept), self._rows], 1)

    def add(self, states: Tensor, logits: Tensor) -> None:
        """The frontier was read: states [w, H] and logits [w, U] of its nodes."""
        self._extend(states, logits, self.scores[self.frontier])

    def best(self, count: int) -> DraftTree:
        """The ``count`` most probable nodes, in the order they were made."""
        order = torch.sort(self.scores, descending=True, stable=True).indices[:count].sort().values
        place = torch.full_like(self.parents, -1)
        place[order] = torch.arange(order.shape[0], device=order.device)
        parents = self.parents[order]
        parents = torch.where(parents < 0, parents, place[parents.clamp(min=0)])
        return DraftTree(self.tokens[order].tolist(), parents.tolist())

    def _extend(self, states: Tensor, logits: Tensor, scores: Tensor) -> None:
        found = torch.log_softmax(logits.float(), -1).topk(self._width)
        made = (scores[:, None] + found.values).flatten()
        first = self.tokens.shape[0]
        self.tokens = torch.cat([self.tokens, self._target_ids[found.indices.flatten()]])
        self.parents = torch.cat([self.parents, self.frontier.repeat_interleave(self._width)])
        self.scores = torch.cat([self.scores, made])
        chosen = torch.sort(made, descending=True, stable=True).indices[: self._width].sort().values
        self.states, self._rows = states[chosen // self._width], self._rows[chosen // self._width]
        self.frontier = first + chosen
