"""Losses of the drafter against the target over the draft vocabulary, fused with the drafter's LM head.

loss_i = sum over taught slots of f(p, q), p = softmax(W x) at step i, q the teacher and f one of `loss_kinds`;
total = sum scale loss. Logits exist for a few teacher rows at a time, and where the vocabulary is large for a part of
it: their gradient is turned into those of x and W at once, so nothing as wide as the vocabulary is kept for the
backward. A teacher row serves all its TTT steps in one product.

Shapes: R teacher rows, K TTT steps, S states (K x active slots), H drafter width, U draft vocabulary, n states of a
block, P tokens of a part of the vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hiddenstore.products import Packed, linear
from trainer.objectives.loss_kinds import LOSSES, Compared, LossKind

LOGIT_BUDGET = 1 << 21
"""Logits alive at a time on CPU, as elements: 8 MiB in fp32; products over fewer rows wait for the weights."""
LOGIT_BUDGET_DEVICE = 1 << 26
FEWEST_STATES = 64
"""A block has no fewer states: below that the matrix products wait for the weights."""
FEWEST_TO_PACK = 1024
"""States for which packing the head costs less than it saves."""
WIDEST_BLOCK = 4
"""Budgets a block may take before the vocabulary is cut into parts, whose logits are then made twice."""


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
    target int64 [R]: the target's token as a draft id, -1 off the draft vocabulary; None where it is the most probable
    of ``probabilities``. probabilities(begin, end): teacher fp32 [end-begin, U], rows summing to one. mass fp32 [R]:
    what the overlap multiplies them by; None for one."""

    slots: Tensor
    target: Tensor | None
    probabilities: Callable[[int, int], Tensor]
    mass: Tensor | None = None


def taught_losses(
    states: Tensor,
    weight: Tensor,
    taught: Taught,
    scales: Tensor,
    kind: LossKind = LOSSES["soft_ce"],
    *,
    by_step: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> StepLosses:
    """Losses of states [S, H] under the drafter's head weight [U, H].

    ``taught.slots`` index ``states``; scales fp32 [K], or [R, K] for a weight per slot. ``by_step``: measure the mean
    overlap of each step first, for a loss that blends by it. ``compute_dtype`` is that of the matrix products
    (autocast); softmax and sums are fp32.
    """
    enabled, dtype = torch.is_grad_enabled(), compute_dtype or states.dtype
    step_overlap = None
    if by_step:
        with torch.no_grad():
            apart = taught_losses(states, weight, taught, scales, LOSSES["tv"], compute_dtype=dtype)
        step_overlap = 1 - apart.sums / apart.counts.clamp(min=1)
    how = _How(kind, dtype, enabled and states.requires_grad, enabled and weight.requires_grad, step_overlap)
    total, value, sums, hits = _FusedHead.apply(states, weight, taught, scales, how)
    return StepLosses(total, value, sums, hits, (taught.slots >= 0).sum(0))


def soft_cross_entropy(
    states: Tensor, weight: Tensor, taught: Taught, scales: Tensor, compute_dtype: torch.dtype | None = None
) -> StepLosses:
    """``taught_losses`` of -sum q log p."""
    return taught_losses(states, weight, taught, scales, compute_dtype=compute_dtype)


@dataclass(frozen=True, eq=False)
class _How:
    kind: LossKind
    dtype: torch.dtype
    grad_states: bool
    grad_weight: bool
    step_overlap: Tensor | None


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, taught: Taught, scales: Tensor, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pass_ = _Pass(states.detach().to(how.dtype), weight.detach().to(how.dtype), taught, scales, how)
        with torch.autocast(states.device.type, enabled=False):
            pass_.run()
        grad_states = None if pass_.grad_states is None else pass_.grad_states[:-1].to(states.dtype)
        grad_weight = None if pass_.grad_weight is None else pass_.grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_states, grad_weight)
        ctx.mark_non_differentiable(pass_.value, pass_.sums, pass_.hits)
        return pass_.value.to(_wide(states.dtype), copy=True), pass_.value, pass_.sums, pass_.hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *scaled_by(grads[0], ctx.saved_tensors), None, None, None


def scaled_by(factor: Tensor, made: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients times the scalar that comes from above."""
    # It is nearly always one, and to read it costs nothing on CPU.
    if factor.device.type == "cpu" and factor == 1:
        return made
    return [g if g is None else g * factor for g in made]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(eq=False)
class _Part:
    """p [rows, K, P]: softmax over this part of the vocabulary alone. top, lse [rows, K] of its logits; agreement
    [rows, K] of its logits with the teacher; target [rows, K]: the logit of the target's token, -inf if elsewhere."""

    p: Tensor
    top: Tensor
    lse: Tensor
    agreement: Tensor
    target: Tensor


class _Pass:
    """One walk over the teacher rows: losses, hits, and the gradients asked for."""

    def __init__(self, states: Tensor, weight: Tensor, taught: Taught, scales: Tensor, how: _How) -> None:
        self.states, self.weight, self.taught, self.scales, self.how = states, weight, taught, scales, how
        self.steps, device = taught.slots.shape[1], states.device
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(self.steps, dtype=torch.float64, device=device)
        self.hits = torch.zeros(self.steps, dtype=torch.int64, device=device)
        # A last row takes the gradients of slots that do not exist.
        self.grad_states = states.new_zeros(states.shape[0] + 1, states.shape[1]) if how.grad_states else None
        self.grad_weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if how.grad_weight else None
        self.rows, self.part = self._block()
        many = taught.slots.numel() >= FEWEST_TO_PACK
        self.product: Callable[[Tensor], Tensor] = Packed(self.weight) if many else partial(linear, weight=self.weight)
        self._softmax = states.new_empty(self.rows * self.steps * self.part, dtype=_wide(states.dtype))

    def run(self) -> None:
        # The teacher is made for several blocks at once: alone, its few rows would wait for the target's head.
        several = self.rows * max(1, self._softmax.shape[0] // (self.rows * self.weight.shape[0]))
        total = self.taught.slots.shape[0]
        for first in range(0, total, several):
            last = min(first + several, total)
            q = self.taught.probabilities(first, last).to(self._softmax.dtype)
            for begin in range(first, last, self.rows):
                end = min(begin + self.rows, last)
                self._add(begin, end, q[begin - first : end - first])

    def _block(self) -> tuple[int, int]:
        """Teacher rows of a block, and tokens of a part of the vocabulary."""
        vocab = self.weight.shape[0]
        budget = LOGIT_BUDGET if self.states.device.type == "cpu" else LOGIT_BUDGET_DEVICE
        rows = max(1, budget // (self.steps * vocab), FEWEST_STATES // self.steps)
        rows = max(1, min(rows, self.taught.slots.shape[0]))
        return rows, max(1, min(vocab, WIDEST_BLOCK * budget // (rows * self.steps)))

    def _add(self, begin: int, end: int, q: Tensor) -> None:
        """Teacher rows begin…end, with their teacher q [end-begin, U]."""
        slots = self.taught.slots[begin:end]
        there = slots >= 0
        x = self.states.index_select(0, slots.clamp(min=0).flatten())
        target = q.max(-1).indices if self.taught.target is None else self.taught.target[begin:end]
        spans = [(at, min(at + self.part, q.shape[1])) for at in range(0, q.shape[1], self.part)]
        parts = [self._measure(x, q, target, span) for span in spans]
        whole = len(parts) == 1
        lse = parts[0].lse if whole else torch.stack([part.lse for part in parts]).logsumexp(0)
        target_logit, top, agreement = (
            torch.stack([part.target for part in parts]).amax(0),
            torch.stack([part.top for part in parts]).amax(0),
            torch.stack([part.agreement for part in parts]).sum(0),
        )
        self.hits += (target_logit >= top).logical_and_(there).sum(0)

        def softmax(index: int) -> Tensor:
            if whole:
                return parts[0].p
            again = self._measure(x, q, target, spans[index])
            return again.p.mul_((again.lse - lse).exp()[..., None])

        q_overlap = q if self.taught.mass is None else q * self.taught.mass[begin:end, None]
        overlap, below = self._overlap(softmax, q_overlap, spans, lse)
        entropy = torch.special.entr(q).sum(-1, keepdim=True) if self.how.kind.entropy else lse.new_zeros(1)
        slopes = self.how.kind.measure(Compared(lse - agreement, entropy, overlap, self.how.step_overlap))
        scale = torch.where(there, self.scales if self.scales.ndim == 1 else self.scales[begin:end], 0.0)
        loss = torch.where(there, slopes.value, 0.0).double()
        self.sums += loss.sum(0)
        self.value += (loss * scale.double()).sum()
        if self.grad_states is None and self.grad_weight is None:
            return
        # The slopes are not folded in where they are one for all: x is far narrower than the logits.
        scaled = x * scale.view(-1, 1).to(x.dtype)
        grad = None if self.grad_states is None else torch.zeros_like(x)
        for index, (left, right) in enumerate(spans):
            p = softmax(index)
            error = _error(p, q[:, None, left:right], q_overlap[:, None, left:right], slopes, below)
            error = error.view(x.shape[0], -1).to(x.dtype)
            if grad is not None:
                grad = linear(error, self.weight.T) if whole else grad.addmm_(error, self.weight[left:right])
            if self.grad_weight is not None:
                _add_product(self.grad_weight[left:right], error, scaled)
        if self.grad_states is not None and grad is not None:
            at = torch.where(there, slots, self.grad_states.shape[0] - 1).flatten()
            self.grad_states.index_copy_(0, at, grad.mul_(scale.view(-1, 1).to(x.dtype)))

    def _measure(self, x: Tensor, q: Tensor, target: Tensor, span: tuple[int, int]) -> _Part:
        """Logits and softmax of one part of the vocabulary; the softmax is where that of the part before was."""
        begin, end = span
        rows, shape = q.shape[0], (q.shape[0], self.steps, end - begin)
        count = x.shape[0] * (end - begin)
        flat = self.product(x) if end - begin == self.weight.shape[0] else linear(x, self.weight[begin:end])
        z = flat.view(shape).to(self._softmax.dtype)
        p = torch.softmax(z, -1, out=self._softmax[:count].view(shape))
        top = z.amax(-1)
        # softmax at its maximum is 1 / sum exp(z - top), which gives the log-sum-exp without another pass of exp.
        lse = top - p.amax(-1).log()
        agreement = torch.bmm(q[:, None, begin:end], z.transpose(1, 2))[:, 0]
        inside = (target >= begin) & (target < end)
        at = torch.where(inside, target - begin, 0)[:, None, None].expand(rows, self.steps, 1)
        return _Part(p, top, lse, agreement, torch.where(inside[:, None], z.gather(-1, at)[..., 0], float("-inf")))

    def _overlap(
        self, softmax: Callable[[int], Tensor], q: Tensor, spans: Sequence[tuple[int, int]], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """sum min(p, q), and the sum of p where it is the smaller: [rows, K] each, zero unless the loss reads them."""
        overlap, below = torch.zeros_like(like), torch.zeros_like(like)
        if self.how.kind.overlap:
            for index, (begin, end) in enumerate(spans):
                p, part = softmax(index), q[:, None, begin:end]
                overlap += torch.minimum(p, part).sum(-1)
                below += torch.where(p < part, p, 0.0).sum(-1)
        return overlap, below


def _error(p: Tensor, q: Tensor, q_overlap: Tensor, slopes: Any, below: Tensor) -> Tensor:
    """Gradient of the loss by the logits [rows, K, P], made in place of p where it can be."""
    if isinstance(slopes.by_overlap, float) and slopes.by_overlap == 0:
        error = p.sub_(q)
        return error if isinstance(slopes.by_cross, float) else error.mul_(slopes.by_cross[..., None])
    pull = ((p < q_overlap).to(p.dtype) - below[..., None]).mul_(p)
    pull.mul_(slopes.by_overlap[..., None] if isinstance(slopes.by_overlap, Tensor) else slopes.by_overlap)
    if isinstance(slopes.by_cross, float) and slopes.by_cross == 0:
        return pull
    by_cross = slopes.by_cross[..., None] if isinstance(slopes.by_cross, Tensor) else slopes.by_cross
    return pull.add_(p.sub_(q).mul_(by_cross))


def _add_product(out: Tensor, error: Tensor, x: Tensor) -> None:
    """out [P, H] += errorᵀ x, in the dtype of ``out``."""
    if x.dtype == out.dtype:
        out.addmm_(error.T, x)
    else:
        out += error.T @ x
