"""DFlash stated once more with one dense mask and torch's plain operations, with nothing shared with the trainer."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Heads [rows, heads, E] rotated to positions [rows]: pairs (j, j + E/2) as complex numbers."""
    half = x.shape[-1] // 2
    rates = torch.tensor([theta ** (-2 * j / x.shape[-1]) for j in range(half)], dtype=x.dtype)
    angle = (positions[:, None].to(x.dtype) * rates)[:, None]
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def dense_mask(
    documents: list[int], anchors: list[int], block: int, window: int | None, causal: bool = False
) -> Tensor:
    """bool [N*B, T + N*B], entry by entry."""
    tokens, slots = len(documents), len(anchors) * block
    mask = torch.zeros(slots, tokens + slots, dtype=torch.bool)
    for row in range(slots):
        anchor, place = anchors[row // block], anchors[row // block] + row % block
        for key in range(tokens):
            near = window is None or abs(place - key) < window
            mask[row, key] = key < anchor and documents[key] == documents[anchor] and near
        for key in range(slots):
            near = window is None or abs(row % block - key % block) < window
            mask[row, tokens + key] = row // block == key // block and near and not (causal and key > row)
    return mask


def convolved(x: Tensor, w: dict[str, Tensor], name: str, side: int, block: int, source: Tensor) -> Tensor:
    """Rows [N*B, D] of blocks mixed with those before them, tap by tap; their kernels follow from ``source``."""
    base = w[f"{name}.base_kernel"][side]
    taps, width = base.shape
    delta = (source @ w[f"{name}.kernel_projection.weight"].T).view(len(x), 2, taps, -1)[:, side]
    rows = []
    for row in range(len(x)):
        kernels = base + delta[row].repeat_interleave(width // delta.shape[-1], -1)
        rows.append(sum(kernels[tap] * x[row - tap] for tap in range(min(taps, row % block + 1))))
    return torch.stack(rows)


def plain_states(
    w: dict[str, Tensor], table: Tensor, pack: dict[str, list[int]], aux: Tensor, anchors: list[int], how: dict
) -> Tensor:
    """States after the final norm of every slot [N, B, D].

    w: checkpoint names, with DFlash2's convolutions or without. table: embeddings [V, D]. pack: ids, positions,
    document. aux [L, T, D]. how: block, mask_id, heads, kv_heads, eps, theta, and of each layer window and whether it
    is causal (sights).
    """
    block, eps, heads, kv_heads = how["block"], how["eps"], how["heads"], how["kv_heads"]
    context = normalised(torch.cat(list(aux), -1) @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    ids = [token for a in anchors for token in [pack["ids"][a], *[how["mask_id"]] * (block - 1)]]
    own = torch.tensor([pack["positions"][a] + k for a in anchors for k in range(block)])
    everywhere = torch.cat([torch.tensor(pack["positions"]), own])
    x = table[torch.tensor(ids)].to(context.dtype)
    for i, (window, causal) in enumerate(how["sights"]):
        mask = dense_mask(pack["document"], anchors, block, window, causal)
        p = f"layers.{i}."
        normed = h = normalised(x, w[p + "input_layernorm.weight"], eps)
        mixes = p + "attention_conv.base_kernel" in w
        if mixes:
            h = convolved(h, w, p + "attention_conv", 0, block, normed)
        seen = torch.cat([context, h])
        q = (h @ w[p + "self_attn.q_proj.weight"].T).unflatten(-1, (heads, -1))
        k = (seen @ w[p + "self_attn.k_proj.weight"].T).unflatten(-1, (kv_heads, -1))
        v = (seen @ w[p + "self_attn.v_proj.weight"].T).unflatten(-1, (kv_heads, -1))
        q = turned(normalised(q, w[p + "self_attn.q_norm.weight"], eps), own, how["theta"])
        k = turned(normalised(k, w[p + "self_attn.k_norm.weight"], eps), everywhere, how["theta"])
        mixed = []
        for n in range(heads):
            g = n // (heads // kv_heads)
            scores = (q[:, n] @ k[:, g].T / math.sqrt(q.shape[-1])).masked_fill(~mask, float("-inf"))
            mixed.append(scores.softmax(-1) @ v[:, g])
        out = torch.cat(mixed, -1) @ w[p + "self_attn.o_proj.weight"].T
        x = x + (convolved(out, w, p + "attention_conv", 1, block, normed) if mixes else out)
        normed = m = normalised(x, w[p + "post_attention_layernorm.weight"], eps)
        if mixes:
            m = convolved(m, w, p + "mlp_conv", 0, block, normed)
        gate, up = m @ w[p + "mlp.gate_proj.weight"].T, m @ w[p + "mlp.up_proj.weight"].T
        out = (F.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
        x = x + (convolved(out, w, p + "mlp_conv", 1, block, normed) if mixes else out)
    return normalised(x, w["norm.weight"], eps).unflatten(0, (len(anchors), block))


def plain_loss(
    logits: Tensor, anchors: list[int], pack: dict[str, list[int]], labels: dict[int, int], teacher: Tensor, how: dict
) -> tuple[Tensor, list[Tensor]]:
    """The loss and per slot 1…B-1 the sum over taught slots.

    logits [N, B, U]; labels: draft id by row, absent where not to be taught; teacher [T, U] target probabilities. how:
    gamma, alpha (None for the decay), distil, by_count.
    """
    weighted, total, sums = [], [], [torch.zeros(()).double() for _ in range(logits.shape[1] - 1)]
    for n, anchor in enumerate(anchors):
        losses: dict[int, Tensor] = {}
        of_label: dict[int, float] = {}
        for k in range(1, logits.shape[1]):
            row = anchor + k
            inside = row < len(pack["ids"]) and pack["document"][row] == pack["document"][anchor]
            if inside and pack["mask"][row] and row in labels:
                log_p = logits[n, k].log_softmax(0)
                soft = -(teacher[row - 1] * log_p).sum() if how["distil"] else torch.zeros(())
                of_label[k] = math.exp(float(log_p[labels[row]].detach()))
                losses[k] = -(1 - how["distil"]) * log_p[labels[row]] + how["distil"] * soft
                sums[k - 1] = sums[k - 1] + losses[k].detach()
        for k, loss in losses.items():
            if how["alpha"] is None:
                weight = math.exp(-(k - 1) / how["gamma"])
            else:
                chance = {i: q * (1 - how["alpha"]) + how["alpha"] for i, q in of_label.items()}
                weight = sum(math.prod(chance[i] for i in losses if i <= m) for m in losses if m >= k)
            weighted.append(weight * loss)
            total.append(1.0 if how["by_count"] else weight)
    return torch.stack(weighted).sum() / sum(total), sums
