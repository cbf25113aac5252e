"""Context parallelism: n ranks share the sequence of a pack, for samples too long for one.

A pack is cut into 2n pieces, of which rank r takes pieces r and 2n-1-r, so that every rank sees as much of the causal
prefix. A rank's share is a pack like any other, in which each piece is followed by the few tokens that teach its last
slots (its halo). Only two things differ: slots in the halo belong to another rank and are not taught here, and the keys
and values of step 0 are gathered over the ranks before the attention. Later steps attend within a slot, so they are
local. The gradient of what was gathered is reduce-scattered: loss and gradients equal those of the whole pack.

Shapes: T tokens of the pack, S of this rank's share, R final rows, G key heads, E head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from trainer.objectives.shift import Run, document_starts
from trainer.scale.group import Group, contact


@dataclass(frozen=True)
class Context:
    """The ``size`` ranks that share packs with this one, which is number ``index`` among them."""

    index: int
    size: int
    peers: Any = None


@dataclass(eq=False)
class WholePack:
    """How a share lies in its pack. rows int64 [S]: pack row of every token of the share. own int64: tokens of the
    share that are this rank's. source int64 [T]: where each row of the pack lies among the gathered own tokens, of
    which every rank sends ``longest``. starts int64 [T]: row at which each row's document starts."""

    context: Context
    rows: Tensor
    own: Tensor
    source: Tensor
    longest: int
    starts: Tensor


@dataclass(eq=False)
class PackShare(PackedBatch):
    """One rank's share of a pack. ``document`` tells pieces apart as well as samples; ``tokens`` counts own ones."""

    whole: WholePack | None = None

    @property
    def tokens(self) -> int:
        return int(self._whole.own.shape[0])

    @property
    def _whole(self) -> WholePack:
        assert self.whole is not None
        return self.whole


def meet(size: int, group: Group) -> Context | None:
    """The context of this rank: consecutive ranks share packs. None where nothing is shared.

    Raises:
        ConfigError: ``size`` does not divide the number of ranks.
    """
    ranks = group.rank.world_size
    if ranks % size:
        raise ConfigError(
            f"train.context_parallel={size} does not divide {ranks} ranks",
            kind="context-parallel",
            hint=f"torchrun --nproc-per-node {size * max(1, ranks // size)} … or train.context_parallel=1",
        )
    if size == 1:
        return None
    with contact():
        # Every rank makes every group, in the same order, as torch.distributed asks.
        groups = [distributed.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return Context(group.rank.rank % size, size, groups[group.rank.rank // size])


def share_of(batch: PackedBatch, context: Context, halo: int) -> PackShare:
    """This rank's share of a pack that all ranks of the context hold; ``halo`` tokens follow each piece."""
    tokens, device = batch.input_ids.shape[0], batch.input_ids.device
    cuts = [tokens * piece // (2 * context.size) for piece in range(2 * context.size + 1)]
    owners = [_pieces_of(rank, context.size) for rank in range(context.size)]
    spans = [(cuts[piece], cuts[piece + 1]) for piece in owners[context.index]]
    reach = [(begin, min(end + halo, tokens) if end > begin else begin) for begin, end in spans]
    rows = torch.cat([torch.arange(begin, end, device=device) for begin, end in reach])
    piece = torch.cat([torch.full((end - begin,), i, device=device) for i, (begin, end) in enumerate(reach)])
    own = torch.cat([(rows >= begin) & (rows < end) & (piece == i) for i, (begin, end) in enumerate(spans)]).view(2, -1)
    longest = max(sum(cuts[p + 1] - cuts[p] for p in mine) for mine in owners)
    source = torch.empty(tokens, dtype=torch.int64, device=device)
    for rank, mine in enumerate(owners):
        at = rank * longest
        for p in mine:
            source[cuts[p] : cuts[p + 1]] = torch.arange(at, at + cuts[p + 1] - cuts[p], device=device)
            at += cuts[p + 1] - cuts[p]
    whole = WholePack(context, rows, torch.nonzero(own.any(0))[:, 0], source, longest, document_starts(batch.document))
    return _taken(batch, reach, piece, whole)


def _pieces_of(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def _taken(batch: PackedBatch, reach: list[tuple[int, int]], piece: Tensor, whole: WholePack) -> PackShare:
    keys = torch.stack([piece, batch.document[whole.rows]], 1)
    documents, inverse = torch.unique_consecutive(keys, dim=0, return_inverse=True)
    picked, final_rows, offset = [], [], 0
    for begin, end in reach:
        inside = torch.nonzero((batch.final_rows >= begin) & (batch.final_rows < end))[:, 0]
        picked.append(inside)
        final_rows.append(batch.final_rows[inside] - begin + offset)
        offset += end - begin
    final = torch.cat(picked)
    topk = batch.topk
    return PackShare(
        input_ids=batch.input_ids[whole.rows],
        loss_mask=batch.loss_mask[whole.rows],
        positions=batch.positions[whole.rows],
        document=inverse,
        aux=torch.cat([batch.aux[:, begin:end] for begin, end in reach], 1),
        final=batch.final[final] if topk is None else batch.final,
        final_rows=torch.cat(final_rows),
        sample_ids=[batch.sample_ids[int(i)] for i in documents[:, 1]],
        topk=None if topk is None else topk.at(final),
        whole=whole,
    )


def own_slots(batch: PackedBatch) -> Tensor | None:
    """Which tokens of a share are this rank's, bool [S]; None for a pack that is not shared."""
    if not isinstance(batch, PackShare) or batch.whole is None:
        return None
    own = torch.zeros_like(batch.loss_mask)
    own[batch.whole.own] = True
    return own


def whole_prefix(
    batch: PackedBatch, k0: Tensor, v0: Tensor, runs: tuple[Run, ...]
) -> tuple[Tensor, Tensor, tuple[Run, ...]]:
    """Keys and values of step 0 over the whole pack [T, G, E], and the runs in its rows.

    k0, v0 [S, G, E] of a share; everything comes back as it is for a pack that is not shared. Called by every rank of
    the context equally often.
    """
    if not isinstance(batch, PackShare) or batch.whole is None:
        return k0, v0, runs
    gathered: Tensor = _Gather.apply(torch.cat([k0, v0], -1), batch.whole)
    rows, starts = batch.whole.rows.tolist(), batch.whole.starts.tolist()
    there = tuple(Run(starts[rows[r.begin]], rows[r.begin], rows[r.end - 1] + 1, r.at) for r in runs)
    keys, values = gathered.chunk(2, -1)
    return keys, values, there


class _Gather(torch.autograd.Function):
    """Own rows of every rank [S, …] in the order of the pack [T, …]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: WholePack) -> Tensor:
        ctx.whole, ctx.shape = whole, x.shape
        mine = x.new_zeros(whole.longest, *x.shape[1:])
        mine[: len(whole.own)] = x[whole.own]
        everyone = x.new_empty(whole.context.size * whole.longest, *x.shape[1:])
        with contact():
            distributed.all_gather(list(everyone.chunk(whole.context.size)), mine, group=whole.context.peers)
        return everyone[whole.source]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole: WholePack = ctx.whole
        everyone = grads[0].new_zeros(whole.context.size * whole.longest, *ctx.shape[1:])
        everyone[whole.source] = grads[0]
        mine = grads[0].new_empty(whole.longest, *ctx.shape[1:])
        with contact():
            distributed.reduce_scatter(mine, list(everyone.chunk(whole.context.size)), group=whole.context.peers)
        out = grads[0].new_zeros(ctx.shape)
        out[whole.own] = mine[: len(whole.own)]
        return out, None
