"""Domino: DFlash with a head that reads the tokens of its block one after another.

A GRU runs over the embeddings of the block's tokens, the newest one and then those just proposed. To the logits of each
slot but the first that proposes W2 silu(W1 [x; g]) is added, x the slot's state and g the GRU's behind the last token
before it. So proposals are chosen one after another, from the states of one forward. ``shift_label``: slots propose the
token after their own position, the first of a block included; else, as DFlash, the token at it.

Trained by DFlash's loss of the logits with the head and of those without, whose share falls from ``base`` to nothing
over the first ``base_share`` of the run. Sources: docs/design/016; SpecForge 0.2 ``domino.py``; ModelOpt 0.47
``hf_domino.py``; SGLang 0.5.23 ``domino_utils.py``, which fills a block of B slots and takes B-1 proposals.

Shapes: D target width (and the drafter's), V target vocabulary, U draft vocabulary, G width of the GRU, M rank of the
correction, N blocks, K proposals of a block, n rows.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.targets.matmul import Linear, linear
from trainer.drafters.base import TargetFacts
from trainer.drafters.dflash import DFLASH, BlockInputs, BlockLoss, BlockObjective, DFlash, DFlashConfig
from trainer.drafters.live import draft_logits
from trainer.formats.domino import DOMINO as DOMINO_EXPORT
from trainer.losses.fused_head import StepLosses
from trainer.slots import BlockMap
from trainer.vocab import DraftVocab

PUBLISHED_RANK, PUBLISHED_GRU = 256, 1024


class DominoLoss(BlockLoss):
    """What the slots of a block are taught."""

    base: float = Field(1.0, ge=0, le=1)
    """Share of the logits without the head in the loss of the first step."""
    base_share: float = Field(0.5, ge=0, le=1)
    """Part of the run over which that share falls to nothing."""

    def base_at(self, progress: float) -> float:
        """That share once ``progress`` of the run is done."""
        return self.base * max(0.0, 1 - progress / self.base_share) if self.base_share else 0.0


class DominoConfig(DFlashConfig):
    """Settings of Domino."""

    name: str = "domino"
    """The kind of drafter."""
    shift_label: bool = True
    """Slots propose the token after their own position."""
    gru_hidden_dim: int = Field(PUBLISHED_GRU, gt=0)
    """Width of what is known of the block's tokens."""
    emb_dim: int = Field(PUBLISHED_RANK, gt=0)
    """Rank of what is added to the logits."""

    @property
    def weights(self) -> int:
        """DFlash's, the GRU's, W1 and W2."""
        joined = self.hidden_size + self.gru_hidden_dim
        return super().weights + (3 * self.gru_hidden_dim + self.emb_dim) * joined + self.emb_dim * self.vocab_size


class PrefixGru(nn.Module):
    """torch's GRU of one layer without biases, under its names of weights: [3G, D] and [3G, G]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden, width))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden, hidden))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(hidden**-0.5), hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Its state behind each of inputs [N, K, D]: [N, K, G]."""
        told, state = linear(x, self.weight_ih_l0), x.new_zeros(len(x), self.weight_hh_l0.shape[1])
        states = []
        for reset_in, keep_in, new_in in (step.chunk(3, -1) for step in told.unbind(1)):
            reset, keep, new = linear(state, self.weight_hh_l0).chunk(3, -1)
            fresh = torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
            state = torch.lerp(fresh, state.to(fresh.dtype), torch.sigmoid(keep_in + keep))
            states.append(state)
        return torch.stack(states, 1)


class Domino(DFlash):
    """The drafter: DFlash's weights, the GRU, and W1 [M, D+G] and W2 [U, M], which starts as no change."""

    config: DominoConfig
    chained = True

    def __init__(self, config: DominoConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.unread = int(config.shift_label)
        self.prefix_gru = PrefixGru(config.hidden_size, config.gru_hidden_dim)
        joined = config.hidden_size + config.gru_hidden_dim
        self.embed_proj = nn.Sequential(Linear(joined, config.emb_dim), nn.SiLU(), Linear(config.emb_dim, vocab.size))
        nn.init.zeros_(self.widening)

    @property
    def widening(self) -> Tensor:
        """W2 [U, M]."""
        return cast(Linear, self.embed_proj[2]).weight

    @property
    def first_slot(self) -> int:
        return 0 if self.config.shift_label else 1

    def before(self, tokens: Tensor) -> Tensor:
        """The GRU's state behind the tokens before each slot, and a last column that is 0 where none of them is a
        proposal: [N*K, G+1]."""
        embedded = F.embedding(tokens, self.frozen_embeddings).to(self.fc.weight.dtype)
        state = self.prefix_gru(embedded)
        follows = (torch.arange(tokens.shape[1], device=tokens.device) > 0).to(state.dtype)
        return torch.cat([state, follows[None, :, None].expand(len(tokens), -1, 1)], -1).flatten(0, 1)

    def correction(self, states: Tensor, before: Tensor) -> Tensor:
        """What W2 turns into logits [n, M], of states [n, D] and what they know [n, G+1]."""
        joined = torch.cat([states, before[:, :-1].to(states.dtype)], -1)
        narrow: Tensor = self.embed_proj[1](self.embed_proj[0](joined))
        return narrow * before[:, -1:].to(narrow.dtype)

    def logits(self, states: Tensor, before: Tensor) -> Tensor:
        return super().logits(states, before) + draft_logits(self.correction(states, before), self.widening)

    def joined(self, batch: PackedBatch, block_map: BlockMap, states: Tensor) -> Tensor:
        """[state; correction] of the slots that propose [N*K, D], after the text's own tokens: [N*K, D+M]."""
        slots = torch.arange(self.config.longest, device=batch.input_ids.device)
        rows = (block_map.anchors[:, None] + slots).clamp(max=len(batch.input_ids) - 1)
        return torch.cat([states, self.correction(states, self.before(batch.input_ids[rows])).to(states.dtype)], -1)


class DominoObjective(BlockObjective):
    """What the loop optimises: DFlash's slots with the head, and at first without."""

    model: Domino
    loss: DominoLoss

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Sums and hits are those of the logits with the head."""
        model, scales = self.model, self.scales(denominators)
        states, base = model.block_states(inputs.batch, inputs.block_map), self.loss.base_at(model.progress)
        joined = model.joined(inputs.batch, inputs.block_map, states)
        losses = self.losses_of(joined, inputs, scales * (1 - base), model.widening)
        if not base:
            return losses
        alone = self.losses_of(states, inputs, scales * base)
        return replace(losses, total=losses.total + alone.total, value=losses.value + alone.value)


class _DominoKind(type(DFLASH)):  # type: ignore[misc]
    name = "domino"
    config, loss, model, teaching = DominoConfig, DominoLoss, Domino, DominoObjective
    export = DOMINO_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """DFlash's, and a head no wider than the target."""
        defaults: dict[str, dict[str, Any]] = super().derive(facts)
        defaults["drafter"] |= {
            "gru_hidden_dim": min(PUBLISHED_GRU, facts.hidden_size),
            "emb_dim": min(PUBLISHED_RANK, facts.hidden_size),
        }
        return defaults


DOMINO = _DominoKind()
