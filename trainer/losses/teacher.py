"""The target's distribution at the rows that teach, from the stored final hidden and the head bundle, or from the
stored top tokens alone.

One pass over the vocabulary finds the target's token per row, which decides the slots taught; the probabilities over
the draft vocabulary are made later, a few rows at a time, once for all TTT steps. No tensor is rows x vocabulary wide.

Shapes: R teacher rows, D target width, V target vocabulary, U draft vocabulary, k stored top tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError, Kind
from hiddenstore.records import TopK
from hiddenstore.targets.head import HeadBundle
from schemas.capture import NormState
from trainer.vocab import DraftVocab


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """logits = widened(x) @ weight.T: the logit scale is multiplied in, a bias is one more column. weight [V, D], or
    [V, D+1] with a bias; fp32 while that is small. A soft cap (Gemma 2) is left out: it is monotone, so greedy
    proposals are the same, and a loss that leaves it out on both sides has the same minimum."""

    weight: Tensor
    bundle: HeadBundle

    @classmethod
    def of(cls, head: HeadBundle) -> Self:
        """The head of a bundle, sharing its memory where it can."""
        weight = head.output_weight
        if weight.numel() * 4 <= FP32_HEAD_BYTES:
            weight = weight.float()
        if head.lm_head_bias is not None:
            weight = torch.cat([weight, head.lm_head_bias[:, None].to(weight.dtype)], -1)
        if head.spec.logit_scale != 1.0:
            weight = weight * head.spec.logit_scale
        return cls(weight, replace(head, spec=head.spec.model_copy(update={"final_logit_softcap": None})))

    def widened(self, x: Tensor) -> Tensor:
        """States [n, D] as ``weight`` reads them."""
        return x if self.bundle.lm_head_bias is None else F.pad(x, (0, 1), value=1.0)

    def probabilities(self, x: Tensor) -> Tensor:
        """Softmax over the vocabulary of states after the final norm [n, D]: fp32 [n, V]."""
        return torch.softmax(self.bundle.logits(x, norm_state="post_norm"), -1)


VOCAB_CHUNK = 8192
STRIPE = 64
"""Logits that are looked at together."""
ROW_CHUNK = 256
ROW_CHUNK_DEVICE = 1024
BF16_ROUNDING = 2.0**-8
"""What rounding to bf16 changes a number by at most, as a share of it; of a product of vectors, of |x| |w|."""
MOST_IN_QUESTION = 64
"""Tokens of a row that are worth a look; where there are more, the whole product is made in fp32."""
PAIR_ELEMENTS = 1 << 26
"""Numbers of the rows and of the head that are multiplied pair by pair at once."""
FP32_HEAD_BYTES = 256 << 20
"""Draft rows of the head are stored in fp32 up to this size, else converted at each use."""


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """normed [R, D]: final hidden after the final norm, or [R, 0] beside ``topk``, the target's top tokens. token
    int64 [R]: the target's argmax over its whole vocabulary; None where it was not read. usable bool [R]: rows whose
    token the draft vocabulary holds, or all that can teach when nothing is dropped. mass fp32 [R]: the target's
    probability of the draft vocabulary; None where it was not measured or is one."""

    normed: Tensor
    token: Tensor | None
    usable: Tensor
    topk: TopK | None = None
    mass: Tensor | None = None

    def pick(self, which: Tensor) -> "TeacherRows":
        """Some rows of it, by int64 indices or a bool mask [R]."""
        topk = None if self.topk is None else self.topk.at(which)
        token, mass = (None if x is None else x[which] for x in (self.token, self.mass))
        return TeacherRows(self.normed[which], token, self.usable[which], topk, mass)


def final_index(
    batch: PackedBatch, rows: Tensor, reader: str = "the loss", option: str = "--final supervised"
) -> Tensor:
    """Which of the pack's final rows are its rows int64 [R]: int64 [R]. Raises FormatError: one is not stored;
    ``reader`` reads it, ``option`` of ``collect`` captures it."""
    index = torch.searchsorted(batch.final_rows, rows)
    stored = index < batch.final_rows.shape[0]
    stored[stored.clone()] = batch.final_rows[index[stored]] == rows[stored]
    if not bool(stored.all()):
        row = int(rows[~stored][0])
        raise FormatError(
            f"sample {batch.sample_ids[int(batch.document[row])]}: no final hidden is stored at pack row {row}, which "
            f"{reader} reads",
            kind=Kind.FINAL_MISSING,
            hint=f"hiddenstore collect DATA -o STORE --target T {option}",
        )
    return index


@dataclass(frozen=True, eq=False)
class TargetInterface:
    """What a drafter is trained and used beside: head bundle, draft vocabulary, norm state of the final hidden, and
    whether its device multiplies bf16 faster."""

    head: HeadBundle
    vocab: DraftVocab
    final_norm: NormState = "pre_norm"
    bf16: bool = False

    def normed(self, final: Tensor) -> Tensor:
        """Final hidden after the final norm [n, D], in fp32 or the bundle's own dtype."""
        return self.head.norm(final) if self.final_norm == "pre_norm" else final


class Teacher:
    """Frozen: head bundle, draft vocabulary and the norm state of the stored final hidden. Where the device multiplies
    bf16 faster, the target's token is looked for in bf16 and found in fp32."""

    def __init__(self, target: TargetInterface, *, drop_off_vocab: bool = True) -> None:
        head, vocab = target.head, target.vocab
        self.head = head
        whole = head.output_weight
        self._narrows = target.bf16 and whole.dtype is torch.bfloat16 and head.lm_head_bias is None
        self._longest_row = torch.zeros(())
        if self._narrows:
            self._longest_row = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float32).max()
        self.vocab = vocab.to(head.embed_tokens.device)
        self.norm_state = target.final_norm
        self.drop_off_vocab = drop_off_vocab
        weight = head.output_weight if vocab.is_full else head.output_weight[self.vocab.target_ids]
        # A GPU multiplies by the bf16 that it is (`linear_in_fp32`).
        if weight.numel() * 4 <= FP32_HEAD_BYTES and not weight.is_cuda:
            weight = weight.float()
        bias = head.lm_head_bias
        if bias is not None and not vocab.is_full:
            bias = bias[self.vocab.target_ids]
        self._draft = _tied_bundle(head, weight, bias)
        self._draft_ids = self.vocab.draft_ids()

    def read(self, batch: PackedBatch, rows: Tensor, *, token: bool = True, mass: bool = False) -> TeacherRows:
        """Teacher of the pack's rows int64 [R]. ``token`` False spares the pass over the vocabulary where nothing can
        be dropped: the token is then the most probable of ``distribution``. ``mass``: measure the target's probability
        of the draft vocabulary. Raises FormatError: the store does not hold the final hidden at a row that teaches."""
        at = final_index(batch, rows)
        if batch.topk is not None:
            return self._read_topk(batch.topk, at)
        normed = batch.final[at]
        normed = self.head.norm(normed) if self.norm_state == "pre_norm" else normed
        if self.vocab.is_full and not token:
            return TeacherRows(normed, None, torch.ones_like(rows, dtype=torch.bool))
        mass = mass and not self.vocab.is_full
        tokens, share = (self._narrowed(normed), None) if self._narrows and not mass else self._scan(normed, mass)
        usable = self.vocab.t2d[tokens] if self.drop_off_vocab else torch.ones_like(tokens, dtype=torch.bool)
        return TeacherRows(normed, tokens, usable, mass=share if mass else None)

    def draft_token(self, token: Tensor) -> Tensor:
        """Draft ids of target tokens int64 [R], -1 off the draft vocabulary."""
        return self._draft_ids[token]

    def probabilities(self, normed: Tensor) -> Tensor:
        """softmax over the draft vocabulary of normed rows [R, D]: fp32 [R, U]."""
        return torch.softmax(self._draft.logits(normed, norm_state="post_norm"), -1)

    def distribution_of(self, rows: TeacherRows, which: Tensor) -> Tensor:
        """``distribution`` of rows that may repeat, int64 [n]: fp32 [n, U]. Blocks that overlap ask for a row once a
        slot, and it is made once."""
        needed, place = torch.unique(which, return_inverse=True)
        return self.distribution(rows.pick(needed))[place]

    def distribution(self, rows: TeacherRows) -> Tensor:
        """Teacher over the draft vocabulary: fp32 [R, U], rows summing to one. Of stored top tokens, those the draft
        vocabulary holds are scaled up to one; the rest is zero."""
        if rows.topk is None:
            return self.probabilities(rows.normed)
        ids, share = self._draft_shares(rows.topk)
        out = share.new_zeros(share.shape[0], self.vocab.size)
        return out.scatter_add_(1, ids, share / share.sum(-1, keepdim=True))

    def _read_topk(self, topk: TopK, at: Tensor) -> TeacherRows:
        topk = topk.at(at)
        tokens = topk.ids[:, 0]
        mass = self._draft_shares(topk)[1].sum(-1)
        usable = self.vocab.t2d[tokens] if self.drop_off_vocab else mass > 0
        return TeacherRows(topk.log_probs[:, :0], tokens, usable, topk, mass.clamp(max=1))

    def _draft_shares(self, topk: TopK) -> tuple[Tensor, Tensor]:
        """Draft ids int64 [R, k], 0 where there is none, and probabilities fp32 [R, k], zero there."""
        ids = self._draft_ids[topk.ids]
        return ids.clamp(min=0), torch.where(ids >= 0, topk.log_probs.exp(), 0.0)

    def _scan(self, normed: Tensor, mass: bool) -> tuple[Tensor, Tensor]:
        """The target's token int64 [R], and where ``mass`` its probability of the draft vocabulary fp32 [R]."""
        token = torch.empty(normed.shape[0], dtype=torch.int64, device=normed.device)
        share = torch.ones(normed.shape[0], device=normed.device)
        chunks = list(self._vocabulary_chunks())
        for begin in range(0, normed.shape[0], ROW_CHUNK):
            rows = normed[begin : begin + ROW_CHUNK]
            best, in_target, in_draft = torch.full((3, rows.shape[0]), float("-inf"), device=rows.device)
            choice = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
            for offset, chunk in chunks:
                logits = chunk.logits(rows, norm_state="post_norm")
                value, index = logits.max(-1)
                better = value > best
                best = torch.where(better, value, best)
                choice = torch.where(better, index + offset, choice)
                if mass:
                    in_target = torch.logaddexp(in_target, logits.logsumexp(-1))
                    unknown = ~self.vocab.t2d[offset : offset + logits.shape[1]]
                    in_draft = torch.logaddexp(in_draft, logits.masked_fill_(unknown, float("-inf")).logsumexp(-1))
            token[begin : begin + ROW_CHUNK] = choice
            if mass:
                share[begin : begin + ROW_CHUNK] = (in_draft - in_target).exp()
        return token, share

    def _narrowed(self, normed: Tensor) -> Tensor:
        """``_scan``'s tokens int64 [R]: the best in fp32 of those that products in bf16 leave in question."""
        token = torch.empty(normed.shape[0], dtype=torch.int64, device=normed.device)
        chunk = ROW_CHUNK_DEVICE if normed.is_cuda else ROW_CHUNK
        for begin in range(0, normed.shape[0], chunk):
            x = normed[begin : begin + chunk]
            row, column = self._in_question(x)
            if len(row) > MOST_IN_QUESTION * len(x):
                token[begin : begin + len(x)] = self._scan(x, mass=False)[0]
                continue
            logit = self._logits_of(x, row, column)
            best = logit.new_full((len(x),), float("-inf")).scatter_reduce_(0, row, logit, "amax")
            last = torch.full_like(best, self.head.vocab_size, dtype=torch.int64)
            first = torch.where(logit == best[row], column, self.head.vocab_size)
            token[begin : begin + len(x)] = last.scatter_reduce_(0, row, first, "amin")
        # Nothing of a row that is not finite is in question: ``_scan``'s token, and the loss says whose it is.
        return token.masked_fill_(token == self.head.vocab_size, 0)

    def _logits_of(self, x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Products in fp32 [n] of some rows of x [m, D] with some of the head, pieces at a time: how many there are
        follows from how flat the logits are."""
        step = max(1, PAIR_ELEMENTS // x.shape[1])
        pieces = zip(row.split(step), column.split(step), strict=True)
        weight = self.head.output_weight
        return torch.cat([torch.linalg.vecdot(x[r].float(), weight[c].float()) for r, c in pieces])

    def _in_question(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and tokens int64 [n] of every logit that rounding to bf16 may have put below the highest one: rounding
        of the result, of x unless it is bf16 already, and of the partial sums of a GPU."""
        z = F.linear(x.bfloat16(), self.head.output_weight)
        stripes = _highest_of_stripes(z)
        top = stripes.amax(-1, keepdim=True).float()
        off = 2 * BF16_ROUNDING * top.abs()
        if inexact := (x.dtype is not torch.bfloat16) + x.is_cuda:
            off += inexact * BF16_ROUNDING * self._longest_row * x.float().norm(dim=-1, keepdim=True)
        least = (top - 2 * off).bfloat16()
        row, stripe = torch.nonzero(stripes >= least, as_tuple=True)
        if len(row) > MOST_IN_QUESTION * len(x):
            # Each holds one at least: too many for the caller, and their columns would be gigabytes.
            return row, stripe
        column = _of_stripe(stripe, z.shape[1])
        near = (column >= 0) & (z[row[:, None], column.clamp(min=0)] >= least[row])
        return row[:, None].expand_as(column)[near], column[near]

    def _vocabulary_chunks(self) -> Iterator[tuple[int, HeadBundle]]:
        if self.vocab.is_full:
            weight, bias = self._draft.embed_tokens, self._draft.lm_head_bias
        else:
            weight, bias = self.head.output_weight, self.head.lm_head_bias
        for begin in range(0, weight.shape[0], VOCAB_CHUNK):
            span_bias = None if bias is None else bias[begin : begin + VOCAB_CHUNK]
            yield begin, _tied_bundle(self.head, weight[begin : begin + VOCAB_CHUNK], span_bias)


def _highest_of_stripes(z: Tensor) -> Tensor:
    """The highest of every stripe of logits [n, V]: [n, V // STRIPE + V % STRIPE]. Stripe s holds the columns s, s + S,
    s + 2 S … with S = V // STRIPE; each of the last columns is one alone. To compare all logits and look for those
    that are near takes a CPU eight times as long."""
    count, rest = divmod(z.shape[1], STRIPE)
    if not count:
        return z
    even = z[:, : z.shape[1] - rest].unflatten(1, (STRIPE, count)).amax(1)
    return torch.cat([even, z[:, z.shape[1] - rest :]], 1) if rest else even


def _of_stripe(stripe: Tensor, width: int) -> Tensor:
    """The columns of stripes int64 [n] of ``width`` logits: int64 [n, STRIPE], -1 where a stripe has no more."""
    count = width // STRIPE
    place = torch.arange(STRIPE, device=stripe.device)
    alone = torch.where(place == 0, (stripe + count * (STRIPE - 1))[:, None], -1)
    return torch.where((stripe < count)[:, None], stripe[:, None] + count * place, alone)


def _tied_bundle(head: HeadBundle, weight: Tensor, bias: Tensor | None) -> HeadBundle:
    """The same head over fewer tokens, as views: the bundle's own arithmetic for logit scale and soft cap."""
    spec = head.spec.model_copy(update={"tied": True})
    return replace(head, spec=spec, embed_tokens=weight, lm_head=None, lm_head_bias=bias)
