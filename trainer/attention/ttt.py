"""Attention of EAGLE-3's training-time test: the causal prefix of step 0 plus the slot's own later steps.

At step i the slot t attends to the step-0 keys s <= t of its document and to its own keys of steps 1…i, under one
softmax. The prefix is a block-causal attention over each range of active slots; a slot's later keys are i more scores.
Both are merged through their log-sum-exp, so neither a T x iT mask nor repeated keys exist, and memory is linear in T.

The backward is exact: with L the joint log-sum-exp, o the joint output and delta = do·o, every key j obeys
p = exp(s_j - L), dv_j += p do, ds_j = p (do·v_j - delta). A flash backward given the joint L and o does just that.

For decoding: keys and values of a growing sequence, and attention over them.

Shapes: A active slots, T tokens, n new rows, N query heads, G key heads, S rows queried, J keys, E head width, K steps
so far.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.targets.attention import any_length
from trainer.slots import SlotRange

KEYS_AT_ONCE = 2.0
"""Packed keys of one call over the pack's tokens: every range of a document takes the document's prefix anew, and a
long conversation of a hundred turns would take fifty times its length."""
_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST_HEAD = 256


def fits(q: Tensor) -> bool:
    """Whether flash attention takes such queries [A, N, E]; others go through matrix products."""
    return q.is_cuda and q.dtype in _DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST_HEAD


def for_kernel(x: Tensor) -> Tensor:
    """Queries, keys or values as the attention takes them fastest: in half precision the backward of torch's CPU kernel
    takes several times as long."""
    return x.float() if x.device.type == "cpu" and x.dtype in _DTYPES else x


@dataclass(frozen=True, eq=False)
class Spans:
    """Where ranges lie in packed queries and keys: int32 [ranges+1] each. rows int64 [S]: token of every packed key."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    rows: Tensor


@lru_cache(maxsize=64)
def spans_of(ranges: tuple[SlotRange, ...], device: torch.device) -> Spans:
    """The same for every TTT step of a pack."""
    lengths, key_lengths = [r.length for r in ranges], [r.end - r.document for r in ranges]
    rows = torch.cat([torch.arange(r.document, r.end) for r in ranges])
    return Spans(
        _offsets(lengths, device), _offsets(key_lengths, device), max(lengths), max(key_lengths), rows.to(device)
    )


def attend_ranges(ranges: tuple[SlotRange, ...], q: Tensor, k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor]:
    """Output [A, N, E] and log-sum-exp fp32 [A, N] of q [A, N, E] over the prefixes in k0, v0 [T, G, E]."""
    results = []
    for chunk, at in _together(ranges, len(k0)):
        spans = spans_of(chunk, q.device)
        out, lse = Flash.forward(q[at], k0[spans.rows], v0[spans.rows], spans)
        results.append((out, lse.T))
    if len(results) == 1:
        return results[0]
    outs, sums = zip(*results, strict=True)
    return torch.cat(outs), torch.cat(sums)


def attend_ranges_backward(
    ranges: tuple[SlotRange, ...], do: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k0, v0, given do [A, N, E] and (q, k0, v0, out, lse) with the joint out and lse [A, N]."""
    q, k0, v0, out, lse = saved
    # Ranges of one document add up on the keys they share; in fp32, as an atomic sum over many must be.
    dk0, dv0 = (torch.zeros_like(k0, dtype=torch.float32) for _ in range(2))
    results = []
    for chunk, at in _together(ranges, len(k0)):
        spans = spans_of(chunk, q.device)
        packed = (q[at], k0[spans.rows], v0[spans.rows], out[at], lse[at].T.contiguous())
        dq, dk, dv = Flash.backward(do[at], packed, spans)
        dk0.index_add_(0, spans.rows, dk.float())
        dv0.index_add_(0, spans.rows, dv.float())
        results.append(dq)
    return results[0] if len(results) == 1 else torch.cat(results), dk0.to(k0.dtype), dv0.to(v0.dtype)


def _together(ranges: tuple[SlotRange, ...], tokens: int) -> Iterator[tuple[tuple[SlotRange, ...], slice]]:
    """Consecutive ranges for one call, as many as its keys allow and at least one, and their active slots."""
    chunk: list[SlotRange] = []
    keys = 0
    for one in ranges:
        keys += one.end - one.document
        if chunk and keys > KEYS_AT_ONCE * tokens:
            yield tuple(chunk), slice(chunk[0].at, chunk[-1].at + chunk[-1].length)
            chunk, keys = [], one.end - one.document
        chunk.append(one)
    yield tuple(chunk), slice(chunk[0].at, chunk[-1].at + chunk[-1].length)


class Flash:
    """torch's variable-length flash attention; lse is [N, A]."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        """q [A, N, E] over k, v [S, G, E]."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, spans.queries, spans.keys, spans.longest_query, spans.longest_key, 0.0, True, False
        )
        return out, lse

    @staticmethod
    def backward(do: Tensor, saved: tuple[Tensor, ...], spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
        """``saved``: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        # The two arguments of the random state are read only with dropout.
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        places = (spans.queries, spans.keys, spans.longest_query, spans.longest_key)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            do, q, k, v, out, lse, *places, 0.0, True, seed, torch.zeros((), dtype=torch.uint64, device=q.device)
        )
        return dq, dk, dv


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


ROW_BLOCK = 1024
LEAF = 160
"""Rows of a causal attention call on CPU; torch's kernel skips nothing below 512."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def ttt_attention(
    q: Tensor, k0: Tensor, v0: Tensor, later: Sequence[tuple[Tensor, Tensor]], ranges: Sequence[SlotRange]
) -> Tensor:
    """Attended values [A, N, E]. q [A, N, E]: this step's queries at the active slots. k0, v0 [T, G, E]: step 0, every
    token. ``later``: key and value [A, G, E] of steps 1…i at the active slots. ``ranges`` tell where the active slots
    lie in the pack. Scores are divided by sqrt(E)."""
    flat = [tensor for pair in later for tensor in pair]
    q, k0, v0, *flat = (for_kernel(x) for x in (q, k0, v0, *flat))
    out: Tensor = _TttAttention.apply(tuple(ranges), q, k0, v0, *flat)
    return out


class _TttAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranges: tuple[SlotRange, ...], q: Tensor, k0: Tensor, v0: Tensor, *later: Tensor) -> Tensor:
        grouped = q.view(q.shape[0], k0.shape[1], q.shape[1] // k0.shape[1], q.shape[2])
        out = torch.empty_like(grouped)
        lse = torch.empty(grouped.shape[:3], dtype=_score_dtype(q), device=q.device)
        if ranges and fits(q):
            flash_out, flash_lse = attend_ranges(ranges, q, k0, v0)
            out, lse = flash_out.view_as(grouped), flash_lse.reshape(lse.shape)
        else:
            prefix = (_shared(x, grouped.shape[2]) for x in (k0, v0))
            heads = (_heads_first(grouped), *prefix, _heads_first(out), _heads_first(lse))
            for slot_range in ranges:
                _attend_range(slot_range, *heads)
        share = None
        if later:
            scores = _later_scores(grouped, later[0::2])
            joint = torch.logsumexp(torch.cat([lse[..., None], scores], -1), -1)
            out = out.mul_((lse - joint).exp()[..., None].to(out.dtype))
            share = scores.sub_(joint[..., None]).exp_().to(out.dtype)
            for j, value in enumerate(later[1::2]):
                out.addcmul_(share[..., j, None], value[:, :, None])
            lse = joint
        ctx.ranges = ranges
        ctx.save_for_backward(q, k0, v0, out, lse, share, *later)
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, share, *later = ctx.saved_tensors
        grouped = q.view(q.shape[0], k0.shape[1], q.shape[1] // k0.shape[1], q.shape[2])
        do = grads[0].contiguous().view_as(grouped)
        dq, dk0, dv0 = _prefix_backward(ctx.ranges, q, k0, v0, out, lse, do)
        if not later:
            return None, dq.view_as(q), dk0, dv0
        scale = q.shape[-1] ** -0.5
        delta = (do * out).sum(-1)
        later_grads: list[Tensor] = []
        for j, (key, value) in enumerate(zip(later[0::2], later[1::2], strict=True)):
            p = share[..., j]
            ds = (p * ((do * value[:, :, None]).sum(-1) - delta) * scale)[..., None]
            dq.addcmul_(ds, key[:, :, None])
            later_grads += [(ds * grouped).sum(2), (p[..., None] * do).sum(2)]
        return None, dq.view_as(q), dk0, dv0, *later_grads


def _prefix_backward(
    ranges: tuple[SlotRange, ...], q: Tensor, k0: Tensor, v0: Tensor, out: Tensor, lse: Tensor, do: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q as [A, G, N/G, E] and of k0, v0, given the joint output and log-sum-exp."""
    if ranges and fits(q):
        dq, dk0, dv0 = attend_ranges_backward(ranges, do.view_as(q), (q, k0, v0, out.view_as(q), lse.flatten(1)))
        return dq.view_as(do), dk0, dv0
    dq = torch.empty_like(do)
    dk, dv = (torch.zeros_like(x.transpose(0, 1), memory_format=torch.contiguous_format) for x in (k0, v0))
    prefix = (_shared(x, do.shape[2]) for x in (k0, v0))
    saved = (_heads_first(q.view_as(do)), *prefix, *(_heads_first(x) for x in (out, lse, do)))
    for slot_range in ranges:
        _attend_range_backward(slot_range, saved, (_heads_first(dq), dk, dv))
    return dq, dk.transpose(0, 1), dv.transpose(0, 1)


def _score_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _later_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scores of every slot with its keys of the later steps: [A, G, N/G, K]."""
    scale = q.shape[-1] ** -0.5
    return torch.stack([(q * key[:, :, None]).sum(-1) for key in keys], -1).to(_score_dtype(q)) * scale


def _spans(slot_range: SlotRange, leaf: int) -> list[tuple[slice, slice, bool]]:
    """What a range attends to, as rectangles of rows and keys of the pack, and triangles (True) before the rectangles.
    The square of a range is halved down to ``leaf`` rows, because an attention call computes what its mask hides."""

    def halve(begin: int, end: int) -> list[tuple[slice, slice, bool]]:
        if end - begin <= leaf:
            return [(slice(begin, end), slice(begin, end), True)]
        middle = (begin + end) // 2
        lower = (slice(middle, end), slice(begin, middle), False)
        return [*halve(begin, middle), *halve(middle, end), lower]

    spans = halve(slot_range.begin, slot_range.end)
    if slot_range.begin > slot_range.document:
        spans.append((slice(slot_range.begin, slot_range.end), slice(slot_range.document, slot_range.begin), False))
    return spans


def _leaf(slot_range: SlotRange, q: Tensor) -> int:
    return LEAF if q.device.type == "cpu" else slot_range.length


def _attend_range(slot_range: SlotRange, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    """All heads first: q, out [G, N/G, A, E], k, v [G, N/G, T, E], lse [G, N/G, A]."""
    shift = slot_range.at - slot_range.begin
    for rows, keys, causal in _spans(slot_range, _leaf(slot_range, q)):
        of_q, of_out, of_lse = (_rows(x, rows, shift) for x in (q, out, lse))
        values, values_lse = _attend(of_q, _rows(k, keys), _rows(v, keys), causal)
        if causal:
            of_out.copy_(values)
            of_lse.copy_(values_lse)
        else:
            joint = torch.logaddexp(of_lse, values_lse)
            of_out.mul_((of_lse - joint).exp_()[..., None].to(out.dtype))
            of_out.addcmul_(values, (values_lse - joint).exp_()[..., None].to(out.dtype))
            of_lse.copy_(joint)


def _attend_range_backward(
    slot_range: SlotRange, saved: tuple[Tensor, ...], grads: tuple[Tensor, Tensor, Tensor]
) -> None:
    """``saved``: q, k, v, out, lse, do, as in ``_attend_range``; ``grads``: dq likewise, dk, dv [G, T, E]."""
    q, k, v, out, lse, do = saved
    dq, dk, dv = grads
    shift = slot_range.at - slot_range.begin
    for rows, keys, causal in _spans(slot_range, _leaf(slot_range, q)):
        of_q, of_out, of_do, of_lse, of_dq = (_rows(x, rows, shift) for x in (q, out, do, lse, dq))
        add_q, add_k, add_v = _attend_backward(of_do, of_q, _rows(k, keys), _rows(v, keys), of_out, of_lse, causal)
        # The triangles come first and name every row once.
        of_dq.copy_(add_q) if causal else of_dq.add_(add_q)
        dk.narrow(1, keys.start, keys.stop - keys.start).add_(add_k)
        dv.narrow(1, keys.start, keys.stop - keys.start).add_(add_v)


def _rows(x: Tensor, rows: slice, shift: int = 0) -> Tensor:
    return x.narrow(2, rows.start + shift, rows.stop - rows.start)


def _heads_first(x: Tensor) -> Tensor:
    """[A, G, N/G, …] as a view [G, N/G, A, …]."""
    return x.movedim(0, 2)


def _shared(x: Tensor, group: int) -> Tensor:
    """Keys [S, G, E] as a view [G, N/G, S, E] that repeats nothing in memory."""
    return x.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [G, N/G, A, E] and log-sum-exp [G, N/G, A] of queries [G, N/G, A, E] over keys [G, N/G, S, E]."""
    if q.device.type == "cpu":
        out, lse = _flash(q, k, v, 0.0, causal)
        return out, lse
    return dense_attend(q, k, v, causal)


def _attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries [G, N/G, A, E], keys and values [G, S, E], given the joint output and log-sum-exp."""
    if q.device.type == "cpu":
        dq, dk, dv = _flash_backward(do, q, k, v, out, lse, 0.0, causal)
        return dq, dk.sum(1), dv.sum(1)
    return dense_attend_backward(do, q, k, v, out, lse, causal)


def dense_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """``_attend`` written with matrix products, in blocks of query rows, on any device."""
    outs, logs = [], []
    for start in range(0, q.shape[2], ROW_BLOCK):
        scores = _dense_scores(q, k, start, causal)
        lse = torch.logsumexp(scores, -1)
        length = scores.shape[-1]
        outs.append((scores - lse[..., None]).exp().to(q.dtype) @ v[:, :, :length])
        logs.append(lse)
    return torch.cat(outs, 2), torch.cat(logs, 2)


def dense_attend_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``_attend_backward`` written with matrix products, in blocks of query rows, on any device."""
    scale = q.shape[-1] ** -0.5
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(x[:, 0], dtype=lse.dtype) for x in (k, v))
    delta = (do * out).to(lse.dtype).sum(-1)
    for start in range(0, q.shape[2], ROW_BLOCK):
        rows = slice(start, start + ROW_BLOCK)
        p = (_dense_scores(q, k, start, causal) - lse[:, :, rows, None]).exp()
        length = p.shape[-1]
        dp = (do[:, :, rows] @ v[:, :, :length].transpose(-1, -2)).to(lse.dtype)
        ds = (p * (dp - delta[:, :, rows, None]) * scale).to(q.dtype)
        dq[:, :, rows] = ds @ k[:, :, :length]
        dk[:, :length] += (ds.transpose(-1, -2) @ q[:, :, rows]).sum(1)
        dv[:, :length] += (p.to(q.dtype).transpose(-1, -2) @ do[:, :, rows]).sum(1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _dense_scores(q: Tensor, k: Tensor, start: int, causal: bool) -> Tensor:
    """Scaled scores of query rows ``start…`` with the keys any of them sees: [G, N/G, rows, length]."""
    rows = q[:, :, start : start + ROW_BLOCK]
    length = min(start + rows.shape[2], k.shape[2]) if causal else k.shape[2]
    scores = (rows @ k[:, :, :length].transpose(-1, -2)).to(_score_dtype(q)) * q.shape[-1] ** -0.5
    if causal:
        at = torch.arange(start, start + rows.shape[2], device=q.device)
        scores.masked_fill_(torch.arange(length, device=q.device) > at[:, None], float("-inf"))
    return scores


class KVCache:
    """Keys and values of one growing sequence, for decoding: [1, G, length, E] a layer, storage grown by doubling.
    ``visible`` bool [n, length + n]: what the next n rows may read, themselves included; None where they are a
    chain."""

    def __init__(self) -> None:
        self.visible: Tensor | None = None
        self._k: dict[int, Tensor] = {}
        self._v: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    @property
    def length(self) -> int:
        """Positions in layer 0, which a forward appends to first."""
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
        self._lengths = {layer: min(old, length) for layer, old in self._lengths.items()}


def attend_cached(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, layer: int = 0) -> Tensor:
    """Add k, v [n, G, E] to the cache and attend to what its rows may read with q [n, N, E]: [n, N, E]."""
    keys, values = cache.append(k, v, layer)
    n, length = q.shape[0], keys.shape[2]
    mask = cache.visible
    if mask is None and n > 1:
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n)
    with any_length():
        return attend(q.transpose(0, 1)[None], keys, values, mask)[0].transpose(0, 1)


def _grown(old: Tensor | None, like: Tensor, length: int, end: int) -> Tensor:
    new = like.new_empty(1, like.shape[1], max(64, 2 * end), like.shape[2])
    if old is not None:
        new[:, :, :length] = old[:, :, :length]
    return new


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attended values [1, N, S, E] of q [1, N, S, E] over k, v [1, G, J, E]; ``mask`` bool [S, J], None for all."""
    shares = shares_keys(q, mask)
    if not shares:
        group = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=shares)


def shares_keys(q: Tensor, mask: Tensor | None) -> bool:
    """Whether the query heads of a group read one copy of their keys. Beside the CPU's only flash attention lets them,
    which takes no mask; otherwise torch falls back to a kernel that keeps every score in fp32. transformers asks the
    same (``use_gqa_in_sdpa``)."""
    return q.device.type == "cpu" or (mask is None and fits(q))
