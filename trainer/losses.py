"""Soft cross-entropy of the drafter against the target over the draft vocabulary, fused with the drafter's LM head.

loss_i = -sum over taught slots sum_v q_v log p_v, p = softmax(W x) at step i, q the teacher; total = sum_i scale_i
loss_i (drafters.md section 3). Logits exist for a few teacher rows at a time: their gradient p - q is turned into those
of x and W at once, so no logits are kept for the backward. A teacher row serves all its TTT steps in one product.

Shapes: R teacher rows, K TTT steps, S states (K x active slots), H drafter width, U draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOGIT_BUDGET = 1 << 20
"""Logits alive at a time on CPU, as elements: 4 MiB in fp32 stay close to the cores."""
LOGIT_BUDGET_DEVICE = 1 << 26


@dataclass(frozen=True, eq=False)
class StepLosses:
    """total: scalar with gradient; value: the same in fp64. sums fp64 [K]: unscaled loss summed over taught slots. hits
    int64 [K]: slots where the drafter's most probable token is the target's. counts int64 [K]: taught slots."""

    total: Tensor
    value: Tensor
    sums: Tensor
    hits: Tensor
    counts: Tensor


def step_weights(steps: int, decay: float, given: Sequence[float] | None = None) -> Tensor:
    """Weight of each TTT step: fp32 [K]; decay^i (SafeAILab 0.8, ModelOpt 0.9, speculators 1.0) unless given."""
    return torch.tensor(list(given) if given is not None else [decay**i for i in range(steps)], dtype=torch.float32)


def step_scales(weights: Tensor, counts: Tensor) -> Tensor:
    """scale_i = w_i / counts_i, 0 where nothing is taught: fp32 [K]. ``counts`` are those of the global batch."""
    return torch.where(counts > 0, weights / counts.clamp(min=1).float(), torch.zeros_like(weights))


@dataclass(frozen=True, eq=False)
class Taught:
    """What the loss compares with. slots int64 [R, K]: which state row r teaches at step i, -1 for none.
    target int64 [R]: the target's token as a draft id, -1 off the draft vocabulary. probabilities(begin, end): teacher
    fp32 [end-begin, U]."""

    slots: Tensor
    target: Tensor
    probabilities: Callable[[int, int], Tensor]


def soft_cross_entropy(
    states: Tensor, weight: Tensor, taught: Taught, scales: Tensor, compute_dtype: torch.dtype | None = None
) -> StepLosses:
    """Losses of states [S, H] under the drafter's head weight [U, H].

    ``taught.slots`` index ``states``; scales fp32 [K]. ``compute_dtype`` is that of the matrix products (autocast);
    softmax and sums are fp32.
    """
    needs = (torch.is_grad_enabled() and states.requires_grad, torch.is_grad_enabled() and weight.requires_grad)
    total, sums, hits = _FusedHead.apply(states, weight, taught, scales, (compute_dtype or states.dtype, needs))
    return StepLosses(total, (sums * scales.double()).sum(), sums, hits, (taught.slots >= 0).sum(0))


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        taught: Taught,
        scales: Tensor,
        how: tuple[torch.dtype, tuple[bool, bool]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, needs = how
        pass_ = _Pass(states.detach().to(dtype), weight.detach().to(dtype), taught, scales, needs)
        budget = LOGIT_BUDGET if states.device.type == "cpu" else LOGIT_BUDGET_DEVICE
        rows, steps = taught.slots.shape
        chunk = max(1, budget // (steps * weight.shape[0]))
        with torch.autocast(states.device.type, enabled=False):
            for begin in range(0, rows, chunk):
                pass_.rows(begin, min(begin + chunk, rows))
        grad_states = None if pass_.grad_states is None else pass_.grad_states[:-1].to(states.dtype)
        grad_weight = None if pass_.grad_weight is None else pass_.grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_states, grad_weight)
        total = (pass_.sums * scales.double()).sum().float()
        ctx.mark_non_differentiable(pass_.sums, pass_.hits)
        return total, pass_.sums, pass_.hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors
        return (
            None if grad_states is None else grad_states * grads[0],
            None if grad_weight is None else grad_weight * grads[0],
            None,
            None,
            None,
        )


class _Pass:
    """One walk over the teacher rows: losses, hits, and the gradients asked for."""

    def __init__(
        self, states: Tensor, weight: Tensor, taught: Taught, scales: Tensor, needs: tuple[bool, bool]
    ) -> None:
        self.states, self.weight, self.taught, self.scales = states, weight, taught, scales
        steps = taught.slots.shape[1]
        self.sums = torch.zeros(steps, dtype=torch.float64, device=states.device)
        self.hits = torch.zeros(steps, dtype=torch.int64, device=states.device)
        # A last row takes the gradients of slots that do not exist.
        self.grad_states = states.new_zeros(states.shape[0] + 1, states.shape[1]) if needs[0] else None
        self.grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None

    def rows(self, begin: int, end: int) -> None:
        """Teacher rows begin…end."""
        slots = self.taught.slots[begin:end]
        rows, steps = slots.shape
        there = slots >= 0
        x = self.states.index_select(0, slots.clamp(min=0).flatten())
        z = (x @ self.weight.T).view(rows, steps, -1).float()
        q = self.taught.probabilities(begin, end)
        agreement = torch.bmm(z, q[:, :, None])[..., 0]
        top = z.amax(-1)
        self.hits += (self._is_target(z, begin, end) >= top).logical_and_(there).sum(0)
        p = torch.softmax(z, -1)
        # softmax at its maximum is 1 / sum exp(z - top), which gives the log-sum-exp without another pass of exp.
        loss = top - p.amax(-1).log() - agreement
        self.sums += torch.where(there, loss, 0.0).double().sum(0)
        if self.grad_states is None and self.grad_weight is None:
            return
        scale = torch.where(there, self.scales, 0.0).view(-1, 1)
        error = p.sub_(q[:, None]).view(rows * steps, -1).to(x.dtype)
        if self.grad_states is not None:
            at = torch.where(there, slots, self.grad_states.shape[0] - 1).flatten()
            self.grad_states.index_copy_(0, at, (error @ self.weight) * scale.to(x.dtype))
        if self.grad_weight is not None:
            scaled = (x * scale.to(x.dtype)).to(x.dtype)
            if x.dtype == torch.float32:
                self.grad_weight.addmm_(error.T, scaled)
            else:
                self.grad_weight += error.T @ scaled

    def _is_target(self, z: Tensor, begin: int, end: int) -> Tensor:
        """Logit of the target's token, -inf where the drafter does not know it: [rows, K]."""
        target = self.taught.target[begin:end]
        at = target.clamp(min=0)[:, None, None].expand(-1, z.shape[1], 1)
        return torch.where(target[:, None] >= 0, z.gather(-1, at)[..., 0], float("-inf"))
