"""Walking a text as a server drafts it: what `eval`, `decode` and the n-gram floor count.

Shapes: T tokens of one sample, K drafted tokens per draft.

A draft starts where the last one ended. When token n is the newest known one, a draft proposes tokens n+1 … n+K; the
``hits`` of n say how many of them, counted from the first, equal the text. One target forward then emits the hits and
one token of its own (the bonus), never past the end of the answer. Two tokens are one to the arithmetic, a tie, where
no more parts their logits than rounding to the dtype can.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import frexp
from typing import Any

import numpy as np

FRACTION_BITS = {"bfloat16": 7, "float16": 10}
STEPS_OF_A_TIE = 2
ROUNDING_FP32 = 1e-3
"""What sums of thousands of fp32 products, added in another order, come to in a logit."""
LARGEST_UNSAID = 63.0
"""Logits are taken to stay below 64 where an engine gives log-probabilities only, which hide their size."""


@dataclass(frozen=True, order=True)
class DraftShape:
    """How far a draft looks ahead, and for a tree how many nodes of each level get children."""

    length: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.length}" if self.width == 1 else f"{self.length}x{self.width}"


@dataclass
class AcceptanceTally:
    """Counts over many answers. ``accepted_at[i]`` = drafts whose first i+1 proposals were all accepted. ``past_end``:
    proposals that the target accepted beyond the end of an answer, which no one gets."""

    draft_len: int
    width: int = 1
    drafts: int = 0
    tokens: int = 0
    slots: int = 0
    slot_tokens: int = 0
    past_end: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.draft_len

    def add_draft(self, accepted: int, emitted: int) -> None:
        """One draft that had ``accepted`` proposals taken and emitted ``emitted`` tokens."""
        self.drafts += 1
        self.tokens += emitted
        for depth in range(accepted):
            self.accepted_at[depth] += 1

    def add_checked(self, verified: int, emitted: int) -> None:
        """One live draft: the target took ``verified`` proposals, the answer got ``emitted`` tokens before it ended."""
        accepted = min(verified, emitted)
        self.add_draft(accepted, emitted)
        self.past_end += verified - accepted

    @property
    def shape(self) -> DraftShape:
        """The shape of the drafts that were counted."""
        return DraftShape(self.draft_len, self.width)

    @property
    def accepted_length(self) -> float | None:
        """Tokens emitted per draft, the bonus token included; None when nothing was drafted."""
        return self.tokens / self.drafts if self.drafts else None

    @property
    def engine_accepted_length(self) -> float | None:
        """The same as serving engines count it: 1 + accepted proposals per draft, those past the end included. vLLM
        counts so (``vllm:spec_decode_num_accepted_tokens``); the longer the answers, the smaller the difference."""
        return 1 + (sum(self.accepted_at) + self.past_end) / self.drafts if self.drafts else None

    @property
    def slot_accepted_length(self) -> float | None:
        """The same when every position of every answer starts a draft, not only those a server would reach."""
        return self.slot_tokens / self.slots if self.slots else None

    def row(self) -> dict[str, Any]:
        """The counts as a row of ``eval --json`` and ``decode --json``."""
        return {
            "draft_len": self.draft_len,
            "tree_width": self.width,
            "accepted_length": self.accepted_length,
            "per_position": self.per_position,
            "drafts": self.drafts,
        }

    @property
    def per_position(self) -> list[float]:
        """Joint acceptance by depth: share of drafts whose proposals 1 … i+1 were all accepted."""
        return [count / self.drafts if self.drafts else 0.0 for count in self.accepted_at]


def answers(loss_mask: np.ndarray) -> Iterator[tuple[int, int]]:
    """Spans of supervised tokens as (start, end), end exclusive, of a mask [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (loss_mask != 0).astype(np.int8), [0]])))
    for start, end in edges.reshape(-1, 2):
        yield int(start), int(end)


def drafting_positions(loss_mask: np.ndarray) -> np.ndarray:
    """Every position n a draft may start from: int64 [N], ascending. Token n and token n+1 belong to one answer, and n
    >= 1 because a drafter reads the hidden state of token n-1. The first token of an answer comes from the prefill, so
    no draft is charged for it."""
    supervised = loss_mask != 0
    starts = np.flatnonzero(supervised[:-1] & supervised[1:])
    return starts[starts >= 1]


def walk(hits: np.ndarray, loss_mask: np.ndarray, tally: AcceptanceTally) -> None:
    """Add one sample to ``tally``: hits int [T], indexed by the newest known token, and its loss mask [T]."""
    for start, end in answers(loss_mask):
        n = max(start, 1)
        left = end - 1 - np.arange(n, end - 1)
        tally.slots += len(left)
        tally.slot_tokens += int(np.minimum(hits[n : end - 1] + 1, left).sum())
        for _, accepted, emitted in drafts(hits, n, end):
            tally.add_draft(accepted, emitted)


def drafts(hits: np.ndarray, n: int, end: int) -> Iterator[tuple[int, int, int]]:
    """The drafts of an answer that ends before ``end``, from its token ``n`` on: newest known token, proposals
    accepted, tokens emitted. hits int [T], as of ``walk``."""
    while n < end - 1:
        remaining = end - 1 - n
        accepted = min(int(hits[n]), remaining)
        emitted = min(accepted + 1, remaining)
        yield n, accepted, emitted
        n += emitted


def hits_of_next_token(correct: np.ndarray, draft_len: int) -> np.ndarray:
    """Hit prefixes int64 [T] of a predictor that looks only at the text so far. ``correct`` bool [T]: the prediction
    made after token n equals token n+1. While proposals match, the context of the next one is the text itself, so the
    hits of n are the run of correct predictions from n, at most ``draft_len``."""
    length = correct.shape[0]
    wrong = np.flatnonzero(np.concatenate([~correct, [True]]))
    first_wrong = wrong[np.searchsorted(wrong, np.arange(length))]
    return np.minimum(first_wrong - np.arange(length), draft_len)


def tie_gap(logit: float | None, dtype: str = "bfloat16") -> float:
    """The widest gap below a top ``logit`` that is a tie: two steps of ``dtype``, which at [2^k, 2^(k+1)) are 2^(k-7)
    in bf16 and 2^(k-10) in fp16; in fp32, whose steps are finer than its sums, a constant. None: of unknown size.

    A target computes a position alone and among drafts, and rounds both logits each time by up to half a step: one
    order and the other can lie two steps apart, before any rounding of states."""
    if dtype not in FRACTION_BITS:
        return ROUNDING_FP32
    _, exponent = frexp(LARGEST_UNSAID if logit is None else logit)
    return STEPS_OF_A_TIE * 2.0 ** (exponent - 1 - FRACTION_BITS[dtype])
