"""DFlash2: DFlash with convolutions inside the block, and a selector among the most probable tokens of each slot.

Around attention and MLP of every layer the slots of a block are mixed with those before them: out_i = sum_t (base_t +
delta_it) x_{i-t}, taps t, zero before the block; base of every channel, delta of every group of channels from the
sublayer's normed input, once for its input and once for its output. The selector takes the k tokens of highest logit of
a slot and adds <A[x] * P h, B[token]> to theirs, x the token before: the newest one, and then the one just proposed. So
proposals are chosen one after another, from the states of one forward. Sources: docs/design/016; z-lab ``model.py``;
speculators 0.9 ``models/dflash2``; vLLM 0.32 ``qwen3_dflash2.py``; llama.cpp ``dflash.cpp``.

Trained by DFlash's loss of the logits, and by the cross-entropy of the label among the candidates, where it takes the
last one's place if it is none of them (speculators).

Shapes: D target width (and the drafter's), U vocabulary, M selector rank, k candidates, T taps, G groups of channels,
N blocks, B slots of a block, K = B-1 taught slots, n rows.
"""

import math
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear
from trainer.attention.block import Sight
from trainer.drafters.base import TargetFacts, require_every_token
from trainer.drafters.blocks import recomputed
from trainer.drafters.dflash import (
    DFLASH,
    BlockInputs,
    BlockLoss,
    BlockObjective,
    DFlash,
    DFlashConfig,
    DFlashLayer,
    dpace_weights,
    spread,
)
from trainer.drafters.live import LOGIT_BUDGET, KeyValues, draft_logits
from trainer.formats.dflash2 import DFLASH2 as DFLASH2_EXPORT
from trainer.losses.fused_head import StepLosses
from trainer.slots import Blocks
from trainer.vocab import DraftVocab

PUBLISHED_GROUP, PUBLISHED_RANK, PUBLISHED_CANDIDATES = 16, 256, 16


class DFlash2Loss(BlockLoss):
    """What the slots of a block are taught."""

    labels: Literal["text", "target"] = "target"
    """What is taught: the text's token or the target's most probable one."""
    distil: float = Field(1.0, ge=0, le=1)
    """Share of the target's distribution in what the logits are taught; the rest is the label."""
    reduction: Literal["weights", "kept"] | None = "kept"
    """What the loss is divided by: the sum of the weights or the taught slots (``kept``: speculators)."""
    selector: float = Field(1.0, ge=0)
    """Weight of the selector's cross-entropy."""


class DFlash2Config(DFlashConfig):
    """Settings of DFlash2."""

    name: str = "dflash2"
    """The kind of drafter."""
    conv_kernel_size: int = Field(2, ge=1)
    """Taps of a convolution: a slot and those before it that it reads."""
    conv_group_size: int = Field(PUBLISHED_GROUP, gt=0)
    """Channels that share what a convolution makes of its input."""
    selector_rank: int = Field(PUBLISHED_RANK, gt=0)
    """Width of what the selector knows of a token."""
    selector_top_k: int = Field(PUBLISHED_CANDIDATES, gt=0)
    """Candidates of a slot, among which the selector chooses."""

    @property
    def weights(self) -> int:
        """DFlash's, the selector's and those of the projections of the convolutions."""
        selector = self.selector_rank * (2 * self.vocab_size + self.hidden_size)
        convolution = 2 * self.conv_kernel_size * self.hidden_size**2 // self.conv_group_size
        return super().weights + selector + 2 * self.num_layers * convolution

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden_size % self.conv_group_size:
            raise ValueError(f"conv_group_size {self.conv_group_size} does not divide hidden_size {self.hidden_size}")
        if self.conv_kernel_size > self.block_size:
            raise ValueError(f"conv_kernel_size {self.conv_kernel_size} is more than block_size {self.block_size}")
        if self.selector_top_k > self.vocab_size:
            raise ValueError(f"selector_top_k {self.selector_top_k} is more than vocab_size {self.vocab_size}")
        return self


class BlockConvolution(nn.Module):
    """base [2, T, D] and the projection to delta [2, T, G], first of what enters a sublayer; starts as no change."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self._shape = (2, config.conv_kernel_size, config.hidden_size // config.conv_group_size)
        self.base_kernel = nn.Parameter(torch.zeros(*self._shape[:2], config.hidden_size))
        self.kernel_projection = Linear(config.hidden_size, math.prod(self._shape))
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Slots [N, B, D] mixed, and the delta [N, B, T, G] of what the sublayer makes of them."""
        delta = self.kernel_projection(x).unflatten(-1, self._shape)
        return self._mixed(x, delta[:, :, 0], 0), delta[:, :, 1]

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        """Outputs [N, S, D] of the first slots mixed, by their delta [N, B, T, G]."""
        return self._mixed(x, delta[:, : x.shape[1]], 1)

    def _mixed(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        groups = (self._shape[-1], -1)
        base, x = self.base_kernel[side].unflatten(-1, groups).to(x.dtype), x.unflatten(-1, groups)
        mixed = (base[0] + delta[:, :, 0, :, None]) * x
        for tap in range(1, self._shape[1]):
            shifted = F.pad(x, (0, 0, 0, 0, tap, 0))[:, : x.shape[1]]
            mixed = mixed + (base[tap] + delta[:, :, tap, :, None]) * shifted
        return mixed.flatten(-2)


class DFlash2Layer(DFlashLayer):
    """DFlash's layer and a convolution on either side of its attention and of its MLP."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def finish_mixed(self, residual: Tensor, attended: Tensor, delta: Tensor) -> Tensor:
        """Layer output [N, S, D] of the first slots from their residual, attended values [N*S, heads, E] and delta."""
        out = self.self_attn.o_proj(attended.flatten(1)).view_as(residual)
        hidden = residual + self.attention_conv.after(out, delta)
        x, delta = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(x), delta)


class CandidateSelector(nn.Module):
    """A and B [U, M], P [M, D]."""

    def __init__(self, vocab: DraftVocab, config: DFlash2Config) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab.size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab.size, config.selector_rank))
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, states: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """What is added to the logits [n, k] of candidates int64 [n, k] of states [n, D] after tokens int64 [n]."""
        gate = self.hidden_projection(states)
        context = F.embedding(previous, self.predecessor_codebook).to(gate.dtype) * gate
        return _products(self.successor_codebook, candidates, context)


def _products(table: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Rows ids int64 [n, k] of a table [U, W] times x [n, W]: fp32 [n, k]."""
    return torch.bmm(F.embedding(ids, table), x.to(table.dtype)[..., None])[..., 0].float()


class DFlash2(DFlash):
    """The drafter: DFlash's weights, convolutions in its layers, and the selector."""

    config: DFlash2Config
    layer = DFlash2Layer
    chained = True

    def __init__(self, config: DFlash2Config, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.candidate_selector = CandidateSelector(vocab, config)

    @classmethod
    def build(cls, config: DFlashConfig, head: HeadBundle, vocab: DraftVocab, seed: int = 0) -> Self:
        """See `DFlash.build`. Raises ConfigError: also where the draft vocabulary is not the target's."""
        require_every_token(vocab, "dflash2 selects among")
        return super().build(config, head, vocab, seed)

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        """Draft logits fp32 [n, U] of states [n, D] that follow the tokens int64 [n]; -inf but for candidates."""
        every = super().logits(states, previous)
        best = every.topk(self.config.selector_top_k)
        scores = best.values + self.candidate_selector(states, previous, best.indices)
        return torch.full_like(every, float("-inf")).scatter(1, best.indices, scores)

    @torch.no_grad()
    def candidates(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The k tokens of highest logit of states [n, D], int64 [n, k], the last one's place taken by the label int64
        [n] where it is none of them; and whether it is one, bool [n]."""
        head = self.head_weight()
        chunks = states.split(max(1, LOGIT_BUDGET // len(head)))
        best = torch.cat([draft_logits(rows, head).topk(self.config.selector_top_k).indices for rows in chunks])
        holds = (best == labels[:, None]).any(1)
        best[:, -1] = torch.where(holds, best[:, -1], labels)
        return best, holds

    def fill(
        self, tokens: Tensor, positions: Tensor, context: list[KeyValues], blocks: Blocks, slots: tuple[int, int]
    ) -> Tensor:
        """See `DFlash.fill`. The last layer is computed from the block's opening on, which later slots read."""
        first, last = slots
        states = super().fill(tokens, positions, context, blocks, (0, last))
        return states.unflatten(0, (-1, last))[:, first:].flatten(0, 1)

    def _through(self, layer: DFlashLayer, x: Tensor, context: KeyValues, sight: Sight, at: Tensor) -> Tensor:
        assert isinstance(layer, DFlash2Layer)
        if len(x) > len(at):
            x = spread(x, sight.block_size)
        mixed, delta = layer.attention_conv.before(layer.input_layernorm(x))
        attended = self.attended(layer.project(mixed, sight.first, sight.last), context, sight, at)
        return layer.finish_mixed(x[:, : sight.last], attended, delta)


class DFlash2Objective(BlockObjective):
    """What the loop optimises: DFlash's slots, and the selector after the text's own tokens."""

    model: DFlash2
    loss: DFlash2Loss

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Sums are those of the logits alone, hits those of the
        selector."""
        states, scales = self.model.block_states(inputs.batch, inputs.block_map), self.scales(denominators)
        unary, taught = self.losses_of(states, inputs, scales), inputs.labels >= 0
        slots = torch.arange(self.depths, device=taught.device)
        rows = (inputs.block_map.anchors[:, None] + slots)[taught]
        surprise, hit = self._selected(states[taught.flatten()], inputs.batch.input_ids[rows], inputs.labels[taught])
        losses = torch.zeros_like(inputs.labels, dtype=surprise.dtype).masked_scatter(taught, surprise)
        if self.loss.weighting == "dpace":
            scales = scales * dpace_weights(losses.detach(), taught, self.loss.dpace_alpha)
        more = self.loss.selector * (losses * scales).sum()
        hits = torch.zeros_like(inputs.labels).masked_scatter(taught, hit.long()).sum(0)
        return replace(unary.plus(more), hits=hits)

    def _selected(self, states: Tensor, previous: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The cross-entropy fp32 [n] of labels int64 [n] among the candidates of states [n, D] that follow the tokens
        int64 [n], and whether the label is what the selector proposes, bool [n]."""
        candidates, holds = self.model.candidates(states, labels)
        few = max(1, LOGIT_BUDGET // (candidates.shape[1] * states.shape[1]))
        parts = zip(candidates.split(few), states.split(few), strict=True)
        # The head's rows of all candidates are far more than the states.
        unary = torch.cat([recomputed(True, _products, self.model.head_weight(), *part) for part in parts])
        scores = unary + self.model.candidate_selector(states, previous, candidates)
        places = (candidates == labels[:, None]).long().argmax(1)
        return F.cross_entropy(scores, places, reduction="none"), holds & (scores.detach().argmax(1) == places)


class _DFlash2Kind(type(DFLASH)):  # type: ignore[misc]
    name = "dflash2"
    config, loss, model, teaching = DFlash2Config, DFlash2Loss, DFlash2, DFlash2Objective
    export = DFLASH2_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """DFlash's, groups that divide the width, a selector no wider than the target, and as many candidates as
        llama.cpp has room for: k (k + 1) <= D."""
        defaults: dict[str, dict[str, Any]] = super().derive(facts)
        width = facts.hidden_size
        defaults["drafter"] |= {
            "conv_group_size": math.gcd(PUBLISHED_GROUP, width),
            "selector_rank": min(PUBLISHED_RANK, width),
            "selector_top_k": min(PUBLISHED_CANDIDATES, (math.isqrt(4 * width + 1) - 1) // 2, facts.vocab_size),
        }
        return defaults


DFLASH2 = _DFlash2Kind()
