"""Where DFlash's blocks stand in a pack and what each may see: anchors, context rows, labels.

A block of B tokens opens with the token at its anchor and goes on with mask tokens; slot k stands at the anchor's
position + k and is taught the token there. It sees the states of its own document before the anchor, and its own B
slots: the state of the anchor itself is not known when a drafter is used (docs/design/010).

Anchors are drawn per sample from (seed, step, sample id) alone, so neither a resume nor the world size changes them.

Shapes: T tokens of a pack, N blocks, B slots of a block, C context rows.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.data.order import splitmix64
from trainer.slots.shift import document_starts, following_rows


@dataclass(frozen=True)
class Piece:
    """Rows ``begin…begin+length`` of a source, laid out at ``at`` of a gather."""

    begin: int
    length: int
    at: int


def gather_pieces(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Rows of x [T, …] named by consecutive pieces, end to end; a view when there is only one.

    Cheaper than an index: forward and backward are slice copies.
    """
    if len(pieces) == 1:
        return x.narrow(0, pieces[0].begin, pieces[0].length)
    out: Tensor = _GatherPieces.apply(x, tuple(pieces))
    return out


class _GatherPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
        ctx.pieces, ctx.shape = pieces, x.shape
        return torch.cat([x[p.begin : p.begin + p.length] for p in pieces]) if pieces else x[:0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[0].new_zeros(ctx.shape)
        for p in ctx.pieces:
            out[p.begin : p.begin + p.length] += grads[0][p.at : p.at + p.length]
        return out, None


AnchorRule = Literal["next", "whole"]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks beside the context rows they see. begin, end int64 [N]: block n sees context rows begin…end, and its
    anchor would be row ``end``. ``bounds``: the same as numbers."""

    begin: Tensor
    end: Tensor
    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, bounds: Sequence[tuple[int, int]], device: torch.device) -> "Blocks":
        """From (begin, end) of every block."""
        both = torch.tensor(list(bounds), dtype=torch.int64, device=device).view(-1, 2)
        return cls(both[:, 0], both[:, 1], tuple(bounds))

    def between(self, first: int, last: int) -> "Blocks":
        """Blocks first…last."""
        return Blocks(self.begin[first:last], self.end[first:last], self.bounds[first:last])


@dataclass(frozen=True, eq=False)
class BlockMap:
    """anchors int64 [N]: pack rows, ascending. ``context``: the pieces of the pack that are its C context rows."""

    anchors: Tensor
    blocks: Blocks
    context: tuple[Piece, ...]


def map_blocks(anchors: Tensor, document: Tensor, window: int | None = None) -> BlockMap:
    """Blocks at anchors int64 [N] (ascending pack rows), over just the context rows that some block sees.

    ``window``: no slot sees further back than that, see `trainer.attention.block`.
    """
    starts = document_starts(document)[anchors].tolist()
    pieces: list[Piece] = []
    bounds = []
    opened = None
    for start, anchor in zip(starts, anchors.tolist(), strict=True):
        if start != opened:
            opened = start
            begin = start if window is None else max(start, anchor - window + 1)
            pieces.append(Piece(begin, 0, _end(pieces)))
        piece = pieces[-1]
        pieces[-1] = Piece(piece.begin, anchor - piece.begin, piece.at)
        bounds.append((piece.at, piece.at + anchor - piece.begin))
    return BlockMap(anchors, Blocks.of(bounds, anchors.device), tuple(pieces))


def _end(pieces: Sequence[Piece]) -> int:
    return pieces[-1].at + pieces[-1].length if pieces else 0


def candidate_anchors(batch: PackedBatch, block_size: int, rule: AnchorRule) -> Tensor:
    """Rows that may be anchors: int64, ascending.

    ``next``: the row and the one after are supervised and of one document (SpecForge). ``whole``: the row is supervised
    and the block ends inside its document (ModelOpt; speculators, per pack).
    """
    reach = 1 if rule == "next" else block_size - 1
    mask, document = batch.loss_mask, batch.document
    inside = torch.zeros_like(mask)
    if reach < len(mask):
        inside[:-reach] = document[reach:] == document[:-reach]
        if rule == "next":
            inside[:-reach] &= mask[reach:]
    return torch.nonzero(mask & inside)[:, 0]


def draw_anchors(batch: PackedBatch, candidates: Tensor, count: int, rng_key: tuple[int, int]) -> Tensor:
    """At most ``count`` of the candidates of every sample, drawn without replacement: int64 [N], ascending.

    ``rng_key``: see `trainer.drafters.base.Drafter`.
    """
    per_document = torch.bincount(batch.document[candidates], minlength=len(batch.sample_ids)).tolist()
    if max(per_document, default=0) <= count:
        return candidates
    anchors_by_sample = []
    for sample_id, rows in zip(batch.sample_ids, candidates.split(per_document), strict=True):
        indices = _draw(f"{rng_key[0]}:{rng_key[1]}:{sample_id}", len(rows), count)
        anchors_by_sample.append(rows[torch.from_numpy(indices).to(rows.device)])
    return torch.cat(anchors_by_sample)


def _draw(key: str, size: int, count: int) -> np.ndarray:
    """``count`` of 0…size-1, ascending."""
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), dtype="<u8").astype(np.uint64)
    order = np.argsort(splitmix64(splitmix64(np.arange(size, dtype=np.uint64)) ^ seed), kind="stable")
    return np.sort(order[:count])


def label_rows(anchors: Tensor, block_size: int, document: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack row each slot 1…B-1 predicts, int64 [N, B-1] clamped to the pack, and where it is taught: bool [N, B-1].

    Taught where the row is supervised and of the anchor's document.
    """
    rows, inside = following_rows(document, anchors, block_size - 1)
    return rows, inside & loss_mask[rows]
