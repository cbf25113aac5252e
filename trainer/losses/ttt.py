"""Training-time test: the objective of drafters that are unrolled over their own output.

Shapes: K TTT steps, A active slots, H drafter width, U draft vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from trainer.config import LossConfig
from trainer.losses.fused_head import StepLosses, Supervision, head_losses, step_scales, step_weights
from trainer.losses.kinds import LOSSES
from trainer.losses.teacher import Teacher, TeacherRows
from trainer.parallel.context import local_slots
from trainer.slots.shift import SlotMap, map_slots, next_tokens, open_steps, teacher_rows


class TttLoss(LossConfig):
    """What the steps of training-time test are taught."""

    steps: int = Field(7, gt=0, le=32)
    """Steps the drafter is unrolled over its own output."""
    kind: str = "soft_ce"
    """A loss of the table in `trainer.losses.kinds`: soft_ce, kl, target_ce, text_ce, tv, lk_alpha or lk_lambda."""
    step_decay: float = Field(0.8, gt=0, le=1)
    """Weight of a step over that of the step before."""
    step_weights: tuple[float, ...] | None = None
    """Weight of every step; wins over ``step_decay``."""
    reduction: Literal["kept", "slots"] = "kept"
    """What a step's loss is divided by: its taught slots (``kept``) or every token of the batch (``slots``: SafeAILab,
    SpecForge)."""
    mask_offset: int = Field(1, ge=-1, le=1)
    """Token that must be supervised for a row to teach: 1 the one it predicts, 0 its own, -1 the one before."""
    drop_off_vocab: bool = True
    """Leave out rows at which the target's choice is not in the draft vocabulary."""
    overlap_mass: Literal["whole", "draft"] = "whole"
    """Losses with an overlap take the target's probabilities as they are (``whole``: SpecForge) or scaled up to one
    over the draft vocabulary (``draft``: Automodel, speculators)."""
    lk_blend: Literal["slot", "step"] = "slot"
    """``lk_lambda`` blends by each slot's overlap (speculators) or by the step's mean over the pack (SpecForge), which
    takes a pass more."""

    @field_validator("kind")
    @classmethod
    def _is_in_the_table(cls, kind: str) -> str:
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

    def unroll(self, batch: PackedBatch, slot_map: SlotMap, steps: int) -> Tensor:
        """States after the final norm at every TTT step, step by step: [K*A, H]."""


@dataclass(frozen=True, eq=False)
class TttInputs:
    """One pack with its teacher read: ``open`` int64 [K] counts slots the mask admits, before any is dropped."""

    batch: PackedBatch
    teacher: TeacherRows
    slot_map: SlotMap
    open: Tensor

    @property
    def counts(self) -> Tensor:
        """Taught slots per TTT step: int64 [K]."""
        return self.slot_map.counts


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
    def prepare(self, batch: PackedBatch) -> TttInputs:
        """Read the teacher and pair its rows with slots; nothing here depends on the drafter."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        local = local_slots(batch)
        if local is not None:
            rows = rows[open_steps(rows, batch.document, self.loss.steps, local).any(1)]
        if self._kind.teacher == "text":
            rows, teacher = self._text(batch, rows)
        else:
            mass = self._kind.overlap and self.loss.overlap_mass == "whole"
            teacher = self.teacher.read(batch, rows, token=self._kind.teacher == "target", mass=mass)
        usable = teacher.usable
        if self._kind.teacher == "target" and teacher.token is not None:
            usable = self.teacher.draft_token(teacher.token) >= 0
        admitted = open_steps(rows, batch.document, self.loss.steps, local).sum(0)
        if not bool(usable.all()):
            rows, teacher = rows[usable], teacher.pick(usable)
        return TttInputs(batch, teacher, map_slots(rows, batch.document, self.loss.steps, local=local), admitted)

    def denominators(self, *packs: TttInputs) -> Tensor:
        """What each step's loss is divided by, over these packs: fp32 [K]. Ranks add theirs."""
        if self.loss.reduction == "slots":
            slots = sum(inputs.batch.tokens for inputs in packs)
            return torch.full((self.loss.steps,), float(slots), device=self._device)
        return sum((inputs.counts for inputs in packs), torch.zeros(self.loss.steps, device=self._device))

    def losses(self, inputs: TttInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch."""
        weights = step_weights(self.loss.steps, self.loss.step_decay, self.loss.step_weights).to(self._device)
        states = self.model.unroll(inputs.batch, inputs.slot_map, self.loss.steps)
        active = inputs.slot_map.active.shape[0]
        step_offset = torch.arange(self.loss.steps, device=states.device) * active
        slots = torch.where(inputs.slot_map.slots >= 0, inputs.slot_map.slots + step_offset, -1)
        return head_losses(
            states,
            self.model.lm_head.weight,
            self._supervision(slots, inputs.teacher),
            step_scales(weights, denominators),
            self._kind,
            by_step=self.loss.kind == "lk_lambda" and self.loss.lk_blend == "step",
        )

    def _text(self, batch: PackedBatch, rows: Tensor) -> tuple[Tensor, TeacherRows]:
        """The rows that a token follows, taught by that token; no final hidden is read."""
        rows, token = next_tokens(batch, rows)
        return rows, TeacherRows(batch.aux.new_empty(len(rows), 0), token, self.teacher.draft_token(token) >= 0)

    def _supervision(self, slots: Tensor, teacher: TeacherRows) -> Supervision:
        labels = None if teacher.token is None else self.teacher.draft_token(teacher.token)
        if self._kind.teacher != "distribution":
            return Supervision(slots, labels, share=0.0)
        rows = torch.arange(slots.shape[0], device=slots.device)
        mass = teacher.mass if self.loss.overlap_mass == "whole" else None
        return Supervision(
            slots, labels, lambda begin, end: self.teacher.distribution(teacher.pick(rows[begin:end])), mass=mass
        )

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device
