"""Products of rows with a weight matrix, by the fastest kernel torch holds for them.

On CPUs with AVX-512 oneDNN multiplies fp32 matrices faster than the MKL behind ``torch.mm``: on an AMD EPYC by 5 to
25 % on one thread, by 10 to 30 % on two, and twice as fast for eight rows (``benchmarks/products.py``). Both sum in
fp32.

Shapes: n rows, I columns of the rows, O rows of the weight.
"""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
)
FEWEST_WITH_GRADIENT = 100_000_000
"""Multiplications below which a step through Python's autograd costs what the kernel saves."""
PACK_BYTES = 64 << 20
PACK_ROWS = 512
"""Rows the layout of a packed weight is chosen for."""
_KEPT: MutableMapping[Tensor, tuple[tuple[object, ...], "Packed"]] = WeakIdKeyDictionary()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [..., I] and weight [O, I]; [..., O], with gradients for both, but none of gradients."""
    if not _takes(x, weight):
        return F.linear(x, weight)
    if not torch.is_grad_enabled() or not (x.requires_grad or weight.requires_grad):
        return _onednn(x, weight)
    if x.numel() * weight.shape[0] < FEWEST_WITH_GRADIENT:
        return F.linear(x, weight)
    out: Tensor = _Linear.apply(x, weight)
    return out


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` without bias, by ``linear``."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        for_x, for_weight = ctx.needs_input_grad
        ctx.save_for_backward(x if for_weight else None, weight if for_x else None)
        return _onednn(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        # oneDNN's kernel takes no transposed rows, so the gradient of the weight stays with torch.
        grad_weight = grads[0].flatten(0, -2).T @ x.flatten(0, -2) if for_weight else None
        return _onednn(grads[0], weight.T) if for_x else None, grad_weight


class Packed:
    """A weight [O, I] that many rows are multiplied with before it changes, in the kernel's own layout; no gradients.

    A large weight stays as it is: its copy would cost more memory than it saves time.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        packs = _takes(weight, weight) and weight.numel() * weight.element_size() <= PACK_BYTES
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS) if packs else None

    def __call__(self, x: Tensor) -> Tensor:
        """``x @ weight.T``."""
        if self._packed is None or not _takes(x, self.weight):
            return linear(x, self.weight)
        return _onednn(x, self._packed)


def frozen(weight: Tensor) -> Packed:
    """A weight without gradient, packed at its first use and again after it has changed.

    What is written through ``.data`` or numpy goes unnoticed; whoever does that packs anew.
    """
    if weight.is_inference():
        return Packed(weight)
    state = (weight.data_ptr(), weight.dtype, weight._version)
    kept = _KEPT.get(weight)
    if kept is None or kept[0] != state:
        kept = _KEPT[weight] = (state, Packed(weight.detach()))
    return kept[1]


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies these. Any other layout of the weight would go to a kernel slower by orders of
    magnitude."""
    return (
        HAS_ONEDNN
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1] > 0
        and type(weight) in (Tensor, torch.nn.Parameter)
        and (weight.is_contiguous() or weight.T.is_contiguous())
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and bool(torch.backends.mkldnn.enabled)
    )


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.contiguous(), weight, None, "none", [], "")
    return out
