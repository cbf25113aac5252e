"""EAGLE-1, whose weights also serve EAGLE-2: decoder layers that predict the target's next feature.

x_t = fc([emb(x_{t+1}); f_t]), embedding first and without bias; L Llama layers, of which the first has no input norm,
give f^_{t+1}, which the target's frozen head reads and which is fed back as the next f. f is the final hidden after the
final norm. Weight names are those engines load; they have no norm at either end, so ``first_norm`` and ``last_norm``
are for comparison. Sources: drafters.md section 1.1; SafeAILab ``cnets1.py``, vLLM ``llama_eagle.py``.

Shapes: T tokens, D target width, K drafted tokens, A active slots, V target vocabulary, N query heads, G key heads,
E head width.
"""

from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from hiddenstore.products import Linear
from trainer.attention.ttt_attention import ttt_attention
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, Seen, TargetFacts, TargetSide
from trainer.drafters.blocks import (
    Attention,
    GatedMLP,
    KVCache,
    Piece,
    RMSNorm,
    Rotary,
    attend_cached,
    gather_pieces,
    rotate,
)
from trainer.drafters.frozen_head import FrozenHead
from trainer.drafting.chain import LiveChain, recurrent_hits
from trainer.drafting.tree import LiveTree
from trainer.objectives.regression import RegressionLoss, RegressionObjective, require_every_final
from trainer.objectives.shift import Run, SlotPlan, document_starts
from trainer.scale.recompute import recomputed


class Eagle1Config(DrafterConfig):
    """No aux layers. ``first_norm``: an input norm in layer 0; ``last_norm``: a norm on what is predicted."""

    name: str = "eagle1"
    aux_layers: tuple[int, ...] = Field((), max_length=0)
    num_layers: int = Field(1, gt=0)
    first_norm: bool = False
    last_norm: bool = False


class DecoderLayer(nn.Module):
    """A Llama layer; ``input_layernorm`` is the identity where it has none."""

    def __init__(self, config: Eagle1Config, has_input_norm: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps) if has_input_norm else nn.Identity()
        self.self_attn = Attention(width, width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def queries(self, normed: Tensor) -> Tensor:
        """[n, N, E] of rows after the input norm [n, D]."""
        q: Tensor = self.self_attn.q_proj(normed)
        return q.unflatten(-1, (-1, self.self_attn.head_dim))

    def keys_values(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Two of [n, G, E] of rows after the input norm [n, D]."""
        k, v = self.self_attn.k_proj(normed), self.self_attn.v_proj(normed)
        return k.unflatten(-1, (-1, self.self_attn.head_dim)), v.unflatten(-1, (-1, self.self_attn.head_dim))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Layer output [n, D] from its residual [n, D] and attended values [n, N, E]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle1(Drafter):
    """The drafter. Embeddings, final norm and LM head are the target's, borrowed and never saved."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i > 0 or config.first_norm) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.last_norm else nn.Identity()
        self._rotary = Rotary.of(config)
        self._head: HeadBundle

    @classmethod
    def build(cls, config: Eagle1Config, head: HeadBundle, seed: int = 0) -> Self:
        """A fresh drafter, random from ``seed``.

        Raises:
            ConfigError: the width or the vocabulary is not that of the frozen head.
        """
        generator = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            model = cls(config)
        finally:
            torch.set_rng_state(generator)
        model.borrow(head)
        return model

    def borrow(self, head: HeadBundle) -> None:
        """Read embeddings, final norm and head from this bundle. Engines share the table unscaled, hence so here."""
        self._head = head.to(self.fc.weight.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [n, D] in the drafter's dtype."""
        return F.embedding(ids, self._head.embed_tokens).to(self.fc.weight.dtype)

    def begin(self, seen: Seen) -> Tensor:
        """Features of verified tokens: [T, D]."""
        return self._head.norm(seen.final).to(self.fc.weight.dtype)

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
            k, v = layer.keys_values(normed)
            q = rotate(layer.queries(normed), cos, sin)
            x = layer.finish(x, attend_cached(q, rotate(k, cos, sin), v, cache, index))
        predicted: Tensor = self.norm(x)
        read = predicted if last is None else predicted[-last:]
        return predicted, self._head.logits(read, norm_state="post_norm")

    def unroll(self, batch: PackedBatch, features: Tensor, plan: SlotPlan, steps: int) -> Tensor:
        """Predicted features of the active slots, step by step: [steps * A, D].

        features [T, D]: those of the target, at every token. From the second step on a slot reads its own prediction
        and the text's next token; it attends to the keys of true features before it and to its own later ones.
        """
        ids = F.pad(batch.input_ids, (0, steps + 1))
        everywhere, active = self._rotary.at(batch.positions), self._rotary.at(batch.positions[plan.active])
        whole = _documents(batch.document)
        pieces = [Piece(run.begin, run.length, run.at) for run in plan.runs]

        def read(layer: DecoderLayer, x: Tensor, is_last: bool) -> tuple[Tensor, Tensor, Tensor]:
            normed, tables, runs = layer.input_layernorm(x), everywhere, whole
            k, v = layer.keys_values(normed)
            k = rotate(k, *everywhere)
            if is_last:
                # Only what is taught or proposed is computed past the last layer's keys.
                x, normed = gather_pieces(x, pieces), gather_pieces(normed, pieces)
                tables, runs = active, plan.runs
            attended = ttt_attention(rotate(layer.queries(normed), *tables), k, v, [], runs)
            return layer.finish(x, attended), k, v

        x = self._fuse(ids[1 : batch.tokens + 1], features.to(self.fc.weight.dtype))
        text: list[tuple[Tensor, Tensor]] = []
        for index, layer in enumerate(self._layers()):
            x, k, v = recomputed(self.recompute, read, layer, x, index == len(self.layers) - 1)
            text.append((k, v))
        outputs: list[Tensor] = [self.norm(x)]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for i in range(1, steps):
            x = self._fuse(ids[plan.active + 1 + i], outputs[-1])
            tables = self._rotary.at(batch.positions[plan.active] + i)
            for layer, before, later in zip(self._layers(), text, own, strict=True):
                normed = layer.input_layernorm(x)
                k, v = layer.keys_values(normed)
                later.append((rotate(k, *tables), v))
                x = layer.finish(x, ttt_attention(rotate(layer.queries(normed), *tables), *before, later, plan.runs))
            outputs.append(self.norm(x))
        return torch.cat(outputs)

    def _fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.cat([self.embed(ids), features], -1))
        return out

    def _layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


def _documents(document: Tensor) -> tuple[Run, ...]:
    """Every document of a pack as one run of active slots."""
    starts = document_starts(document).unique().tolist()
    ends = [*starts[1:], document.shape[0]]
    return tuple(Run(begin, begin, end, begin) for begin, end in zip(starts, ends, strict=True))


class _Eagle1Kind(DrafterKind[Eagle1, Eagle1Config, RegressionLoss]):
    name = layers = "eagle1"
    config, loss = Eagle1Config, RegressionLoss

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The whole vocabulary: engines read what is predicted with the target's head."""
        return {"drafter": {"vocab_size": facts.vocab_size}}

    def needs(self, config: Eagle1Config, loss: RegressionLoss | None) -> Needs:
        return Needs((), "all", hidden=True)

    def build(self, config: Eagle1Config, side: TargetSide, seed: int) -> Eagle1:
        _require_the_target_s_shape(config, side)
        return Eagle1.build(config, side.head, seed)

    def objective(self, model: Eagle1, side: TargetSide, loss: RegressionLoss) -> RegressionObjective:
        return RegressionObjective(model, side, loss)

    def hits(self, model: Eagle1, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        require_every_final(pack)
        head, features = FrozenHead.of(side.head), side.normed(pack.final)
        dtype = model.fc.weight.dtype

        def unroll(plan: SlotPlan, steps: int) -> Tensor:
            return head.widened(model.unroll(pack, features, plan, steps))

        return recurrent_hits(unroll, head.weight.to(dtype), side.vocab, pack, draft_len)

    def live(self, model: Eagle1, side: TargetSide) -> LiveChain:
        return LiveChain(model, side.vocab)

    def tree(self, model: Eagle1, side: TargetSide, width: int) -> LiveTree:
        return LiveTree(model, side.vocab, width)


def _require_the_target_s_shape(config: Eagle1Config, side: TargetSide) -> None:
    width = side.head.hidden_size
    if config.hidden_size != width:
        raise ConfigError(
            f"eagle1 predicts what the target's head reads: drafter.hidden_size is {config.hidden_size}, "
            f"the target's is {width}",
            kind="drafter-shape",
            hint=f"drafter.hidden_size={width}",
        )
    if not side.vocab.is_full:
        raise ConfigError(
            f"eagle1 is read by the target's whole head of {side.vocab.target_size} tokens, in training and in every "
            f"engine; a draft vocabulary of {side.vocab.size} has no place in it",
            kind="drafter-shape",
            hint=f"drafter.vocab_size={side.vocab.target_size}",
        )


EAGLE1 = _Eagle1Kind()
