"""DSpark: DFlash with a head that knows the token before, and another that says how sure a slot is.

Every slot of the block proposes: slot k stands at the newest token's position + k and proposes the token after it;
without ``sample_from_anchor`` slots but the first propose the token at their own, as DFlash's. To a slot's logits a
Markov head adds W2 W1[x], x the token before the proposed one: the newest, and then the one just proposed. So
proposals are chosen one after another, from the states of one forward. A confidence head reads [state; W1[x]] and is
taught how much of the target's distribution the drafter's overlaps. Sources: docs/design/016; DeepSeek's released
DSpark; speculators 0.9 ``models/dspark``; llama.cpp ``dflash.cpp``.

Shapes: D target width (and the drafter's), V target vocabulary, U draft vocabulary, M Markov rank, N blocks,
K proposals of a block, n rows.
"""

from functools import partial
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.targets.matmul import Linear
from trainer.config import LossConfig
from trainer.drafters.base import Needs, TargetFacts
from trainer.drafters.dflash import DFLASH, BlockInputs, BlockLoss, BlockObjective, DFlash, DFlashConfig
from trainer.drafters.live import draft_logits
from trainer.formats.dspark import DSPARK as DSPARK_EXPORT
from trainer.losses.fused_head import StepLosses
from trainer.losses.kinds import Compared, LossKind, Slopes
from trainer.slots import BlockMap
from trainer.vocab import DraftVocab

PUBLISHED_BLOCK, PUBLISHED_RANK = 7, 256
EVERY_ANCHOR = 1 << 30


class BlendLoss(BlockLoss):
    """What the slots of a block are taught: a label, and the target's distribution by its overlap."""

    labels: Literal["text", "target"] = "target"
    """What the cross-entropy teaches: the text's token or the target's most probable one."""
    reduction: Literal["weights", "kept"] | None = "kept"
    """What the loss is divided by: the sum of the weights or the taught slots (``kept``: speculators)."""
    cross_entropy: float = Field(0.1, ge=0)
    """Weight of the cross-entropy."""
    overlap: float = Field(0.9, ge=0)
    """Weight of one less the overlap of both distributions, which is the chance of a rejection."""

    @model_validator(mode="after")
    def _weighs_by_place(self) -> Self:
        if self.weighting == "dpace":
            raise ValueError("dpace weighs by cross-entropies alone; slots taught by an overlap are weighed by decay")
        return self

    @property
    def reads_teacher(self) -> bool:
        return True


class DSparkLoss(BlendLoss):
    """What the slots of a block are taught."""

    overlap_mass: Literal["whole", "draft"] = "draft"
    """The overlap takes the target's probabilities as they are (``whole``) or scaled up to one over the draft
    vocabulary (``draft``: speculators), where it says fewer rejections than there are."""
    confidence: float = Field(1.0, ge=0)
    """Weight of the confidence head's cross-entropy with the overlap."""

    @model_validator(mode="after")
    def _teaches_something(self) -> Self:
        if not (self.cross_entropy or self.overlap or self.confidence):
            raise ValueError("cross_entropy, overlap and confidence are all 0")
        return self

    def as_rejection(self) -> Self:
        """The overlap alone, of a block behind every token."""
        alone = {"cross_entropy": 0.0, "overlap": 1.0, "overlap_mass": "whole", "distil": 0.0, "confidence": 0.0}
        return self.model_copy(update={**alone, "num_anchors": EVERY_ANCHOR})


class DSparkConfig(DFlashConfig):
    """Settings of DSpark."""

    name: str = "dspark"
    """The kind of drafter."""
    block_size: int = Field(PUBLISHED_BLOCK, ge=2)
    """Slots of a block."""
    sample_from_anchor: bool = True
    """The newest token's slot proposes too, and each slot the token after its own position; else that at it."""
    markov_rank: int = Field(PUBLISHED_RANK, gt=0)
    """Width of what the Markov head knows of the token before."""
    confidence_head: bool = True
    """Train and save a head that says how probable it is that a slot's proposal is accepted."""

    @property
    def longest(self) -> int:
        return self.block_size - (not self.sample_from_anchor)

    @property
    def weights(self) -> int:
        """DFlash's, W1 and W2, which has no fewer rows."""
        return super().weights + 2 * self.markov_rank * self.vocab_size


class MarkovHead(nn.Module):
    """W1 [V, M] and W2 [U, M]."""

    def __init__(self, vocab: DraftVocab, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab.target_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = Linear(rank, vocab.size)


class ConfidenceHead(nn.Module):
    """The logit [n] of a slot's acceptance, from [state; W1[x]]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, joined: Tensor) -> Tensor:
        return F.linear(joined.float(), self.proj.weight.float(), self.proj.bias.float())[:, 0]


class DSpark(DFlash):
    """The drafter: DFlash's weights and two heads."""

    config: DSparkConfig
    chained = True

    def __init__(self, config: DSparkConfig, vocab: DraftVocab) -> None:
        super().__init__(config, vocab)
        self.markov_head = MarkovHead(vocab, config.markov_rank)
        if config.confidence_head:
            self.confidence_head = ConfidenceHead(config.hidden_size + config.markov_rank)

    def logits(self, states: Tensor, previous: Tensor) -> Tensor:
        before = F.embedding(previous, self.markov_head.markov_w1.weight)
        bias = draft_logits(before, self.markov_head.markov_w2.weight)
        return super().logits(states, previous) + bias

    def joined(self, states: Tensor, previous: Tensor) -> Tensor:
        """[state; W1[x]] of states [n, D] that follow the tokens int64 [n]: [n, D+M]."""
        return torch.cat([states, F.embedding(previous, self.markov_head.markov_w1.weight).to(states.dtype)], -1)

    def confidence(self, joined: Tensor) -> Tensor:
        """The probability fp32 [n] that a slot's proposal is accepted."""
        return torch.sigmoid(self.confidence_head(joined))

    def block_states(self, batch: PackedBatch, block_map: BlockMap) -> Tensor:
        """[state; W1[x]] of the slots that propose, after the text's own tokens: [N*K, D+M]."""
        slots = torch.arange(self.config.longest, device=batch.input_ids.device)
        rows = (block_map.anchors[:, None] + slots).clamp(max=len(batch.input_ids) - 1)
        return self.joined(super().block_states(batch, block_map), batch.input_ids[rows].flatten())


def _blend(cross_entropy: float, overlap: float, compared: Compared) -> Slopes:
    value = cross_entropy * compared.cross + overlap * (1 - compared.overlap)
    return Slopes(value, by_cross=cross_entropy, by_overlap=-overlap)


class BlendObjective(BlockObjective):
    """What the loop optimises: DFlash's slots under `BlendLoss`."""

    loss: BlendLoss
    compares = True

    @property
    def kind(self) -> LossKind:
        return LossKind(partial(_blend, self.loss.cross_entropy, self.loss.overlap), overlap=True)


class DSparkObjective(BlendObjective):
    """What the loop optimises: DFlash's slots under both heads."""

    model: DSpark
    loss: DSparkLoss

    @property
    def takes_mass(self) -> bool:
        return self.loss.overlap_mass == "whole"

    def losses(self, inputs: BlockInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Sums are those of the tokens alone."""
        model, loss = self.model, self.loss
        joined = model.block_states(inputs.batch, inputs.block_map)
        scales = self.scales(denominators)
        losses = self.losses_of(joined, inputs, scales, model.markov_head.markov_w2.weight)
        if not model.config.confidence_head or loss.confidence == 0:
            return losses
        assert losses.overlap is not None
        taught, overlap = inputs.labels >= 0, losses.overlap.view_as(inputs.labels)
        guess = model.confidence_head(joined).view_as(overlap)
        surprise = F.binary_cross_entropy_with_logits(guess, overlap.to(guess.dtype).clamp(0, 1), reduction="none")
        more = loss.confidence * (surprise * scales.to(guess.dtype))[taught].sum()
        return losses.plus(more)


class _DSparkKind(type(DFLASH)):  # type: ignore[misc]
    name = "dspark"
    config, loss, model, teaching = DSparkConfig, DSparkLoss, DSpark, DSparkObjective
    export = DSPARK_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """DFlash's without the target's windows, which llama.cpp and speculators do not read, and a Markov head no
        wider than the target."""
        defaults: dict[str, dict[str, Any]] = super().derive(facts)
        drafter = defaults["drafter"]
        drafter["markov_rank"] = min(PUBLISHED_RANK, facts.hidden_size)
        for name in ("sliding_window", "layer_types"):
            drafter.pop(name, None)
        return defaults

    def needs(self, config: DSparkConfig, loss: LossConfig | None) -> Needs:
        return Needs(config.aux_layers, "none" if loss is None else "supervised")


DSPARK = _DSparkKind()
