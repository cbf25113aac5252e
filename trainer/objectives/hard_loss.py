"""Cross-entropy of states against labels, fused with the head: block slots and Medusa heads.

loss_s = -log softmax(W x_s)[label_s], or against (1 - share) onehot + share q_s where a teacher is blended in; total =
sum_s scale_s loss_s. Logits exist for a few states at a time, and their gradient is turned into those of x and W at
once; a state without a label costs nothing.

Shapes: S states, H drafter width, U draft vocabulary, K depths (block slots or heads), B states per group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hiddenstore.products import frozen, linear
from trainer.objectives.losses import LOGIT_BUDGET, LOGIT_BUDGET_DEVICE, StepLosses, scaled_by


@dataclass(frozen=True, eq=False)
class Blend:
    """A teacher beside the labels, which get 1 - ``share``. probabilities(which states, int64 [n]) -> fp32 [n, U]."""

    share: float
    probabilities: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Adapt:
    """Weights that depend on the losses: consecutive groups of ``size`` states, of which weights(losses fp32 [n, B],
    taught bool [n, B]) -> fp32 [n, B] are taken without gradient and multiply the scales."""

    size: int
    weights: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class _How:
    dtype: torch.dtype
    depths: int
    grad_states: bool
    grad_weight: bool
    blend: Blend | None
    adapt: Adapt | None


def hard_cross_entropy(
    states: Tensor,
    weight: Tensor,
    labels: Tensor,
    depth: Tensor,
    scales: Tensor,
    depths: int,
    *,
    compute_dtype: torch.dtype | None = None,
    blend: Blend | None = None,
    adapt: Adapt | None = None,
) -> StepLosses:
    """Losses of states [S, H] under a head weight [U, H].

    labels int64 [S]: draft ids, -1 where nothing is taught. depth int64 [S]: 0…depths-1, what the sums are kept by.
    scales fp32 [S]. ``compute_dtype`` is that of the matrix products (autocast); softmax and sums are fp32.
    """
    enabled = torch.is_grad_enabled()
    how = _How(
        compute_dtype or states.dtype,
        depths,
        enabled and states.requires_grad,
        enabled and weight.requires_grad,
        blend,
        adapt,
    )
    total, value, sums, hits = _FusedHead.apply(states, weight, labels, depth, scales, how)
    counts = torch.bincount(depth[labels >= 0], minlength=depths)
    return StepLosses(total, value, sums, hits, counts)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, labels: Tensor, depth: Tensor, scales: Tensor, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pass_ = _Pass(states.detach(), weight.detach().to(how.dtype), labels, depth, scales, how)
        if not weight.requires_grad and weight.dtype == how.dtype:
            pass_.product = frozen(weight)
        budget = LOGIT_BUDGET if states.device.type == "cpu" else LOGIT_BUDGET_DEVICE
        rows = max(1, budget // weight.shape[0])
        with torch.autocast(states.device.type, enabled=False):
            for chunk in _chunks(labels, rows, how.adapt):
                pass_.add(chunk)
        grad_weight = None if pass_.grad_weight is None else pass_.grad_weight.to(weight.dtype)
        ctx.save_for_backward(pass_.grad_states, grad_weight)
        ctx.mark_non_differentiable(pass_.value, pass_.sums, pass_.hits)
        total = torch.empty((), dtype=_wide(states.dtype), device=states.device).copy_(pass_.value)
        return total, pass_.value, pass_.sums, pass_.hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_by(grads[0], ctx.saved_tensors), *(None,) * 4


def _chunks(labels: Tensor, rows: int, adapt: Adapt | None) -> tuple[Tensor, ...]:
    """States worked on together: int64 each. Only taught ones, unless whole groups are asked for."""
    if adapt is None:
        return torch.nonzero(labels >= 0)[:, 0].split(rows)
    groups = torch.nonzero((labels.view(-1, adapt.size) >= 0).any(1))
    members = groups * adapt.size + torch.arange(adapt.size, device=labels.device)
    return tuple(part.flatten() for part in members.split(max(1, rows // adapt.size)))


class _Pass:
    """One walk over the states: losses, hits, and the gradients asked for."""

    def __init__(
        self, states: Tensor, weight: Tensor, labels: Tensor, depth: Tensor, scales: Tensor, how: _How
    ) -> None:
        self.states, self.weight, self.labels, self.depth, self.scales = states, weight, labels, depth, scales
        self.how = how
        self.product: Callable[[Tensor], Tensor] = partial(linear, weight=weight)
        self.value = torch.zeros((), dtype=torch.float64, device=states.device)
        self.sums = torch.zeros(how.depths, dtype=torch.float64, device=states.device)
        self.hits = torch.zeros(how.depths, dtype=torch.int64, device=states.device)
        self.grad_states = torch.zeros_like(states) if how.grad_states else None
        self.grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if how.grad_weight else None

    def add(self, at: Tensor) -> None:
        """Losses, hits and gradients of the states ``at`` int64 [n]."""
        x = self.states.index_select(0, at).to(self.how.dtype)
        z = self.product(x)
        z = z.to(_wide(z.dtype))
        labels, depth = self.labels[at], self.depth[at]
        taught, label = labels >= 0, labels.clamp(min=0)[:, None]
        of_label, top = z.gather(1, label)[:, 0], z.amax(-1)
        self.hits += torch.bincount(depth[taught & (of_label >= top)], minlength=self.how.depths)
        q = None if self.how.blend is None else self.how.blend.probabilities(at).to(z.dtype)
        share = 0.0 if self.how.blend is None else self.how.blend.share
        agreement = of_label if q is None else (1 - share) * of_label + share * torch.linalg.vecdot(z, q)
        p = torch.softmax(z, -1)
        # softmax at its maximum is 1 / sum exp(z - top), which gives the log-sum-exp without another pass of exp.
        loss = torch.where(taught, top - p.amax(-1).log() - agreement, 0.0)
        scale = torch.where(taught, self.scales[at], 0.0)
        if self.how.adapt is not None:
            size = self.how.adapt.size
            scale = scale * self.how.adapt.weights(loss.view(-1, size), taught.view(-1, size)).flatten()
        self.value += (loss.double() * scale.double()).sum()
        self.sums.index_add_(0, depth, loss.double())
        if not (self.how.grad_states or self.how.grad_weight):
            return
        p.scatter_add_(1, label, p.new_full((len(at), 1), share - 1.0))
        error = (p if q is None else p.sub_(q, alpha=share)).to(self.how.dtype)
        by_row = scale[:, None].to(self.how.dtype)
        if self.grad_states is not None:
            self.grad_states.index_copy_(0, at, linear(error, self.weight.T).mul_(by_row).to(self.grad_states.dtype))
        if self.grad_weight is not None:
            if self.grad_weight.dtype == error.dtype:
                self.grad_weight.addmm_(error.T, x * by_row)
            else:
                self.grad_weight += error.T @ (x * by_row)
