"""DFlash's objective: every slot of a block is taught the token at its own position, later slots less.

w_k = exp(-(k-1) / gamma) for slots k = 1…B-1 (drafters.md section 3), or D-PACE's weights: with q the probability the
drafter gives the label and q~ = (1-a) q + a, w_j = sum_{m>=j} prod_{i<=m} q~_i, without gradient. The label is the
token of the text or the target's own choice; a share of its weight may go to the target's whole distribution at the
position before (distillation).

Shapes: N blocks, B slots of a block, K = B-1 taught slots, H drafter width, U draft vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.config import LossConfig
from trainer.objectives.anchors import AnchorRule, BlockPlan, candidate_anchors, draw_anchors, label_rows, plan_blocks
from trainer.objectives.hard_loss import Adapt, Blend, hard_cross_entropy
from trainer.objectives.losses import StepLosses
from trainer.objectives.teacher import Teacher, TeacherRows


class BlockLoss(LossConfig):
    """num_anchors: blocks per sample at most. anchor_rule: see `anchors`. gamma defaults to 7, 5 or 4 for
    blocks of 16, 10 or 8. labels: the ``text`` or the ``target``'s most probable token (speculators). distil: share of
    the weight for the target's distribution. reduction: divide by the sum of the ``weights`` (SpecForge, ModelOpt) or
    by the taught slots (``kept``, speculators; D-PACE's default)."""

    num_anchors: int = Field(512, gt=0)
    anchor_rule: AnchorRule = "next"
    weighting: Literal["decay", "dpace"] = "decay"
    gamma: float | None = Field(None, gt=0)
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    labels: Literal["text", "target"] = "text"
    distil: float = Field(0.0, ge=0, le=1)
    reduction: Literal["weights", "kept"] | None = None

    @model_validator(mode="after")
    def _weights_are_known(self) -> "BlockLoss":
        if self.weighting == "dpace" and self.reduction == "weights":
            raise ValueError("dpace weights follow from the losses, so reduction must be kept")
        return self

    @property
    def reads_teacher(self) -> bool:
        """Whether the final hidden is read."""
        return self.distil > 0 or self.labels == "target"

    def slot_weights(self, block_size: int) -> Tensor:
        """Weight of slots 1…B-1: fp32 [K]."""
        if self.weighting == "dpace":
            return torch.ones(block_size - 1)
        gamma = self.gamma or (7.0 if block_size >= 16 else 5.0 if block_size >= 10 else 4.0)
        return torch.tensor([math.exp(-k / gamma) for k in range(block_size - 1)])


def dpace_weights(losses: Tensor, taught: Tensor, alpha: float) -> Tensor:
    """D-PACE weights fp32 [n, K] of cross-entropies [n, K]; a slot that is not taught neither counts nor stops."""
    smooth = torch.where(taught, (1 - alpha) * torch.exp(-losses) + alpha, 1.0)
    reached = smooth.cumprod(-1) * taught
    return reached.flip(-1).cumsum(-1).flip(-1)


class BlockDrafter(Protocol):
    """A drafter whose blocks are all computed in one forward."""

    moment: tuple[int, int]

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def window(self) -> int | None:
        """How far a slot sees."""

    def head_weight(self) -> Tensor:
        """Draft logits are its product with states: [U, H]."""

    def block_states(self, batch: PackedBatch, plan: BlockPlan) -> Tensor:
        """States after the final norm of slots 1…B-1 of every block: [N*K, H]."""


@dataclass(frozen=True, eq=False)
class BlockWork:
    """labels int64 [N, K]: draft ids, -1 where nothing is taught; ``open`` int64 [K] counts the slots the mask admits.
    teacher_at int64 [N*K]: row of ``teacher`` for each slot, 0 where none."""

    batch: PackedBatch
    plan: BlockPlan
    labels: Tensor
    open: Tensor
    teacher: TeacherRows | None
    teacher_at: Tensor | None

    @property
    def counts(self) -> Tensor:
        """Taught slots per depth: int64 [K]."""
        return (self.labels >= 0).sum(0)


class BlockObjective:
    """What the loop optimises."""

    def __init__(self, model: BlockDrafter, teacher: Teacher, loss: BlockLoss) -> None:
        self.model, self.teacher, self.loss = model, teacher, loss
        self._weights = loss.slot_weights(model.block_size)

    @property
    def depths(self) -> int:
        """K."""
        return self.model.block_size - 1

    @torch.no_grad()
    def plan(self, batch: PackedBatch) -> BlockWork:
        """Draw the anchors, find the labels and read the teacher; nothing here depends on the drafter."""
        candidates = candidate_anchors(batch, self.model.block_size, self.loss.anchor_rule)
        return self.plan_at(batch, draw_anchors(batch, candidates, self.loss.num_anchors, self.model.moment))

    @torch.no_grad()
    def plan_at(self, batch: PackedBatch, anchors: Tensor) -> BlockWork:
        """The same with blocks at the given rows int64 [N], ascending."""
        rows, admitted = label_rows(anchors, self.model.block_size, batch.document, batch.loss_mask)
        tokens, teacher, at = batch.input_ids[rows], None, None
        if self.loss.reads_teacher:
            taught_by = rows - 1
            needed, inverse = torch.unique(taught_by[admitted], return_inverse=True)
            by_choice = self.loss.labels == "target"
            teacher = self.teacher.read(batch, needed, token=by_choice)
            at = torch.zeros_like(rows).masked_scatter_(admitted, inverse)
            if by_choice and teacher.token is not None and len(needed):
                tokens = teacher.token[at]
            at = at.flatten()
        labels = torch.where(admitted, self.teacher.draft_token(tokens), -1)
        plan = plan_blocks(anchors, batch.document, self.model.window)
        return BlockWork(batch, plan, labels, admitted.sum(0), teacher, at)

    def divisors(self, *works: BlockWork) -> Tensor:
        """What the loss is divided by, over these packs: fp32 [1]. Ranks add theirs."""
        weights = torch.ones_like(self._weights) if self._by_count else self._weights
        total = torch.zeros(1, device=self.model.head_weight().device)
        for work in works:
            total += (work.counts * weights.to(work.counts.device)).sum()
        return total

    def losses(self, work: BlockWork, divisors: Tensor) -> StepLosses:
        """This pack's share of the loss; over all packs and ranks the shares add up."""
        states, weight = self.model.block_states(work.batch, work.plan), self.model.head_weight()
        blocks, device = work.labels.shape[0], states.device
        weights = self._weights.to(device) / divisors.clamp(min=torch.finfo(torch.float32).tiny)
        autocast = torch.is_autocast_enabled(device.type)
        return hard_cross_entropy(
            states,
            weight,
            work.labels.flatten(),
            torch.arange(self.depths, device=device).repeat(blocks),
            weights.repeat(blocks),
            self.depths,
            compute_dtype=torch.get_autocast_dtype(device.type) if autocast else None,
            blend=self._blend(work),
            adapt=self._adapt(),
        )

    @property
    def _by_count(self) -> bool:
        return self.loss.reduction == "kept" or self.loss.weighting == "dpace"

    def _blend(self, work: BlockWork) -> Blend | None:
        teacher, at = work.teacher, work.teacher_at
        if self.loss.distil == 0 or teacher is None or at is None:
            return None
        found, rows = teacher, at
        return Blend(self.loss.distil, lambda states: self.teacher.distribution(found.pick(rows[states])))

    def _adapt(self) -> Adapt | None:
        if self.loss.weighting != "dpace":
            return None
        alpha = self.loss.dpace_alpha
        return Adapt(self.depths, lambda losses, taught: dpace_weights(losses, taught, alpha))
