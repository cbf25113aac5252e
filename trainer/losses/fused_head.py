"""Losses of a drafter fused with its LM head: one walk over the rows that teach, for every loss of the table.

loss of a slot = f(p, q), with p = softmax(W x) of its state x, q what teaches it and f one of `trainer.losses.kinds`;
total = sum of scale * loss over the slots taught. q is the target's distribution, a label, or a blend of both. Logits
exist for a few rows at a time, and where the vocabulary is large for a span of it: their gradient is turned into those
of x and W at once, so nothing as wide as the vocabulary is kept for the backward. A row serves all its slots in one
product.

Shapes: R rows that teach, K slots of a row (TTT steps; one for labels), S states, D depths that losses are summed by,
H drafter width, U draft vocabulary, n rows of a block, P tokens of a span.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hiddenstore.targets.matmul import add_product, linear, linear_in_fp32, without_autocast
from trainer.losses.kinds import LOSSES, Compared, LossKind, Slopes

LOGIT_BUDGET = 1 << 22
"""Logits alive at a time on CPU, as elements: 16 MiB in fp32; products over fewer rows wait for the weights."""
LOGIT_BUDGET_DEVICE = 1 << 27
FEWEST_STATES = 64
"""A block has no fewer states: below that the matrix products wait for the weights."""
WIDEST_BLOCK = 4
"""Budgets a block may take before the vocabulary is cut into spans, whose logits are then made twice."""

Weigh = Callable[[Tensor, Tensor], Tensor]
"""Weights fp32 [n, D], without gradient, from cross-entropies of labels fp32 [n, D], whatever else teaches, and which
are taught, bool [n, D]."""


@dataclass(frozen=True, eq=False)
class StepLosses:
    """total: scalar with gradient; value: the same in fp64. sums fp64 [D]: unscaled loss summed over taught slots. hits
    int64 [D]: slots where the drafter's most probable token is the target's. counts int64 [D]: taught slots. overlap
    [S]: sum min(p, q) of every taught state, without gradient; zero elsewhere and where the loss does not read
    it."""

    total: Tensor
    value: Tensor
    sums: Tensor
    hits: Tensor
    counts: Tensor
    overlap: Tensor | None = None

    def plus(self, more: Tensor) -> Self:
        """The same beside a scalar of another loss, with gradient."""
        return replace(self, total=self.total + more, value=self.value + more.detach().double())


def step_weights(steps: int, decay: float, listed: Sequence[float] | None = None) -> Tensor:
    """Weight of each TTT step: fp32 [K]; decay^i (SafeAILab 0.8, ModelOpt 0.9, speculators 1.0) unless listed."""
    return torch.tensor(list(listed) if listed is not None else [decay**i for i in range(steps)], dtype=torch.float32)


def step_scales(weights: Tensor, counts: Tensor) -> Tensor:
    """scale_i = w_i / counts_i, 0 where nothing is taught: fp32 [K]. ``counts`` are those of the global batch."""
    return torch.where(counts > 0, weights / counts.clamp(min=1).float(), torch.zeros_like(weights))


@dataclass(frozen=True, eq=False)
class Supervision:
    """What the states are compared with, row by row.

    slots int64 [R, K]: which state row r teaches at step i, -1 for none. labels int64 [R]: the token a hit proposes, as
    a draft id, -1 off the draft vocabulary; None for the most probable one of ``distribution``. distribution(begin,
    end): of rows begin…end, fp32 [end-begin, U] summing to one. share: None where the distribution alone teaches, else
    how much of q it is beside the labels, 0 without one. mass fp32 [R]: what the overlap multiplies q by, None for one.
    depth int64 [R]: which sum a row of one slot counts for; None where slot i counts for sum i.
    """

    slots: Tensor
    labels: Tensor | None
    distribution: Callable[[int, int], Tensor] | None = None
    share: float | None = None
    mass: Tensor | None = None
    depth: Tensor | None = None

    @classmethod
    def of_labels(
        cls,
        labels: Tensor,
        distribution: Callable[[Tensor], Tensor] | None = None,
        share: float = 0.0,
        *,
        complete: bool = False,
        mass: Tensor | None = None,
    ) -> Self:
        """Labels int64 [N, D] of states [N*D], -1 where nothing is taught, which then costs nothing. ``share`` of q is
        ``distribution(which states, int64 [n]) -> fp32 [n, U]``; ``mass`` fp32 [N*D] is of states. ``complete``: the D
        states of a row of labels stay together if any of them is taught, as `Weigh` asks."""
        taught, depths = labels >= 0, labels.shape[1]
        if complete:
            taught = taught.any(1, keepdim=True).expand_as(labels)
        states = torch.nonzero(taught.flatten())[:, 0]
        row_labels = labels.flatten()[states]
        return cls(
            slots=torch.where(row_labels >= 0, states, -1)[:, None],
            labels=row_labels,
            distribution=None if distribution is None else lambda begin, end: distribution(states[begin:end]),
            share=share,
            mass=None if mass is None else mass[states],
            depth=states % depths,
        )

    def counts(self, depths: int) -> Tensor:
        """Taught slots of each depth: int64 [D]."""
        if self.depth is None:
            return (self.slots >= 0).sum(0)
        return torch.bincount(self.depth[self.slots[:, 0] >= 0], minlength=depths)


def head_losses(
    states: Tensor,
    weight: Tensor,
    supervision: Supervision,
    scales: Tensor,
    kind: LossKind = LOSSES["soft_ce"],
    *,
    by_step: bool = False,
    weigh: Weigh | None = None,
    fixed: Tensor | None = None,
) -> StepLosses:
    """Losses of states [S, H] under the drafter's head weight [U, H]; scales fp32 [D]. ``fixed`` [U, F]: what stands
    before the weight for the first columns of the states, then [S, F+H], and is not trained. ``by_step``: measure the
    mean overlap of each step first, for a loss that blends by it. ``weigh`` multiplies the scales of complete rows of
    labels. Matrix products are those of autocast where it is on; softmax and sums are fp32."""
    device = states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    counts, step_overlap = supervision.counts(scales.shape[0]), None
    if by_step:
        with torch.no_grad():
            tv = head_losses(states, weight, supervision, scales, LOSSES["tv"], fixed=fixed)
            step_overlap = 1 - tv.sums / counts.clamp(min=1)
    enabled = torch.is_grad_enabled()
    options = _Options(
        kind, dtype, enabled and states.requires_grad, enabled and weight.requires_grad, step_overlap, weigh, fixed
    )
    total, value, sums, hits, overlap = _FusedHead.apply(states, weight, supervision, scales, options)
    return StepLosses(total, value, sums, hits, counts, overlap)


@dataclass(frozen=True, eq=False)
class _Options:
    kind: LossKind
    dtype: torch.dtype
    grad_states: bool
    grad_weight: bool
    step_overlap: Tensor | None
    weigh: Weigh | None
    fixed: Tensor | None = None


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, supervision: Supervision, scales: Tensor, options: _Options
    ) -> tuple[Tensor, ...]:
        walk = _Walk(states.detach(), weight, supervision, scales, options)
        with without_autocast(states.device):
            walk.run()
        grad_weight = None if walk.grad_weight is None else walk.grad_weight.to(weight.dtype)
        ctx.save_for_backward(None if walk.grad_states is None else walk.grad_states[:-1], grad_weight)
        overlap = walk.overlap[:-1]
        ctx.mark_non_differentiable(walk.value, walk.sums, walk.hits, overlap)
        return walk.value.to(_wide(states.dtype), copy=True), walk.value, walk.sums, walk.hits, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        factor, saved = grads[0], ctx.saved_tensors
        # It is nearly always one, and to read it costs nothing on CPU.
        if factor.device.type != "cpu" or factor != 1:
            saved = [gradient if gradient is None else gradient * factor for gradient in saved]
        return *saved, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class _Block:
    """Some rows. slots [n, K]; x [n*K, H] their states; labels [n]; q fp32 [n, U], None where labels alone teach;
    q_overlap: the same times the mass."""

    slots: Tensor
    x: Tensor
    labels: Tensor
    q: Tensor | None
    q_overlap: Tensor | None

    def q_of(self, begin: int, end: int, *, times_mass: bool = False) -> Tensor:
        """The distribution over a span of the vocabulary: [n, 1, P]."""
        q = self.q_overlap if times_mass else self.q
        assert q is not None, "these rows have labels alone"
        return q[:, None, begin:end]

    def label_index(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Where the label lies in a span of the vocabulary [n, K, 1], and whether it does [n, 1]."""
        inside = (self.labels >= begin) & (self.labels < end)
        index = torch.where(inside, self.labels - begin, 0)[:, None, None]
        return index.expand(*self.slots.shape, 1), inside[:, None]


@dataclass(eq=False)
class _Span:
    """Tokens begin…end. p [n, K, P]: softmax over them alone. top, lse [n, K] of their logits; agreement [n, K]: their
    logits under the distribution; label [n, K]: the label's logit, -inf if elsewhere."""

    begin: int
    end: int
    p: Tensor
    top: Tensor
    lse: Tensor
    agreement: Tensor
    label: Tensor


class _Walk:
    """Losses, hits, and the gradients that are required."""

    def __init__(
        self, states: Tensor, weight: Tensor, supervision: Supervision, scales: Tensor, options: _Options
    ) -> None:
        self.states, self.supervision, self.scales, self.options = states, supervision, scales, options
        self.weight = weight.detach().to(options.dtype)
        if options.fixed is not None:
            self.weight = torch.cat([options.fixed.to(options.dtype), self.weight], 1)
        device, depths = states.device, scales.shape[0]
        self.value = torch.zeros((), dtype=torch.float64, device=device)
        self.sums = torch.zeros(depths, dtype=torch.float64, device=device)
        self.hits = torch.zeros(depths, dtype=torch.int64, device=device)
        # A last row takes the gradients of slots that do not exist.
        self.grad_states = states.new_zeros(states.shape[0] + 1, states.shape[1]) if options.grad_states else None
        self.grad_weight = torch.zeros_like(weight, dtype=_wide(options.dtype)) if options.grad_weight else None
        self.trained = slice(self.weight.shape[1] - weight.shape[1], None)
        self.overlap = states.new_zeros(states.shape[0] + 1, dtype=_wide(options.dtype))
        self.rows, self.span = self._block_size()
        size = self.rows * supervision.slots.shape[1] * self.span
        self._softmax = self.weight.new_empty(size, dtype=_wide(options.dtype))

    def run(self) -> None:
        # The teacher is made for several blocks at once: alone, its few rows would wait for the target's head.
        several = self.rows * max(1, self._softmax.shape[0] // (self.rows * self.weight.shape[0]))
        distribution, total = self.supervision.distribution, self.supervision.slots.shape[0]
        for first in range(0, total, several):
            last = min(first + several, total)
            q = None if distribution is None else distribution(first, last).to(self._softmax.dtype)
            for begin in range(first, last, self.rows):
                end = min(begin + self.rows, last)
                self._add(begin, end, None if q is None else q[begin - first : end - first])

    def _block_size(self) -> tuple[int, int]:
        """Rows of a block, and tokens of a span of the vocabulary."""
        (total, slots), vocab, depths = self.supervision.slots.shape, self.weight.shape[0], self.scales.shape[0]
        budget = LOGIT_BUDGET if self.states.device.type == "cpu" else LOGIT_BUDGET_DEVICE
        rows = max(1, budget // (slots * vocab), FEWEST_STATES // slots)
        if self.options.weigh is not None:
            rows = max(1, rows // depths) * depths
        rows = max(1, min(rows, total))
        return rows, max(1, min(vocab, WIDEST_BLOCK * budget // (rows * slots)))

    def _add(self, begin: int, end: int, q: Tensor | None) -> None:
        """Rows begin…end, with their distribution q [n, U]."""
        block, vocab = self._block(begin, end, q), self.weight.shape[0]
        spans = [self._measure(block, at, min(at + self.span, vocab)) for at in range(0, vocab, self.span)]
        lse = _over([span.lse for span in spans], torch.logsumexp)

        def softmax(index: int) -> Tensor:
            if len(spans) == 1:
                return spans[0].p
            again = self._measure(block, spans[index].begin, spans[index].end)
            return again.p.mul_((again.lse - lse).exp()[..., None])

        overlap, below = self._overlap(softmax, block, spans, lse)
        entropy = lse.new_zeros(1)
        if self.options.kind.entropy and q is not None:
            entropy = torch.special.entr(q).sum(-1, keepdim=True)
        label, top = _over([span.label for span in spans], torch.amax), _over([span.top for span in spans], torch.amax)
        cross = lse - self._agreement(label, _over([span.agreement for span in spans], torch.sum))
        slopes = self.options.kind.measure(Compared(cross, entropy, overlap, self.options.step_overlap))
        states = torch.where(block.slots >= 0, block.slots, len(self.overlap) - 1).flatten()
        if self.options.kind.overlap:
            self.overlap.index_copy_(0, states, overlap.flatten())
        scale = self._count(begin, end, slopes.value, lse - label, label >= top).view(-1, 1).to(block.x.dtype)
        if self.grad_states is None and self.grad_weight is None:
            return
        # The scale is not folded into the error: x is far narrower than the logits.
        scaled, grad = block.x * scale, torch.zeros_like(block.x)
        for index, span in enumerate(spans):
            error = self._error(softmax(index), block, span, slopes, below).view(len(grad), -1).to(grad.dtype)
            rows = self.weight[span.begin : span.end]
            if self.grad_states is not None:
                grad = linear(error, rows.T) if len(spans) == 1 else grad.addmm_(error, rows)
            if self.grad_weight is not None:
                add_product(self.grad_weight[span.begin : span.end], error.T, scaled[:, self.trained])
        if self.grad_states is not None:
            self.grad_states.index_copy_(0, states, grad.mul_(scale).to(self.grad_states.dtype))

    def _block(self, begin: int, end: int, q: Tensor | None) -> _Block:
        slots, labels, mass = self.supervision.slots[begin:end], self.supervision.labels, self.supervision.mass
        x = self.states.index_select(0, slots.clamp(min=0).flatten()).to(self.options.dtype)
        if labels is None:
            assert q is not None, "rows without labels have a distribution"
            labels = q.max(-1).indices
        else:
            labels = labels[begin:end]
        return _Block(slots, x, labels, q, q if q is None or mass is None else q * mass[begin:end, None])

    def _measure(self, block: _Block, begin: int, end: int) -> _Span:
        """Logits and softmax of a span of the vocabulary; the softmax is where that of the span before was."""
        shape = (*block.slots.shape, end - begin)
        z = _logits(block.x, self.weight[begin:end], self._softmax.dtype).view(shape)
        p = torch.softmax(z, -1, out=self._softmax[: z.numel()].view(shape))
        top = z.amax(-1)
        # softmax at its maximum is 1 / sum exp(z - top), which gives the log-sum-exp without another pass of exp.
        lse = top - p.amax(-1).log()
        agreement = torch.zeros_like(top)
        if block.q is not None:
            q = block.q_of(begin, end)
            # The product over all slots of a row, and for a single one the product of two vectors.
            by_row = self.supervision.share is None
            agreement = torch.bmm(q, z.transpose(1, 2))[:, 0] if by_row else torch.linalg.vecdot(z, q)
        index, inside = block.label_index(begin, end)
        label = torch.where(inside, z.gather(-1, index)[..., 0], float("-inf"))
        return _Span(begin, end, p, top, lse, agreement, label)

    def _agreement(self, label: Tensor, agreement: Tensor) -> Tensor:
        """sum q z [n, K], from the label's logit and the logits under the distribution."""
        share = self.supervision.share
        if share is None:
            return agreement
        return label if self.supervision.distribution is None else (1 - share) * label + share * agreement

    def _overlap(
        self, softmax: Callable[[int], Tensor], block: _Block, spans: Sequence[_Span], like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """sum min(p, q), and the sum of p where it is the smaller: [n, K] each, zero unless the loss reads them."""
        overlap, below = torch.zeros_like(like), torch.zeros_like(like)
        if self.options.kind.overlap:
            for index, span in enumerate(spans):
                p, q = softmax(index), block.q_of(span.begin, span.end, times_mass=True)
                overlap += torch.minimum(p, q).sum(-1)
                below += torch.where(p < q, p, 0.0).sum(-1)
        return overlap, below

    def _count(self, begin: int, end: int, value: Tensor, surprise: Tensor, hit: Tensor) -> Tensor:
        """Add losses and hits [n, K] of rows begin…end to the sums; the scale of each, by the cross-entropies of their
        labels [n, K] where these weigh: fp32 [n, K]."""
        taught, depth, depths = self.supervision.slots[begin:end] >= 0, self.supervision.depth, self.scales.shape[0]
        rows = None if depth is None else depth[begin:end]
        scale = torch.where(taught, self.scales if rows is None else self.scales[rows, None], 0.0)
        loss, hit = torch.where(taught, value, 0.0), hit.logical_and_(taught)
        if self.options.weigh is not None:
            weights = self.options.weigh(surprise.view(-1, depths), taught.view(-1, depths))
            scale = scale * weights.view_as(scale)
        loss = loss.double()
        self.value += (loss * scale.double()).sum()
        if rows is None:
            self.sums += loss.sum(0)
            self.hits += hit.sum(0)
        else:
            self.sums.index_add_(0, rows, loss[:, 0])
            self.hits.index_add_(0, rows, hit[:, 0].long())
        return scale

    def _error(self, p: Tensor, block: _Block, span: _Span, slopes: Slopes, below: Tensor) -> Tensor:
        """Gradient of the loss by the logits [n, K, P], made in place of p where it can be."""
        pull = None
        if slopes.by_overlap is not None:
            smaller = p < block.q_of(span.begin, span.end, times_mass=True)
            pull = _times((smaller.to(p.dtype) - below[..., None]).mul_(p), slopes.by_overlap)
            if not isinstance(slopes.by_cross, Tensor) and slopes.by_cross == 0:
                return pull
        share = self.supervision.share
        if share is not None:
            index, inside = block.label_index(span.begin, span.end)
            p.scatter_add_(-1, index, torch.where(inside, share - 1, p.new_zeros(()))[..., None].expand_as(index))
        if block.q is not None:
            p.sub_(block.q_of(span.begin, span.end), alpha=1.0 if share is None else share)
        error = _times(p, slopes.by_cross)
        return error if pull is None else pull.add_(error)


def _over(spans: Sequence[Tensor], reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Numbers [n, K] of each span as those of the whole vocabulary."""
    return spans[0] if len(spans) == 1 else reduce(torch.stack(list(spans)), 0)


def _times(x: Tensor, slope: Tensor | float) -> Tensor:
    """x [n, K, P] times a number or one of each slot, in place."""
    if isinstance(slope, Tensor):
        return x.mul_(slope[..., None])
    return x if slope == 1 else x.mul_(slope)


def _logits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x [m, H] @ weight [P, H].T in ``dtype``."""
    # A GPU writes them in fp32 at once.
    return linear_in_fp32(x, weight) if x.is_cuda and dtype is torch.float32 else linear(x, weight).to(dtype)
