"""Attention of DFlash's blocks: a prefix of the context and the block's own slots, under one softmax.

Blocks are worked on in groups of neighbours, each over the slice of context that any of its blocks sees and the slots
of the group, so the largest mask is that of one group and memory is linear in the context. With a window W a slot sees
only keys closer than W positions, before and after (ModelOpt ``use_swa``, TensorRT-LLM); ``causal`` hides from a slot
those after it.

Shapes: N blocks, B slots of a block, S slots queried (S <= B), C context rows, Q query heads, G key heads, E head
width, J keys of a group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.attention.ttt import attend, for_kernel
from trainer.slots import Blocks

GROUP_ROWS = 64
"""Query rows of a group on CPU: more of them waste keys on neighbours, fewer waste calls."""
GROUP_ROWS_DEVICE = 4096
FEWEST_FILLED = 64
"""Rows and keys of a group on a device are multiples of it."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class Sight:
    """What is attended from where: queries of slots first…last of every block, B slots wide; see ``window`` above.
    Layers with one sight share the work of finding its groups and masks."""

    blocks: Blocks
    block_size: int
    first: int
    last: int
    window: int | None = None
    causal: bool = False

    @property
    def slots(self) -> int:
        """S."""
        return self.last - self.first

    @cached_property
    def cpu_groups(self) -> "list[tuple[_Group, Tensor | None]]":
        """Groups for the CPU kernel with their masks as numbers, 0 or -inf: fp32 [n, S or 1, J] of n blocks."""
        groups: list[tuple[_Group, Tensor | None]] = []
        for group in _groups(self, GROUP_ROWS):
            mask = allowed(group, self)
            groups.append((group, None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))))
        return groups


@dataclass(frozen=True)
class _Group:
    """Blocks first…last over context rows begin…end."""

    first: int
    last: int
    begin: int
    end: int


def block_attention(q: Tensor, context: tuple[Tensor, Tensor], block_kv: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
    """Attended values [N*S, Q, E]; scores are divided by sqrt(E). q [N*S, Q, E]; ``context`` keys and values [C, G, E];
    ``block_kv`` those of every slot [N*B, G, E]."""
    # Under autocast the head norms leave queries and keys in fp32 beside values in half precision.
    dtype = for_kernel(block_kv[1]).dtype
    q, *rest = (x.to(dtype) for x in (q, *context, *block_kv))
    context, block_kv = (rest[0], rest[1]), (rest[2], rest[3])
    if q.device.type == "cpu":
        out: Tensor = _BlockAttention.apply(q, *context, *block_kv, sight)
        return out
    return attend_groups(q, context, block_kv, sight)


def attend_groups(q: Tensor, context: tuple[Tensor, Tensor], block_kv: tuple[Tensor, Tensor], sight: Sight) -> Tensor:
    """``block_attention`` by torch's own attention and autograd, on any device."""
    out = []
    for group in _groups(sight, GROUP_ROWS_DEVICE):
        pairs, rows = zip(context, block_kv, strict=True), _block_rows(group, sight)
        k, v = (torch.cat([before[group.begin : group.end], inside[rows]]) for before, inside in pairs)
        queries = q[group.first * sight.slots : group.last * sight.slots]
        mask = allowed(group, sight)
        if mask is None:
            mask = torch.ones(1, 1, len(k), dtype=torch.bool, device=q.device)
        out.append(_attend_padded(queries, k, v, mask.expand(-1, sight.slots, -1).flatten(0, 1)))
    return torch.cat(out) if out else q[:0]


def _attend_padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attended values [m, Q, E] of queries [m, Q, E] over keys and values [J, G, E]; mask bool [m, J]."""
    rows, keys = (_few_lengths(len(x)) - len(x) for x in (q, k))
    # A row that only fills up sees every key: one that sees none has no softmax.
    mask = F.pad(F.pad(mask, (0, keys)), (0, 0, 0, rows), value=True)
    queries, k, v = (
        F.pad(x, (0, 0, 0, 0, 0, more)).transpose(0, 1)[None] for x, more in ((q, rows), (k, keys), (v, keys))
    )
    return attend(queries, k, v, mask)[0].transpose(0, 1)[: len(q)]


def _few_lengths(count: int) -> int:
    """The next length of three significant bits. cuDNN plans for each pair of lengths that it has not seen, in tens of
    milliseconds (H200, torch 2.11)."""
    step = max(FEWEST_FILLED, 1 << max(0, count.bit_length() - 3))
    return -(-count // step) * step


def allowed(group: _Group, sight: Sight) -> Tensor | None:
    """Which keys the blocks of a group see, bool [blocks, S, J], [blocks, 1, J] where all slots see the same; None for
    all."""
    count, blocks = group.last - group.first, sight.blocks
    if count == 1 and sight.window is None and not sight.causal:
        return None
    device = blocks.begin.device
    begin, end = (x[group.first : group.last, None, None] for x in (blocks.begin, blocks.end))
    row = torch.arange(group.begin, group.end, device=device)
    before = (row >= begin) & (row < end)
    block = torch.arange(count, device=device)
    inside = (block[:, None] == block)[:, None, :, None].expand(-1, -1, -1, sight.block_size)
    slot = torch.arange(sight.first, sight.last, device=device)[:, None]
    behind = slot - torch.arange(sight.block_size, device=device)
    if sight.causal:
        inside = inside & (behind >= 0)[:, None]
    if sight.window is not None:
        before = before & (end + slot - row < sight.window)
        inside = inside & (behind.abs() < sight.window)[:, None]
    before = before.expand(-1, inside.shape[1], -1)
    return torch.cat([before, inside.flatten(2)], -1)


def _groups(sight: Sight, limit: int) -> Iterator[_Group]:
    """Neighbouring blocks of one document, at most ``limit`` query rows of them."""
    bounds, most = sight.blocks.bounds, max(1, limit // sight.slots)
    first = 0
    for at in range(1, len(bounds) + 1):
        if at < len(bounds) and at - first < most and bounds[at][0] == bounds[first][0]:
            continue
        begin, end = bounds[first]
        if sight.window is not None:
            begin = max(begin, end + sight.first - sight.window + 1)
        last_end = bounds[at - 1][1]
        yield _Group(first, at, min(begin, last_end), last_end)
        first = at


def _block_rows(group: _Group, sight: Sight) -> slice:
    return slice(group.first * sight.block_size, group.last * sight.block_size)


class _BlockAttention(torch.autograd.Function):
    """The CPU kernel group by group; its backward is exact given the output and the log-sum-exp of the softmax. Queries
    are laid out [G, N, Q/G, S, E], so that those of a group are one slice and share their keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor, sight: Sight
    ) -> Tensor:
        queries = _by_block(q, block_k.shape[1], sight)
        context, block_kv = (
            (_heads_first(k), _heads_first(v)) for k, v in ((context_k, context_v), (block_k, block_v))
        )
        out, logs = torch.empty_like(queries), []
        for group, mask in sight.cpu_groups:
            rows = queries[:, group.first : group.last]
            keys, values = _joined(group, sight, context, block_kv)
            attended, lse = _flash(_flat(rows), keys, values, 0.0, False, attn_mask=_spread(mask, rows))
            out[:, group.first : group.last] = attended[0].view_as(rows)
            logs.append(lse)
        ctx.sight = sight
        ctx.save_for_backward(queries, *context, *block_kv, out, *logs)
        return _by_row(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: activation checkpointing refuses a second time.
        saved = ctx.saved_tensors
        queries, *kv, out = saved[:6]
        sight: Sight = ctx.sight
        context, block_kv = tuple(kv[:2]), tuple(kv[2:])
        do, dq = _by_block(grads[0], queries.shape[0], sight), torch.empty_like(queries)
        d_context, d_block = [torch.zeros_like(x) for x in context], [torch.empty_like(x) for x in block_kv]
        for (group, mask), lse in zip(sight.cpu_groups, saved[6:], strict=True):
            members, size = slice(group.first, group.last), group.end - group.begin
            keys, values = _joined(group, sight, context, block_kv)
            of_do, of_q, of_out = (_flat(x[:, members]) for x in (do, queries, out))
            wide = _spread(mask, queries[:, members])
            d_queries, *d_keys_values = _flash_backward(
                of_do, of_q, keys, values, of_out, lse, 0.0, False, attn_mask=wide
            )
            dq[:, members] = d_queries[0].view_as(dq[:, members])
            for d, of_context, of_block in zip(d_keys_values, d_context, d_block, strict=True):
                of_context[:, group.begin : group.end] += d[0, :, :size]
                of_block[:, _block_rows(group, sight)] = d[0, :, size:]
        return _by_row(dq), *(x.transpose(0, 1) for x in (*d_context, *d_block)), None


def _by_block(x: Tensor, kv_heads: int, sight: Sight) -> Tensor:
    """[N*S, Q, E] as [G, N, Q/G, S, E]."""
    return x.view(-1, sight.slots, kv_heads, x.shape[1] // kv_heads, x.shape[2]).permute(2, 0, 3, 1, 4).contiguous()


def _by_row(x: Tensor) -> Tensor:
    """The inverse of ``_by_block``."""
    return x.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """Rows [R, G, E] as [G, R, E]."""
    return x.transpose(0, 1).contiguous()


def _flat(x: Tensor) -> Tensor:
    """Blocks [G, n, Q/G, S, E] as the kernel's [1, G, rows, E], a view."""
    return x.flatten(1, 3)[None]


def _joined(group: _Group, sight: Sight, context: tuple[Tensor, ...], block_kv: tuple[Tensor, ...]) -> list[Tensor]:
    """Keys and values [1, G, J, E] of a group."""
    pairs = zip(context, block_kv, strict=True)
    return [torch.cat([c[:, group.begin : group.end], o[:, _block_rows(group, sight)]], 1)[None] for c, o in pairs]


def _spread(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """A mask of blocks [n, S or 1, J] for queries [G, n, Q/G, S, E], as the kernel takes it: [1, 1, rows, J]."""
    if mask is None:
        return None
    return mask.to(rows.dtype)[:, None].expand(-1, *rows.shape[2:4], -1).flatten(0, 2)[None, None]
