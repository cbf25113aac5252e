"""Products of rows with a weight matrix, by the fastest kernel torch holds for them, and whether bf16 pays.

``onednn_pays`` is the one switch of the private operator used here: on AMD CPUs with AVX-512 oneDNN multiplies fp32
matrices faster than ``torch.mm`` (EPYC: by 5 to 25 % on one thread, by 10 to 30 % on two, twice as fast for eight
rows; ``benchmarks/results/products-2026-11-21.json``). Everything else is torch's. Both sum in fp32.

Shapes: n rows, I columns of the rows, O rows of the weight.
"""

import math
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def _has_mkl_kernels() -> bool:
    """Whether ``torch.mm`` is MKL's AVX-512, which it keeps for Intel's CPUs."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            cpu = file.read(1024)
    except OSError:
        cpu = platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in cpu


HAS_ONEDNN = (
    torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and not _has_mkl_kernels()
)
"""Whether oneDNN multiplies fp32 faster than torch on this CPU."""


def _has_bf16() -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    # With AVX-512 alone oneDNN takes bf16 and is slower at it than at fp32, four times from 64 rows on
    # (benchmarks/results/bf16-avx512-2026-11-28.md).
    has_own = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return has_own or platform.machine().lower() not in ("x86_64", "amd64")


HAS_BF16 = _has_bf16()
"""Whether this CPU has instructions that multiply bf16, and oneDNN uses them."""
FEWEST_WIDENED = 16
"""Rows below which reading a bf16 weight costs less than turning it into fp32."""
FEWEST_WITH_GRADIENT = 100_000_000
"""Multiplications below which a step through Python's autograd costs what the kernel saves."""

NARROWEST = 512
"""Narrower models stay in fp32: most of their step is no product."""
FEWEST_TIMES = 1.3
"""How many times as fast a bf16 product must be: casts and what is not a product take a part of it back."""
_ROUNDS = 5


def bf16_pays(width: int, inner: int, rows: int) -> float | None:
    """How many times as fast this CPU multiplies an MLP's bf16 weights, where that is worth it; None where it is not.
    A CPU with AMX or AVX512-BF16 gains two to eight times; without either it emulates bf16, and a try takes seconds."""
    times = bf16_speedup(width, inner, rows) if width >= NARROWEST and HAS_BF16 else 0.0
    return times if times > FEWEST_TIMES else None


def bf16_speedup(width: int, inner: int, rows: int) -> float:
    """How many times as fast this CPU multiplies rows [rows, width] with a weight [inner, width] in bf16 as in fp32, by
    the fastest of a few tries in turn, which other processes disturb least; some milliseconds."""
    x, weight = torch.randn(rows, width), torch.randn(inner, width)
    pairs = ((x, weight), (x.bfloat16(), weight.bfloat16()))
    fastest = [float("inf"), float("inf")]
    with torch.no_grad():
        for _ in range(_ROUNDS):
            for index, (left, right) in enumerate(pairs):
                began = time.perf_counter()
                linear(left, right)
                fastest[index] = min(fastest[index], time.perf_counter() - began)
    return fastest[0] / fastest[1]


def onednn_pays(x: Tensor, weight: Tensor, *, needs_gradient: bool = False) -> bool:
    """Whether oneDNN multiplies these faster than torch: fp32 on a CPU where it is, outside autocast and compilation,
    and large enough where a gradient is made. A weight that is a slice of columns would go to a kernel slower by orders
    of magnitude."""
    return (
        HAS_ONEDNN
        and x.dtype is weight.dtype is torch.float32
        and x.device.type == "cpu"
        and x.ndim > 1
        and x.shape[-1] == weight.shape[1] > 0
        and type(weight) in (Tensor, torch.nn.Parameter)
        and (weight.is_contiguous() or weight.T.is_contiguous())
        and not (needs_gradient and x.numel() * weight.shape[0] < FEWEST_WITH_GRADIENT)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and bool(torch.backends.mkldnn.enabled)
    )


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In it products on ``device`` have the dtype of what is multiplied, under whatever precision this thread is."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    # Where none is on, leaving one would empty the casts that all threads share: a weight cast twice in a forward of
    # another thread sums its gradients in another order.
    return nullcontext()


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` for x [..., I] and weight [O, I]; [..., O], with gradients for both, but none of gradients."""
    needs_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if not onednn_pays(x, weight, needs_gradient=needs_gradient):
        return F.linear(x, weight)
    out: Tensor = _Linear.apply(x, weight) if needs_gradient else _onednn(x, weight)
    return out


def linear_in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.T`` fp32 [n, O] for x [n, I] and weight [O, I] of any type, without gradients.

    GPUs multiply bf16 some fifteen times as fast as fp32, and its products are exact in fp32. So a bf16 weight stays
    one there, and x is split into two bf16 parts where it has more bits: they hold 16 of them, which leaves an error of
    2**-17 |x| |w|, what summing a thousand products in fp32 costs too.
    """
    if not x.is_cuda or weight.dtype is not torch.bfloat16:
        return linear(x.float(), weight.float())
    high = x.bfloat16()
    out = torch.mm(high, weight.T, out_dtype=torch.float32)
    return out if x.dtype is torch.bfloat16 else add_product(out, (x - high).bfloat16(), weight.T)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out`` [n, O] += left [n, I] @ right [I, O], in the type of ``out``, which it returns."""
    if left.dtype == out.dtype:
        return out.addmm_(left, right)
    if out.is_cuda:
        # Summed where it lies: half of the bytes, and no rounding of the product.
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return out.add_(left @ right)


class Linear(torch.nn.Linear):
    """`torch.nn.Linear` without bias, by ``linear``."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight)


def widen_bf16(model: torch.nn.Module) -> None:
    """Have the linear layers of a frozen model multiply bf16 as this CPU does it fastest; nothing where it has
    instructions for it. Weights and results stay bf16."""
    if HAS_BF16:
        return
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = WideLinear


class WideLinear(torch.nn.Linear):
    """`torch.nn.Linear` that multiplies bf16 rows with bf16 weights in fp32 and rounds once, as instructions for bf16
    do. Without those torch sums value by value: seven to twenty times as long, but for the few rows of one token."""

    def forward(self, input: Tensor) -> Tensor:
        rows, weight, bias = math.prod(input.shape[:-1]), self.weight, self.bias
        is_bf16 = input.dtype is weight.dtype is torch.bfloat16
        if not is_bf16 or input.device.type != "cpu" or rows < FEWEST_WIDENED or torch.is_grad_enabled():
            return super().forward(input)
        return F.linear(input.float(), weight.float(), None if bias is None else bias.float()).bfloat16()


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


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x.contiguous(), weight, None, "none", [], "")
    return out
