"""The causal prefix of EAGLE-3's attention on a GPU: one variable-length flash call over all runs of a pack.

A run's queries are the last of the keys it sees, document start to run end, which is the causal mask flash attention
aligns to the lower right. Keys of a document with several runs are repeated once per run, without touching the queries.
The backward takes the joint output and log-sum-exp, as `trainer.attention.ttt_attention` explains.

Shapes: A active slots, T tokens, N query heads, G key heads, E head width, S keys seen, summed over runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from trainer.objectives.shift import Run

_DTYPES = (torch.bfloat16, torch.float16)
_WIDEST_HEAD = 256


def fits(q: Tensor) -> bool:
    """Whether flash attention takes such queries [A, N, E]; others go through matrix products."""
    return q.is_cuda and q.dtype in _DTYPES and q.shape[-1] % 8 == 0 and q.shape[-1] <= _WIDEST_HEAD


@dataclass(frozen=True, eq=False)
class Spans:
    """Where runs lie in packed queries and keys: int32 [runs+1] each. rows int64 [S]: token of every packed key."""

    queries: Tensor
    keys: Tensor
    longest_query: int
    longest_key: int
    rows: Tensor


@lru_cache(maxsize=8)
def spans_of(runs: tuple[Run, ...], device: torch.device) -> Spans:
    """The same for every TTT step of a pack."""
    lengths = [run.length for run in runs]
    seen = [run.end - run.document for run in runs]
    rows = torch.cat([torch.arange(run.document, run.end) for run in runs])
    return Spans(_offsets(lengths, device), _offsets(seen, device), max(lengths), max(seen), rows.to(device))


def attend_runs(runs: tuple[Run, ...], q: Tensor, k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor]:
    """Output [A, N, E] and log-sum-exp fp32 [A, N] of q [A, N, E] over the prefixes in k0, v0 [T, G, E]."""
    spans = spans_of(runs, q.device)
    out, lse = Flash.forward(q, k0[spans.rows], v0[spans.rows], spans)
    return out, lse.T


def attend_runs_backward(
    runs: tuple[Run, ...], do: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k0, v0, given do [A, N, E] and (q, k0, v0, out, lse) with the joint out and lse [A, N]."""
    q, k0, v0, out, lse = saved
    spans = spans_of(runs, q.device)
    packed = (q, k0[spans.rows], v0[spans.rows], out, lse.T.contiguous())
    dq, dk, dv = Flash.backward(do, packed, spans)
    # Runs of one document add up on the keys they share; in fp32, as an atomic sum over many runs must be.
    dk0, dv0 = (torch.zeros_like(k0, dtype=torch.float32) for _ in range(2))
    dk0.index_add_(0, spans.rows, dk.float())
    dv0.index_add_(0, spans.rows, dv.float())
    return dq, dk0.to(k0.dtype), dv0.to(v0.dtype)


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
