"""EAGLE-3 and 3.1: decoder layers over fused aux states, unrolled over their own output (training-time test).

g = fc([a; b; c]); layer input [input_layernorm(emb(x_{t+1})); hidden_norm(g)]; residual g; the layer's output is fed
back as the next step's g before the final norm, or after it with ``norm_output``. Weight names are those engines load.
Sources: drafters.md sections 1.2, 1.3 and 3; vLLM ``llama_eagle3.py`` for ``norm_output`` and ``norm_before_residual``.

Shapes: T tokens, L aux layers, D target width, H drafter width, V target vocabulary, U draft vocabulary, K TTT steps,
A active slots, N query heads, G key heads, E head width.
"""

from functools import partial
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.head import HeadBundle
from hiddenstore.products import Linear
from schemas.layers import default_aux_layers
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter, DrafterKind, Needs, Seen, TargetFacts, TargetSide
from trainer.drafters.blocks import (
    DecoderLayer,
    KVCache,
    RMSNorm,
    Rotary,
    attend_cached,
    rotate,
)
from trainer.drafters.eagle3_unroll import unrolled
from trainer.drafting.chain import LiveChain, recurrent_hits
from trainer.drafting.tree import LiveTree
from trainer.objectives.loss_kinds import LOSSES
from trainer.objectives.shift import SlotPlan
from trainer.objectives.teacher import Teacher
from trainer.objectives.ttt import TttLoss, TttObjective
from trainer.vocab import DraftVocab

FC_START = 0.2
"""Scale of a fresh ``fc`` beside torch's default: the residual starts small beside what the layer adds to it. On the
bundled target after 400 steps, two seeds: accepted length over all slots 1.666 and 1.670, against 1.657 and 1.653."""


class Eagle3Config(DrafterConfig):
    """``fc_norm`` and ``norm_output`` make EAGLE-3.1. Layers after the first are plain Llama layers."""

    name: str = "eagle3"
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    num_layers: int = Field(1, gt=0)
    train_embeddings: bool = False
    train_head: bool = True


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

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decode n slots after those in ``cache``: returns what the next step reads as g [n, H], and logits [n, U].

        g [n, H]: ``start`` of verified rows, or what ``step`` returned for the slot before. next_ids int64 [n]: the
        token after each row. positions int64 [n] of the rows. ``last``: make the logits of so many last slots only.
        """
        normed = self.midlayer.hidden_norm(g)
        x = torch.cat([self.midlayer.input_layernorm(self.embed(next_ids)), normed], -1)
        hidden = normed if self.config.norm_before_residual else g
        cos, sin = self.rotary.at(positions)
        for index, layer in enumerate(self.decoder_layers()):
            q, k, v = layer.self_attn.project(layer.input_layernorm(hidden) if index else x)
            hidden = layer.finish(hidden, attend_cached(rotate(q, cos, sin), rotate(k, cos, sin), v, cache, index))
        normed = self.norm(hidden)
        return (normed if self.config.norm_output else hidden), self.lm_head(normed if last is None else normed[-last:])

    def unroll(self, batch: PackedBatch, plan: SlotPlan, steps: int) -> Tensor:
        """States after the final norm at every TTT step, step by step: [K*A, H]."""
        return unrolled(self, batch, plan, steps)

    def decoder_layers(self) -> list[DecoderLayer]:
        """Layer 0 first."""
        return [self.midlayer, *(layer for layer in self.layers.values() if isinstance(layer, DecoderLayer))]


class _Eagle3Kind(DrafterKind[Eagle3, Eagle3Config, TttLoss]):
    name = layers = "eagle3"
    splits_context = True
    config, loss = Eagle3Config, TttLoss

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The field's three layers where the store holds them, else all it holds."""
        try:
            wanted = default_aux_layers("eagle3", facts.num_layers)
        except ValueError:
            wanted = []
        held = wanted if wanted and set(wanted) <= set(facts.held) else list(facts.held)
        # Named even where the store has none, so that `check_store` says what is missing.
        return {"drafter": {"aux_layers": held or wanted}, "optim": {"kind": "muon"}}

    def needs(self, config: Eagle3Config, loss: TttLoss | None) -> Needs:
        reads_final = loss is not None and LOSSES[loss.kind].teacher != "text"
        return Needs(config.aux_layers, "supervised" if reads_final else "none")

    def build(self, config: Eagle3Config, side: TargetSide, seed: int) -> Eagle3:
        return Eagle3.build(config, side.head, side.vocab, seed)

    def objective(self, model: Eagle3, side: TargetSide, loss: TttLoss) -> TttObjective:
        return TttObjective(model, Teacher(side.head, side.vocab, side.final_norm, loss.drop_off_vocab), loss)

    def hits(self, model: Eagle3, side: TargetSide, pack: PackedBatch, draft_len: int) -> Tensor:
        return recurrent_hits(partial(model.unroll, pack), model.lm_head.weight, side.vocab, pack, draft_len)

    def live(self, model: Eagle3, side: TargetSide) -> LiveChain:
        return LiveChain(model, side.vocab)

    def tree(self, model: Eagle3, side: TargetSide, width: int) -> LiveTree:
        return LiveTree(model, side.vocab, width)


EAGLE3 = _Eagle3Kind()
