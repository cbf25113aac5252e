"""EAGLE-3 and 3.1: decoder layers over fused aux states, unrolled over their own output (training-time test).

g = fc([a; b; c]); layer input [input_layernorm(emb(x_{t+1})); hidden_norm(g)]; residual g; the layer's output is fed
back as the next step's g before the final norm, or after it with ``norm_output``. Weight names are those engines load.
Mixed states are Model Optimizer's ``eagle_mix_hidden_states`` with its ``eagle_hsm_mode``: every step is a causal pass
over all rows, so that keys too come from mixed states. What a step says at row t-1 is what row t may read next. The
first row of a sample has none before it and reads the target's state throughout.
Sources: docs/design/009; vLLM ``llama_eagle3.py`` for ``norm_output`` and ``norm_before_residual``.

Shapes: T tokens, L aux layers, D target width, H drafter width, V target vocabulary, U draft vocabulary, K TTT steps,
A active slots, N query heads, G key heads, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear, linear
from trainer.attention.ttt import KVCache, attend_cached, for_kernel, ttt_attention
from trainer.config import DrafterConfig, LossConfig
from trainer.drafters.base import (
    Drafter,
    LossInputs,
    Needs,
    TargetFacts,
    Verified,
    quiet_scale,
    rms_weight,
    sample_generator,
    seeded,
)
from trainer.drafters.blocks import DecoderLayer, RMSNorm, Rotary, recomputed, rotate
from trainer.drafters.live import KeyValues, RecurrentKind
from trainer.formats.eagle3 import EAGLE3 as EAGLE3_EXPORT
from trainer.losses.fused_head import StepLosses, Supervision, head_losses, step_scales, step_weights
from trainer.losses.kinds import LOSSES
from trainer.losses.teacher import TargetInterface, Teacher, TeacherRows
from trainer.parallel.context import gather_prefix, local_slots
from trainer.slots import (
    SlotMap,
    SlotRange,
    document_ranges,
    document_starts,
    gather_ranges,
    map_slots,
    next_tokens,
    open_steps,
    teacher_rows,
)
from trainer.vocab import DraftVocab

Mixing = Literal["none", "sparse_replace", "uniform_layer_sample", "no_replace"]
"""Which row's next step reads a state of the target, and which one of the drafter's own."""


class TttLoss(LossConfig):
    """What the steps of training-time test are taught."""

    steps: int = Field(7, gt=0, le=32)
    """Steps the drafter is unrolled over its own output."""
    kind: str = "soft_ce"
    """A loss of the table in `trainer.losses.kinds`: soft_ce, kl, target_ce, text_ce, tv, lk_alpha or lk_lambda."""
    step_decay: float = Field(0.8, gt=0, le=1)
    """Weight of a step over that of the step before."""
    step_weights: tuple[float, ...] | None = None
    """Weight of every step; wins over ``step_decay``."""
    reduction: Literal["kept", "slots", "all"] = "kept"
    """What a step's loss is divided by: its taught slots (``kept``), every token of the batch (``slots``: SafeAILab,
    SpecForge) or the taught slots of all steps (``all``)."""
    mask_offset: int = Field(1, ge=-1, le=1)
    """Token that must be supervised for a row to teach: 1 the one it predicts, 0 its own, -1 the one before."""
    drop_off_vocab: bool = True
    """Leave out rows at which the target's choice is not in the draft vocabulary."""
    overlap_mass: Literal["whole", "draft"] = "whole"
    """Losses with an overlap take the target's probabilities as they are (``whole``: SpecForge) or scaled up to one
    over the draft vocabulary (``draft``: Automodel, speculators)."""
    lk_blend: Literal["slot", "step"] = "slot"
    """``lk_lambda`` blends by each slot's overlap (speculators) or by the step's mean over the pack (SpecForge), which
    takes a pass more and trains something else where other ranks or another ``data.pack_tokens`` make other packs."""

    @property
    def blends_by_step(self) -> bool:
        """Whether a slot's loss depends on the others of its step."""
        return self.kind == "lk_lambda" and self.lk_blend == "step"

    def as_rejection(self) -> Self:
        """Total variation, of the target's probabilities as they are."""
        return self.model_copy(update={"kind": "tv", "overlap_mass": "whole"})

    @field_validator("kind")
    @classmethod
    def _is_in_the_table(cls, kind: str) -> str:
        if kind not in LOSSES:
            raise ValueError(f"unknown loss {kind!r}; there are: {', '.join(LOSSES)}")
        return kind

    @model_validator(mode="after")
    def _weights_fit(self) -> "TttLoss":
        if self.step_weights is not None and len(self.step_weights) != self.steps:
            raise ValueError(f"step_weights has {len(self.step_weights)} entries for {self.steps} steps")
        if self.step_weights is not None and (min(self.step_weights) < 0 or not any(self.step_weights)):
            listed = ",".join(f"{weight:g}" for weight in self.step_weights)
            raise ValueError(f"step_weights are at least 0 and not all 0, found {listed}")
        return self


@dataclass(frozen=True, eq=False)
class TttInputs(LossInputs):
    """One pack with the rows that teach and the slots they teach."""

    teacher: TeacherRows
    slot_map: SlotMap


class Unrolled(Protocol):
    """A drafter that training-time test unrolls."""

    @property
    def lm_head(self) -> Any:
        """Whose ``weight`` [U, H] makes logits of states."""

    def unroll(self, batch: PackedBatch, slot_map: SlotMap, steps: int) -> Tensor:
        """States after the final norm at every TTT step, step by step: [K*A, H]."""


class TttObjective:
    """What the loop optimises: a loss over the TTT steps, the teacher computed once per pack."""

    def __init__(self, model: Unrolled, teacher: Teacher, loss: TttLoss) -> None:
        self.model, self.teacher, self.loss, self.depths = model, teacher, loss, loss.steps
        self._kind = LOSSES[loss.kind]

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> TttInputs:
        """Read the teacher and pair its rows with slots; nothing here depends on the drafter."""
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        local = local_slots(batch)
        if local is not None:
            rows = rows[open_steps(rows, batch.document, self.loss.steps, local).any(1)]
        rows, teacher, usable = self._teach(batch, rows)
        admitted = open_steps(rows, batch.document, self.loss.steps, local).sum(0)
        if not bool(usable.all()):
            rows, teacher = rows[usable], teacher.pick(usable)
        slot_map = map_slots(rows, batch.document, self.loss.steps, local=local)
        return TttInputs(batch, admitted, slot_map.counts, teacher, slot_map)

    def denominators(self, *packs: TttInputs) -> Tensor:
        """What each step's loss is divided by, over these packs: fp32 [K]. Ranks add theirs."""
        if self.loss.reduction == "slots":
            slots = sum(inputs.batch.tokens for inputs in packs)
            return torch.full((self.loss.steps,), float(slots), device=self._device)
        counts = sum((inputs.counts for inputs in packs), torch.zeros(self.loss.steps, device=self._device))
        return counts.sum().expand_as(counts).clone() if self.loss.reduction == "all" else counts

    def losses(self, inputs: TttInputs, denominators: Tensor) -> StepLosses:
        states = self._states(inputs)
        active = inputs.slot_map.active.shape[0]
        step_offset = torch.arange(self.loss.steps, device=states.device) * active
        slots = torch.where(inputs.slot_map.slots >= 0, inputs.slot_map.slots + step_offset, -1)
        return self._compared(states, slots, inputs.teacher, denominators)

    def _states(self, inputs: TttInputs) -> Tensor:
        """After the final norm at every TTT step, step by step: [K*A, H]."""
        return self.model.unroll(inputs.batch, inputs.slot_map, self.loss.steps)

    def _compared(self, states: Tensor, slots: Tensor, teacher: TeacherRows, denominators: Tensor) -> StepLosses:
        """Losses of states [S, H], which ``slots`` int64 [R, K] names."""
        weights = step_weights(self.loss.steps, self.loss.step_decay, self.loss.step_weights).to(self._device)
        return head_losses(
            states,
            self.model.lm_head.weight,
            self._supervision(slots, teacher),
            step_scales(weights, denominators),
            self._kind,
            by_step=self.loss.blends_by_step,
        )

    def _teach(self, batch: PackedBatch, rows: Tensor) -> tuple[Tensor, TeacherRows, Tensor]:
        """Rows that have a teacher int64 [R], what it says there, and which of them can teach: bool [R]."""
        if self._kind.teacher == "text":
            # The rows that a token follows are taught by that token; no final hidden is read.
            rows, token = next_tokens(batch, rows)
            teacher = TeacherRows(batch.aux.new_empty(len(rows), 0), token, self.teacher.draft_token(token) >= 0)
        else:
            mass = self._kind.overlap and self.loss.overlap_mass == "whole"
            teacher = self.teacher.read(batch, rows, token=self._kind.teacher == "target", mass=mass)
        usable = teacher.usable
        if self._kind.teacher == "target" and teacher.token is not None:
            usable = self.teacher.draft_token(teacher.token) >= 0
        return rows, teacher, usable

    def _supervision(self, slots: Tensor, teacher: TeacherRows) -> Supervision:
        labels = None if teacher.token is None else self.teacher.draft_token(teacher.token)
        if self._kind.teacher != "distribution":
            return Supervision(slots, labels, share=0.0)
        rows = torch.arange(slots.shape[0], device=slots.device)
        mass = teacher.mass if self.loss.overlap_mass == "whole" else None
        return Supervision(
            slots, labels, lambda begin, end: self.teacher.distribution(teacher.pick(rows[begin:end])), mass=mass
        )

    @property
    def _device(self) -> torch.device:
        return self.model.lm_head.weight.device


def unrolled_mixed(model: "Eagle3", batch: PackedBatch, slot_map: SlotMap, steps: int, how: Mixing) -> Tensor:
    """As `Eagle3.unroll`, where every step is a causal pass over all rows that read mixed hidden states."""
    stages, tables = stages_of(model), model.rotary.at(batch.positions)
    everyone, shares = document_ranges(batch.document), draw_shares(batch, steps, model.rng_key)
    from_tokens = project_tokens(model, F.pad(batch.input_ids[1:], (0, 1)))

    def causal_pass(hidden: Tensor) -> Tensor:
        tokens: Tensor | None = from_tokens
        for stage in stages:
            normed = stage.norm(hidden)
            q, k, v = stage.layer.self_attn.split(stage.project(normed, tokens))
            attended = ttt_attention(rotate(q, *tables), rotate(k, *tables), v, [], everyone)
            hidden, tokens = stage.finish(hidden, normed, attended), None
        return hidden

    read = model.start(batch.aux)
    history, outputs = [read], []
    for i in range(steps):
        if i > 0:
            read = mixed(how, read, history, shares[i - 1], batch.document)
        hidden = recomputed(model.recompute, causal_pass, read)
        out = model.norm(hidden)
        # A slot that TTT keeps in place over i steps stands i rows further on here.
        outputs.append(gather_ranges(F.pad(out, (0, 0, 0, steps)), slot_map.ranges, i))
        history.append(moved(out if model.config.norm_output else hidden))
    return torch.cat(outputs)


def project_tokens(model: "Eagle3", ids: Tensor) -> Tensor:
    """What the embeddings of ids int64 [n] add to layer 0's joint projection: [n, (N+2G)E]."""
    attention, width = model.midlayer.self_attn, model.config.hidden_size
    weight = torch.cat([p.weight[:, :width] for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    return linear(model.midlayer.input_layernorm(model.embed(ids)), weight)


def first_step(
    model: "Eagle3", stages: "list[Stage]", batch: PackedBatch, slot_map: SlotMap, tokens_in: Tensor
) -> Tensor:
    """Output of the last layer at the active slots, before the final norm [A, H]; gives every stage the keys and values
    of its rows. tokens_in [T, (N+2G)E]: ``project_tokens`` of the token after each row."""
    hidden, normed = _prefix(model, stages, batch, slot_map, tokens_in)
    positions = batch.positions[slot_map.active]

    def last(hidden: Tensor, normed: Tensor) -> Tensor:
        stage = stages[-1]
        tokens = gather_ranges(tokens_in, slot_map.ranges) if len(stages) == 1 else None
        q = rotate(stage.queries(normed, tokens), *model.rotary.at(positions))
        return stage.finish(hidden, normed, ttt_attention(q, *stage.prefix, [], stage.ranges))

    return recomputed(model.recompute, last, hidden, normed)


@dataclass(eq=False)
class Stage:
    """A layer during an unroll. weight [(N+2G)E, H]: its joint projection of the normed hidden, made once. prefix: keys
    and values of step 0 [T, G, E]; ranges: where the active slots lie among them."""

    layer: DecoderLayer
    norm: torch.nn.Module
    weight: Tensor
    residual_normed: bool
    prefix: KeyValues = field(init=False)
    ranges: tuple[SlotRange, ...] = ()

    def project(self, normed: Tensor, tokens: Tensor | None, part: slice = slice(None)) -> Tensor:
        """A part of the joint projection [n, (N+2G)E]; ``tokens``: what the embeddings add to the whole."""
        out = for_kernel(linear(normed, self.weight[part]))
        return out if tokens is None else out + tokens[:, part]

    def queries(self, normed: Tensor, tokens: Tensor | None) -> Tensor:
        """[n, N, E]."""
        attention = self.layer.self_attn
        return self.project(normed, tokens, slice(attention.q_width)).unflatten(-1, (-1, attention.head_dim))

    def keys_values(self, normed: Tensor, tokens: Tensor | None) -> KeyValues:
        """Two of [n, G, E]."""
        attention = self.layer.self_attn
        kv = self.project(normed, tokens, slice(attention.q_width, None)).unflatten(-1, (-1, attention.head_dim))
        k, v = kv.chunk(2, 1)
        return k, v

    def finish(self, hidden: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Layer output [n, H]."""
        return self.layer.finish(normed if self.residual_normed else hidden, attended)


def stages_of(model: "Eagle3") -> list[Stage]:
    width, stages = model.config.hidden_size, []
    for layer in model.decoder_layers():
        attention = layer.self_attn
        joint = [p.weight[:, -width:] for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        stages.append(Stage(layer, layer.input_layernorm, torch.cat(joint), False))
    stages[0].norm, stages[0].residual_normed = model.midlayer.hidden_norm, model.config.norm_before_residual
    return stages


def _prefix(
    model: "Eagle3", stages: list[Stage], batch: PackedBatch, slot_map: SlotMap, tokens_in: Tensor
) -> tuple[Tensor, Tensor]:
    """Give every stage the keys and values of step 0; returns the last one's input at the active slots [A, H], plain
    and normed."""
    tables, tokens = model.rotary.at(batch.positions), tokens_in
    everyone = document_ranges(batch.document) if len(stages) > 1 else ()
    hidden = model.start(batch.aux)
    for index, stage in enumerate(stages):
        added = tokens if index == 0 else None
        normed = stage.norm(hidden)
        k, v = stage.keys_values(normed, added)
        k, v, ranges = gather_prefix(batch, rotate(k, *tables), v, (*everyone, *slot_map.ranges))
        stage.prefix, stage.ranges = (k, v), ranges[len(everyone) :]
        if index < len(stages) - 1:
            q = rotate(stage.queries(normed, added), *tables)
            hidden = stage.finish(hidden, normed, ttt_attention(q, k, v, [], ranges[: len(everyone)]))
    return gather_ranges(hidden, slot_map.ranges), gather_ranges(normed, slot_map.ranges)


FC_START = 0.2
"""Scale of a fresh ``fc`` beside torch's default: the residual starts small beside what the layer adds to it. On the
bundled target after 400 steps, two seeds: accepted length over all slots 1.666 and 1.670, against 1.657 and 1.653."""


class Eagle3Config(DrafterConfig):
    """Settings of EAGLE-3; ``fc_norm`` and ``norm_output`` make EAGLE-3.1."""

    name: str = "eagle3"
    """The kind of drafter."""
    fc_norm: bool = False
    """Norm every aux layer before they are fused."""
    norm_output: bool = False
    """Feed the output back after the final norm instead of before it."""
    norm_before_residual: bool = False
    """Take the normed hidden as the residual of layer 0."""
    num_layers: int = Field(1, gt=0)
    """Decoder layers; those after the first are plain Llama layers."""
    train_embeddings: bool = False
    """Train and save embeddings of the drafter instead of reading the target's."""
    train_head: bool = True
    """Train the LM head; it starts as the target's rows of the draft vocabulary."""
    image_token_id: int | None = Field(None, ge=0)
    """The token whose embedding stood at images; none where the store holds text alone."""

    @model_validator(mode="after")
    def _reads_states(self) -> Self:
        if not self.aux_layers:
            raise ValueError("aux_layers is empty: the drafter would see nothing of the target")
        return self


class Eagle3Loss(TttLoss):
    """What the steps are taught, and what they read."""

    mix_hidden_states: Mixing = "none"
    """What later steps read while training, as Model Optimizer's eagle_mix_hidden_states: the drafter's output at a few
    rows (``sparse_replace``), at each row the target's state or the output of any step before
    (``uniform_layer_sample``) or the last output everywhere (``no_replace``), in causal passes over whole samples; with
    ``none`` a slot's own output, and the keys of the first step, as when drafting."""


class MixedObjective(TttObjective):
    """What the loop optimises where later steps read mixed hidden states. Without gradients, steps are those of a
    drafter in use."""

    model: "Eagle3"
    loss: Eagle3Loss

    def _states(self, inputs: TttInputs) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._states(inputs)
        return unrolled_mixed(self.model, inputs.batch, inputs.slot_map, self.loss.steps, self.loss.mix_hidden_states)


class MidLayer(DecoderLayer):
    """Layer 0: attention reads [embedding; hidden], 2H wide; everything after is H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config, width_in=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3(Drafter):
    """The drafter. Frozen embeddings are borrowed from the head bundle and never saved."""

    config: Eagle3Config
    frozen_embeddings: Tensor | None

    def __init__(self, config: Eagle3Config, target_hidden_size: int, target_vocab_size: int, draft_size: int) -> None:
        super().__init__()
        self.config = config
        aux = len(config.aux_layers)
        width = config.hidden_size
        self.fc = Linear(aux * target_hidden_size, width)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target_hidden_size, config.rms_norm_eps) for _ in range(aux))
        self.midlayer = MidLayer(config)
        self.layers = nn.ModuleDict({str(i): DecoderLayer(config) for i in range(1, config.num_layers)})
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = Linear(width, draft_size)
        self.lm_head.weight.requires_grad_(config.train_head)
        self.register_buffer("frozen_embeddings", None, persistent=False)
        if config.train_embeddings or width != target_hidden_size:
            self.embed_tokens = nn.Embedding(target_vocab_size, width)
            self.embed_tokens.weight.requires_grad_(config.train_embeddings)
        self.rotary = Rotary.of(config)

    @classmethod
    def build(cls, config: Eagle3Config, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """A fresh drafter: head and final norm start as the target's, the norm scaled to say little, the rest random
        from ``seed``. A drafter of another width than the target starts with a random projection of its rows."""
        with seeded(seed):
            model = cls(config, head.hidden_size, head.embed_tokens.shape[0], vocab.size)
            model._start_from(head, vocab)
        return model

    @torch.no_grad()
    def _start_from(self, head: HeadBundle, vocab: DraftVocab) -> None:
        self.fc.weight.mul_(FC_START)
        rows = head.output_weight[vocab.target_ids.to(head.output_weight.device)].float().cpu()
        same = self.config.hidden_size == head.hidden_size
        project = None if same else torch.randn(head.hidden_size, self.config.hidden_size) / head.hidden_size**0.5
        self.lm_head.weight.copy_(rows if project is None else rows @ project)
        if same:
            self.norm.weight.copy_(rms_weight(head))
        self.norm.weight.mul_(quiet_scale(self.norm.weight, self.lm_head.weight))
        if hasattr(self, "embed_tokens"):
            table = head.embed_tokens.float().cpu()
            self.embed_tokens.weight.copy_(table if project is None else table @ project)
        self.tie_weights(head)

    def tie_weights(self, head: HeadBundle) -> None:
        """Read frozen embeddings from this bundle. The table is taken unscaled, as engines share it."""
        if not hasattr(self, "embed_tokens"):
            self.frozen_embeddings = head.embed_tokens.to(self.fc.weight.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [T, H] in the drafter's dtype."""
        if self.frozen_embeddings is not None:
            return F.embedding(ids, self.frozen_embeddings).to(self.fc.weight.dtype)
        out: Tensor = self.embed_tokens(ids)
        return out

    def start(self, aux: Tensor) -> Tensor:
        """The first g [T, H] from captured states [L, T, D]."""
        aux = aux.to(self.fc.weight.dtype)
        if self.config.fc_norm:
            aux = torch.stack([norm(layer) for norm, layer in zip(self.fc_norm, aux, strict=True)])
        # Concatenating the layers would copy them transposed; the sum of one product per layer is the same number.
        parts = self.fc.weight.split(aux.shape[-1], -1)
        g = F.linear(aux[0], parts[0])
        for layer, layer_weight in zip(aux[1:], parts[1:], strict=True):
            g = g + F.linear(layer, layer_weight)
        return g

    def begin(self, verified: Verified) -> Tensor:
        """The g [T, H] of verified tokens."""
        return self.start(verified.aux.to(self.fc.weight.device))

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `trainer.drafters.live.Recurrent`."""
        normed = self.midlayer.hidden_norm(g)
        x = torch.cat([self.midlayer.input_layernorm(self.embed(next_ids)), normed], -1)
        hidden = normed if self.config.norm_before_residual else g
        cos, sin = self.rotary.at(positions)
        for index, layer in enumerate(self.decoder_layers()):
            q, k, v = layer.self_attn.project(layer.input_layernorm(hidden) if index else x)
            hidden = layer.finish(hidden, attend_cached(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, index))
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), self.lm_head(normed if last is None else normed[-last:])

    def unroll(self, batch: PackedBatch, slot_map: SlotMap, steps: int) -> Tensor:
        stages = stages_of(self)
        # The embedding half of the projection depends on the token alone, so one product serves every step.
        from_tokens = project_tokens(self, F.pad(batch.input_ids, (0, steps + 1)))
        positions = batch.positions[slot_map.active]

        def later(i: int, hidden: Tensor, before: list[list[KeyValues]]) -> tuple[Tensor, list[KeyValues]]:
            tokens: Tensor | None = gather_ranges(from_tokens, slot_map.ranges, 1 + i)
            tables, step_keys = self.rotary.at(positions + i), []
            for stage, later_keys in zip(stages, before, strict=True):
                normed = stage.norm(hidden)
                q, k, v = stage.layer.self_attn.split(stage.project(normed, tokens))
                step_keys.append((rotate(k, *tables), v))
                attended = ttt_attention(rotate(q, *tables), *stage.prefix, [*later_keys, step_keys[-1]], stage.ranges)
                hidden, tokens = stage.finish(hidden, normed, attended), None
            return hidden, step_keys

        hidden = first_step(self, stages, batch, slot_map, from_tokens[1 : batch.input_ids.shape[0] + 1])
        outputs = []
        later_keys: list[list[KeyValues]] = [[] for _ in stages]
        for i in range(steps):
            if i > 0:
                hidden, step_keys = recomputed(self.recompute, later, i, hidden, [list(keys) for keys in later_keys])
                for keys, more in zip(later_keys, step_keys, strict=True):
                    keys.append(more)
            out = self.norm(hidden)
            outputs.append(out)
            hidden = out if self.config.norm_output else hidden
        return torch.cat(outputs)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Layer 0 first."""
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, DecoderLayer))]


class _Eagle3Kind(RecurrentKind[Eagle3, Eagle3Config, Eagle3Loss]):
    name = layers = "eagle3"
    takes_images = True
    config, loss = Eagle3Config, Eagle3Loss
    export = EAGLE3_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The field's three layers where the store holds them, else all it holds."""
        return {"drafter": {"aux_layers": self.default_aux_layers(facts)}, "optim": {"kind": "muon"}}

    def needs(self, config: Eagle3Config, loss: Eagle3Loss | None) -> Needs:
        reads_final = loss is not None and LOSSES[loss.kind].teacher != "text"
        return Needs(config.aux_layers, "supervised" if reads_final else "none")

    def build(self, config: Eagle3Config, target: TargetInterface, seed: int) -> Eagle3:
        return Eagle3.build(config, target.head, target.vocab, seed)

    def objective(self, model: Eagle3, target: TargetInterface, loss: Eagle3Loss) -> TttObjective:
        kind = TttObjective if loss.mix_hidden_states == "none" else MixedObjective
        return kind(model, Teacher(target, drop_off_vocab=loss.drop_off_vocab), loss)

    def splits_context(self, loss: Eagle3Loss) -> bool:
        return loss.mix_hidden_states == "none" and not loss.blends_by_step


EAGLE3 = _Eagle3Kind()


def draw_shares(batch: PackedBatch, steps: int, rng_key: tuple[int, int]) -> Tensor:
    """Numbers in [0, 1) that follow from step of the run and sample alone: fp32 [K, T]."""
    lengths = torch.bincount(batch.document, minlength=len(batch.sample_ids)).tolist()
    # Drawn on the CPU, so that a device changes nothing of what is drawn.
    parts = [
        torch.rand(steps, length, generator=sample_generator(rng_key, name, torch.device("cpu")))
        for name, length in zip(batch.sample_ids, lengths, strict=True)
    ]
    return torch.cat(parts, 1).to(batch.aux.device)


def moved(outputs: Tensor) -> Tensor:
    """Outputs [T, H] at the row after their own; row 0 is zero."""
    return F.pad(outputs, (0, 0, 1, -1))


def mixed(how: Mixing, read: Tensor, history: Sequence[Tensor], shares: Tensor, document: Tensor) -> Tensor:
    """What the next step reads [T, H], after a step that read ``read``. ``history``: the target's states, then `moved`
    outputs of every step so far [T, H] each; shares fp32 [T]; document int64 [T]."""
    at = torch.arange(len(document), device=document.device)
    inner = at > document_starts(document)
    if how == "uniform_layer_sample":
        chosen = (shares * len(history)).long().clamp(max=len(history) - 1)
        return torch.stack(list(history))[torch.where(inner, chosen, 0), at]
    taken = inner if how == "no_replace" else replaced_rows(len(history) - 2, shares, document)
    return torch.where(taken[:, None], history[-1], read)


def replaced_rows(step: int, shares: Tensor, document: Tensor) -> Tensor:
    """Rows whose state gives way to an output of ``step``: bool [T]. Of a sample's n rows n // (2^step + 1), one at the
    least, those of the lowest shares."""
    taken = torch.zeros_like(document, dtype=torch.bool)
    for sample in document_ranges(document):
        first = sample.begin + 1
        count = max(1, sample.length // (2**step + 1))
        taken[first + shares[first : sample.end].argsort()[:count]] = True
    return taken
