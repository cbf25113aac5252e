"""The target's distribution at the rows that teach, from the stored final hidden and the head bundle alone.

One pass finds the target's own token per row, streaming over the vocabulary, which decides the slots kept; the
probabilities over the draft vocabulary are made later, a few rows at a time, once for all TTT steps. No tensor holds
rows x vocabulary.

Shapes: R teacher rows, D target width, V target vocabulary, U draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError
from hiddenstore.head import HeadBundle
from schemas.capture import NormState
from trainer.vocab import DraftVocab

VOCAB_CHUNK = 8192
ROW_CHUNK = 256
FP32_HEAD_BYTES = 256 << 20
"""Draft rows of the head are held in fp32 up to this size, else converted at each use."""


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """normed [R, D]: final hidden after the final norm. token int64 [R]: the target's argmax over its whole vocabulary.
    kept bool [R]: rows whose token the draft vocabulary holds, or all when nothing is dropped."""

    normed: Tensor
    token: Tensor
    kept: Tensor


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

    def read(self, batch: PackedBatch, rows: Tensor) -> TeacherRows:
        """Teacher of the pack's rows int64 [R].

        Raises:
            FormatError: the store does not hold the final hidden at a row that teaches.
        """
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
        normed = batch.final[at]
        normed = self.head.norm(normed) if self.norm_state == "pre_norm" else normed
        token = self._tokens(normed)
        kept = self.vocab.t2d[token] if self.drop_off_vocab else torch.ones_like(token, dtype=torch.bool)
        return TeacherRows(normed, token, kept)

    def draft_token(self, token: Tensor) -> Tensor:
        """Draft ids of target tokens int64 [R], -1 off the draft vocabulary."""
        return self._draft_ids[token]

    def probabilities(self, normed: Tensor) -> Tensor:
        """softmax over the draft vocabulary of normed rows [R, D]: fp32 [R, U]."""
        return torch.softmax(self._draft.logits(normed, norm_state="post_norm"), -1)

    def _tokens(self, normed: Tensor) -> Tensor:
        token = torch.empty(normed.shape[0], dtype=torch.int64, device=normed.device)
        chunks = list(self._vocabulary_chunks())
        for begin in range(0, normed.shape[0], ROW_CHUNK):
            rows = normed[begin : begin + ROW_CHUNK]
            best = torch.full((rows.shape[0],), float("-inf"), device=rows.device)
            found = torch.zeros(rows.shape[0], dtype=torch.int64, device=rows.device)
            for offset, chunk in chunks:
                value, index = chunk.logits(rows, norm_state="post_norm").max(-1)
                better = value > best
                best = torch.where(better, value, best)
                found = torch.where(better, index + offset, found)
            token[begin : begin + ROW_CHUNK] = found
        return token

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
