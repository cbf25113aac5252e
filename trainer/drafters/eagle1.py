"""EAGLE-1, whose weights also serve EAGLE-2: decoder layers that predict the target's next feature.

x_t = fc([emb(x_{t+1}); f_t]), embedding first and without bias; L Llama layers, of which the first has no input norm,
give f^_{t+1}, which the target's frozen head reads and which is fed back as the next f. f is the final hidden after the
final norm. Weight names are those engines load; they have no norm at either end, so ``first_norm`` and ``last_norm``
are for comparison. Sources: docs/design/009; SafeAILab ``cnets1.py``, vLLM ``llama_eagle.py``.

Shapes: T tokens, D target width, K drafted tokens, A active slots, V target vocabulary, N query heads, G key heads,
E head width.
"""

from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear
from trainer.attention.cache import KVCache, attend_cached
from trainer.attention.ttt import ttt_attention
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, TargetFacts, Verified, seeded
from trainer.drafters.blocks import DecoderLayer, RMSNorm, Rotary, recomputed, rotate
from trainer.drafters.chain import LiveChain, recurrent_hits
from trainer.drafters.tree import DynamicTree
from trainer.formats.eagle1 import EAGLE1 as EAGLE1_EXPORT
from trainer.losses.regression import RegressionLoss, RegressionObjective, require_every_final
from trainer.losses.teacher import FrozenHead, TargetInterface
from trainer.slots.anchors import Piece, gather_pieces
from trainer.slots.shift import SlotMap, document_ranges


class Eagle1Config(DrafterConfig):
    """Settings of EAGLE-1."""

    name: str = "eagle1"
    """The kind of drafter."""
    aux_layers: tuple[int, ...] = Field((), max_length=0)
    """None: it reads the final hidden alone."""
    num_layers: int = Field(1, gt=0)
    """Decoder layers."""
    first_norm: bool = False
    """An input norm in layer 0; engines load none."""
    last_norm: bool = False
    """A norm on the predicted feature; engines load none."""


class Eagle1Layer(DecoderLayer):
    """A Llama layer; ``input_layernorm`` is the identity where it has none."""

    def __init__(self, config: Eagle1Config, has_input_norm: bool) -> None:
        super().__init__(config)
        if not has_input_norm:
            self.input_layernorm = nn.Identity()


class Eagle1(Drafter):
    """The drafter. Embeddings, final norm and LM head are the target's, borrowed and never saved."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(Eagle1Layer(config, i > 0 or config.first_norm) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.last_norm else nn.Identity()
        self._rotary = Rotary.of(config)
        self._head: HeadBundle

    @classmethod
    def build(cls, config: Eagle1Config, head: HeadBundle, seed: int = 0) -> Self:
        """A fresh drafter, random from ``seed``.

        Raises:
            ConfigError: the width or the vocabulary is not that of the frozen head.
        """
        with seeded(seed):
            model = cls(config)
        model.tie_weights(head)
        return model

    def tie_weights(self, head: HeadBundle) -> None:
        """Read embeddings, final norm and head from this bundle. Engines share the table unscaled, hence so here."""
        self._head = head.to(self.fc.weight.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [n, D] in the drafter's dtype."""
        return F.embedding(ids, self._head.embed_tokens).to(self.fc.weight.dtype)

    def begin(self, verified: Verified) -> Tensor:
        """Features of verified tokens: [T, D]."""
        return self._head.norm(verified.final).to(self.fc.weight.dtype)

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Predicted features [n, D] and the head's logits [n, V] of n slots after those in ``cache``.

        g [n, D]: ``begin`` of verified rows, or what ``step`` returned for the slot before. next_ids int64 [n]: the
        token after each row. positions int64 [n] of the rows. ``last``: make the logits of so many last slots only.
        """
        x = self._fuse(next_ids, g)
        cos, sin = self._rotary.at(positions)
        for index, layer in enumerate(self._layers()):
            normed = layer.input_layernorm(x)
            k, v = layer.self_attn.keys_values(normed)
            q = rotate(layer.self_attn.queries(normed), cos, sin)
            x = layer.finish(x, attend_cached(q, rotate(k, cos, sin), v, cache, index))
        predicted: Tensor = self.norm(x)
        read = predicted if last is None else predicted[-last:]
        return predicted, self._head.logits(read, norm_state="post_norm")

    def unroll(self, batch: PackedBatch, features: Tensor, slot_map: SlotMap, steps: int) -> Tensor:
        """Predicted features of the active slots, step by step: [steps * A, D].

        features [T, D]: those of the target, at every token. From the second step on a slot reads its own prediction
        and the text's next token; it attends to the keys of true features before it and to its own later ones.
        """
        ids = F.pad(batch.input_ids, (0, steps + 1))
        everywhere, active = self._rotary.at(batch.positions), self._rotary.at(batch.positions[slot_map.active])
        documents = document_ranges(batch.document)
        pieces = [Piece(slot_range.begin, slot_range.length, slot_range.at) for slot_range in slot_map.ranges]

        def read(layer: Eagle1Layer, x: Tensor, is_last: bool) -> tuple[Tensor, Tensor, Tensor]:
            normed, tables, ranges = layer.input_layernorm(x), everywhere, documents
            k, v = layer.self_attn.keys_values(normed)
            k = rotate(k, *everywhere)
            if is_last:
                # Only what is taught or proposed is computed past the last layer's keys.
                x, normed = gather_pieces(x, pieces), gather_pieces(normed, pieces)
                tables, ranges = active, slot_map.ranges
            attended = ttt_attention(rotate(layer.self_attn.queries(normed), *tables), k, v, [], ranges)
            return layer.finish(x, attended), k, v

        x = self._fuse(ids[1 : batch.tokens + 1], features.to(self.fc.weight.dtype))
        text: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self._layers()):
            x, k, v = recomputed(self.recompute, read, layer, x, index == len(self.layers) - 1)
            text.append((k, v))
        outputs: list[Tensor] = [self.norm(x)]
        later_keys: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for i in range(1, steps):
            x = self._fuse(ids[slot_map.active + 1 + i], outputs[-1])
            tables = self._rotary.at(batch.positions[slot_map.active] + i)
            for layer, before, later in zip(self._layers(), text, later_keys, strict=True):
                normed = layer.input_layernorm(x)
                k, v = layer.self_attn.keys_values(normed)
                later.append((rotate(k, *tables), v))
                x = layer.finish(
                    x, ttt_attention(rotate(layer.self_attn.queries(normed), *tables), *before, later, slot_map.ranges)
                )
            outputs.append(self.norm(x))
        return torch.cat(outputs)

    def _fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat([self.embed(ids), features], -1))
        return out

    def _layers(self) -> list[Eagle1Layer]:
        return [layer for layer in self.layers if isinstance(layer, Eagle1Layer)]


class _Eagle1Kind(DrafterKind[Eagle1, Eagle1Config, RegressionLoss]):
    name = layers = "eagle1"
    config, loss = Eagle1Config, RegressionLoss
    export = EAGLE1_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The whole vocabulary: engines read what is predicted with the target's head."""
        return {"drafter": {"vocab_size": facts.vocab_size}}

    def needs(self, config: Eagle1Config, loss: RegressionLoss | None) -> Needs:
        return Needs((), "all", hidden=True)

    def build(self, config: Eagle1Config, target: TargetInterface, seed: int) -> Eagle1:
        _require_the_target_s_shape(config, target)
        return Eagle1.build(config, target.head, seed)

    def objective(self, model: Eagle1, target: TargetInterface, loss: RegressionLoss) -> RegressionObjective:
        return RegressionObjective(model, target, loss)

    def hits(self, model: Eagle1, target: TargetInterface, pack: PackedBatch, draft_len: int) -> Tensor:
        require_every_final(pack)
        head, features = FrozenHead.of(target.head), target.normed(pack.final)
        dtype = model.fc.weight.dtype

        def unroll(slot_map: SlotMap, steps: int) -> Tensor:
            return head.widened(model.unroll(pack, features, slot_map, steps))

        return recurrent_hits(unroll, head.weight.to(dtype), target.vocab, pack, draft_len)

    def live(self, model: Eagle1, target: TargetInterface) -> LiveChain:
        return LiveChain(model, target.vocab)

    def tree(self, model: Eagle1, target: TargetInterface, width: int) -> DynamicTree:
        return DynamicTree(model, target.vocab, width)


def _require_the_target_s_shape(config: Eagle1Config, target: TargetInterface) -> None:
    width = target.head.hidden_size
    if config.hidden_size != width:
        raise ConfigError(
            f"eagle1 predicts what the target's head reads: drafter.hidden_size is {config.hidden_size}, "
            f"the target's is {width}",
            kind=Kind.DRAFTER_SHAPE,
            hint=f"drafter.hidden_size={width}",
        )
    if not target.vocab.is_full:
        raise ConfigError(
            f"eagle1 is read by the target's whole head of {target.vocab.target_size} tokens, in training and in every "
            f"engine; a draft vocabulary of {target.vocab.size} has no place in it",
            kind=Kind.DRAFTER_SHAPE,
            hint=f"drafter.vocab_size={target.vocab.target_size}",
        )


EAGLE1 = _Eagle1Kind()
