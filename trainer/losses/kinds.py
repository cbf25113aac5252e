"""The table of losses: what each makes of a slot's cross-entropy, entropy and overlap, and its slopes in them.

A slot has the drafter's p = softmax(z) and the teacher's q over the draft vocabulary. Two gradients serve every loss:
that of the cross-entropy -sum q log p is p - q, that of the overlap alpha = sum min(p, m q) is p (1[p < m q] - b) with
b = sum p 1[p < m q]. So a loss is a function that returns its value and its derivative by each; it needs no backward of
its own. m is 1, or the mass the target's whole distribution puts on the draft vocabulary.

Formulas: docs/design/009. Sources of the LK losses: SpecForge 0.2 ``lk_loss``, speculators 0.9 ``lk_hybrid_loss``.

Shapes: R teacher rows, K TTT steps.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hiddenstore.registry import Registry

LK_DECAY = 3.0
"""How fast ``lk_lambda`` moves from KL to the overlap as that grows."""


@dataclass(frozen=True, eq=False)
class Compared:
    """Per row and step: cross [R, K] = -sum q log p; entropy [R, 1] of q and overlap [R, K], zero unless the
    loss reads them. step_overlap [K]: the mean overlap of each step, for a loss that blends by it."""

    cross: Tensor
    entropy: Tensor
    overlap: Tensor
    step_overlap: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Slopes:
    """value [R, K] of the loss; its derivatives by cross and by overlap: numbers or [R, K], None without an overlap."""

    value: Tensor
    by_cross: Tensor | float = 0.0
    by_overlap: Tensor | float | None = None


@dataclass(frozen=True)
class LossKind:
    """A loss. ``entropy``, ``overlap``: what it reads; the overlap takes more passes over the logits. ``teacher``: what
    q is, the target's distribution, or all of it on the target's most probable token or on the text's."""

    measure: Callable[[Compared], Slopes]
    entropy: bool = False
    overlap: bool = False
    teacher: str = "distribution"


def _soft_ce(compared: Compared) -> Slopes:
    return Slopes(compared.cross, by_cross=1.0)


def _lk_alpha(compared: Compared) -> Slopes:
    overlap = compared.overlap.clamp(min=torch.finfo(compared.overlap.dtype).tiny)
    return Slopes(-overlap.log(), by_overlap=-1 / overlap)


def _lk_lambda(compared: Compared) -> Slopes:
    """The blend is a weight, not a function to descend: it has no slope."""
    by_step = compared.step_overlap
    blend = (-LK_DECAY * (compared.overlap if by_step is None else by_step.expand_as(compared.overlap))).exp()
    value = blend * (compared.cross - compared.entropy) + (1 - blend) * (1 - compared.overlap)
    return Slopes(value, by_cross=blend, by_overlap=blend - 1)


LOSSES: Registry[LossKind] = Registry(
    "loss",
    "hiddenstore.losses",
    {
        "soft_ce": LossKind(_soft_ce),
        "kl": LossKind(lambda slot: Slopes(slot.cross - slot.entropy, by_cross=1.0), entropy=True),
        "target_ce": LossKind(_soft_ce, teacher="target"),
        "text_ce": LossKind(_soft_ce, teacher="text"),
        "tv": LossKind(lambda slot: Slopes(1 - slot.overlap, by_overlap=-1.0), overlap=True),
        "lk_alpha": LossKind(_lk_alpha, overlap=True),
        "lk_lambda": LossKind(_lk_lambda, entropy=True, overlap=True),
    },
    "trainer.losses.kinds:LossKind",
)
