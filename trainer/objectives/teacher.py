"""The target's distribution at the rows that teach, from the stored final hidden and the head bundle, or from the
stored top tokens alone.

One pass over the vocabulary finds the target's own token per row, which decides the slots kept; the probabilities over
the draft vocabulary are made later, a few rows at a time, once for all TTT steps. No tensor holds rows x vocabulary.

Shapes: R teacher rows, D target width, V target vocabulary, U draft vocabulary, k stored top tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError
from hiddenstore.head import HeadBundle
from hiddenstore.records import TopK
from schemas.capture import NormState
from trainer.vocab import DraftVocab

VOCAB_CHUNK = 8192
ROW_CHUNK = 256
FP32_HEAD_BYTES = 256 << 20
"""Draft rows of the head are held in fp32 up to this size, else converted at each use."""


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """normed [R, D]: final hidden after the final norm, or [R, 0] beside ``topk``, the target's top tokens. token
    int64 [R]: the target's argmax over its whole vocabulary; None where it was not asked for. kept bool [R]: rows whose
    token the draft vocabulary holds, or all that can teach when nothing is dropped. mass fp32 [R]: the target's
    probability of the draft vocabulary; None where it was not asked for or is one."""

    normed: Tensor
    token: Tensor | None
    kept: Tensor
    topk: TopK | None = None
    mass: Tensor | None = None

    def pick(self, which: Tensor) -> "TeacherRows":
        """Some rows of it, by int64 indices or a bool mask [R]."""
        topk = None if self.topk is None else self.topk.at(which)
        token, mass = (None if x is None else x[which] for x in (self.token, self.mass))
        return TeacherRows(self.normed[which], token, self.kept[which], topk, mass)


class Teacher:
    """Frozen: head bundle, draft vocabulary and the norm state of the stored final hidden."""

    def __init__(
        self, head: HeadBundle, vocab: DraftVocab, norm_state: NormState = "pre_norm", drop_off_vocab: bool = True
    ) -> None:
        self.head = head
        self.vocab = vocab.to(head.embed_tokens.device)
        self.norm_state = norm_state
        self.drop_off_vocab = drop_off_vocab
        weight = head.output_weight if vocab.is_full else head.output_weight[self.vocab.target_ids]
        if weight.numel() * 4 <= FP32_HEAD_BYTES:
            weight = weight.float()
        bias = head.lm_head_bias
        if bias is not None and not vocab.is_full:
            bias = bias[self.vocab.target_ids]
        self._draft = _tied_bundle(head, weight, bias)
        self._draft_ids = self.vocab.draft_ids()

    def read(self, batch: PackedBatch, rows: Tensor, *, token: bool = True, mass: bool = False) -> TeacherRows:
        """Teacher of the pack's rows int64 [R].

        ``token`` False spares the pass over the vocabulary where nothing can be dropped: the token is then the most
        probable of ``distribution``. ``mass``: measure the target's probability of the draft vocabulary.

        Raises:
            FormatError: the store does not hold the final hidden at a row that teaches.
        """
        at = self._held(batch, rows)
        if batch.topk is not None:
            return self._read_topk(batch.topk, at)
        normed = batch.final[at]
        normed = self.head.norm(normed) if self.norm_state == "pre_norm" else normed
        if self.vocab.is_full and not token:
            return TeacherRows(normed, None, torch.ones_like(rows, dtype=torch.bool))
        mass = mass and not self.vocab.is_full
        tokens, share = self._scan(normed, mass)
        kept = self.vocab.t2d[tokens] if self.drop_off_vocab else torch.ones_like(tokens, dtype=torch.bool)
        return TeacherRows(normed, tokens, kept, mass=share if mass else None)

    def draft_token(self, token: Tensor) -> Tensor:
        """Draft ids of target tokens int64 [R], -1 off the draft vocabulary."""
        return self._draft_ids[token]

    def probabilities(self, normed: Tensor) -> Tensor:
        """softmax over the draft vocabulary of normed rows [R, D]: fp32 [R, U]."""
        return torch.softmax(self._draft.logits(normed, norm_state="post_norm"), -1)

    def distribution(self, found: TeacherRows) -> Tensor:
        """Teacher over the draft vocabulary: fp32 [R, U], rows summing to one.

        Of stored top tokens, those the draft vocabulary holds are scaled up to one; the rest is zero.
        """
        if found.topk is None:
            return self.probabilities(found.normed)
        ids, share = self._known(found.topk)
        out = share.new_zeros(share.shape[0], self.vocab.size)
        return out.scatter_add_(1, ids, share / share.sum(-1, keepdim=True))

    def _held(self, batch: PackedBatch, rows: Tensor) -> Tensor:
        at = torch.searchsorted(batch.final_rows, rows)
        held = at < batch.final_rows.shape[0]
        held[held.clone()] = batch.final_rows[at[held]] == rows[held]
        if not bool(held.all()):
            row = int(rows[~held][0])
            sample = batch.sample_ids[int(batch.document[row])]
            raise FormatError(
                f"sample {sample}: no final hidden is stored at pack row {row}, which the loss reads",
                kind="final-rows-missing",
                hint="hiddenstore collect DATA -o STORE --target T --final supervised",
            )
        return at

    def _read_topk(self, topk: TopK, at: Tensor) -> TeacherRows:
        topk = topk.at(at)
        tokens = topk.ids[:, 0]
        mass = self._known(topk)[1].sum(-1)
        kept = self.vocab.t2d[tokens] if self.drop_off_vocab else mass > 0
        return TeacherRows(topk.log_probs[:, :0], tokens, kept, topk, mass.clamp(max=1))

    def _known(self, topk: TopK) -> tuple[Tensor, Tensor]:
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
            best, everything, known = (torch.full((rows.shape[0],), float("-inf"), device=rows.device) for _ in "123")
            found = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
            for offset, chunk in chunks:
                logits = chunk.logits(rows, norm_state="post_norm")
                value, index = logits.max(-1)
                better = value > best
                best = torch.where(better, value, best)
                found = torch.where(better, index + offset, found)
                if mass:
                    everything = torch.logaddexp(everything, logits.logsumexp(-1))
                    unknown = ~self.vocab.t2d[offset : offset + logits.shape[1]]
                    known = torch.logaddexp(known, logits.masked_fill_(unknown, float("-inf")).logsumexp(-1))
            token[begin : begin + ROW_CHUNK] = found
            if mass:
                share[begin : begin + ROW_CHUNK] = (known - everything).exp()
        return token, share

    def _vocabulary_chunks(self) -> Iterator[tuple[int, HeadBundle]]:
        if self.vocab.is_full:
            weight, bias = self._draft.embed_tokens, self._draft.lm_head_bias
        else:
            weight, bias = self.head.output_weight, self.head.lm_head_bias
        for begin in range(0, weight.shape[0], VOCAB_CHUNK):
            part = None if bias is None else bias[begin : begin + VOCAB_CHUNK]
            yield begin, _tied_bundle(self.head, weight[begin : begin + VOCAB_CHUNK], part)


def _tied_bundle(head: HeadBundle, weight: Tensor, bias: Tensor | None) -> HeadBundle:
    """The same head over fewer tokens, as views: the bundle's own arithmetic for logit scale and soft cap."""
    spec = head.spec.model_copy(update={"tied": True})
    return replace(head, spec=spec, embed_tokens=weight, lm_head=None, lm_head_bias=bias)
