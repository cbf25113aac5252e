"""EAGLE-3 and 3.1: one decoder layer over fused aux states, unrolled over its own output (training-time test).

g = fc([a; b; c]); layer input [input_layernorm(emb(x_{t+1})); hidden_norm(g)]; residual g; the layer's output is fed
back as the next step's g before the final norm, or after it with ``norm_output``. Weight names are those engines load.
Sources: drafters.md sections 1.2, 1.3 and 3; vLLM ``llama_eagle3.py`` for ``norm_output`` and ``norm_before_residual``.

Shapes: T tokens, L aux layers, D target width, H drafter width, V target vocabulary, U draft vocabulary, K TTT steps,
A active slots, N query heads, G key heads, E head width.
"""

from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.head import HeadBundle
from schemas.layers import default_aux_layers
from trainer.chain import LiveChain, recurrent_hits
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, Seen, TargetFacts, TargetSide
from trainer.drafters.blocks import (
    Attention,
    GatedMLP,
    KVCache,
    Piece,
    RMSNorm,
    Rotary,
    gather_pieces,
    rotate,
)
from trainer.shift import Run, SlotPlan
from trainer.teacher import Teacher
from trainer.ttt import TttLoss, TttObjective
from trainer.ttt_attention import ttt_attention
from trainer.vocab import DraftVocab

FC_START = 0.2
"""Scale of a fresh ``fc`` beside torch's default: the residual starts small beside what the layer adds to it. Tried
once and only together with a wider MLP on the bundled target; its own share is not measured."""


class Eagle3Config(DrafterConfig):
    """``fc_norm`` and ``norm_output`` make EAGLE-3.1."""

    name: str = "eagle3"
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    train_embeddings: bool = False
    train_head: bool = True


class MidLayer(nn.Module):
    """The decoder layer: attention reads [embedding; hidden], 2H wide; everything after is H wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(2 * width, width, config.num_heads, config.num_kv_heads, config.head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, config.intermediate_size)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Layer output [A, H] from its residual [A, H] and attended values [A, N, E]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Eagle3(Drafter):
    """The drafter. Frozen embeddings are borrowed from the head bundle and never saved."""

    config: Eagle3Config
    frozen_embeddings: Tensor | None

    def __init__(self, config: Eagle3Config, target_hidden_size: int, target_vocab_size: int, draft_size: int) -> None:
        super().__init__()
        self.config = config
        aux = len(config.aux_layers)
        width = config.hidden_size
        self.fc = nn.Linear(aux * target_hidden_size, width, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(target_hidden_size, config.rms_norm_eps) for _ in range(aux))
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, draft_size, bias=False)
        self.lm_head.weight.requires_grad_(config.train_head)
        self.register_buffer("frozen_embeddings", None, persistent=False)
        if config.train_embeddings or width != target_hidden_size:
            self.embed_tokens = nn.Embedding(target_vocab_size, width)
            self.embed_tokens.weight.requires_grad_(config.train_embeddings)
        self._rotary = Rotary(config.head_dim, config.rope_theta)

    @classmethod
    def build(cls, config: Eagle3Config, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """A fresh drafter: head and final norm start as the target's, the rest random from ``seed``.

        A drafter of another width than the target starts with a random projection of the target's rows.
        """
        generator = torch.get_rng_state()
        torch.manual_seed(seed)
        try:
            model = cls(config, head.hidden_size, head.embed_tokens.shape[0], vocab.size)
            model._start_from(head, vocab)
        finally:
            torch.set_rng_state(generator)
        return model

    @torch.no_grad()
    def _start_from(self, head: HeadBundle, vocab: DraftVocab) -> None:
        self.fc.weight.mul_(FC_START)
        rows = head.output_weight[vocab.target_ids.to(head.output_weight.device)].float().cpu()
        same = self.config.hidden_size == head.hidden_size
        project = None if same else torch.randn(head.hidden_size, self.config.hidden_size) / head.hidden_size**0.5
        self.lm_head.weight.copy_(rows if project is None else rows @ project)
        if same:
            plus_one = head.spec.norm_flavour == "rms_plus_one"
            self.norm.weight.copy_(head.norm_weight.float().cpu() + float(plus_one))
        if hasattr(self, "embed_tokens"):
            table = head.embed_tokens.float().cpu()
            self.embed_tokens.weight.copy_(table if project is None else table @ project)
        self.borrow(head)

    def borrow(self, head: HeadBundle) -> None:
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
        for layer, part in zip(aux[1:], parts[1:], strict=True):
            g = g + F.linear(layer, part)
        return g

    def begin(self, seen: Seen) -> Tensor:
        """The g [T, H] of verified tokens."""
        return self.start(seen.aux.to(self.fc.weight.device))

    def step(self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Decode n slots after those in ``cache``: returns what the next step reads as g [n, H], and logits [n, U].

        g [n, H]: ``start`` of verified rows, or what ``step`` returned for the slot before. next_ids int64 [n]: the
        token after each row. positions int64 [n] of the rows.
        """
        layer = self.midlayer
        x = torch.cat([layer.input_layernorm(self.embed(next_ids)), layer.hidden_norm(g)], -1)
        q, k, v = layer.self_attn.split(F.linear(x, self._joint_projection()))
        cos, sin = self._rotary.at(positions)
        before = cache.length
        keys, values = cache.append(rotate(k, cos, sin), v)
        n = q.shape[0]
        mask = None
        if n > 1:
            mask = torch.ones(n, before + n, dtype=torch.bool, device=q.device).tril(before)
        attended = F.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )[0].transpose(0, 1)
        hidden = layer.finish(self._residual(g), attended)
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), self.lm_head(normed)

    def unroll(self, batch: PackedBatch, plan: SlotPlan, steps: int) -> Tensor:
        """States after the final norm at every TTT step, step by step: [K*A, H]."""
        layer, width = self.midlayer, self.config.hidden_size
        qkv = self._joint_projection()
        queries = self.config.num_heads * self.config.head_dim
        ids = F.pad(batch.input_ids, (0, steps + 1))
        # The embedding half of the projection depends on the token alone, so one product serves every step.
        from_tokens = F.linear(layer.input_layernorm(self.embed(ids)), qkv[:, :width])
        g = self.start(batch.aux)
        hidden_in = layer.hidden_norm(g)
        tokens = batch.input_ids.shape[0]
        kv = F.linear(hidden_in, qkv[queries:, width:]) + from_tokens[1 : tokens + 1, queries:]
        k0, v0 = kv.unflatten(-1, (-1, self.config.head_dim)).chunk(2, 1)
        cos, sin = self._rotary.at(batch.positions)
        k0 = rotate(k0, cos, sin)
        here = _pieces(plan.runs, 0)
        hidden, hidden_in = gather_pieces(g, here), gather_pieces(hidden_in, here)
        positions = batch.positions[plan.active]
        later: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for i in range(steps):
            tokens_in = gather_pieces(from_tokens, _pieces(plan.runs, 1 + i))
            cos, sin = self._rotary.at(positions + i)
            if i == 0:
                q = F.linear(hidden_in, qkv[:queries, width:]) + tokens_in[:, :queries]
                q = q.unflatten(-1, (-1, self.config.head_dim))
            else:
                hidden_in = layer.hidden_norm(hidden)
                q, k, v = layer.self_attn.split(F.linear(hidden_in, qkv[:, width:]) + tokens_in)
                later.append((rotate(k, cos, sin), v))
            attended = ttt_attention(rotate(q, cos, sin), k0, v0, later, plan.runs)
            residual = hidden_in if self.config.norm_before_residual else hidden
            hidden = layer.finish(residual, attended)
            if self.config.norm_output:
                hidden = self.norm(hidden)
            outputs.append(hidden)
        states = torch.cat(outputs)
        return states if self.config.norm_output else self.norm(states)

    def _residual(self, g: Tensor) -> Tensor:
        return self.midlayer.hidden_norm(g) if self.config.norm_before_residual else g

    def _joint_projection(self) -> Tensor:
        attention = self.midlayer.self_attn
        return torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])


def _pieces(runs: tuple[Run, ...], shift: int) -> list[Piece]:
    return [Piece(run.begin + shift, run.length, run.at) for run in runs]


class _Eagle3Kind(DrafterKind[Eagle3, Eagle3Config, TttLoss]):
    name = layers = "eagle3"
    config, loss = Eagle3Config, TttLoss

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The field's three layers where the store holds them, else all it holds."""
        try:
            wanted = default_aux_layers("eagle3", facts.num_layers)
        except ValueError:
            wanted = []
        held = wanted if wanted and set(wanted) <= set(facts.held) else list(facts.held)
        # Named even where the store has none, so that `check_store` says what is missing.
        return {"drafter": {"aux_layers": held or wanted}}

    def needs(self, config: Eagle3Config, loss: TttLoss | None) -> Needs:
        return Needs(config.aux_layers, "none" if loss is None else "supervised")

    def build(self, config: Eagle3Config, side: TargetSide, seed: int) -> Eagle3:
        return Eagle3.build(config, side.head, side.vocab, seed)

    def objective(self, model: Eagle3, side: TargetSide, loss: TttLoss) -> TttObjective:
        return TttObjective(model, Teacher(side.head, side.vocab, side.final_norm, loss.drop_off_vocab), loss)

    def hits(self, model: Eagle3, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        return recurrent_hits(partial(model.unroll, pack), model.lm_head.weight, side.vocab, pack, draft_len)

    def live(self, model: Eagle3, side: TargetSide) -> LiveChain:
        return LiveChain(model, side.vocab)


EAGLE3 = _Eagle3Kind()
