"""DFlash: a block of mask tokens filled in one forward, over context keys made of the target's aux states.

c = hidden_norm(fc([aux...])) of every token before the anchor gives the keys and values of each layer, by the same
weights as the block's own; the block [anchor, mask x (B-1)] alone has queries. Layers are Qwen3's: per-head norms of
queries and keys, then rotary at absolute positions. Bidirectional inside a block. Logits are the target's LM head over
the final norm. Weight names are those engines load. Sources: docs/design/010; z-lab ``dflash.py``.

Shapes: T tokens, L aux layers, D target width (and the drafter's), C context rows, N blocks, B slots of a block,
U draft vocabulary, n verified rows, Q query heads, G key heads, E head width.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear, linear
from trainer.attention.block import Sight, block_attention
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, TargetFacts, rms_weight, seeded
from trainer.drafters.block_drafting import KeyValues, LiveBlocks, block_hits
from trainer.drafters.blocks import Attention, DecoderLayer, RMSNorm, Rotary, recomputed, rotate
from trainer.formats.dflash import DFLASH as DFLASH_EXPORT
from trainer.losses.block import BlockLoss, BlockObjective
from trainer.losses.teacher import FP32_HEAD_BYTES, TargetInterface, Teacher
from trainer.slots.anchors import BlockMap, Blocks, Piece, gather_pieces
from trainer.vocab import DraftVocab

CHAT_ROLES = frozenset({"system", "user", "assistant", "developer", "tool", "ipython", "function", "observation"})

FileOf = Callable[[str], bytes | None]
"""The bytes of a file of the store's ``target/`` by name, None where it holds none."""


def mask_token(file: FileOf, vocab_size: int) -> int | None:
    """The tokenizer's mask token, else its first added token without a role, else its pad token; None when there is
    none below ``vocab_size``. Roles are those its config names one by one, the chat template's, and those of a chat.

    Reads ``tokenizer.json`` and ``tokenizer_config.json`` as the store holds them.
    """
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
    document = json.loads(data) if data else {}
    return document if isinstance(document, dict) else {}


PUBLISHED_LAYERS = 5


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
    sliding_window: int | None = Field(None, gt=0)
    """Slots see keys closer than this many positions, before and after; none for all."""
    train_head: bool = False
    """Train and save an LM head of the drafter instead of reading the target's rows of the draft vocabulary."""

    @model_validator(mode="after")
    def _reads_states(self) -> "DFlashConfig":
        if not self.aux_layers:
            raise ValueError("aux_layers is empty: the drafter would see nothing of the target")
        return self


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
        with seeded(seed):
            model = cls(config, vocab.size)
        model._draft_ids = None if vocab.is_full else vocab.target_ids
        with torch.no_grad():
            model.norm.weight.copy_(rms_weight(head))
            if config.train_head:
                model.lm_head.weight.copy_(model._head_rows(head).float().cpu())
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
        weight = torch.cat([x for a in attentions for x in (a.k_proj.weight, a.v_proj.weight)])
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
        last_sight, everything = (Sight(blocks, size, *span, self.window) for span in (slots, (0, size)))
        for index, layer in enumerate(self._decoder()):
            sight = last_sight if index == self.config.num_layers - 1 else everything
            x = recomputed(self.recompute, self._through, layer, x, context[index], sight, at)
        out: Tensor = self.norm(x).flatten(0, 1)
        return out

    def _through(self, layer: DFlashLayer, x: Tensor, context: KeyValues, sight: Sight, at: Tensor) -> Tensor:
        """Slots first…last after a layer [N, S, D], from all slots [N, B, D] at positions int64 [N, B], or from the
        openings and one mask row [N+1, 1, D]."""
        if x.shape[1] == 1:
            # All mask slots are one row until positions tell them apart.
            parts = layer.project(x, 0, 1)
            x, q, k, v = (_spread(rows, sight.block_size) for rows in (x, *parts))
            q = q[:, sight.first : sight.last]
        else:
            q, k, v = layer.project(x, sight.first, sight.last)
        q = rotate(q.flatten(0, 1), *self._rotary.at(at[:, sight.first : sight.last].flatten()))
        k = rotate(k.flatten(0, 1), *self._rotary.at(at.flatten()))
        attended = block_attention(q, context, (k, v.flatten(0, 1)), sight)
        return layer.finish(x[:, sight.first : sight.last], attended)

    def _decoder(self) -> list[DFlashLayer]:
        return [cast(DFlashLayer, layer) for layer in self.layers]

    def block_states(self, batch: PackedBatch, block_map: BlockMap) -> Tensor:
        """States after the final norm of slots 1…B-1 of every block: [N*(B-1), D]."""
        context = self.context(batch.aux, batch.positions, block_map.context)
        tokens, positions = batch.input_ids[block_map.anchors], batch.positions[block_map.anchors]
        return self.fill(tokens, positions, context, block_map.blocks, (1, self.block_size))


def _spread(x: Tensor, block_size: int) -> Tensor:
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
    if config.mask_token_id >= head.embed_tokens.shape[0]:
        raise ConfigError(
            f"drafter.mask_token_id {config.mask_token_id} has no embedding: the target has "
            f"{head.embed_tokens.shape[0]} rows",
            kind=Kind.OPTION_INVALID,
        )


class _DFlashKind(DrafterKind[DFlash, DFlashConfig, BlockLoss]):
    name = layers = "dflash"
    config, loss = DFlashConfig, BlockLoss
    export = DFLASH_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """Whole vocabulary, a layer for every four of the target, its mask token, and the published aux layers where
        the store holds them, else all it holds."""
        drafter: dict[str, Any] = {
            "aux_layers": self.default_aux_layers(facts),
            "num_layers": max(1, min(PUBLISHED_LAYERS, facts.num_layers // 4)),
            "vocab_size": facts.vocab_size,
        }
        mask = mask_token(facts.file, facts.vocab_size)
        if mask is not None:
            drafter["mask_token_id"] = mask
        return {"drafter": drafter, "optim": {"kind": "muon"}}

    def needs(self, config: DFlashConfig, loss: BlockLoss | None) -> Needs:
        return Needs(config.aux_layers, "supervised" if loss is not None and loss.reads_teacher else "none")

    def build(self, config: DFlashConfig, target: TargetInterface, seed: int) -> DFlash:
        return DFlash.build(config, target.head, target.vocab, seed)

    def objective(self, model: DFlash, target: TargetInterface, loss: BlockLoss) -> BlockObjective:
        return BlockObjective(model, Teacher(target.head, target.vocab, target.final_norm), loss)

    def hits(self, model: DFlash, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        return block_hits(model, target.vocab, pack, draft_len)

    def longest_draft(self, config: DFlashConfig) -> int:
        return config.block_size - 1

    def live(self, model: DFlash, target: TargetInterface) -> LiveBlocks:
        return LiveBlocks(model, target.vocab)


DFLASH = _DFlashKind()
