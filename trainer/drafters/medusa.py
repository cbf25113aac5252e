"""Medusa: heads that each read one final hidden and propose one of the next tokens, all at once.

Head k of f_t, the final hidden after the final norm, predicts x_{t+2+k}. Sources: docs/design/010; ModelOpt
``hf_medusa.py`` for the loss.

Shapes: T tokens, R rows that teach, D target width, K heads, N drafting positions.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear
from trainer.config import DrafterConfig, LossConfig
from trainer.drafters.base import (
    Drafter,
    DrafterKind,
    LossInputs,
    Needs,
    Pick,
    TargetFacts,
    Verified,
    most_probable,
    require_width,
    seeded,
)
from trainer.drafters.blocks import recomputed
from trainer.drafters.live import draft_tokens, pack_drafting_positions, text_hits
from trainer.formats.medusa import MEDUSA as MEDUSA_EXPORT
from trainer.losses.fused_head import StepLosses, Supervision, head_losses, step_scales, step_weights
from trainer.losses.kinds import LOSSES
from trainer.losses.teacher import FrozenHead, TargetInterface, Teacher, final_index
from trainer.slots import following_rows
from trainer.vocab import DraftVocab

READER = ("the heads", "--layers medusa")
"""Who reads final rows, and what captures them, as an error names them."""


class MedusaConfig(DrafterConfig):
    """Settings of Medusa."""

    name: str = "medusa"
    """The kind of drafter."""
    aux_layers: tuple[int, ...] = Field((), max_length=0)
    """None: it reads the final hidden alone."""
    medusa_heads: int = Field(4, gt=0, le=16)
    """Heads, and so drafted tokens; published models have 3 to 5."""
    medusa_layers: int = Field(1, gt=0)
    """Residual blocks of a head; published models have one."""
    original_head: bool = False
    """End every head in the target's frozen LM head instead of one of its own."""

    @property
    def weights(self) -> int:
        """Those of the heads; there is no decoder layer."""
        table = 0 if self.original_head else self.vocab_size
        return self.medusa_heads * self.hidden_size * (self.medusa_layers * self.hidden_size + table)


class ResBlocks(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = x + F.silu(layer(x))
        return x


class Medusa(Drafter):
    """The heads. With ``original_head`` the LM head is borrowed and never saved."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, draft_size: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            ResBlocks(config.hidden_size, config.medusa_layers) for _ in range(config.medusa_heads)
        )
        heads = 0 if config.original_head else config.medusa_heads
        self.lm_heads = nn.ModuleList(Linear(config.hidden_size, draft_size) for _ in range(heads))
        self._original: FrozenHead | None = None

    @classmethod
    @torch.no_grad()
    def build(cls, config: MedusaConfig, head: HeadBundle, vocab: DraftVocab) -> Self:
        """Fresh heads, in which nothing is random: rows of the target's head times its logit scale; a bias is left."""
        with seeded(0):
            model = cls(config, vocab.size)
        rows = head.output_weight[vocab.target_ids.to(head.output_weight.device)].float() * head.spec.logit_scale
        for weight in model.lm_heads.parameters():
            weight.copy_(rows)
        model.tie_weights(head)
        return model

    def tie_weights(self, head: HeadBundle) -> None:
        """Read the original head from this bundle."""
        if self.config.original_head:
            self._original = FrozenHead.of(head.to(next(self.parameters()).device))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def states(self, features: Tensor, index: int) -> Tensor:
        """What the LM head of head ``index`` reads of features [R, D], as wide as ``head_weight``."""
        states: Tensor = recomputed(self.recompute, self.blocks[index], features.to(self.dtype))
        return states if self._original is None else self._original.widened(states)

    def head_weight(self, index: int) -> Tensor:
        """Its rows [U, D], or [U, D+1] where the original head has a bias."""
        if self._original is not None:
            return self._original.weight
        weight = self.lm_heads[index].weight
        assert isinstance(weight, Tensor)
        return weight


class MedusaLoss(LossConfig):
    """Head k weighs head_weight * decay^k (ModelOpt)."""

    head_weight: float = Field(0.2, gt=0)
    """Weight of the first head."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of a head over that of the head before."""
    teacher_share: float = Field(0.0, ge=0, le=1)
    """Share of the target's own distribution in what is taught; the rest is the text's token."""


@dataclass(frozen=True, eq=False)
class MedusaInputs(LossInputs):
    """One pack. features [R, D] after the final norm; labels int64 [R, K]: draft ids, -1 where nothing is taught;
    teacher [R, K]: which row of ``final`` predicts the label; ``open`` counts labels on and off the vocabulary."""

    features: Tensor
    labels: Tensor
    teacher: Tensor


class MedusaObjective:
    """What the loop optimises: sum_k head_weight * decay^k * mean cross-entropy of head k. Row t teaches head k where
    tokens t+1 and t+2+k are supervised: just the rows a draft is ever proposed from, because the first token of an
    answer comes from the prefill. Hence ``final: supervised`` stores every row that is needed, and a store with more
    rows teaches the same."""

    def __init__(self, model: Medusa, target: TargetInterface, loss: MedusaLoss) -> None:
        self.model, self.target, self.loss = model, target, loss
        self.depths = model.config.medusa_heads
        self.teacher = Teacher(target, drop_off_vocab=False)
        self._weights = loss.head_weight * step_weights(self.depths, loss.decay)

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> MedusaInputs:
        """Find the rows that teach, whose next token is supervised and of their document, and what each head is taught
        there."""
        rows = torch.nonzero(batch.loss_mask[1:] & (batch.document[1:] == batch.document[:-1]))[:, 0]
        ahead, taught = following_rows(batch.document, rows + 1, self.depths)
        taught &= batch.loss_mask[ahead]
        labels = torch.where(taught, self.teacher.draft_token(batch.input_ids[ahead]), -1)
        final = final_index(batch, rows, *READER)
        before = torch.where(labels >= 0, ahead - 1, rows[:, None])
        teacher = torch.searchsorted(batch.final_rows, before)
        features = self.target.normed(batch.final[final])
        return MedusaInputs(batch, taught.sum(0), (labels >= 0).sum(0), features, labels, teacher)

    def denominators(self, *packs: MedusaInputs) -> Tensor:
        """Taught slots of each head over these packs: fp32 [K]. Ranks add theirs."""
        zeros = torch.zeros(self.depths, device=self.target.head.embed_tokens.device)
        return sum((inputs.counts for inputs in packs), zeros)

    def losses(self, inputs: MedusaInputs, denominators: Tensor) -> StepLosses:
        scales = step_scales(self._weights.to(denominators.device), denominators)
        heads = [self._losses(inputs, index, scales[index : index + 1]) for index in range(self.depths)]
        total, value = heads[0].total, heads[0].value
        for head in heads[1:]:
            total, value = total + head.total, value + head.value
        sums, hits, counts = (torch.cat([getattr(head, name) for head in heads]) for name in ("sums", "hits", "counts"))
        return StepLosses(total, value, sums, hits, counts)

    def _losses(self, inputs: MedusaInputs, index: int, scale: Tensor) -> StepLosses:
        states, labels = self.model.states(inputs.features, index), inputs.labels[:, index : index + 1]

        def distribution(which: Tensor) -> Tensor:
            return self.teacher.probabilities(self.target.normed(inputs.batch.final[inputs.teacher[which, index]]))

        share = self.loss.teacher_share
        supervision = Supervision.of_labels(labels, distribution if share else None, share)
        return head_losses(states, self.model.head_weight(index), supervision, scale, LOSSES["text_ce"])


class LiveMedusa:
    """The heads beside a live target; a `trainer.drafters.base.Live`. Holds nothing of the text."""

    def __init__(self, model: Medusa, target: TargetInterface) -> None:
        self._model, self._target = model, target

    def reset(self) -> None:
        """Nothing to forget."""

    @torch.inference_mode()
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        """Target ids of the first ``draft_len`` heads."""
        features = self._target.head.norm(verified.final[-1:])
        heads = range(draft_len)
        logits = [self._model.states(features, k).float() @ self._model.head_weight(k).float().T for k in heads]
        ids: list[int] = self._target.vocab.target_ids[pick(torch.cat(logits))].tolist()
        return ids


class _MedusaKind(DrafterKind[Medusa, MedusaConfig, MedusaLoss]):
    name = layers = "medusa"
    config, loss = MedusaConfig, MedusaLoss
    export = MEDUSA_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        return {}

    def needs(self, config: MedusaConfig, loss: MedusaLoss | None) -> Needs:
        return Needs((), "supervised", hidden=True)

    def build(self, config: MedusaConfig, target: TargetInterface, seed: int) -> Medusa:
        require_width(config, target, "medusa heads read the target's final hidden")
        if config.original_head and not target.vocab.is_full:
            raise ConfigError(
                f"the target's own head knows {target.vocab.target_size} tokens, the draft vocabulary "
                f"{target.vocab.size}",
                kind=Kind.DRAFTER_SHAPE,
                hint=f"drafter.vocab_size={target.vocab.target_size}, or drafter.original_head=false",
            )
        return Medusa.build(config, target.head, target.vocab)

    def objective(self, model: Medusa, target: TargetInterface, loss: MedusaLoss) -> MedusaObjective:
        return MedusaObjective(model, target, loss)

    def hits(self, model: Medusa, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        start = pack_drafting_positions(pack)
        at = final_index(pack, start - 1, *READER)

        def proposed(index: int, left: Tensor) -> Tensor:
            states = model.states(target.normed(pack.final[at[left]]), index)
            return target.vocab.target_ids[draft_tokens(states.float(), model.head_weight(index).float())]

        return text_hits(pack, start, draft_len, proposed)

    def longest_draft(self, config: MedusaConfig) -> int:
        return config.medusa_heads

    def live(self, model: Medusa, target: TargetInterface) -> LiveMedusa:
        return LiveMedusa(model, target)


MEDUSA = _MedusaKind()
