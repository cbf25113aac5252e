"""Training-time test: the objective of drafters that are unrolled over their own output.

Shapes: K TTT steps, A active slots, H drafter width, U draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from trainer.config import LossConfig
from trainer.losses import StepLosses, Taught, soft_cross_entropy, step_scales, step_weights
from trainer.shift import SlotPlan, open_steps, plan_slots, teacher_rows
from trainer.teacher import Teacher, TeacherRows


class TttLoss(LossConfig):
    """steps: TTT length. step_weights wins over step_decay^i. reduction: per step, divide by the taught slots
    (``kept``) or by every token of the batch (``slots``, as SafeAILab and SpecForge do). mask_offset: see
    `trainer.shift`."""

    steps: int = Field(7, gt=0, le=32)
    step_decay: float = Field(0.8, gt=0, le=1)
    step_weights: tuple[float, ...] | None = None
    reduction: Literal["kept", "slots"] = "kept"
    mask_offset: int = Field(1, ge=-1, le=1)
    drop_off_vocab: bool = True

    @model_validator(mode="after")
    def _weights_fit(self) -> "TttLoss":
        if self.step_weights is not None and len(self.step_weights) != self.steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries for {self.steps} steps")
        return self


class Unrolled(Protocol):
    """A drafter that can be unrolled."""

    @property
    def lm_head(self) -> nn.Linear:
        """Draft logits of states after the final norm."""

    def unroll(self, batch: PackedBatch, plan: SlotPlan, steps: int) -> Tensor:
        """States after the final norm at every TTT step, step by step: [K*A, H]."""


@dataclass(frozen=True, eq=False)
class TttWork:
    """One pack with its teacher read: ``open`` int64 [K] counts slots the mask admits, before any is dropped."""

    batch: PackedBatch
    teacher: TeacherRows
    plan: SlotPlan
    open: Tensor

    @property
    def counts(self) -> Tensor:
        """Taught slots per TTT step: int64 [K]."""
        return self.plan.counts


class TttObjective:
    """What the loop optimises: soft cross-entropy over the TTT steps, the teacher computed once per pack."""

    def __init__(self, model: Unrolled, teacher: Teacher, loss: TttLoss) -> None:
        self.model, self.teacher, self.loss = model, teacher, loss

    @property
    def depths(self) -> int:
        """K."""
        return self.loss.steps

    @torch.no_grad()
    def plan(self, batch: PackedBatch) -> TttWork:
        """Read the teacher and pair its rows with slots; nothing here depends on the drafter."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        found = self.teacher.read(batch, rows)
        admitted = open_steps(rows, batch.document, self.loss.steps).sum(0)
        if not bool(found.kept.all()):
            rows = rows[found.kept]
            found = TeacherRows(found.normed[found.kept], found.token[found.kept], found.kept)
        return TttWork(batch, found, plan_slots(rows, batch.document, self.loss.steps), admitted)

    def divisors(self, *works: TttWork) -> Tensor:
        """What each step's loss is divided by, over these packs: fp32 [K]. Ranks add theirs."""
        if self.loss.reduction == "slots":
            slots = sum(work.batch.input_ids.shape[0] for work in works)
            return torch.full((self.loss.steps,), float(slots), device=self._device)
        total = torch.zeros(self.loss.steps, device=self._device)
        for work in works:
            total += work.counts
        return total

    def losses(self, work: TttWork, divisors: Tensor) -> StepLosses:
        """This pack's share of the loss; over all packs and ranks the shares add up."""
        weights = step_weights(self.loss.steps, self.loss.step_decay, self.loss.step_weights).to(self._device)
        states = self.model.unroll(work.batch, work.plan, self.loss.steps)
        active = work.plan.active.shape[0]
        step_offset = torch.arange(self.loss.steps, device=states.device) * active
        slots = torch.where(work.plan.slots >= 0, work.plan.slots + step_offset, -1)
        normed = work.teacher.normed
        taught = Taught(
            slots,
            self.teacher.draft_token(work.teacher.token),
            lambda begin, end: self.teacher.probabilities(normed[begin:end]),
        )
        dtype = torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else None
        return soft_cross_entropy(states, self.model.lm_head.weight, taught, step_scales(weights, divisors), dtype)

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device
