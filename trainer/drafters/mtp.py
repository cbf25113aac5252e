"""A target's own MTP layer, trained on: it reads the final hidden and the next token, and then its own output.

x_t = fc([hidden_norm(h_t); token_norm(emb(x_{t+1}))]) through one decoder layer and a norm; the target's head reads the
result, which proposes x_{t+2} and is fed back as the next h. One layer drafts every token, as engines run it. What
differs from family to family is a `trainer.formats.mtp.Layout`. Sources: docs/design/018; vLLM 0.32 ``mimo_mtp.py`` and
``qwen3_5_mtp.py``; llama.cpp b11434 ``qwen35.cpp``; speculators 0.9 ``models/mtp`` for the weights of the steps
(FastMTP, arXiv 2509.18362).

Shapes: T tokens, D target width, V target vocabulary, K steps, A active slots, n rows, N query heads, E head width.
"""

from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from hiddenstore.data import PackedBatch
from hiddenstore.errors import FormatError, Kind
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear
from schemas.capture import NormState
from trainer.config import DrafterConfig
from trainer.drafters.base import Needs, TargetFacts, Verified, require_width, seeded
from trainer.drafters.blocks import Attention, DecoderLayer, OnePlusNorm, RMSNorm, Rotary, rotate
from trainer.drafters.eagle1 import FeatureDrafter, require_every_final
from trainer.drafters.eagle3 import TttLoss, TttObjective
from trainer.drafters.live import RecurrentKind
from trainer.formats.mtp import LAYOUTS
from trainer.formats.mtp import MTP as MTP_EXPORT
from trainer.losses.teacher import FrozenHead, TargetInterface, Teacher
from trainer.slots import SlotMap


class MtpLoss(TttLoss):
    """What the steps are taught."""

    steps: int = Field(3, gt=0, le=32)
    """Steps the layer is unrolled over its own output."""
    step_decay: float = Field(0.6, gt=0, le=1)
    """Weight of a step over that of the step before."""


class MtpConfig(DrafterConfig):
    """Settings of an MTP layer; all follow from the target."""

    name: str = "mtp"
    """The kind of drafter."""
    aux_layers: tuple[int, ...] = Field((), max_length=0)
    """None: it reads the final hidden alone."""
    layout: str = "mimo"
    """The family whose MTP layer it is: a word of `trainer.formats.mtp`."""
    rotary_share: float = Field(1.0, gt=0, le=1)
    """Share of a head's channels that rope turns, the first ones."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; there are: {', '.join(LAYOUTS)}")
        if self.turned < 2 or self.turned % 2:
            raise ValueError(
                f"rope turns pairs of channels, and {self.rotary_share} of {self.head_dim} are {self.turned}"
            )
        return self

    @property
    def turned(self) -> int:
        """Channels of a head that rope turns."""
        return int(self.head_dim * self.rotary_share)


class MtpAttention(Attention):
    """The projections, with the biases, norms of heads, and gate that the target's have."""

    def __init__(self, config: DrafterConfig, width_in: int) -> None:
        super().__init__(config, width_in)
        assert isinstance(config, MtpConfig)
        self.layout = LAYOUTS[config.layout]
        if self.layout.qkv_bias:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self, name, nn.Linear(width_in, getattr(self, name).out_features))
        if self.layout.gated:
            norm = _norm_of(config)
            self.q_norm, self.k_norm = (norm(self.head_dim, config.rms_norm_eps) for _ in range(2))
            self.gate_proj = Linear(width_in, self.q_width)

    def queries(self, x: Tensor) -> Tensor:
        q = super().queries(x)
        return self.q_norm(q).to(q.dtype) if self.layout.gated else q

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().keys_values(x)
        return (self.k_norm(k).to(k.dtype) if self.layout.gated else k), v

    def gated(self, attended: Tensor, x: Tensor) -> Tensor:
        """Attended values [n, N, E] as the target lets them through, by its inputs x [n, D]."""
        return attended * self.gate_proj(x).view_as(attended).sigmoid() if self.layout.gated else attended


class MtpLayer(DecoderLayer):
    """The decoder layer."""

    attention = MtpAttention
    self_attn: MtpAttention

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        norm, width, eps = _norm_of(config), config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = norm(width, eps), norm(width, eps)


def _norm_of(config: MtpConfig) -> type[RMSNorm]:
    return OnePlusNorm if LAYOUTS[config.layout].one_plus else RMSNorm


class Mtp(FeatureDrafter):
    """The layer and what joins its inputs."""

    config: MtpConfig

    def __init__(self, config: MtpConfig, stored_norm: NormState = "pre_norm") -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.config, self.layout = config, LAYOUTS[config.layout]
        self.hidden_norm, self.token_norm, self.norm = (_norm_of(config)(width, eps) for _ in range(3))
        self.fc = Linear(2 * width, width)
        self.layers = nn.ModuleList([MtpLayer(config)])
        self._stored_norm = stored_norm
        self._rotary = Rotary(config.turned, config.rope_theta, config.rope_scaling, config.max_position)
        self.lm_head: FrozenHead

    @classmethod
    def build(cls, config: MtpConfig, target: TargetInterface, seed: int = 0) -> Self:
        """A fresh layer, random from ``seed``."""
        with seeded(seed):
            model = cls(config, target.final_norm)
        model.tie_weights(target.head)
        return model

    def tie_weights(self, head: HeadBundle) -> None:
        super().tie_weights(head)
        self.lm_head = FrozenHead.of(self._head)

    def begin(self, verified: Verified) -> Tensor:
        """What the first step reads of verified tokens: [T, D]."""
        return self._first(verified.final, verified.final_norm)

    def unroll(self, batch: PackedBatch, slot_map: SlotMap, steps: int) -> Tensor:
        """States of the active slots as ``lm_head`` reads them, step by step: [K*A, D]. Raises FormatError: the final
        hidden is not stored at every token."""
        require_every_final(batch)
        return self.lm_head.widened(self.unrolled(batch, self._first(batch.final, self._stored_norm), slot_map, steps))

    def _first(self, final: Tensor, stored: NormState) -> Tensor:
        """Final hiddens [T, D] on the side of the norm that the layer reads. Raises FormatError: ``final-norm``."""
        if stored == self.layout.final:
            return final.to(self.fc.weight.dtype)
        if self.layout.final == "pre_norm":
            raise FormatError(
                f"an MTP layer of {self.config.layout} reads the final hidden before the final norm, and the store "
                "holds it after",
                kind=Kind.FINAL_NORM,
                hint="hiddenstore collect DATA -o NEW_STORE --target T --layers eagle1 --final all",
            )
        return self._head.norm(final).to(self.fc.weight.dtype)

    def _fuse(self, g: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        tokens = self.embed(ids)
        if self.layout.blind_first:
            tokens = tokens.masked_fill((positions == 0)[:, None], 0)
        halves = [self.token_norm(tokens), self.hidden_norm(g)]
        out: Tensor = self.fc(torch.cat(halves[::-1] if self.layout.hidden_first else halves, -1))
        return out

    def _turned(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        count = self.config.turned
        turned = rotate(x[..., :count], *tables)
        return turned if count == x.shape[-1] else torch.cat([turned, x[..., count:]], -1)

    def _finish(self, layer: Any, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        return super()._finish(layer, x, normed, layer.self_attn.gated(attended, normed))

    def _fed_back(self, x: Tensor, out: Tensor) -> Tensor:
        return out if self.layout.feeds_normed else x


class _MtpKind(RecurrentKind[Mtp, MtpConfig, MtpLoss]):
    name = "mtp"
    layers = "eagle1"
    config, loss = MtpConfig, MtpLoss
    export = MTP_EXPORT
    begins_as_the_target_s = True

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The whole vocabulary: the target's head reads what is predicted. The rest is said by the target's own layer,
        as it is read (`trainer.formats.mtp`)."""
        return {"drafter": {"vocab_size": facts.vocab_size}}

    def needs(self, config: MtpConfig, loss: MtpLoss | None) -> Needs:
        return Needs((), "all", hidden=True)

    def build(self, config: MtpConfig, target: TargetInterface, seed: int) -> Mtp:
        require_width(config, target, "an MTP layer predicts what the target's head reads")
        return Mtp.build(config, target, seed)

    def objective(self, model: Mtp, target: TargetInterface, loss: MtpLoss) -> TttObjective:
        return TttObjective(model, Teacher(target, drop_off_vocab=loss.drop_off_vocab), loss)


MTP = _MtpKind()
