"""The heads of Medusa: their settings, residual blocks and LM heads, under the weight names vLLM loads.

Head k is lm_head_k(ResBlock^n(f)) of a final hidden f after the final norm, with ResBlock(x) = x + SiLU(W x + b).
Blocks start as the identity and heads as the target's, so a fresh head repeats the target's next token.

Shapes: R rows, D target width, U draft vocabulary.
"""

from typing import Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.head import HeadBundle
from hiddenstore.products import Linear
from trainer.config import DrafterConfig
from trainer.drafters.base import Drafter
from trainer.drafters.frozen_head import FrozenHead
from trainer.scale.recompute import recomputed
from trainer.vocab import DraftVocab


class MedusaConfig(DrafterConfig):
    """``medusa_heads`` K and ``medusa_layers`` blocks in each (published models have 3 to 5 heads of one block).
    ``original_head``: every head ends in the target's frozen LM head instead of one of its own."""

    name: str = "medusa"
    aux_layers: tuple[int, ...] = Field((), max_length=0)
    medusa_heads: int = Field(4, gt=0, le=16)
    medusa_layers: int = Field(1, gt=0)
    original_head: bool = False


class ResBlocks(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.children():
            x = x + F.silu(layer(x))
        return x


class Medusa(Drafter):
    """The heads. With ``original_head`` the LM head is borrowed and never saved."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, draft_size: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            ResBlocks(config.hidden_size, config.medusa_layers) for _ in range(config.medusa_heads)
        )
        heads = 0 if config.original_head else config.medusa_heads
        self.lm_heads = nn.ModuleList(Linear(config.hidden_size, draft_size) for _ in range(heads))
        self._original: FrozenHead | None = None

    @classmethod
    @torch.no_grad()
    def build(cls, config: MedusaConfig, head: HeadBundle, vocab: DraftVocab) -> Self:
        """Fresh heads, in which nothing is random: rows of the target's head times its logit scale; a bias is left."""
        generator = torch.get_rng_state()
        try:
            model = cls(config, vocab.size)
        finally:
            torch.set_rng_state(generator)
        rows = head.output_weight[vocab.target_ids.to(head.output_weight.device)].float() * head.spec.logit_scale
        for weight in model.lm_heads.parameters():
            weight.copy_(rows)
        model.borrow(head)
        return model

    def borrow(self, head: HeadBundle) -> None:
        """Read the original head from this bundle."""
        if self.config.original_head:
            self._original = FrozenHead.of(head.to(next(self.parameters()).device))

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def states(self, features: Tensor, index: int) -> Tensor:
        """What the LM head of head ``index`` reads of features [R, D], as wide as ``head_weight``."""
        states: Tensor = recomputed(self.recompute, self.blocks[index], features.to(self.dtype))
        return states if self._original is None else self._original.widened(states)

    def head_weight(self, index: int) -> Tensor:
        """Its rows [U, D], or [U, D+1] where the original head has a bias."""
        if self._original is not None:
            return self._original.weight
        weight = self.lm_heads[index].weight
        assert isinstance(weight, Tensor)
        return weight
