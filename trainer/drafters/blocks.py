"""Blocks that drafters share: norm, rotary embedding, gated MLP, attention projections, key-value cache.

Shapes: T tokens, N query heads, G key heads, E head width, H drafter width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hiddenstore.products import Linear
from trainer.config import DrafterConfig
from trainer.drafters.rope import RopeScaling, frequencies


class RMSNorm(nn.Module):
    """x / sqrt(mean x² + eps) * weight over the last axis, in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _RmsNorm.apply(x, self.weight, self.eps)
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
    """Half-split rotary tables for positions 0…length-1, made once and indexed.

    cos, sin fp32 [length, E/2]; angle = position * theta^(-2j/E) (Llama layout), stretched where the settings say so
    (`trainer.drafters.rope`).
    """

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

    def __init__(self, width_in: int, width_out: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = Linear(width_in, heads * head_dim)
        self.k_proj = Linear(width_in, kv_heads * head_dim)
        self.v_proj = Linear(width_in, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, width_out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, E], k and v [T, G, E] of inputs [T, width_in]."""
        each = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in each)
        return q, k, v

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Joint projection [T, (N+2G)E] as q [T, N, E], k and v [T, G, E]."""
        sizes = [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        q, k, v = qkv.split(sizes, -1)
        return (
            q.unflatten(-1, (self.heads, self.head_dim)),
            k.unflatten(-1, (self.kv_heads, self.head_dim)),
            v.unflatten(-1, (self.kv_heads, self.head_dim)),
        )


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
    """A Llama layer; the attention between its projections and ``finish`` is the drafter's. ``width_in``: columns it
    reads, where the drafter joins something to its input."""

    def __init__(self, config: DrafterConfig, width_in: int | None = None) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width_in or width, width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Layer output [A, H] from its residual [A, H] and attended values [A, N, E]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class KVCache:
    """Keys and values of one growing sequence, for decoding: [1, G, length, E] a layer, storage grown by doubling.

    ``visible`` bool [n, length + n]: what the next n rows may read, themselves included; None where they are a chain.
    """

    def __init__(self) -> None:
        self.visible: Tensor | None = None
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Positions held by layer 0, which a forward appends to first."""
        return self._lengths.get(0, 0)

    def append(self, k: Tensor, v: Tensor, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Add k, v [n, G, E]; returns everything so far as views [1, G, length, E]."""
        begin = self._lengths.get(layer, 0)
        end = begin + k.shape[0]
        if layer not in self._k or end > self._k[layer].shape[2]:
            self._k[layer] = _grown(self._k.get(layer), k, begin, end)
            self._v[layer] = _grown(self._v.get(layer), v, begin, end)
        self._k[layer][0, :, begin:end] = k.transpose(0, 1)
        self._v[layer][0, :, begin:end] = v.transpose(0, 1)
        self._lengths[layer] = end
        return self._k[layer][:, :, :end], self._v[layer][:, :, :end]

    def crop(self, length: int) -> None:
        """Forget everything from position ``length`` on, in every layer."""
        self._lengths = {layer: min(held, length) for layer, held in self._lengths.items()}


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int = 0) -> Tensor:
    """Add k, v [n, G, E] to the cache and attend to what its rows may read with q [n, N, E]: [n, N, E]."""
    keys, values = cache.append(k, v, layer)
    n, held = q.shape[0], keys.shape[2]
    mask = cache.visible
    if mask is None and n > 1:
        mask = torch.ones(n, held, dtype=torch.bool, device=q.device).tril(held - n)
    attended = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)


def _grown(old: Tensor | None, like: Tensor, held: int, end: int) -> Tensor:
    new = like.new_empty(1, like.shape[1], max(64, 2 * end), like.shape[2])
    if old is not None:
        new[:, :, :held] = old[:, :, :held]
    return new


@dataclass(frozen=True)
class Piece:
    """Rows ``begin…begin+length`` of a source, laid out at ``at`` of a gather."""

    begin: int
    length: int
    at: int


def gather_pieces(x: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Rows of x [T, …] named by consecutive pieces, end to end; a view when there is only one.

    Cheaper than an index: forward and backward are slice copies.
    """
    if len(pieces) == 1:
        return x.narrow(0, pieces[0].begin, pieces[0].length)
    out: Tensor = _GatherPieces.apply(x, tuple(pieces))
    return out


class _GatherPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
        ctx.pieces, ctx.shape = pieces, x.shape
        return torch.cat([x[p.begin : p.begin + p.length] for p in pieces]) if pieces else x[:0].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out = grads[0].new_zeros(ctx.shape)
        for p in ctx.pieces:
            out[p.begin : p.begin + p.length] += grads[0][p.at : p.at + p.length]
        return out, None
