"""Blocks that drafters share: norm, rotary embedding, gated MLP, attention projections, key-value cache.

Shapes: T tokens, N query heads, G key heads, E head width, H drafter width.
"""

from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hiddenstore.targets.matmul import Linear
from trainer.attention.rope import RopeScaling, frequencies
from trainer.config import DrafterConfig


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + eps) * weight over the last axis, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class OnePlusNorm(RMSNorm):
    """As `RMSNorm`, times 1 + weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        # In fp32 at least: bf16 has no room for a small weight beside 1.
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return rms_norm(x, 1 + weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., W] / sqrt(mean x² + eps) * weight [W], in fp32; fp64 stays."""
    if x.is_cuda and x.dtype is not torch.float64:
        # torch has a kernel each way there.
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    """Keeps only x and one scalar per row for the backward; half the passes of the composed form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(torch.linalg.vector_norm(x32, dim=-1, keepdim=True).square_().div_(x.shape[-1]) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (x32 * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        g = grads[0]
        normed = x.to(g.dtype) * scale
        along = g * normed
        grad_weight = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        share = (along @ weight.to(along.dtype)).div_(x.shape[-1])[..., None]
        grad_x = (g * weight).addcmul_(normed, share, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class Rotary:
    """Half-split rotary tables for positions 0…length-1, made once and indexed. cos, sin fp32 [length, E/2]; angle =
    position * theta^(-2j/E) (Llama layout), stretched where the settings say so (`trainer.attention.rope`)."""

    def __init__(
        self, head_dim: int, theta: float, scaling: RopeScaling | None = None, max_position: int = 4096
    ) -> None:
        self._frequencies, self._factor = frequencies(head_dim, theta, scaling, max_position)
        self._cos = self._sin = torch.zeros(0, head_dim // 2)

    @classmethod
    def of(cls, config: DrafterConfig) -> Self:
        """The tables a drafter's settings ask for."""
        return cls(config.head_dim, config.rope_theta, config.rope_scaling, config.max_position)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, E/2] for integer positions [T]."""
        longest = int(positions.max()) + 1 if positions.numel() else 0
        if longest > self._cos.shape[0] or self._cos.device != positions.device:
            self._grow(max(longest, 2 * self._cos.shape[0]), positions.device)
        return self._cos[positions][:, None], self._sin[positions][:, None]

    def _grow(self, length: int, device: torch.device) -> None:
        places = torch.arange(length, device=device, dtype=torch.float32)[:, None]
        angle = places * self._frequencies.to(device)
        self._cos, self._sin = angle.cos() * self._factor, angle.sin() * self._factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, N, E] by tables [T, 1, E/2], keeping the dtype of x."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    left, right = out.chunk(2, -1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out


class Attention(nn.Module):
    """The four projections of grouped-query attention, without bias; the attention itself is the drafter's."""

    def __init__(self, config: DrafterConfig, width_in: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_width = self.heads * self.head_dim
        self.q_proj = Linear(width_in, self.q_width)
        self.k_proj = Linear(width_in, self.kv_heads * self.head_dim)
        self.v_proj = Linear(width_in, self.kv_heads * self.head_dim)
        self.o_proj = Linear(self.q_width, config.hidden_size)

    def queries(self, x: Tensor) -> Tensor:
        """[n, N, E] of inputs [n, width_in]."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [n, G, E] of inputs [n, width_in]."""
        shape = (-1, self.head_dim)
        return self.k_proj(x).unflatten(-1, shape), self.v_proj(x).unflatten(-1, shape)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, E], k and v [T, G, E] of inputs [T, width_in]."""
        return self.queries(x), *self.keys_values(x)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint projection [T, (N+2G)E] as q [T, N, E], k and v [T, G, E]."""
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split([self.heads, self.kv_heads, self.kv_heads], -2)
        return q, k, v


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gated: Tensor = _Gated.apply(self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(gated)
        return out


class _Gated(torch.autograd.Function):
    """silu(gate) * up; keeps the two and makes the rest again, a tensor less than the composed form."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


class DecoderLayer(nn.Module):
    """A Llama layer; the attention between its projections and ``finish`` is the drafter's. ``width_in``: columns its
    projections read, where the drafter joins something to the hidden."""

    attention: type[Attention] = Attention

    def __init__(self, config: DrafterConfig, width_in: int | None = None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm: nn.Module = RMSNorm(width, eps)
        self.self_attn = self.attention(config, width_in or width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Layer output [..., H] from its residual [..., H] and attended values [A, N, E] of its A rows."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1)).view_as(residual)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


R = TypeVar("R")


def recomputed(enabled: bool, layer: Callable[..., R], *args: Any) -> R:
    """``layer(*args)``; with ``enabled`` only its arguments and results stay until the backward. The layer must draw no
    random numbers, and must run no collective: ranks differ in how often they recompute."""
    if not enabled or not torch.is_grad_enabled():
        return layer(*args)
    out: R = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False)
    return out


def compile_blocks(model: nn.Module, backend: str = "inductor") -> int:
    """Compile the norms and MLPs of a drafter at their first use; how many there are."""
    blocks = [module for module in model.modules() if isinstance(module, (GatedMLP, RMSNorm))]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)
