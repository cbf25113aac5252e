"""Which slot predicts from which teacher row: the one place where stored tokens, mask and final rows are shifted.

A store holds tokens and mask unshifted. EAGLE-3's slot t reads the hidden of token t and the embedding of token t+1; at
TTT step i it reads the embedding of token t+1+i and is taught by the target's distribution at row p = t+1+i, which
predicts token p+1. A row p teaches where loss_mask[p + mask_offset] is set: +1 asks that the predicted token is
supervised (exact, ModelOpt online), 0 that the row's own token is (speculators, Automodel), -1 the token before
(SafeAILab, SpecForge, TorchSpec). Nothing crosses a document of the pack.

Only slots that are taught at some step are computed past the keys and values of step 0: at later steps a slot is read
by nobody but itself.

Shapes: T tokens of a pack, R teacher rows, K TTT steps, A active slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch

JOIN_GAP = 16
"""Idle slots between two ranges that are computed anyway: a longer range beats one more attention call."""


@dataclass(frozen=True)
class SlotRange:
    """Consecutive active slots ``begin…end`` (end exclusive, rows of the pack) of the document that starts at
    ``document``; ``at`` is where ``begin`` lies among the active slots."""

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
    """Rows p whose distribution teaches: int64 [R], ascending.

    loss_mask bool [T]; document int64 [T]. The first row of a document teaches nobody: its slot would lie before it.
    """
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
    """Pair teacher rows int64 [R] (ascending) with the slots they teach at each of ``steps`` TTT steps.

    ``local`` bool [T]: slots that may be taught on this rank; all where None.
    """
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
