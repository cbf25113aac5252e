"""Which slot predicts from which row: the one place where stored tokens, mask and final rows are shifted.

A store holds tokens and mask unshifted. EAGLE-3's slot t reads the hidden of token t and the embedding of token t+1; at
TTT step i it reads the embedding of token t+1+i and is taught by the target's distribution at row p = t+1+i, which
predicts token p+1. A row p teaches where loss_mask[p + mask_offset] is set: +1 asks that the predicted token is
supervised (exact, ModelOpt online), 0 that the row's own token is (speculators, Automodel), -1 the token before
(SafeAILab, SpecForge, TorchSpec). Nothing crosses a document of the pack. Only slots that are taught at some step are
computed past the keys and values of step 0: at later steps a slot is read by nobody but itself.

A DFlash block of B tokens opens with the token at its anchor and goes on with mask tokens; slot k stands at the
anchor's position + k and is taught the token there. It sees the states of its own document before the anchor, and its
own B slots: the state of the anchor itself is not known when a drafter is used (docs/design/010). Anchors are drawn per
sample from (seed, step, sample id) alone, so neither a resume nor the world size changes them.

Shapes: T tokens of a pack, R teacher rows, K TTT steps, A active slots, N blocks, B slots of a block.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.data.order import splitmix64

JOIN_GAP = 16
"""Idle slots between two ranges that are computed anyway: a longer range beats one more attention call."""


@dataclass(frozen=True)
class SlotRange:
    """Consecutive rows ``begin…end`` (end exclusive) of a pack, of the document that starts at ``document``: active
    slots, or what blocks see; ``at`` is where ``begin`` lies among all of them."""

    document: int
    begin: int
    end: int
    at: int

    @property
    def length(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class SlotMap:
    """rows int64 [R]: teacher rows p, ascending. slots int64 [R, K]: index among the active slots of the slot taught by
    row r at step i, -1 where that slot would lie before its document. active int64 [A]: pack rows of the active slots,
    ascending, the concatenation of ``ranges``."""

    rows: Tensor
    slots: Tensor
    active: Tensor
    ranges: tuple[SlotRange, ...]

    @property
    def counts(self) -> Tensor:
        """Taught slots per step: int64 [K]."""
        return (self.slots >= 0).sum(0)


def document_starts(document: Tensor) -> Tensor:
    """Pack row at which each row's document starts: int64 [T]."""
    at = torch.arange(document.shape[0], device=document.device)
    first = torch.ones_like(document, dtype=torch.bool)
    first[1:] = document[1:] != document[:-1]
    return torch.where(first, at, 0).cummax(0).values if len(at) else at


def following_rows(document: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` rows after each of ``rows`` int64 [N], clamped to the pack, and which are of its document:
    int64 and bool [N, count]."""
    ahead = rows[:, None] + torch.arange(1, count + 1, device=rows.device)
    clamped = ahead.clamp(max=max(document.shape[0] - 1, 0))
    return clamped, (ahead == clamped) & (document[clamped] == document[rows][:, None])


def document_ranges(document: Tensor) -> tuple[SlotRange, ...]:
    """Every document of a pack int64 [T] as one range of active slots."""
    starts = document_starts(document).unique().tolist()
    ends = [*starts[1:], document.shape[0]]
    return tuple(SlotRange(begin, begin, end, begin) for begin, end in zip(starts, ends, strict=True))


def teacher_rows(loss_mask: Tensor, document: Tensor, mask_offset: int) -> Tensor:
    """Rows p whose distribution teaches: int64 [R], ascending. loss_mask bool [T]; document int64 [T]. The first row of
    a document teaches nobody: its slot would lie before it."""
    tokens = loss_mask.shape[0]
    at = torch.arange(tokens, device=loss_mask.device)
    gate = at + mask_offset
    inside = (gate >= 0) & (gate < tokens)
    gate = gate.clamp(0, max(tokens - 1, 0))
    taught = inside & (document[gate] == document) & loss_mask[gate] & (at > document_starts(document))
    return torch.nonzero(taught)[:, 0]


def next_tokens(batch: PackedBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows p that have a next token in their document, and that token: int64 [R] each."""
    inside = (rows + 1).clamp(max=batch.document.shape[0] - 1)
    rows = rows[(inside > rows) & (batch.document[inside] == batch.document[rows])]
    return rows, batch.input_ids[rows + 1]


def open_steps(rows: Tensor, document: Tensor, steps: int, local: Tensor | None = None) -> Tensor:
    """Whether row r has a slot inside its document at step i, a ``local`` one (bool [T]) where given: bool [R, K]."""
    slot = rows[:, None] - 1 - torch.arange(steps, device=rows.device)
    inside = slot >= document_starts(document)[rows][:, None]
    return inside if local is None else inside & local[slot.clamp(min=0)]


def map_slots(
    rows: Tensor, document: Tensor, steps: int, join_gap: int = JOIN_GAP, local: Tensor | None = None
) -> SlotMap:
    """Pair teacher rows int64 [R] (ascending) with the slots they teach at each of ``steps`` TTT steps. ``local`` bool
    [T]: slots that may be taught on this rank; all where None."""
    slot = rows[:, None] - 1 - torch.arange(steps, device=rows.device)
    taught = open_steps(rows, document, steps, local)
    active_rows = torch.zeros(document.shape[0], dtype=torch.bool, device=rows.device)
    active_rows[slot[taught]] = True
    ranges = _ranges(torch.nonzero(active_rows)[:, 0], document, join_gap)
    pieces = [torch.arange(slot_range.begin, slot_range.end, device=rows.device) for slot_range in ranges]
    active = torch.cat(pieces) if pieces else rows.new_zeros(0)
    index = torch.full_like(document, -1)
    index[active] = torch.arange(active.shape[0], device=rows.device)
    slots = torch.where(taught, index[slot.clamp(min=0)], -1)
    return SlotMap(rows, slots, active, ranges)


def _ranges(active_rows: Tensor, document: Tensor, join_gap: int) -> tuple[SlotRange, ...]:
    if active_rows.numel() == 0:
        return ()
    before, after = active_rows[:-1], active_rows[1:]
    cuts = torch.nonzero((after - before > join_gap + 1) | (document[after] != document[before]))[:, 0]
    begins = torch.cat([active_rows[:1], after[cuts]]).tolist()
    ends = torch.cat([before[cuts], active_rows[-1:]]).add(1).tolist()
    starts = document_starts(document)[torch.tensor(begins, device=document.device)].tolist()
    ranges, at = [], 0
    for start, begin, end in zip(starts, begins, ends, strict=True):
        ranges.append(SlotRange(start, begin, end, at))
        at += end - begin
    return tuple(ranges)


def gather_ranges(x: Tensor, ranges: Sequence[SlotRange], shift: int = 0) -> Tensor:
    """Rows of x [T, …] in consecutive ranges, each ``shift`` rows on, end to end; a view when there is only one.
    Cheaper than an index: forward and backward are slice copies."""
    if len(ranges) == 1:
        return x.narrow(0, ranges[0].begin + shift, ranges[0].length)
    out: Tensor = _GatherRanges.apply(x, tuple(ranges), shift)
    return out


class _GatherRanges(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: tuple[SlotRange, ...], shift: int) -> Tensor:
        ctx.ranges, ctx.shift, ctx.shape = ranges, shift, x.shape
        return torch.cat([x[r.begin + shift : r.end + shift] for r in ranges]) if ranges else x[:0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[0].new_zeros(ctx.shape)
        for r in ctx.ranges:
            out[r.begin + ctx.shift : r.end + ctx.shift] += grads[0][r.at : r.at + r.length]
        return out, None, None


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
    """anchors int64 [N]: pack rows, ascending. ``context``: the ranges of the pack that are its C context rows."""

    anchors: Tensor
    blocks: Blocks
    context: tuple[SlotRange, ...]


def map_blocks(anchors: Tensor, document: Tensor, window: int | None = None) -> BlockMap:
    """Blocks at anchors int64 [N] (ascending pack rows), over just the context rows that some block sees. ``window``:
    no slot sees further back than that, see `trainer.attention.block`."""
    starts = document_starts(document)[anchors].tolist()
    ranges: list[SlotRange] = []
    bounds = []
    for start, anchor in zip(starts, anchors.tolist(), strict=True):
        if not ranges or ranges[-1].document != start:
            begin = start if window is None else max(start, anchor - window + 1)
            ranges.append(SlotRange(start, begin, begin, ranges[-1].at + ranges[-1].length if ranges else 0))
        seen = ranges[-1] = replace(ranges[-1], end=anchor)
        bounds.append((seen.at, seen.at + seen.length))
    return BlockMap(anchors, Blocks.of(bounds, anchors.device), tuple(ranges))


def candidate_anchors(batch: PackedBatch, block_size: int, rule: AnchorRule) -> Tensor:
    """Rows that may be anchors: int64, ascending. ``next``: the row and the one after are supervised and of one
    document (SpecForge). ``whole``: the row is supervised and the block ends inside its document (ModelOpt;
    speculators, per pack)."""
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
    ``rng_key``: see `trainer.drafters.base.Drafter`."""
    per_document = torch.bincount(batch.document[candidates], minlength=len(batch.sample_ids)).tolist()
    if max(per_document, default=0) <= count:
        return candidates
    anchors_by_sample = []
    for sample_id, rows in zip(batch.sample_ids, candidates.split(per_document), strict=True):
        indices = np.sort(_shuffled(f"{rng_key[0]}:{rng_key[1]}:{sample_id}", len(rows))[:count])
        anchors_by_sample.append(rows[torch.from_numpy(indices).to(rows.device)])
    return torch.cat(anchors_by_sample)


def _shuffled(key: str, size: int) -> np.ndarray:
    """0…size-1 in an order that follows from the key alone."""
    seed = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), dtype="<u8").astype(np.uint64)
    return np.argsort(splitmix64(splitmix64(np.arange(size, dtype=np.uint64)) ^ seed), kind="stable")


def chain_lengths(
    batch: PackedBatch, rows: Tensor, steps: int, keep: tuple[float, float, int | None], rng_key: tuple[int, int]
) -> Tensor:
    """How many mask slots follow each token's own slot: int64 [T], 0…steps-1. rows int64 [R]: those that may teach.

    Slot d after token t is taught by row t+1+d. In every sample, depth d keeps max(ratio^d, least) of its rows less d,
    ``keep`` being ratio, least and the most rows that count, drawn from the tokens kept at depth d-1 whose slot d can
    be taught (P-EAGLE's conditional drop, docs/design/016). One draw of priorities a sample serves all depths, which
    gives the same distribution as a new one for each."""
    document, samples = batch.document, len(batch.sample_ids)
    at = torch.arange(document.shape[0], device=document.device)
    taught = torch.zeros_like(document, dtype=torch.bool)
    taught[rows] = True
    sizes = torch.bincount(document, minlength=samples).tolist()
    drawn = [_shuffled(f"{rng_key[0]}:{rng_key[1]}:{name}", n) for name, n in zip(batch.sample_ids, sizes, strict=True)]
    order = torch.from_numpy(np.concatenate(drawn)).to(at) + document_starts(document)
    ratio, least, most = keep
    count = torch.bincount(document[rows], minlength=samples).clamp(min=0, max=most)
    lengths, alive = torch.zeros_like(document), torch.ones_like(taught)
    ahead, inside = following_rows(document, at, steps)
    for depth in range(1, steps):
        alive &= inside[:, depth] & taught[ahead[:, depth]]
        ranked = order[alive[order]]
        first = torch.searchsorted(document[ranked], torch.arange(samples, device=at.device))
        place = torch.arange(len(ranked), device=at.device) - first[document[ranked]]
        size = ((count - depth).clamp(min=0).double() * max(ratio**depth, least)).floor()
        kept = ranked[place < size[document[ranked]]]
        alive = torch.zeros_like(alive).index_fill_(0, kept, True)
        lengths[kept] = depth
    return lengths


def label_rows(anchors: Tensor, block_size: int, document: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Pack row each slot 1…B-1 predicts, int64 [N, B-1] clamped to the pack, and where it is taught: bool [N, B-1].
    Taught where the row is supervised and of the anchor's document."""
    rows, inside = following_rows(document, anchors, block_size - 1)
    return rows, inside & loss_mask[rows]
