"""``topk``: the target's k most probable tokens at each final row, in place of the final hidden.

A row of the code array is bytes: k token ids int32, k log-probs float16 (log softmax over the whole vocabulary, most
probable first), and the logsumexp of all logits as one float32. Kept as they are: no temperature, no renormalising, so
a loss may choose what the missing tail means. What stands in the rows is made by whoever has the LM head
(``top_tokens``); the final hidden itself cannot be read back.

Shapes: R final rows, k top tokens, D target width, V target vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import FIXED_CHUNK_TOKENS, Encoded, RowPart, SmallField
from hiddenstore.records import Record, TopK
from schemas.capture import TOPK, CaptureSpec, NormState, topk_of

if TYPE_CHECKING:
    from hiddenstore.targets.head import HeadBundle

# Logits in memory at once: 256 rows of a vocabulary of 150,000 are 150 MB.
_LOGITS_AT_ONCE = 1 << 25
# What is read of them stays in a CPU's cache meanwhile.
_READ_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class TopKCodec:
    """6 k + 4 bytes a row whatever D is; ids and lse are exact, log-probs rounded to float16."""

    name: str = TOPK
    exact: bool = False
    code_dtype: str = "uint8"
    compressed: bool = False
    formula: str = "row = token ids, then log-probs (log softmax over all tokens), then logsumexp of all logits"
    small: Mapping[str, SmallField] = field(default_factory=dict)
    nominal_bits: float = 6.5

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def code_columns(self, width: int) -> int:
        return sum(part.size for part in self.row_parts(width))

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        k = topk_of(width)
        return RowPart("ids", "<i4", k), RowPart("log_probs", "<f2", k), RowPart("lse", "<f4", 1)

    def row_bits(self, width: int) -> float:
        return 8.0 * self.code_columns(width)


TOPK_CODEC = TopKCodec()


def pack_rows(parts: Sequence[TopK], k: int) -> Encoded:
    """The rows of one unit, sample after sample, as codes."""
    none = TopK(torch.empty((0, k), dtype=torch.int64), torch.empty((0, k)), torch.empty(0))
    columns = (
        torch.cat([part.ids for part in parts or (none,)]).to(torch.int32),
        torch.cat([part.log_probs for part in parts or (none,)]).to(torch.float16),
        torch.cat([part.lse for part in parts or (none,)]).to(torch.float32)[:, None],
    )
    rows = [np.ascontiguousarray(column.cpu().numpy()) for column in columns]
    little = [row.astype(row.dtype.newbyteorder("<"), copy=False).view(np.uint8) for row in rows]
    return Encoded([torch.from_numpy(np.concatenate(little, axis=1))])


def unpack_rows(part: Encoded) -> TopK:
    """The inverse, on the CPU."""
    rows = part.codes[0].cpu().numpy()
    k = (rows.shape[1] - 4) // 6
    columns = [np.ascontiguousarray(column) for column in np.split(rows, [4 * k, 6 * k], axis=1)]
    return TopK(
        ids=torch.from_numpy(columns[0].view("<i4").astype(np.int64)),
        log_probs=torch.from_numpy(columns[1].view("<f2").astype(np.float32)),
        lse=torch.from_numpy(columns[2].view("<f4").astype(np.float32)[:, 0]),
    )


def top_tokens(head: "HeadBundle", final: Tensor, norm_state: NormState, k: int) -> TopK:
    """The k most probable tokens after each final hidden [R, D], on its device; equal logits go by the lower id.

    ``norm_state`` says what ``final`` is; the head must be on the device of ``final``.
    """
    rows, vocab = final.shape[0], head.vocab_size
    ids = torch.empty((rows, k), dtype=torch.int64, device=final.device)
    log_probs = torch.empty((rows, k), dtype=torch.float32, device=final.device)
    lse = torch.empty(rows, dtype=torch.float32, device=final.device)
    step = max(1, _LOGITS_AT_ONCE // vocab)
    few = step if final.is_cuda else max(1, _READ_AT_ONCE // vocab)
    parts = (
        (start + low, block)
        for start in range(0, rows, step)
        for low, block in _blocks(head.logits(final[start : start + step], norm_state), few)
    )
    for start, logits in parts:
        part = slice(start, start + len(logits))
        picked = _first_of_equals(logits, _largest(logits, k)).sort(dim=-1).values
        values = logits.gather(1, picked)
        order = values.sort(dim=-1, descending=True, stable=True).indices
        lse[part] = logits.logsumexp(dim=-1)
        ids[part] = picked.gather(1, order)
        log_probs[part] = values.gather(1, order) - lse[part, None]
    return TopK(ids, log_probs, lse)


def _blocks(logits: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks of so many rows, each with the number of its first."""
    return zip(range(0, len(logits), rows), logits.split(rows), strict=True)


def _largest(logits: Tensor, k: int) -> Tensor:
    """Where the k largest of each row of [n, V] stand, int64 [n, k] in any order.

    On a CPU they are looked for in the k groups whose own largest are the largest: no other group holds one of them.
    """
    vocab = logits.shape[1]
    members = isqrt(vocab // k)
    groups = vocab // max(1, members)
    if logits.is_cuda or members < 2 or groups < k:
        return logits.topk(k, dim=-1).indices
    grouped = logits[:, : members * groups].unflatten(1, (members, groups))
    best = grouped.amax(dim=1).topk(k, dim=-1).indices
    places = (torch.arange(members)[:, None] * groups + best[:, None]).flatten(1)
    rest = torch.arange(members * groups, vocab).expand(len(logits), -1)
    places = torch.cat([places, rest], dim=1)
    return places.gather(1, logits.gather(1, places).topk(k, dim=-1).indices)


def _first_of_equals(logits: Tensor, places: Tensor) -> Tensor:
    """``places`` int64 [n, k] of the k largest of each row of [n, V], of equals at the last of them the lowest ids."""
    least = logits.gather(1, places).amin(dim=-1, keepdim=True)
    tied = (logits >= least).sum(dim=-1) > places.shape[1]
    if bool(tied.any()):
        ordered = logits[tied].sort(dim=-1, descending=True, stable=True)
        places[tied] = ordered.indices[:, : places.shape[1]]
    return places


def with_top_tokens(record: Record, head: "HeadBundle | None", capture: CaptureSpec) -> Record:
    """The record as a store of this capture holds it: where that is ``topk``, its final hidden becomes top tokens.

    ``head`` may be None when the capture holds no top tokens or the record has them.
    """
    if not capture.holds_topk or record.topk is not None:
        return record
    if head is None:
        raise ValueError("a final hidden becomes top tokens through the target's LM head, and none was given")
    teacher = top_tokens(head, record.final, capture.final_norm, capture.topk)
    return replace(record, final=record.final[:0], topk=teacher)
