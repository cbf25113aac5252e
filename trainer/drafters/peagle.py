"""P-EAGLE: EAGLE-3 that drafts all its tokens in one forward, by mask slots behind the newest token's own.

Slot 0 after token t is EAGLE-3's first step. Slot d > 0 stands d positions on; it reads the embedding of a mask token
and, for the aux states, one trained vector; it sees slot 0 of every token up to t and slots 1…d of its own chain, and
proposes token t+2+d. Nothing is fed back. In training every token has its slot 0, and depth d keeps a falling share of
the chains (conditional drop). Weight names are those engines load. Sources: docs/design/016; speculators 0.9
``models/peagle``; vLLM ``llama_eagle3.py`` and ``llm_base_proposer.py``.

Shapes: T tokens, L aux layers, D target width, H drafter width, U draft vocabulary, R teacher rows, K depths, A active
first slots, C chains of one length c, M mask slots.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from hiddenstore.targets.head import HeadBundle
from trainer.attention.block import Sight, block_attention
from trainer.config import LossConfig
from trainer.drafters.base import DrafterKind, Needs, Pick, TargetFacts, Verified, most_probable
from trainer.drafters.blocks import recomputed, rotate
from trainer.drafters.dflash import mask_token, require_mask_embedding
from trainer.drafters.eagle3 import (
    Eagle3,
    Eagle3Config,
    Stage,
    TttInputs,
    TttLoss,
    TttObjective,
    first_step,
    project_tokens,
    stages_of,
)
from trainer.drafters.live import LiveRecurrent, recurrent_hits
from trainer.formats.peagle import PEAGLE as PEAGLE_EXPORT
from trainer.losses.fused_head import StepLosses
from trainer.losses.kinds import LOSSES
from trainer.losses.teacher import TargetInterface, Teacher
from trainer.slots import Blocks, SlotMap, chain_lengths, document_starts, map_slots, open_steps, teacher_rows
from trainer.vocab import DraftVocab

PUBLISHED_LAYERS = 4


class PEagleLoss(TttLoss):
    """What the slots of a chain are taught."""

    steps: int = Field(8, gt=0, le=32)
    """Depths: tokens drafted in one forward."""
    step_decay: float = Field(1.0, gt=0, le=1)
    """Weight of a depth over that of the depth before."""
    reduction: Literal["kept", "slots", "all"] = "all"
    """What a depth's loss is divided by: the taught slots of all depths (``all``: speculators), its own (``kept``) or
    every token of the batch (``slots``)."""
    keep_ratio: float = Field(0.7, gt=0, le=1)
    """Share of a sample's chains that reach depth d is this to the power of d."""
    keep_least: float = Field(0.2, ge=0, le=1)
    """The share below which it does not fall."""
    max_chains: int | None = Field(None, gt=0)
    """Supervised tokens of a sample that count for the share; none for all."""


class PEagleConfig(Eagle3Config):
    """Settings of P-EAGLE."""

    name: str = "peagle"
    """The kind of drafter."""
    num_layers: int = Field(PUBLISHED_LAYERS, gt=0)
    """Decoder layers; those after the first are plain Llama layers."""
    mask_token_id: int = Field(ge=0)
    """Target token whose embedding the mask slots read."""

    @model_validator(mode="after")
    def _feeds_nothing_back(self) -> Self:
        if self.norm_output:
            raise ValueError("norm_output says what is fed back, and P-EAGLE feeds nothing back")
        return self


@dataclass(frozen=True, eq=False)
class Chains:
    """Mask slots, chain by chain and those of one length together. base int64 [T]: index of a token's first mask slot,
    -1 without one. positions int64 [M]. ``sights``: the chains of each length over the rows of the pack."""

    base: Tensor
    positions: Tensor
    sights: tuple[Sight, ...]

    @classmethod
    def of(cls, lengths: Tensor, batch: PackedBatch) -> Self:
        """From the mask slots behind every token, int64 [T]."""
        starts, base = document_starts(batch.document), torch.full_like(lengths, -1)
        positions, sights, total = [], [], 0
        for length in range(1, int(lengths.max()) + 1 if lengths.numel() else 0):
            tokens = torch.nonzero(lengths == length)[:, 0]
            if not len(tokens):
                continue
            base[tokens] = total + length * torch.arange(len(tokens), device=tokens.device)
            total += length * len(tokens)
            depth = torch.arange(1, length + 1, device=tokens.device)
            positions.append((batch.positions[tokens][:, None] + depth).flatten())
            bounds = list(zip(starts[tokens].tolist(), (tokens + 1).tolist(), strict=True))
            sights.append(Sight(Blocks.of(bounds, tokens.device), length, 0, length, causal=True))
        return cls(base, torch.cat(positions) if positions else lengths[:0], tuple(sights))


class PEagle(Eagle3):
    """The drafter: EAGLE-3's weights and what stands for the aux states of a mask slot."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, target_hidden_size: int, target_vocab_size: int, draft_size: int) -> None:
        super().__init__(config, target_hidden_size, target_vocab_size, draft_size)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.aux_layers) * target_hidden_size))

    @classmethod
    def build(cls, config: Eagle3Config, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """As EAGLE-3's. Raises ConfigError: the mask token has no embedding."""
        assert isinstance(config, PEagleConfig)
        require_mask_embedding(config.mask_token_id, head)
        return super().build(config, head, vocab, seed)

    def mask_start(self) -> Tensor:
        """The g of a mask slot: [1, H]."""
        return self.start(self.mask_hidden.view(len(self.config.aux_layers), 1, -1))

    def mask_ids(self, count: int) -> Tensor:
        """int64 [count]."""
        return torch.full((count,), self.config.mask_token_id, device=self.fc.weight.device)

    def slot_states(self, batch: PackedBatch, slot_map: SlotMap, chains: Chains) -> Tensor:
        """States after the final norm of the active first slots, then of the mask slots: [A+M, H]."""
        stages = stages_of(self)
        tokens = project_tokens(self, batch.input_ids.roll(-1))
        first = first_step(self, stages, batch, slot_map, tokens)
        if not len(chains.positions):
            return self.norm(first)
        hidden, from_mask = self.mask_start(), project_tokens(self, self.mask_ids(1))
        for index, stage in enumerate(stages):
            added = None if index else from_mask
            hidden = recomputed(self.recompute, self._through, stage, hidden, added, chains)
        return self.norm(torch.cat([first, hidden]))

    def _through(self, stage: Stage, hidden: Tensor, tokens: Tensor | None, chains: Chains) -> Tensor:
        """Mask slots after a layer [M, H], from those before it, which are one row until positions tell them apart."""
        count, normed = len(chains.positions), stage.norm(hidden)
        parts = stage.layer.self_attn.split(stage.project(normed, tokens))
        q, k, v = (x.expand(count, -1, -1) for x in parts)
        tables = self.rotary.at(chains.positions)
        q, k, attended, at = rotate(q, *tables), rotate(k, *tables), [], 0
        for sight in chains.sights:
            rows = slice(at, at + len(sight.blocks.bounds) * sight.block_size)
            attended.append(block_attention(q[rows], stage.prefix, (k[rows], v[rows]), sight))
            at = rows.stop
        shape = (count, hidden.shape[1])
        return stage.finish(hidden.expand(shape), normed.expand(shape), torch.cat(attended))

    def unroll(self, batch: PackedBatch, slot_map: SlotMap, steps: int) -> Tensor:
        """States after the final norm of whole chains behind every active slot, depth by depth: [K*A, H]."""
        lengths = torch.zeros_like(batch.input_ids).index_fill_(0, slot_map.active, steps - 1)
        states = self.slot_states(batch, slot_map, Chains.of(lengths, batch))
        active = len(slot_map.active)
        first, masked = states[:active], states[active:].view(active, steps - 1, states.shape[1])
        return torch.cat([first[None], masked.transpose(0, 1)]).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class ChainInputs(TttInputs):
    """chains: the mask slots that were drawn. at int64 [R, K]: the state that row r teaches at depth d, -1 for none."""

    chains: Chains
    at: Tensor


class ChainObjective(TttObjective):
    """What the loop optimises: a loss over first slots and the mask slots drawn for this step."""

    model: PEagle
    loss: PEagleLoss

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> ChainInputs:
        """Draw the chains, read the teacher and pair its rows with slots; nothing here depends on the drafter."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        keep = (self.loss.keep_ratio, self.loss.keep_least, self.loss.max_chains)
        return self.prepare_at(batch, chain_lengths(batch, rows, self.loss.steps, keep, self.model.rng_key))

    @torch.no_grad()
    def prepare_at(self, batch: PackedBatch, lengths: Tensor) -> ChainInputs:
        """The same with given mask slots behind every token: int64 [T]."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        rows, teacher, usable = self._teach(batch, rows)
        depth = torch.arange(self.loss.steps, device=rows.device)
        token = (rows[:, None] - 1 - depth).clamp(min=0)
        drawn = open_steps(rows, batch.document, self.loss.steps) & (depth <= lengths[token])
        slot_map, chains = map_slots(rows[usable], batch.document, 1), Chains.of(lengths, batch)
        token, kept = token[usable], drawn[usable]
        masked = len(slot_map.active) + chains.base[token] + depth - 1
        at = torch.where(kept, torch.where(depth == 0, slot_map.slots, masked), -1)
        return ChainInputs(batch, drawn.sum(0), kept.sum(0), teacher.pick(usable), slot_map, chains, at)

    def losses(self, inputs: TttInputs, denominators: Tensor) -> StepLosses:
        assert isinstance(inputs, ChainInputs)
        states = self.model.slot_states(inputs.batch, inputs.slot_map, inputs.chains)
        return self._compared(states, inputs.at, inputs.teacher, denominators)


class LiveChain(LiveRecurrent):
    """The drafter beside a live target, one forward a draft. Its KV cache holds first slots only between calls."""

    _model: PEagle

    @torch.inference_mode()
    def propose(self, verified: Verified, draft_len: int, pick: Pick = most_probable) -> list[int]:
        device, begin = self._target_ids.device, self._cache.length
        length = begin + len(verified.next_ids)
        known = torch.tensor(list(verified.next_ids), device=device)
        ids = torch.cat([known, self._model.mask_ids(draft_len - 1)])
        g = torch.cat([self._model.begin(verified), self._model.mask_start().expand(draft_len - 1, -1)])
        positions = torch.arange(begin, begin + len(ids), device=device)
        _, logits = self._model.step(g, ids, positions, self._cache, last=draft_len)
        self._cache.crop(length)
        return [int(token) for token in self._target_ids[pick(logits)].tolist()]


class _PEagleKind(DrafterKind[PEagle, PEagleConfig, PEagleLoss]):
    name = "peagle"
    layers = "eagle3"
    config, loss = PEagleConfig, PEagleLoss
    export = PEAGLE_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """EAGLE-3's aux layers where the store holds them, else all it holds; a layer for every four of the target, up
        to the published four; the target's mask token."""
        drafter: dict[str, Any] = {
            "aux_layers": self.default_aux_layers(facts),
            "num_layers": max(1, min(PUBLISHED_LAYERS, facts.num_layers // 4)),
        }
        mask = mask_token(facts.file, facts.vocab_size)
        if mask is not None:
            drafter["mask_token_id"] = mask
        return {"drafter": drafter, "optim": {"kind": "muon"}}

    def needs(self, config: PEagleConfig, loss: LossConfig | None) -> Needs:
        reads_final = isinstance(loss, PEagleLoss) and LOSSES[loss.kind].teacher != "text"
        return Needs(config.aux_layers, "supervised" if reads_final else "none")

    def build(self, config: PEagleConfig, target: TargetInterface, seed: int) -> PEagle:
        return PEagle.build(config, target.head, target.vocab, seed)

    def objective(self, model: PEagle, target: TargetInterface, loss: PEagleLoss) -> ChainObjective:
        teacher = Teacher(target, drop_off_vocab=loss.drop_off_vocab)
        return ChainObjective(model, teacher, loss)

    def hits(self, model: PEagle, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        return recurrent_hits(partial(model.unroll, pack), model.lm_head.weight, target.vocab, pack, draft_len)

    def live(self, model: PEagle, target: TargetInterface) -> LiveChain:
        return LiveChain(model, target.vocab)


PEAGLE = _PEagleKind()
