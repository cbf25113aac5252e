"""EAGLE-1's objective: the next feature by regression, and what the target's head makes of it by soft cross-entropy.

loss = w_r * mean over taught slots of mean over D of SmoothL1(f^, f) + w_c * mean over taught slots of
CE(softmax(head f), softmax(head f^)), with 1 and 0.1 the published weights (SafeAILab/EAGLE; docs/design/009).
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
from hiddenstore.errors import FormatError, Kind
from trainer.config import LossConfig
from trainer.losses.fused_head import StepLosses, Supervision, head_losses, step_scales
from trainer.losses.teacher import FrozenHead, TargetInterface
from trainer.slots.shift import SlotMap, map_slots, open_steps, teacher_rows


class RegressionLoss(LossConfig):
    """Regression of the next feature, and cross-entropy of what the target's head makes of it."""

    regression: Literal["smooth_l1", "mse"] = "smooth_l1"
    """The distance between predicted and true feature."""
    regression_weight: float = Field(1.0, ge=0)
    """Weight of the distance."""
    ce_weight: float = Field(0.1, ge=0)
    """Weight of the cross-entropy."""
    noise: float = Field(0.2, ge=0)
    """Width of the uniform noise added to the features read, in training only."""
    noise_tokens: int | None = Field(512, gt=0)
    """Noise is multiplied by this over the length of the sample (SafeAILab); none for the same at every length."""
    mask_offset: int = Field(1, ge=-1, le=1)
    """Token that must be supervised for a row to teach: 1 the one it predicts, 0 its own, -1 the one before."""

    @model_validator(mode="after")
    def _teaches_something(self) -> "RegressionLoss":
        if not self.regression_weight and not self.ce_weight:
            raise ValueError("regression_weight and ce_weight are both 0")
        return self


class Predictor(Protocol):
    """A drafter that predicts the next feature."""

    rng_key: tuple[int, int]

    def unroll(self, batch: PackedBatch, features: Tensor, slot_map: SlotMap, steps: int) -> Tensor:
        """Predicted features of the active slots [steps * A, D] from the features [T, D] of the pack."""


@dataclass(frozen=True, eq=False)
class RegressionInputs:
    """One pack: ``features`` [T, D] after the final norm; ``slot_map.rows`` are those that teach."""

    batch: PackedBatch
    features: Tensor
    slot_map: SlotMap
    open: Tensor

    @property
    def counts(self) -> Tensor:
        """Taught slots: int64 [1]."""
        return self.slot_map.counts


class RegressionObjective:
    """What the loop optimises. ``sums`` are of the cross-entropy alone; ``value`` and ``total`` are of both."""

    depths = 1

    def __init__(self, model: Predictor, target: TargetInterface, loss: RegressionLoss) -> None:
        self.model, self.target, self.loss = model, target, loss
        self.head = FrozenHead.of(target.head)

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> RegressionInputs:
        """Read the features and pair teacher rows with slots."""
        require_every_final(batch)
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        admitted = open_steps(rows, batch.document, 1).sum(0)
        return RegressionInputs(batch, self.target.normed(batch.final), map_slots(rows, batch.document, 1), admitted)

    def denominators(self, *packs: RegressionInputs) -> Tensor:
        """Taught slots over these packs: fp32 [1]. Ranks add theirs."""
        return sum((inputs.counts for inputs in packs), torch.zeros(1, device=self.target.head.embed_tokens.device))

    def losses(self, inputs: RegressionInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Noise only where gradients are."""
        features = self._noisy(inputs) if torch.is_grad_enabled() else inputs.features
        states = self.model.unroll(inputs.batch, features, inputs.slot_map, 1)
        slots, features_ahead = inputs.slot_map.slots, inputs.features[inputs.slot_map.rows]
        supervision = Supervision(slots, None, lambda begin, end: self.head.probabilities(features_ahead[begin:end]))
        scale = step_scales(torch.ones_like(denominators), denominators)
        ce = head_losses(self.head.widened(states), self.head.weight, supervision, scale * self.loss.ce_weight)
        distance = self._distance(states[slots[:, 0]], features_ahead) * (scale[0] * self.loss.regression_weight)
        return replace(ce, total=ce.total + distance, value=ce.value + distance.detach().double())

    def _distance(self, predicted: Tensor, features: Tensor) -> Tensor:
        """Sum over slots of the mean over D."""
        measure = F.smooth_l1_loss if self.loss.regression == "smooth_l1" else F.mse_loss
        wide = torch.promote_types(predicted.dtype, torch.float32)
        return measure(predicted.to(wide), features.to(wide), reduction="sum") / predicted.shape[-1]

    def _noisy(self, inputs: RegressionInputs) -> Tensor:
        if not self.loss.noise:
            return inputs.features
        noise = torch.empty_like(inputs.features, dtype=torch.float32)
        lengths = torch.bincount(inputs.batch.document, minlength=len(inputs.batch.sample_ids)).tolist()
        for sample, sample_noise in zip(inputs.batch.sample_ids, noise.split(lengths), strict=True):
            width = self.loss.noise * (self.loss.noise_tokens or len(sample_noise)) / max(1, len(sample_noise))
            sample_noise.uniform_(-width / 2, width / 2, generator=_generator(self.model.rng_key, sample, noise.device))
        return inputs.features + noise


def require_every_final(batch: PackedBatch) -> None:
    """Raise FormatError unless the final hidden itself is stored at every token of the pack."""
    rows = batch.final_rows.shape[0]
    if batch.topk is None and rows == batch.tokens:
        return
    what = "the target's top tokens" if batch.topk is not None else f"the final hidden of {rows} tokens"
    raise FormatError(
        f"the drafter reads the final hidden of every token, a pack of {batch.tokens} holds {what}",
        kind=Kind.FINAL_MISSING,
        hint="hiddenstore collect DATA -o STORE --target T --layers eagle1",
    )


def _generator(rng_key: tuple[int, int], sample: str, device: torch.device) -> torch.Generator:
    """A generator for one sample at one step: the same after a resume and under any number of ranks."""
    digest = hashlib.blake2b(f"{rng_key[0]}:{rng_key[1]}:{sample}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)
