"""Training-time test: the objective of drafters that are unrolled over their own output.

Shapes: K TTT steps, A active slots, H drafter width, U draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from trainer.config import LossConfig
from trainer.objectives.loss_kinds import LOSSES
from trainer.objectives.losses import StepLosses, Taught, step_scales, step_weights, taught_losses
from trainer.objectives.shift import SlotPlan, next_tokens, open_steps, plan_slots, teacher_rows
from trainer.objectives.teacher import Teacher, TeacherRows
from trainer.scale.context import own_slots


class TttLoss(LossConfig):
    """steps: TTT length. kind: see `loss_kinds`. step_weights wins over step_decay^i. reduction: per step,
    divide by the taught slots (``kept``) or by every token of the batch (``slots``, as SafeAILab and SpecForge do).
    mask_offset: see `shift`. overlap_mass: the losses with an overlap take the target's probabilities as they
    are, with the mass outside the draft vocabulary left out (``whole``, SpecForge), or scaled up to one (``draft``,
    Automodel, speculators). lk_blend: ``lk_lambda`` blends by each slot's overlap (speculators) or by the mean of the
    step over the pack (SpecForge), which takes a pass more."""

    steps: int = Field(7, gt=0, le=32)
    kind: str = "soft_ce"
    step_decay: float = Field(0.8, gt=0, le=1)
    step_weights: tuple[float, ...] | None = None
    reduction: Literal["kept", "slots"] = "kept"
    mask_offset: int = Field(1, ge=-1, le=1)
    drop_off_vocab: bool = True
    overlap_mass: Literal["whole", "draft"] = "whole"
    lk_blend: Literal["slot", "step"] = "slot"

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind not in LOSSES:
            raise ValueError(f"unknown loss {kind!r}; there are: {', '.join(LOSSES)}")
        return kind

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
    """What the loop optimises: a loss over the TTT steps, the teacher computed once per pack."""

    def __init__(self, model: Unrolled, teacher: Teacher, loss: TttLoss) -> None:
        self.model, self.teacher, self.loss = model, teacher, loss
        self._kind = LOSSES[loss.kind]

    @property
    def depths(self) -> int:
        """K."""
        return self.loss.steps

    @torch.no_grad()
    def plan(self, batch: PackedBatch) -> TttWork:
        """Read the teacher and pair its rows with slots; nothing here depends on the drafter."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        own = own_slots(batch)
        if own is not None:
            rows = rows[open_steps(rows, batch.document, self.loss.steps, own).any(1)]
        if self._kind.teacher == "text":
            rows, found = self._text(batch, rows)
        else:
            mass = self._kind.overlap and self.loss.overlap_mass == "whole"
            found = self.teacher.read(batch, rows, token=self._kind.teacher == "target", mass=mass)
        kept = found.kept
        if self._kind.teacher == "target" and found.token is not None:
            kept = self.teacher.draft_token(found.token) >= 0
        admitted = open_steps(rows, batch.document, self.loss.steps, own).sum(0)
        if not bool(kept.all()):
            rows, found = rows[kept], found.pick(kept)
        return TttWork(batch, found, plan_slots(rows, batch.document, self.loss.steps, own=own), admitted)

    def divisors(self, *works: TttWork) -> Tensor:
        """What each step's loss is divided by, over these packs: fp32 [K]. Ranks add theirs."""
        if self.loss.reduction == "slots":
            slots = sum(work.batch.tokens for work in works)
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
        device = states.device.type
        return taught_losses(
            states,
            self.model.lm_head.weight,
            self._taught(slots, work.teacher),
            step_scales(weights, divisors),
            self._kind,
            by_step=self.loss.kind == "lk_lambda" and self.loss.lk_blend == "step",
            compute_dtype=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
        )

    def _text(self, batch: PackedBatch, rows: Tensor) -> tuple[Tensor, TeacherRows]:
        """The rows that a token follows, taught by that token; no final hidden is read."""
        rows, token = next_tokens(batch, rows)
        return rows, TeacherRows(batch.aux.new_empty(len(rows), 0), token, self.teacher.draft_token(token) >= 0)

    def _taught(self, slots: Tensor, found: TeacherRows) -> Taught:
        token = None if found.token is None else self.teacher.draft_token(found.token)
        at = torch.arange(slots.shape[0], device=slots.device)

        def probabilities(begin: int, end: int) -> Tensor:
            if self._kind.teacher == "distribution" or token is None:
                return self.teacher.distribution(found.pick(at[begin:end]))
            return F.one_hot(token[begin:end], self.teacher.vocab.size).float()

        return Taught(slots, token, probabilities, found.mass if self.loss.overlap_mass == "whole" else None)

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device
