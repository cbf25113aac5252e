"""Context parallelism: n ranks share the sequence of a pack, for samples too long for one.

A pack is cut into 2n pieces, of which rank r takes pieces r and 2n-1-r, so that every rank sees as much of the causal
prefix. A rank's shard is a pack like any other, in which each piece is followed by the few tokens that teach its last
slots (its halo). Only two things differ: slots in the halo belong to another rank and are not taught here, and the keys
and values of step 0 are gathered over the ranks before the attention. Later steps attend within a slot, so they are
local. The gradient of what was gathered is reduce-scattered: loss and gradients equal those of the whole pack.

Shapes: T tokens of the pack, S of this rank's shard, R final rows, G key heads, E head width.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from trainer.parallel.group import ProcessGroup, peer_errors
from trainer.slots import SlotRange, document_starts


@dataclass(frozen=True)
class ContextGroup:
    """The ``size`` ranks that share packs with this one, which is number ``index`` among them."""

    index: int
    size: int
    peers: Any = None


@dataclass(eq=False)
class ShardMap:
    """How a shard lies in its pack. rows int64 [S]: pack row of every token of the shard. local int64: tokens of the
    shard that are not halo. source int64 [T]: where each row of the pack lies among the gathered local tokens, of which
    every rank sends ``longest``. starts int64 [T]: row at which each row's document starts."""

    context: ContextGroup
    rows: Tensor
    local: Tensor
    source: Tensor
    longest: int
    starts: Tensor


@dataclass(eq=False)
class PackShard(PackedBatch):
    """A rank's shard of a pack. ``document`` tells pieces apart as well as samples; ``tokens`` leaves the halo out."""

    shard_map: ShardMap = field(kw_only=True)

    @property
    def tokens(self) -> int:
        return int(self.shard_map.local.shape[0])


def context_group(size: int, group: ProcessGroup) -> ContextGroup | None:
    """The group of this rank: consecutive ranks share packs. None where nothing is shared. Raises ConfigError: ``size``
    does not divide the number of ranks."""
    ranks = group.rank.world_size
    if ranks % size:
        raise ConfigError(
            f"train.context_parallel={size} does not divide {ranks} ranks",
            kind=Kind.OPTION_INVALID,
            hint=f"torchrun --nproc-per-node {size * max(1, ranks // size)} … or train.context_parallel=1",
        )
    if size == 1:
        return None
    with peer_errors():
        # Every rank makes every group, in the same order, as torch.distributed asks.
        members = (list(range(first, first + size)) for first in range(0, ranks, size))
        groups = [distributed.new_group(ranks_of_one, timeout=group.timeout) for ranks_of_one in members]
    return ContextGroup(group.rank.rank % size, size, groups[group.rank.rank // size])


def shard_of(batch: PackedBatch, context: ContextGroup, halo: int) -> PackShard:
    """This rank's shard of a pack that all ranks of the context have; ``halo`` tokens follow each piece."""
    tokens, device = batch.input_ids.shape[0], batch.input_ids.device
    cuts = [tokens * piece // (2 * context.size) for piece in range(2 * context.size + 1)]
    owners = [(rank, 2 * context.size - 1 - rank) for rank in range(context.size)]
    spans = [(cuts[piece], cuts[piece + 1]) for piece in owners[context.index]]
    reach = [(begin, min(end + halo, tokens) if end > begin else begin) for begin, end in spans]
    rows = torch.cat([torch.arange(begin, end, device=device) for begin, end in reach])
    piece = torch.cat([torch.full((end - begin,), i, device=device) for i, (begin, end) in enumerate(reach)])
    local = torch.stack([(rows >= begin) & (rows < end) & (piece == i) for i, (begin, end) in enumerate(spans)])
    longest = max(sum(cuts[p + 1] - cuts[p] for p in local_rows) for local_rows in owners)
    source = torch.empty(tokens, dtype=torch.int64, device=device)
    for rank, local_rows in enumerate(owners):
        at = rank * longest
        for p in local_rows:
            source[cuts[p] : cuts[p + 1]] = torch.arange(at, at + cuts[p + 1] - cuts[p], device=device)
            at += cuts[p + 1] - cuts[p]
    shard_map = ShardMap(
        context, rows, torch.nonzero(local.any(0))[:, 0], source, longest, document_starts(batch.document)
    )
    return _cut(batch, reach, piece, shard_map)


def _cut(batch: PackedBatch, reach: list[tuple[int, int]], piece: Tensor, shard_map: ShardMap) -> PackShard:
    keys = torch.stack([piece, batch.document[shard_map.rows]], 1)
    documents, inverse = torch.unique_consecutive(keys, dim=0, return_inverse=True)
    picked, final_rows, offset = [], [], 0
    for begin, end in reach:
        inside = torch.nonzero((batch.final_rows >= begin) & (batch.final_rows < end))[:, 0]
        picked.append(inside)
        final_rows.append(batch.final_rows[inside] - begin + offset)
        offset += end - begin
    final = torch.cat(picked)
    topk = batch.topk
    return PackShard(
        input_ids=batch.input_ids[shard_map.rows],
        loss_mask=batch.loss_mask[shard_map.rows],
        positions=batch.positions[shard_map.rows],
        document=inverse,
        aux=torch.cat([batch.aux[:, begin:end] for begin, end in reach], 1),
        final=batch.final[final] if topk is None else batch.final,
        final_rows=torch.cat(final_rows),
        sample_ids=[batch.sample_ids[int(i)] for i in documents[:, 1]],
        topk=None if topk is None else topk.at(final),
        shard_map=shard_map,
    )


def local_slots(batch: PackedBatch) -> Tensor | None:
    """Which tokens of a shard are not halo, bool [S]; None for a pack that is not sharded."""
    if not isinstance(batch, PackShard):
        return None
    local = torch.zeros_like(batch.loss_mask)
    local[batch.shard_map.local] = True
    return local


def gather_prefix(
    batch: PackedBatch, k0: Tensor, v0: Tensor, ranges: tuple[SlotRange, ...]
) -> tuple[Tensor, Tensor, tuple[SlotRange, ...]]:
    """Keys and values of step 0 over the pack [T, G, E], and the ranges in its rows. k0, v0 [S, G, E] of a shard;
    everything comes back as it is for a pack that is not sharded. Called by every rank of the context equally often."""
    if not isinstance(batch, PackShard):
        return k0, v0, ranges
    gathered: Tensor = _Gather.apply(torch.cat([k0, v0], -1), batch.shard_map)
    rows, starts = batch.shard_map.rows.tolist(), batch.shard_map.starts.tolist()
    pack_ranges = tuple(SlotRange(starts[rows[r.begin]], rows[r.begin], rows[r.end - 1] + 1, r.at) for r in ranges)
    keys, values = gathered.chunk(2, -1)
    return keys, values, pack_ranges


class _Gather(torch.autograd.Function):
    """Local rows of every rank [S, …] in the order of the pack [T, …]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shard_map: ShardMap) -> Tensor:
        ctx.shard_map, ctx.shape = shard_map, x.shape
        local_rows = x.new_zeros(shard_map.longest, *x.shape[1:])
        local_rows[: len(shard_map.local)] = x[shard_map.local]
        everyone = x.new_empty(shard_map.context.size * shard_map.longest, *x.shape[1:])
        with peer_errors():
            distributed.all_gather(
                list(everyone.chunk(shard_map.context.size)), local_rows, group=shard_map.context.peers
            )
        return everyone[shard_map.source]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard_map: ShardMap = ctx.shard_map
        everyone = grads[0].new_zeros(shard_map.context.size * shard_map.longest, *ctx.shape[1:])
        everyone[shard_map.source] = grads[0]
        local_rows = grads[0].new_empty(shard_map.longest, *ctx.shape[1:])
        with peer_errors():
            distributed.reduce_scatter(
                local_rows, list(everyone.chunk(shard_map.context.size)), group=shard_map.context.peers
            )
        out = grads[0].new_zeros(ctx.shape)
        out[shard_map.local] = local_rows[: len(shard_map.local)]
        return out, None
