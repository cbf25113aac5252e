"""DFlash's objective: every slot of a block is taught the token at its own position, later slots less.

w_k = exp(-(k-1) / gamma) for slots k = 1…B-1 (docs/design/010), or D-PACE's weights: with q the probability the
drafter gives the label and q~ = (1-a) q + a, w_j = sum_{m>=j} prod_{i<=m} q~_i, without gradient. The label is the
token of the text or the target's own choice; a share of its weight may go to the target's whole distribution at the
position before (distillation).

Shapes: N blocks, B slots of a block, K = B-1 taught slots, H drafter width, U draft vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor

from hiddenstore.data import PackedBatch
from trainer.config import LossConfig
from trainer.losses.fused_head import StepLosses, Supervision, head_losses
from trainer.losses.kinds import LOSSES
from trainer.losses.teacher import Teacher, TeacherRows
from trainer.slots.anchors import AnchorRule, BlockMap, candidate_anchors, draw_anchors, label_rows, map_blocks


class BlockLoss(LossConfig):
    """What the slots of a block are taught."""

    num_anchors: int = Field(512, gt=0)
    """Blocks per sample at most."""
    anchor_rule: AnchorRule = "next"
    """``next``: a block may open where its token and the next are supervised (SpecForge); ``whole``: where its token is
    and the block ends inside the sample (ModelOpt, speculators)."""
    weighting: Literal["decay", "dpace"] = "decay"
    """``decay``: slot k weighs exp(-(k-1) / gamma); ``dpace``: by how probable the slots before it are (D-PACE)."""
    gamma: float | None = Field(None, gt=0)
    """Slots over which the weight falls to 1/e; derived as 7, 5 or 4 for blocks of 16, 10 or 8."""
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    """D-PACE: how far probabilities are moved towards one."""
    labels: Literal["text", "target"] = "text"
    """What is taught: the text's token or the target's most probable one (speculators)."""
    distil: float = Field(0.0, ge=0, le=1)
    """Share of the target's distribution in what is taught; the rest is the label."""
    reduction: Literal["weights", "kept"] | None = None
    """What the loss is divided by: the sum of the weights (SpecForge, ModelOpt; the default of ``decay``) or the taught
    slots (``kept``: speculators; the default of ``dpace``)."""

    @model_validator(mode="after")
    def _reduction_fits_weighting(self) -> "BlockLoss":
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

    rng_key: tuple[int, int]

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def window(self) -> int | None:
        """How far a slot sees."""

    def head_weight(self) -> Tensor:
        """Draft logits are its product with states: [U, H]."""

    def block_states(self, batch: PackedBatch, block_map: BlockMap) -> Tensor:
        """States after the final norm of slots 1…B-1 of every block: [N*K, H]."""


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """labels int64 [N, K]: draft ids, -1 where nothing is taught; ``open`` int64 [K] counts the slots the mask admits.
    teacher_at int64 [N*K]: row of ``teacher`` for each slot, 0 where none."""

    batch: PackedBatch
    block_map: BlockMap
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
    def prepare(self, batch: PackedBatch) -> BlockInputs:
        """Draw the anchors, find the labels and read the teacher; nothing here depends on the drafter."""
        candidates = candidate_anchors(batch, self.model.block_size, self.loss.anchor_rule)
        return self.prepare_at(batch, draw_anchors(batch, candidates, self.loss.num_anchors, self.model.rng_key))

    @torch.no_grad()
    def prepare_at(self, batch: PackedBatch, anchors: Tensor) -> BlockInputs:
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
        block_map = map_blocks(anchors, batch.document, self.model.window)
        return BlockInputs(batch, block_map, labels, admitted.sum(0), teacher, at)

    def denominators(self, *packs: BlockInputs) -> Tensor:
        """What the loss is divided by, over these packs: fp32 [1]. Ranks add theirs."""
        weights = torch.ones_like(self._weights) if self._by_count else self._weights
        total = torch.zeros(1, device=self.model.head_weight().device)
        for inputs in packs:
            total += (inputs.counts * weights.to(inputs.counts.device)).sum()
        return total

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch."""
        states = self.model.block_states(inputs.batch, inputs.block_map)
        scales = self._weights.to(states.device) / denominators.clamp(min=torch.finfo(torch.float32).tiny)
        by_losses = self.loss.weighting == "dpace"
        return head_losses(
            states,
            self.model.head_weight(),
            self._supervision(inputs, complete=by_losses),
            scales,
            LOSSES["text_ce"],
            weigh=partial(dpace_weights, alpha=self.loss.dpace_alpha) if by_losses else None,
        )

    @property
    def _by_count(self) -> bool:
        return self.loss.reduction == "kept" or self.loss.weighting == "dpace"

    def _supervision(self, inputs: BlockInputs, *, complete: bool) -> Supervision:
        teacher, rows = inputs.teacher, inputs.teacher_at
        if self.loss.distil == 0 or teacher is None or rows is None:
            return Supervision.of_labels(inputs.labels, complete=complete)

        def distribution(states: Tensor) -> Tensor:
            return self.teacher.distribution(teacher.pick(rows[states]))

        return Supervision.of_labels(inputs.labels, distribution, self.loss.distil, complete=complete)
