"""Medusa: heads that each read one final hidden and propose one of the next tokens, all at once.

Head k of f_t, the final hidden after the final norm, predicts x_{t+2+k}. Sources: drafters.md sections 1.5 and 3,
ModelOpt ``hf_medusa.py`` for the loss.

Shapes: T tokens, R rows that teach, D target width, K heads, N drafting positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, FormatError
from trainer.config import LossConfig
from trainer.drafters.base import DrafterKind, Needs, Pick, Seen, TargetFacts, TargetSide, most_probable
from trainer.drafters.medusa_heads import Medusa, MedusaConfig
from trainer.drafting.chain import LOGIT_BUDGET, pack_drafting_positions
from trainer.objectives.hard_loss import Blend, hard_cross_entropy
from trainer.objectives.losses import StepLosses, step_scales, step_weights
from trainer.objectives.teacher import Teacher


class MedusaLoss(LossConfig):
    """Head k weighs head_weight * decay^k (ModelOpt). teacher_share: how much of what is taught is the target's own
    distribution at token t+1+k instead of the text's token."""

    head_weight: float = Field(0.2, gt=0)
    decay: float = Field(0.8, gt=0, le=1)
    teacher_share: float = Field(0.0, ge=0, le=1)


@dataclass(frozen=True, eq=False)
class MedusaWork:
    """One pack. features [R, D] after the final norm; labels int64 [R, K]: draft ids, -1 where nothing is taught;
    teacher [R, K]: which row of ``final`` predicts the label; ``open`` counts labels before the vocabulary is asked."""

    batch: PackedBatch
    features: Tensor
    labels: Tensor
    teacher: Tensor
    open: Tensor

    @property
    def counts(self) -> Tensor:
        """Taught slots per head: int64 [K]."""
        return (self.labels >= 0).sum(0)


class MedusaObjective:
    """What the loop optimises: sum_k head_weight * decay^k * mean cross-entropy of head k.

    Row t teaches head k where tokens t+1 and t+2+k are supervised: just the rows a draft is ever proposed from, because
    the first token of an answer comes from the prefill. Hence every row of ``final: supervised`` that is needed is
    held, and a store with more rows teaches the same.
    """

    def __init__(self, model: Medusa, side: TargetSide, loss: MedusaLoss) -> None:
        self.model, self.side, self.loss = model, side, loss
        self.depths = model.config.medusa_heads
        self.teacher = Teacher(side.head, side.vocab, side.final_norm, drop_off_vocab=False)
        self._weights = loss.head_weight * step_weights(self.depths, loss.decay)

    @torch.no_grad()
    def plan(self, batch: PackedBatch) -> MedusaWork:
        """Find the rows that teach and what each head is taught there."""
        rows = _taught_rows(batch)
        ahead, there = _following(batch, rows + 1, self.depths)
        there &= batch.loss_mask[ahead]
        labels = torch.where(there, self.teacher.draft_token(batch.input_ids[ahead]), -1)
        final = final_index(batch, rows)
        before = torch.where(labels >= 0, ahead - 1, rows[:, None])
        teacher = torch.searchsorted(batch.final_rows, before)
        return MedusaWork(batch, self.side.normed(batch.final[final]), labels, teacher, there.sum(0))

    def divisors(self, *works: MedusaWork) -> Tensor:
        """Taught slots of each head over these packs: fp32 [K]. Ranks add theirs."""
        total = torch.zeros(self.depths, device=self.side.head.embed_tokens.device)
        for work in works:
            total += work.counts
        return total

    def losses(self, work: MedusaWork, divisors: Tensor) -> StepLosses:
        """This pack's share of the loss; over all packs and ranks the shares add up."""
        scales = step_scales(self._weights.to(divisors.device), divisors)
        return _summed([self._losses(work, index, scales) for index in range(self.depths)])

    def _losses(self, work: MedusaWork, index: int, scales: Tensor) -> StepLosses:
        states = self.model.states(work.features, index)
        kind = states.device.type
        return hard_cross_entropy(
            states,
            self.model.head_weight(index),
            work.labels[:, index],
            torch.full_like(work.labels[:, index], index),
            scales[index].expand(len(states)),
            self.depths,
            compute_dtype=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            blend=self._blend(work, index) if self.loss.teacher_share else None,
        )

    def _blend(self, work: MedusaWork, index: int) -> Blend:
        def probabilities(which: Tensor) -> Tensor:
            return self.teacher.probabilities(self.side.normed(work.batch.final[work.teacher[which, index]]))

        return Blend(self.loss.teacher_share, probabilities)


class LiveMedusa:
    """The heads beside a live target; a `trainer.drafters.base.Live`. Holds nothing of the text."""

    def __init__(self, model: Medusa, side: TargetSide) -> None:
        self._model, self._side = model, side

    def reset(self) -> None:
        """Nothing to forget."""

    @torch.inference_mode()
    def propose(self, seen: Seen, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """Target ids of the first ``draft_len`` heads."""
        features = self._side.head.norm(seen.final[-1:])
        logits = [
            _logits(self._model.states(features, index), self._model.head_weight(index)) for index in range(draft_len)
        ]
        found: list[int] = self._side.vocab.target_ids[pick(torch.cat(logits))].tolist()
        return found


def final_index(batch: PackedBatch, rows: Tensor) -> Tensor:
    """Where in ``batch.final`` pack rows int64 [R] are held: int64 [R].

    Raises:
        FormatError: one is not.
    """
    at = torch.searchsorted(batch.final_rows, rows)
    held = at < batch.final.shape[0]
    held[held.clone()] = batch.final_rows[at[held]] == rows[held]
    if not bool(held.all()):
        row = int(rows[~held][0])
        raise FormatError(
            f"sample {batch.sample_ids[int(batch.document[row])]}: no final hidden is stored at pack row {row}, which "
            f"the heads read",
            kind="final-rows-missing",
            hint="hiddenstore collect DATA -o STORE --target T --layers medusa",
        )
    return at


def _taught_rows(batch: PackedBatch) -> Tensor:
    """Rows t whose next token is supervised, in the same document: int64 [R], ascending."""
    return torch.nonzero(batch.loss_mask[1:] & (batch.document[1:] == batch.document[:-1]))[:, 0]


def _following(pack: PackedBatch, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` rows after each of ``rows`` int64 [N, count], and whether each is of the same document."""
    at = rows[:, None] + 1 + torch.arange(count, device=rows.device)
    inside = at.clamp(max=max(pack.tokens - 1, 0))
    return inside, (at < pack.tokens) & (pack.document[inside] == pack.document[rows][:, None])


def _summed(parts: Sequence[StepLosses]) -> StepLosses:
    total, value, sums, hits, counts = parts[0].total, parts[0].value, parts[0].sums, parts[0].hits, parts[0].counts
    for part in parts[1:]:
        total, value, sums = total + part.total, value + part.value, sums + part.sums
        hits, counts = hits + part.hits, counts + part.counts
    return StepLosses(total, value, sums, hits, counts)


def _logits(states: Tensor, weight: Tensor) -> Tensor:
    return states.float() @ weight.float().T


class _MedusaKind(DrafterKind[Medusa, MedusaConfig, MedusaLoss]):
    name = layers = "medusa"
    config, loss = MedusaConfig, MedusaLoss

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        return {}

    def needs(self, config: MedusaConfig, loss: MedusaLoss | None) -> Needs:
        return Needs((), "supervised", hidden=True)

    def build(self, config: MedusaConfig, side: TargetSide, seed: int) -> Medusa:
        _require_fit(config, side)
        return Medusa.build(config, side.head, side.vocab)

    def objective(self, model: Medusa, side: TargetSide, loss: MedusaLoss) -> MedusaObjective:
        return MedusaObjective(model, side, loss)

    def hits(self, model: Medusa, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        hits = torch.zeros_like(pack.input_ids)
        start = pack_drafting_positions(pack)
        at = final_index(pack, start - 1)
        target_ids, rows = side.vocab.target_ids, max(1, LOGIT_BUDGET // side.vocab.size)
        ahead, there = _following(pack, start, draft_len)
        text = pack.input_ids[ahead]
        for index in range(draft_len):
            states = model.states(side.normed(pack.final[at]), index)
            found = [_logits(part, model.head_weight(index)).argmax(-1) for part in states.split(rows)]
            proposed = target_ids[torch.cat(found)] if found else start
            alive = there[:, index] & (proposed == text[:, index])
            start, at, text, there = start[alive], at[alive], text[alive], there[alive]
            hits[start] += 1
        return hits

    def longest_draft(self, config: MedusaConfig) -> int:
        return config.medusa_heads

    def live(self, model: Medusa, side: TargetSide) -> LiveMedusa:
        return LiveMedusa(model, side)


def _require_fit(config: MedusaConfig, side: TargetSide) -> None:
    width = side.head.hidden_size
    if config.hidden_size != width:
        raise ConfigError(
            f"medusa heads read the target's final hidden: drafter.hidden_size is {config.hidden_size}, the target's "
            f"is {width}",
            kind="drafter-shape",
            hint=f"drafter.hidden_size={width}",
        )
    if config.original_head and not side.vocab.is_full:
        raise ConfigError(
            f"the target's own head knows {side.vocab.target_size} tokens, the draft vocabulary {side.vocab.size}",
            kind="drafter-shape",
            hint=f"drafter.vocab_size={side.vocab.target_size}, or drafter.original_head=false",
        )


MEDUSA = _MedusaKind()
