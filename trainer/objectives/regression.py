"""EAGLE-1's objective: the next feature by regression, and what the target's head makes of it by soft cross-entropy.

loss = w_r * mean over taught slots of mean over D of SmoothL1(f^, f) + w_c * mean over taught slots of
CE(softmax(head f), softmax(head f^)), with 1 and 0.1 the published weights (SafeAILab/EAGLE; drafters.md section 3).
Features are the final hidden after the final norm. The head is frozen; gradients pass through it to f^.

Shapes: T tokens of a pack, R taught slots, D target width.
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError
from trainer.config import LossConfig
from trainer.drafters.base import TargetSide
from trainer.drafters.frozen_head import FrozenHead
from trainer.objectives.losses import StepLosses, Taught, soft_cross_entropy, step_scales
from trainer.objectives.shift import SlotPlan, open_steps, plan_slots, teacher_rows


class RegressionLoss(LossConfig):
    """noise: width of the uniform noise added to the features read, in training only; with ``noise_tokens`` N it is
    multiplied by N / length of the sample (SafeAILab: 0.2 and 512), without one it is the same for every sample (the
    paper, Automodel: 0.2). mask_offset: see `trainer.objectives.shift`."""

    regression: Literal["smooth_l1", "mse"] = "smooth_l1"
    regression_weight: float = Field(1.0, ge=0)
    ce_weight: float = Field(0.1, ge=0)
    noise: float = Field(0.2, ge=0)
    noise_tokens: int | None = Field(512, gt=0)
    mask_offset: int = Field(1, ge=-1, le=1)

    @model_validator(mode="after")
    def _teaches_something(self) -> "RegressionLoss":
        if not self.regression_weight and not self.ce_weight:
            raise ValueError("regression_weight and ce_weight are both 0")
        return self


class Predictor(Protocol):
    """A drafter that predicts the next feature."""

    moment: tuple[int, int]

    def unroll(self, batch: PackedBatch, features: Tensor, plan: SlotPlan, steps: int) -> Tensor:
        """Predicted features of the active slots [steps * A, D] from the features [T, D] of the pack."""


@dataclass(frozen=True, eq=False)
class RegressionWork:
    """One pack: ``features`` [T, D] after the final norm; ``plan.rows`` are those that teach."""

    batch: PackedBatch
    features: Tensor
    plan: SlotPlan
    open: Tensor

    @property
    def counts(self) -> Tensor:
        """Taught slots: int64 [1]."""
        return self.plan.counts


class RegressionObjective:
    """What the loop optimises. ``sums`` are of the cross-entropy alone; ``value`` and ``total`` are of both."""

    depths = 1

    def __init__(self, model: Predictor, side: TargetSide, loss: RegressionLoss) -> None:
        self.model, self.side, self.loss = model, side, loss
        self.head = FrozenHead.of(side.head)

    @torch.no_grad()
    def plan(self, batch: PackedBatch) -> RegressionWork:
        """Read the features and pair teacher rows with slots."""
        require_every_final(batch)
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        admitted = open_steps(rows, batch.document, 1).sum(0)
        return RegressionWork(batch, self.side.normed(batch.final), plan_slots(rows, batch.document, 1), admitted)

    def divisors(self, *works: RegressionWork) -> Tensor:
        """Taught slots over these packs: fp32 [1]. Ranks add theirs."""
        total = torch.zeros(1, device=self.side.head.embed_tokens.device)
        for work in works:
            total += work.counts
        return total

    def losses(self, work: RegressionWork, divisors: Tensor) -> StepLosses:
        """This pack's share of the loss; over all packs and ranks the shares add up. Noise only where gradients are."""
        features = self._noisy(work) if torch.is_grad_enabled() else work.features
        states = self.model.unroll(work.batch, features, work.plan, 1)
        slots, wanted = work.plan.slots, work.features[work.plan.rows]
        taught = Taught(slots, None, lambda begin, end: self.head.probabilities(wanted[begin:end]))
        dtype = torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else None
        scale = step_scales(torch.ones_like(divisors), divisors)
        ce = soft_cross_entropy(self.head.widened(states), self.head.weight, taught, scale * self.loss.ce_weight, dtype)
        distance = self._distance(states[slots[:, 0]], wanted) * (scale[0] * self.loss.regression_weight)
        return replace(ce, total=ce.total + distance, value=ce.value + distance.detach().double())

    def _distance(self, predicted: Tensor, features: Tensor) -> Tensor:
        """Sum over slots of the mean over D."""
        measure = F.smooth_l1_loss if self.loss.regression == "smooth_l1" else F.mse_loss
        wide = torch.promote_types(predicted.dtype, torch.float32)
        return measure(predicted.to(wide), features.to(wide), reduction="sum") / predicted.shape[-1]

    def _noisy(self, work: RegressionWork) -> Tensor:
        if not self.loss.noise:
            return work.features
        noise = torch.empty_like(work.features, dtype=torch.float32)
        lengths = torch.bincount(work.batch.document, minlength=len(work.batch.sample_ids)).tolist()
        for sample, part in zip(work.batch.sample_ids, noise.split(lengths), strict=True):
            width = self.loss.noise * (self.loss.noise_tokens or len(part)) / max(1, len(part))
            part.uniform_(-width / 2, width / 2, generator=_generator(self.model.moment, sample, noise.device))
        return work.features + noise


def require_every_final(batch: PackedBatch) -> None:
    """Raise FormatError unless the final hidden itself is held at every token of the pack."""
    held = batch.final_rows.shape[0]
    if batch.topk is None and held == batch.tokens:
        return
    what = "the target's top tokens" if batch.topk is not None else f"the final hidden of {held} tokens"
    raise FormatError(
        f"the drafter reads the final hidden of every token, a pack of {batch.tokens} holds {what}",
        kind="final-rows-missing",
        hint="hiddenstore collect DATA -o STORE --target T --layers eagle1",
    )


def _generator(moment: tuple[int, int], sample: str, device: torch.device) -> torch.Generator:
    """A generator for one sample at one step: the same after a resume and under any number of ranks."""
    digest = hashlib.blake2b(f"{moment[0]}:{moment[1]}:{sample}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
