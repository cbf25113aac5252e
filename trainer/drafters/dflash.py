"""DFlash: a block of mask tokens filled in one forward, over context keys made of the target's aux states.

c = hidden_norm(fc([aux...])) of every token before the anchor gives the keys and values of each layer, by the same
weights as the block's own; the block [anchor, mask x (B-1)] alone has queries. Layers are Qwen3's: per-head norms of
queries and keys, then rotary at absolute positions. Bidirectional inside a block. Logits are the target's LM head over
the final norm. Weight names are those engines load. Sources: drafters.md sections 1.4 and 2; z-lab ``dflash.py``.

Shapes: T tokens, L aux layers, D target width (and the drafter's), C context rows, N blocks, B slots of a block,
U draft vocabulary, n verified rows, Q query heads, G key heads, E head width.
"""

from typing import Any, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from hiddenstore.products import Linear, linear
from schemas.layers import default_aux_layers
from trainer.attention.block_attention import Sight, block_attention
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, TargetFacts, TargetSide
from trainer.drafters.blocks import Attention, GatedMLP, Piece, RMSNorm, Rotary, gather_pieces, rotate
from trainer.drafters.mask_token import mask_token
from trainer.drafting.block_drafting import KeyValues, LiveBlocks, block_hits
from trainer.objectives.anchors import BlockPlan, Blocks
from trainer.objectives.block_objective import BlockLoss, BlockObjective
from trainer.objectives.teacher import FP32_HEAD_BYTES, Teacher
from trainer.scale.recompute import recomputed
from trainer.vocab import DraftVocab

PUBLISHED_LAYERS = 5


class DFlashConfig(DrafterConfig):
    """``sliding_window``: slots see keys closer than this, symmetrically. ``train_head``: an own LM head, saved, in
    place of the target's rows of the draft vocabulary."""

    name: str = "dflash"
    num_layers: int = Field(PUBLISHED_LAYERS, gt=0)
    block_size: int = Field(8, ge=2)
    mask_token_id: int = Field(ge=0)
    sliding_window: int | None = Field(None, gt=0)
    train_head: bool = False

    @model_validator(mode="after")
    def _reads_states(self) -> "DFlashConfig":
        if not self.aux_layers:
            raise ValueError("aux_layers is empty: the drafter would see nothing of the target")
        return self


class NormedAttention(Attention):
    """Attention projections with Qwen3's norms of every query and key head."""

    def __init__(self, width: int, config: DFlashConfig) -> None:
        super().__init__(width, width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class DFlashLayer(nn.Module):
    """A decoder layer: pre-norm attention, pre-norm gated MLP."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = NormedAttention(width, config)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def project(self, x: Tensor, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of slots first…last and keys, values of all, of x [N, B, D]: [N, slots, heads, E], before rotary."""
        attention, x = self.self_attn, self.input_layernorm(x)
        weights = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        if last - first == x.shape[1]:
            q, k, v = attention.split(linear(x, torch.cat(weights)))
        else:
            q = attention.q_proj(x[:, first:last]).unflatten(-1, (attention.heads, attention.head_dim))
            kv = linear(x, torch.cat(weights[1:])).unflatten(-1, (-1, attention.head_dim))
            k, v = kv.split(attention.kv_heads, -2)
        return attention.q_norm(q), attention.k_norm(k), v

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Layer output [N, S, D] from its residual [N, S, D] and attended values [N*S, Q, E]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1)).view_as(residual)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class DFlash(Drafter):
    """The drafter. Embeddings and, unless ``train_head``, the LM head are the target's and never saved."""

    config: DFlashConfig
    frozen_embeddings: Tensor
    frozen_head: Tensor | None
    _draft_ids: Tensor | None

    def __init__(self, config: DFlashConfig, draft_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = Linear(len(config.aux_layers) * width, width)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        if config.train_head:
            self.lm_head = Linear(width, draft_size)
        self.register_buffer("frozen_embeddings", torch.empty(0), persistent=False)
        self.register_buffer("frozen_head", None, persistent=False)
        self._rotary = Rotary.of(config)

    @classmethod
    def build(cls, config: DFlashConfig, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """A fresh drafter: the final norm, and an own head, start as the target's, the rest random from ``seed``.

        Raises:
            ConfigError: the drafter is not as wide as the target, or the mask token has no embedding.
        """
        _check_fits(config, head)
        generator = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            model = cls(config, vocab.size)
        finally:
            torch.set_rng_state(generator)
        model._draft_ids = None if vocab.is_full else vocab.target_ids
        with torch.no_grad():
            plus_one = head.spec.norm_flavour == "rms_plus_one"
            model.norm.weight.copy_(head.norm_weight.float().cpu() + float(plus_one))
            if config.train_head:
                model.lm_head.weight.copy_(model._head_rows(head).float().cpu())
        model.borrow(head)
        return model

    def borrow(self, head: HeadBundle) -> None:
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
        """B."""
        return self.config.block_size

    @property
    def window(self) -> int | None:
        """How far a slot sees."""
        return self.config.sliding_window

    def head_weight(self) -> Tensor:
        """Draft logits are its product with states: [U, D]."""
        return self.lm_head.weight if self.frozen_head is None else self.frozen_head

    def context(self, aux: Tensor, positions: Tensor, pieces: tuple[Piece, ...] | None = None) -> list[KeyValues]:
        """Keys and values of every layer for captured states [L, T, D] at positions int64 [T], or for ``pieces``."""
        if pieces is not None:
            positions = gather_pieces(positions, pieces)
            aux = torch.stack([gather_pieces(layer, pieces) for layer in aux])
        states = aux.transpose(0, 1).flatten(1).to(self.fc.weight.dtype)
        shared = self.hidden_norm(self.fc(states))
        attentions = [layer.self_attn for layer in self._decoder()]
        # One product serves all layers: they read the same rows.
        weight = torch.cat([part for a in attentions for part in (a.k_proj.weight, a.v_proj.weight)])
        parts = linear(shared, weight).unflatten(-1, (-1, self.config.head_dim)).split(self.config.num_kv_heads, 1)
        turn = self._rotary.at(positions)
        return [(rotate(a.k_norm(k), *turn), v) for a, k, v in zip(attentions, parts[0::2], parts[1::2], strict=True)]

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """States after the final norm [N*S, D] of slots first…last of blocks that open with ``tokens`` int64 [N] at
        ``positions`` int64 [N]; ``blocks`` index the rows of ``context``."""
        size = self.config.block_size
        at = positions[:, None] + torch.arange(size, device=positions.device)
        opening = F.embedding(F.pad(tokens, (0, 1), value=self.config.mask_token_id), self.frozen_embeddings)
        x = opening.to(self.fc.weight.dtype)[:, None]
        # What the last layer makes of slots nobody asks for would be thrown away.
        asked, everything = (Sight(blocks, size, *span, self.window) for span in (slots, (0, size)))
        for index, layer in enumerate(self._decoder()):
            sight = asked if index == self.config.num_layers - 1 else everything
            x = recomputed(self.recompute, self._through, layer, x, context[index], sight, at)
        out: Tensor = self.norm(x).flatten(0, 1)
        return out

    def _through(self, layer: DFlashLayer, x: Tensor, context: KeyValues, sight: Sight, at: Tensor) -> Tensor:
        """Slots first…last after a layer [N, S, D], from all slots [N, B, D] at positions int64 [N, B], or from the
        openings and one mask row [N+1, 1, D]."""
        if x.shape[1] == 1:
            # All mask slots are one row until positions tell them apart.
            parts = layer.project(x, 0, 1)
            x, q, k, v = (_spread(part, sight.block_size) for part in (x, *parts))
            q = q[:, sight.first : sight.last]
        else:
            q, k, v = layer.project(x, sight.first, sight.last)
        q = rotate(q.flatten(0, 1), *self._rotary.at(at[:, sight.first : sight.last].flatten()))
        k = rotate(k.flatten(0, 1), *self._rotary.at(at.flatten()))
        attended = block_attention(q, context, (k, v.flatten(0, 1)), sight)
        return layer.finish(x[:, sight.first : sight.last], attended)

    def _decoder(self) -> list[DFlashLayer]:
        return [cast(DFlashLayer, layer) for layer in self.layers]

    def block_states(self, batch: PackedBatch, plan: BlockPlan) -> Tensor:
        """States after the final norm of slots 1…B-1 of every block: [N*(B-1), D]."""
        context = self.context(batch.aux, batch.positions, plan.context)
        tokens, positions = batch.input_ids[plan.anchors], batch.positions[plan.anchors]
        return self.fill(tokens, positions, context, plan.blocks, (1, self.block_size))


def _spread(x: Tensor, block_size: int) -> Tensor:
    """Slots [N, B, ...] of N openings and one mask row [N+1, 1, ...]."""
    count = x.shape[0] - 1
    return torch.cat([x[:-1], x[-1:].expand(count, block_size - 1, *x.shape[2:])], 1)


def _check_fits(config: DFlashConfig, head: HeadBundle) -> None:
    if config.hidden_size != head.hidden_size:
        raise ConfigError(
            f"dflash shares the target's embeddings, so drafter.hidden_size must be {head.hidden_size}, "
            f"not {config.hidden_size}",
            kind="drafter-width",
            hint=f"drafter.hidden_size={head.hidden_size}",
        )
    if config.mask_token_id >= head.embed_tokens.shape[0]:
        raise ConfigError(
            f"drafter.mask_token_id {config.mask_token_id} has no embedding: the target has "
            f"{head.embed_tokens.shape[0]} rows",
            kind="mask-token",
        )


class _DFlashKind(DrafterKind[DFlash, DFlashConfig, BlockLoss]):
    name = layers = "dflash"
    config, loss = DFlashConfig, BlockLoss

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """Whole vocabulary, a layer for every four of the target, its mask token, and the published aux layers where
        the store holds them, else all it holds."""
        try:
            wanted = default_aux_layers("dflash", facts.num_layers)
        except ValueError:
            wanted = []
        held = wanted if wanted and set(wanted) <= set(facts.held) else list(facts.held)
        drafter: dict[str, Any] = {
            # Named even where the store has none, so that `check_store` says what is missing.
            "aux_layers": held or wanted,
            "num_layers": max(1, min(PUBLISHED_LAYERS, facts.num_layers // 4)),
            "vocab_size": facts.vocab_size,
        }
        mask = mask_token(facts.file, facts.vocab_size)
        if mask is not None:
            drafter["mask_token_id"] = mask
        return {"drafter": drafter, "optim": {"kind": "muon"}}

    def needs(self, config: DFlashConfig, loss: BlockLoss | None) -> Needs:
        return Needs(config.aux_layers, "supervised" if loss is not None and loss.reads_teacher else "none")

    def build(self, config: DFlashConfig, side: TargetSide, seed: int) -> DFlash:
        return DFlash.build(config, side.head, side.vocab, seed)

    def objective(self, model: DFlash, side: TargetSide, loss: BlockLoss) -> BlockObjective:
        return BlockObjective(model, Teacher(side.head, side.vocab, side.final_norm), loss)

    def hits(self, model: DFlash, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        return block_hits(model, side.vocab, pack, draft_len)

    def longest_draft(self, config: DFlashConfig) -> int:
        return config.block_size - 1

    def live(self, model: DFlash, side: TargetSide) -> LiveBlocks:
        return LiveBlocks(model, side.vocab)


DFLASH = _DFlashKind()
