"""DFlash: a block of mask tokens filled in one forward, over context keys made of the target's aux states.

c = hidden_norm(fc([aux...])) of every token before the anchor gives the keys and values of each layer, by the same
weights as the block's own; the block [anchor, mask x (B-1)] alone has queries. Layers are Qwen3's: per-head norms of
queries and keys, then rotary at absolute positions. Bidirectional inside a block. Logits are the target's LM head over
the final norm. Weight names are those engines load. Sources: docs/design/010; z-lab ``dflash.py``. With ``causal`` no
slot sees a later one, which makes it JetSpec (docs/design/016).

Every slot is taught the token at its own position with weight w_k = exp(-(k-1) / gamma), or D-PACE's: with q the
probability the drafter gives the label and q~ = (1-a) q + a, w_j = sum_{m>=j} prod_{i<=m} q~_i, without gradient. The
label is the token of the text or the target's own choice; a share of its weight may go to the target's whole
distribution at the position before (distillation).

Shapes: T tokens, L aux layers, D target width (and the drafter's), C context rows, N blocks, B slots of a block,
K = B-1 taught slots, U draft vocabulary, n verified rows, Q query heads, G key heads, E head width.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.documents import foreign_json
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear, linear
from trainer.attention.block import Sight, block_attention
from trainer.config import DrafterConfig, LossConfig
from trainer.drafters.base import (
    FROZEN_START_NATS,
    START_NATS,
    Drafter,
    DrafterKind,
    LossInputs,
    Needs,
    TargetFacts,
    quiet_scale,
    rms_weight,
    seeded,
)
from trainer.drafters.blocks import Attention, DecoderLayer, RMSNorm, Rotary, recomputed, rotate
from trainer.drafters.live import KeyValues, LiveBlocks, block_hits, draft_logits
from trainer.formats.dflash import DFLASH as DFLASH_EXPORT
from trainer.losses.fused_head import StepLosses, Supervision, head_losses
from trainer.losses.kinds import LOSSES, LossKind
from trainer.losses.teacher import FP32_HEAD_BYTES, TargetInterface, Teacher, TeacherRows
from trainer.slots import (
    AnchorRule,
    BlockMap,
    Blocks,
    SlotRange,
    candidate_anchors,
    draw_anchors,
    gather_ranges,
    label_rows,
    map_blocks,
)
from trainer.vocab import DraftVocab


class BlockLoss(LossConfig):
    """What the slots of a block are taught."""

    num_anchors: int = Field(512, gt=0)
    """Blocks per sample at most."""
    anchor_rule: AnchorRule = "next"
    """``next``: a block may open where its token and the next are supervised (SpecForge); ``whole``: where its token is
    and the block ends inside the sample (ModelOpt, speculators)."""
    weighting: Literal["decay", "dpace"] = "decay"
    """``decay``: slot k weighs exp(-(k-1) / gamma); ``dpace``: by how probable the slots before it are (D-PACE)."""
    gamma: float | None = Field(None, ge=0)
    """Slots over which the weight falls to 1/e, 0 for equal weights; derived as 7, 5 or 4 for blocks of 16, 10 or 8."""
    dpace_alpha: float = Field(0.5, ge=0, le=1)
    """D-PACE: how far probabilities are moved towards one."""
    labels: Literal["text", "target"] = "text"
    """What is taught: the text's token or the target's most probable one (speculators)."""
    distil: float = Field(0.0, ge=0, le=1)
    """Share of the target's distribution in what is taught; the rest is the label."""
    reduction: Literal["weights", "kept"] | None = None
    """What the loss is divided by: the sum of the weights (SpecForge, ModelOpt; the default of ``decay``) or the taught
    slots (``kept``: speculators; the default of ``dpace``)."""

    @model_validator(mode="after")
    def _reduction_fits_weighting(self) -> "BlockLoss":
        if self.weighting == "dpace" and self.reduction == "weights":
            raise ValueError("dpace weights follow from the losses, so reduction must be kept")
        return self

    @property
    def reads_teacher(self) -> bool:
        """Whether the final hidden is read."""
        return self.distil > 0 or self.labels == "target"

    def slot_weights(self, block_size: int) -> Tensor:
        """Weight of slots 1…B-1: fp32 [B-1]."""
        if self.weighting == "dpace" or self.gamma == 0:
            return torch.ones(block_size - 1)
        gamma = self.gamma or (7.0 if block_size >= 16 else 5.0 if block_size >= 10 else 4.0)
        return torch.tensor([math.exp(-k / gamma) for k in range(block_size - 1)])


def dpace_weights(losses: Tensor, taught: Tensor, alpha: float) -> Tensor:
    """D-PACE weights fp32 [n, K] of cross-entropies [n, K]; a slot that is not taught neither counts nor stops."""
    smooth = torch.where(taught, (1 - alpha) * torch.exp(-losses) + alpha, 1.0)
    reached = smooth.cumprod(-1) * taught
    return reached.flip(-1).cumsum(-1).flip(-1)


@dataclass(frozen=True, eq=False)
class BlockInputs(LossInputs):
    """labels int64 [N, K]: draft ids, -1 where nothing is taught. teacher_at int64 [N*K]: row of ``teacher`` for each
    slot, 0 where none."""

    block_map: BlockMap
    labels: Tensor
    teacher: TeacherRows | None
    teacher_at: Tensor | None


class BlockObjective:
    """What the loop optimises."""

    def __init__(self, model: "DFlash", teacher: Teacher, loss: BlockLoss) -> None:
        self.model, self.teacher, self.loss, self.depths = model, teacher, loss, model.config.longest
        self._weights = loss.slot_weights(self.depths + 1)

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> BlockInputs:
        """Draw the anchors, find the labels and read the teacher; nothing here depends on the drafter."""
        candidates = candidate_anchors(batch, self.depths + 1, self.loss.anchor_rule)
        return self.prepare_at(batch, draw_anchors(batch, candidates, self.loss.num_anchors, self.model.rng_key))

    @torch.no_grad()
    def prepare_at(self, batch: PackedBatch, anchors: Tensor) -> BlockInputs:
        """The same with blocks at the given rows int64 [N], ascending."""
        rows, admitted = label_rows(anchors, self.depths + 1, batch.document, batch.loss_mask)
        tokens, taught, teacher, at = batch.input_ids[rows], admitted, None, None
        if self.loss.reads_teacher:
            taught_by = rows - 1
            needed, inverse = torch.unique(taught_by[admitted], return_inverse=True)
            by_choice = self.loss.labels == "target"
            teacher = self.teacher.read(batch, needed, token=by_choice, mass=self.takes_mass)
            at = torch.zeros_like(rows).masked_scatter_(admitted, inverse)
            if by_choice and teacher.token is not None and len(needed):
                tokens = teacher.token[at]
            if self.compares and teacher.mass is not None and len(needed):
                # None of the stored top tokens in the draft vocabulary is no distribution over it.
                taught = admitted & (teacher.mass[at] > 0)
            at = at.flatten()
        labels = torch.where(taught, self.teacher.draft_token(tokens), -1)
        block_map = map_blocks(anchors, batch.document, self.model.window)
        return BlockInputs(batch, admitted.sum(0), (labels >= 0).sum(0), block_map, labels, teacher, at)

    def denominators(self, *packs: BlockInputs) -> Tensor:
        """What the loss is divided by, over these packs: fp32 [1]. Ranks add theirs."""
        weights = torch.ones_like(self._weights) if self._by_count else self._weights
        total = torch.zeros(1, device=self.model.head_weight().device)
        for inputs in packs:
            total += (inputs.counts * weights.to(inputs.counts.device)).sum()
        return total

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        states = self.model.block_states(inputs.batch, inputs.block_map)
        return self.losses_of(states, inputs, self.scales(denominators))

    def losses_of(self, states: Tensor, inputs: BlockInputs, scales: Tensor, more: Tensor | None = None) -> StepLosses:
        """The same of states [N*K, D] of its slots; of [N*K, D+M] where the head has ``more`` trained columns
        [U, M]."""
        by_losses = self.loss.weighting == "dpace"
        head, fixed = self.model.head_weight(), None
        if more is not None and self.model.frozen_head is None:
            head = torch.cat([head, more], 1)
        elif more is not None:
            head, fixed = more, head
        return head_losses(
            states,
            head,
            self._supervision(inputs, complete=by_losses),
            scales,
            self.kind,
            weigh=partial(dpace_weights, alpha=self.loss.dpace_alpha) if by_losses else None,
            fixed=fixed,
        )

    @property
    def kind(self) -> LossKind:
        """The loss of a slot."""
        return LOSSES["text_ce"]

    def scales(self, denominators: Tensor) -> Tensor:
        """What the losses of each depth are multiplied by: fp32 [K]."""
        return self._weights.to(denominators.device) / denominators.clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def compares(self) -> bool:
        """Whether a slot is held against the target's distribution too, not against its label alone."""
        return self.loss.distil > 0

    @property
    def takes_mass(self) -> bool:
        """Whether the target's probabilities are compared as they are, not scaled up to one over the draft
        vocabulary."""
        return False

    @property
    def _by_count(self) -> bool:
        return self.loss.reduction == "kept" or self.loss.weighting == "dpace"

    def _supervision(self, inputs: BlockInputs, *, complete: bool) -> Supervision:
        teacher, rows = inputs.teacher, inputs.teacher_at
        if not self.compares or teacher is None or rows is None:
            return Supervision.of_labels(inputs.labels, complete=complete)

        def distribution(states: Tensor) -> Tensor:
            return self.teacher.distribution_of(teacher, rows[states])

        mass = teacher.mass[rows] if self.takes_mass and teacher.mass is not None else None
        return Supervision.of_labels(inputs.labels, distribution, self.loss.distil, complete=complete, mass=mass)


CHAT_ROLES = frozenset({"system", "user", "assistant", "developer", "tool", "ipython", "function", "observation"})

FileOf = Callable[[str], bytes | None]
"""The bytes of a file of the store's ``target/`` by name, None where it holds none."""


def mask_token(file: FileOf, vocab_size: int) -> int | None:
    """The tokenizer's mask token, else its first added token without a role, else its pad token; None when there is
    none below ``vocab_size``. Roles are those its config names one by one, the chat template's, and those of a chat.
    Reads ``tokenizer.json`` and ``tokenizer_config.json`` as the store holds them."""
    settings = _object(file("tokenizer_config.json"))
    added = _added_tokens(_object(file("tokenizer.json")), settings)
    ids = {content: index for index, content in added.items() if index < vocab_size}
    for name in ("mask_token", "first_unused", "pad_token"):
        content = _first_unused(file, settings, added) if name == "first_unused" else _content(settings.get(name))
        if content in ids:
            return ids[content]
    return None


def _added_tokens(tokenizer: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[int, str]:
    """Content by id, ascending."""
    contents = {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or []}
    for index, token in (settings.get("added_tokens_decoder") or {}).items():
        contents.setdefault(int(index), str(_content(token)))
    return dict(sorted(contents.items()))


def _first_unused(file: FileOf, settings: Mapping[str, Any], added: Mapping[int, str]) -> str | None:
    template = (file("chat_template.jinja") or b"").decode() or str(settings.get("chat_template") or "")
    named = {_content(value) for key, value in settings.items() if key.endswith("_token")}
    for content in added.values():
        # A template may spell <|user|> as "<|" + role + "|>".
        word = re.sub(r"\W|_", "", content).lower()
        if content not in named and content not in template and word not in CHAT_ROLES:
            return content
    return None


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _object(data: bytes | None) -> dict[str, Any]:
    document = foreign_json(data) if data else {}
    return document if isinstance(document, dict) else {}


PUBLISHED_LAYERS = 5
LayerType = Literal["full_attention", "sliding_attention"]


class DFlashConfig(DrafterConfig):
    """Settings of DFlash."""

    name: str = "dflash"
    """The kind of drafter."""
    num_layers: int = Field(PUBLISHED_LAYERS, gt=0)
    """Decoder layers."""
    block_size: int = Field(8, ge=2)
    """Slots of a block: the newest token and those drafted after it."""
    mask_token_id: int = Field(ge=0)
    """Target token whose embedding fills the drafted slots."""
    causal: bool = False
    """Slots see no later slot of their block (JetSpec)."""
    sliding_window: int | None = Field(None, gt=0)
    """Slots see keys closer than this many positions; none for all."""
    layer_types: tuple[LayerType, ...] = ()
    """Which layers the window holds in, of a list at least as long as the drafter the last ones; empty for all."""
    sliding_causal: bool = False
    """Slots see no later slot in layers with a window, as vLLM, SGLang and published drafters have it."""
    train_head: bool = False
    """Train and save an LM head of the drafter instead of reading the target's rows of the draft vocabulary."""

    @model_validator(mode="after")
    def _reads_states(self) -> "DFlashConfig":
        if not self.aux_layers:
            raise ValueError("aux_layers is empty: the drafter would see nothing of the target")
        if self.layer_types and len(self.layer_types) < self.num_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers of {self.num_layers}")
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise ValueError("layer_types has sliding_attention, but there is no sliding_window")
        return self

    @property
    def longest(self) -> int:
        """K: tokens of one draft."""
        return self.block_size - 1

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far the slots of each layer see."""
        types = self.layer_types[-self.num_layers :] or ("sliding_attention",) * self.num_layers
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in types)

    def is_causal(self, window: int | None) -> bool:
        """Whether the slots of a layer of that window see no later ones."""
        return self.causal or (self.sliding_causal and window is not None)


class NormedAttention(Attention):
    """Attention projections with Qwen3's norms of every query and key head."""

    def __init__(self, config: DrafterConfig, width_in: int) -> None:
        super().__init__(config, width_in)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class DFlashLayer(DecoderLayer):
    """A decoder layer whose queries are those of a block."""

    attention = NormedAttention
    self_attn: NormedAttention

    def project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of slots first…last and keys, values of all, of normed x [N, B, D]: [N, slots, heads, E], before
        rotary."""
        attention = self.self_attn
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        if last - first == x.shape[1]:
            q, k, v = attention.split(linear(x, torch.cat(weights)))
        else:
            q = attention.q_proj(x[:, first:last]).unflatten(-1, (attention.heads, attention.head_dim))
            kv = linear(x, torch.cat(weights[1:])).unflatten(-1, (-1, attention.head_dim))
            k, v = kv.split(attention.kv_heads, -2)
        return attention.q_norm(q), attention.k_norm(k), v


class DFlash(Drafter):
    """The drafter. Embeddings and, unless ``train_head``, the LM head are the target's and never saved. ``unread``:
    slots at a block's end that are filled and propose nothing."""

    config: DFlashConfig
    layer: type[DFlashLayer] = DFlashLayer
    chained: bool = False
    unread: int = 0
    frozen_embeddings: Tensor
    frozen_head: Tensor | None
    _draft_ids: Tensor | None

    def __init__(self, config: DFlashConfig, vocab: DraftVocab) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = Linear(len(config.aux_layers) * width, width)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        if config.train_head:
            self.lm_head = Linear(width, vocab.size)
        self.register_buffer("frozen_embeddings", torch.empty(0), persistent=False)
        self.register_buffer("frozen_head", None, persistent=False)
        self._rotary = Rotary.of(config)

    @classmethod
    def build(cls, config: DFlashConfig, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """A fresh drafter: the final norm, scaled to say less, and an own head start as the target's, the rest random
        from ``seed``. Raises ConfigError: the drafter is not as wide as the target, or the mask token has no
        embedding."""
        _check_fits(config, head)
        with seeded(seed):
            model = cls(config, vocab)
        model._draft_ids = None if vocab.is_full else vocab.target_ids
        with torch.no_grad():
            rows, norm = model._head_rows(head), rms_weight(head)
            nats = START_NATS if config.train_head else FROZEN_START_NATS
            model.norm.weight.copy_(norm * quiet_scale(norm, rows, nats))
            if config.train_head:
                model.lm_head.weight.copy_(rows.float().cpu())
        model.tie_weights(head)
        return model

    def tie_weights(self, head: HeadBundle) -> None:
        """Read embeddings, unscaled as engines share them, and LM head of this bundle."""
        self.frozen_embeddings = head.embed_tokens.to(self.fc.weight.device)
        if not self.config.train_head:
            self.frozen_head = self._head_rows(head).to(self.fc.weight.device)

    def _head_rows(self, head: HeadBundle) -> Tensor:
        rows = head.output_weight
        if self._draft_ids is not None:
            rows = rows[self._draft_ids.to(rows.device)]
        return rows.float() if rows.numel() * 4 <= FP32_HEAD_BYTES else rows

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def window(self) -> int | None:
        windows = self.config.windows
        return None if None in windows else self.config.sliding_window

    @property
    def first_slot(self) -> int:
        return self.block_size - self.config.longest

    def head_weight(self) -> Tensor:
        """Draft logits are its product with states: [U, D]."""
        return self.lm_head.weight if self.frozen_head is None else self.frozen_head

    def guesses(self, states: Tensor, tokens: Tensor) -> Tensor:
        return tokens

    def before(self, tokens: Tensor) -> Tensor:
        return tokens.flatten()

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        return draft_logits(states, self.head_weight())

    def context(self, aux: Tensor, positions: Tensor, ranges: tuple[SlotRange, ...] | None = None) -> list[KeyValues]:
        if ranges is not None:
            positions = gather_ranges(positions, ranges)
            aux = torch.stack([gather_ranges(layer, ranges) for layer in aux])
        states = aux.transpose(0, 1).flatten(1).to(self.fc.weight.dtype)
        shared = self.hidden_norm(self.fc(states))
        attentions = [layer.self_attn for layer in self._decoder()]
        # One product serves all layers: they read the same rows.
        weight = torch.cat([x for a in attentions for x in (a.k_proj.weight, a.v_proj.weight)])
        parts = linear(shared, weight).unflatten(-1, (-1, self.config.head_dim)).split(self.config.num_kv_heads, 1)
        turn = self._rotary.at(positions)
        return [(rotate(a.k_norm(k), *turn), v) for a, k, v in zip(attentions, parts[0::2], parts[1::2], strict=True)]

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """States after the final norm [N*S, D] of slots first…last of blocks that open with ``tokens`` int64 [N] at
        ``positions`` int64 [N]; ``blocks`` index the rows of ``context``. A block ends with the last slot and those
        ``unread``, as engines fill no more slots than they draft (vLLM's ``dflash.py``: one and the drafted)."""
        size = slots[1] + self.unread
        at = positions[:, None] + torch.arange(size, device=positions.device)
        opening = F.embedding(F.pad(tokens, (0, 1), value=self.config.mask_token_id), self.frozen_embeddings)
        x = opening.to(self.fc.weight.dtype)[:, None]
        # What the last layer makes of slots nobody asks for would be thrown away.
        windows = self.config.windows
        spans = [(0, size)] * (len(windows) - 1) + [slots]
        kinds = [(*span, window, self.config.is_causal(window)) for span, window in zip(spans, windows, strict=True)]
        sights = {kind: Sight(blocks, size, *kind) for kind in kinds}
        for layer, keys, kind in zip(self._decoder(), context, kinds, strict=True):
            x = recomputed(self.recompute, self._through, layer, x, keys, sights[kind], at)
        out: Tensor = self.norm(x).flatten(0, 1)
        return out

    def _through(self, layer: DFlashLayer, x: Tensor, context: KeyValues, sight: Sight, at: Tensor) -> Tensor:
        """Slots first…last after a layer [N, S, D], from all slots [N, B, D] at positions int64 [N, B], or from the
        openings and one mask row [N+1, 1, D]."""
        normed = layer.input_layernorm(x)
        if len(x) > len(at):
            # All mask slots are one row until positions tell them apart.
            parts = layer.project(normed, 0, 1)
            x, q, k, v = (spread(rows, sight.block_size) for rows in (x, *parts))
            parts = q[:, sight.first : sight.last], k, v
        else:
            parts = layer.project(normed, sight.first, sight.last)
        return layer.finish(x[:, sight.first : sight.last], self.attended(parts, context, sight, at))

    def attended(self, parts: tuple[Tensor, Tensor, Tensor], context: KeyValues, sight: Sight, at: Tensor) -> Tensor:
        """What slots first…last [N*S, heads, E] see, by what a layer projects of them at positions int64 [N, B]."""
        q, k, v = (part.flatten(0, 1) for part in parts)
        q = rotate(q, *self._rotary.at(at[:, sight.first : sight.last].flatten()))
        k = rotate(k, *self._rotary.at(at.flatten()))
        return block_attention(q, context, (k, v), sight)

    def _decoder(self) -> list[DFlashLayer]:
        return [cast(DFlashLayer, layer) for layer in self.layers]

    def block_states(self, batch: PackedBatch, block_map: BlockMap) -> Tensor:
        """States after the final norm of the slots of every block that propose: [N*K, D]."""
        context = self.context(batch.aux, batch.positions, block_map.context)
        tokens, positions = batch.input_ids[block_map.anchors], batch.positions[block_map.anchors]
        slots = (self.first_slot, self.first_slot + self.config.longest)
        return self.fill(tokens, positions, context, block_map.blocks, slots)


def spread(x: Tensor, block_size: int) -> Tensor:
    """Slots [N, B, ...] of N openings and one mask row [N+1, 1, ...]."""
    count = x.shape[0] - 1
    return torch.cat([x[:-1], x[-1:].expand(count, block_size - 1, *x.shape[2:])], 1)


def _check_fits(config: DFlashConfig, head: HeadBundle) -> None:
    if config.hidden_size != head.hidden_size:
        raise ConfigError(
            f"dflash shares the target's embeddings, so drafter.hidden_size must be {head.hidden_size}, "
            f"not {config.hidden_size}",
            kind=Kind.OPTION_INVALID,
            hint=f"drafter.hidden_size={head.hidden_size}",
        )
    require_mask_embedding(config.mask_token_id, head)


def require_mask_embedding(mask_token_id: int, head: HeadBundle) -> None:
    """Raises ConfigError: ``option-invalid``: the target has no embedding of the mask token."""
    if mask_token_id >= head.embed_tokens.shape[0]:
        raise ConfigError(
            f"drafter.mask_token_id {mask_token_id} has no embedding: the target has {head.embed_tokens.shape[0]} rows",
            kind=Kind.OPTION_INVALID,
        )


def _windows(facts: TargetFacts) -> dict[str, Any]:
    """The target's sliding window, and the types of its layers where they differ. A window is causal, as engines have
    it, whoever sets it."""
    window, types = facts.shape.get("sliding_window"), facts.shape.get("layer_types") or []
    fields: dict[str, Any] = {"sliding_causal": True}
    if not window or not facts.shape.get("use_sliding_window", True) or (types and "sliding_attention" not in types):
        return fields
    inherited = ["sliding_attention" if kind == "sliding_attention" else "full_attention" for kind in types]
    if len(set(inherited)) > 1:
        fields["layer_types"] = inherited
    return {**fields, "sliding_window": window}


class _DFlashKind(DrafterKind[DFlash, DFlashConfig, BlockLoss]):
    name = layers = "dflash"
    config, loss = DFlashConfig, BlockLoss
    model: type[DFlash] = DFlash
    teaching: type[BlockObjective] = BlockObjective
    export = DFLASH_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """Whole vocabulary, a layer for every four of the target, its mask token and windows, and the published aux
        layers where the store holds them, else all it holds."""
        drafter: dict[str, Any] = {
            "aux_layers": self.default_aux_layers(facts),
            "num_layers": max(1, min(PUBLISHED_LAYERS, facts.num_layers // 4)),
            "vocab_size": facts.vocab_size,
        }
        mask = mask_token(facts.file, facts.vocab_size)
        if mask is not None:
            drafter["mask_token_id"] = mask
        return {"drafter": {**drafter, **_windows(facts)}, "optim": {"kind": "muon"}}

    def needs(self, config: DFlashConfig, loss: BlockLoss | None) -> Needs:
        return Needs(config.aux_layers, "supervised" if loss is not None and loss.reads_teacher else "none")

    def build(self, config: DFlashConfig, target: TargetInterface, seed: int) -> DFlash:
        return self.model.build(config, target.head, target.vocab, seed)

    def objective(self, model: DFlash, target: TargetInterface, loss: BlockLoss) -> BlockObjective:
        return self.teaching(model, Teacher(target), loss)

    def hits(self, model: DFlash, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        return block_hits(model, target.vocab, pack, draft_len)

    def longest_draft(self, config: DFlashConfig) -> int:
        return config.longest

    def depends_on_length(self, config: DFlashConfig) -> bool:
        return not all(config.is_causal(window) for window in config.windows)

    def live(self, model: DFlash, target: TargetInterface) -> LiveBlocks:
        return LiveBlocks(model, target.vocab)


DFLASH = _DFlashKind()
