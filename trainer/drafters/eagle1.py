"""EAGLE-1, whose weights also serve EAGLE-2: decoder layers that predict the target's next feature.

x_t = fc([emb(x_{t+1}); f_t]), embedding first and without bias; L Llama layers, of which the first has no input norm,
give f^_{t+1}, which the target's frozen head reads and which is fed back as the next f. f is the final hidden after the
final norm. Weight names are those engines load; they have no norm at either end, so ``first_norm`` and ``last_norm``
are for comparison. Sources: docs/design/009; SafeAILab ``cnets1.py``, vLLM ``llama_eagle.py``.

loss = w_r * mean over taught slots of mean over D of SmoothL1(f^, f) + w_c * mean over taught slots of
CE(softmax(head f), softmax(head f^)), with 1 and 0.1 the published weights; gradients pass through the head to f^.

Shapes: T tokens, R taught slots, D target width, K drafted tokens, A active slots, V target vocabulary, N query heads,
G key heads, E head width.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.matmul import Linear
from trainer.attention.ttt import KVCache, attend_cached, ttt_attention
from trainer.config import DrafterConfig, LossConfig
from trainer.drafters.base import (
    Drafter,
    LossInputs,
    Needs,
    TargetFacts,
    Verified,
    require_width,
    sample_generator,
    seeded,
)
from trainer.drafters.blocks import DecoderLayer, RMSNorm, Rotary, recomputed, rotate
from trainer.drafters.live import KeyValues, RecurrentKind, recurrent_hits
from trainer.formats.eagle1 import EAGLE1 as EAGLE1_EXPORT
from trainer.losses.fused_head import StepLosses, Supervision, head_losses, step_scales
from trainer.losses.teacher import FrozenHead, TargetInterface
from trainer.slots import SlotMap, document_ranges, gather_ranges, map_slots, open_steps, teacher_rows


class RegressionLoss(LossConfig):
    """Regression of the next feature, and cross-entropy of what the target's head makes of it."""

    regression: Literal["smooth_l1", "mse"] = "smooth_l1"
    """The distance between predicted and true feature."""
    regression_weight: float = Field(1.0, ge=0)
    """Weight of the distance."""
    ce_weight: float = Field(0.1, ge=0)
    """Weight of the cross-entropy."""
    noise: float = Field(0.2, ge=0)
    """Width of the uniform noise added to the features read, in training only."""
    noise_tokens: int | None = Field(512, gt=0)
    """Noise is multiplied by this over the length of the sample (SafeAILab); none for the same at every length."""
    mask_offset: int = Field(1, ge=-1, le=1)
    """Token that must be supervised for a row to teach: 1 the one it predicts, 0 its own, -1 the one before."""

    @model_validator(mode="after")
    def _teaches_something(self) -> "RegressionLoss":
        if not self.regression_weight and not self.ce_weight:
            raise ValueError("regression_weight and ce_weight are both 0")
        return self


@dataclass(frozen=True, eq=False)
class RegressionInputs(LossInputs):
    """One pack: ``features`` [T, D] after the final norm; ``slot_map.rows`` are those that teach."""

    features: Tensor
    slot_map: SlotMap


class RegressionObjective:
    """What the loop optimises. ``sums`` are of the cross-entropy alone; ``value`` and ``total`` are of both."""

    depths = 1

    def __init__(self, model: "Eagle1", target: TargetInterface, loss: RegressionLoss) -> None:
        self.model, self.target, self.loss = model, target, loss
        self.head = FrozenHead.of(target.head)

    @torch.no_grad()
    def prepare(self, batch: PackedBatch) -> RegressionInputs:
        """Read the features and pair teacher rows with slots."""
        require_every_final(batch)
        rows = teacher_rows(batch.loss_mask, batch.document, self.loss.mask_offset)
        admitted = open_steps(rows, batch.document, 1).sum(0)
        slot_map = map_slots(rows, batch.document, 1)
        return RegressionInputs(batch, admitted, slot_map.counts, self.target.normed(batch.final), slot_map)

    def denominators(self, *packs: RegressionInputs) -> Tensor:
        """Taught slots over these packs: fp32 [1]. Ranks add theirs."""
        return sum((inputs.counts for inputs in packs), torch.zeros(1, device=self.target.head.embed_tokens.device))

    def losses(self, inputs: RegressionInputs, denominators: Tensor) -> StepLosses:
        """What this pack adds to the loss of the global batch. Noise only where gradients are."""
        features = self._noisy(inputs) if torch.is_grad_enabled() else inputs.features
        states = self.model.unroll(inputs.batch, features, inputs.slot_map, 1)
        slots, features_ahead = inputs.slot_map.slots, inputs.features[inputs.slot_map.rows]
        supervision = Supervision(slots, None, lambda begin, end: self.head.probabilities(features_ahead[begin:end]))
        scale = step_scales(torch.ones_like(denominators), denominators)
        ce = head_losses(self.head.widened(states), self.head.weight, supervision, scale * self.loss.ce_weight)
        distance = self._distance(states[slots[:, 0]], features_ahead) * (scale[0] * self.loss.regression_weight)
        return ce.plus(distance)

    def _distance(self, predicted: Tensor, features: Tensor) -> Tensor:
        """Sum over slots of the mean over D."""
        measure = F.smooth_l1_loss if self.loss.regression == "smooth_l1" else F.mse_loss
        wide = torch.promote_types(predicted.dtype, torch.float32)
        return measure(predicted.to(wide), features.to(wide), reduction="sum") / predicted.shape[-1]

    def _noisy(self, inputs: RegressionInputs) -> Tensor:
        if not self.loss.noise:
            return inputs.features
        noise = torch.empty_like(inputs.features, dtype=torch.float32)
        lengths = torch.bincount(inputs.batch.document, minlength=len(inputs.batch.sample_ids)).tolist()
        for sample, sample_noise in zip(inputs.batch.sample_ids, noise.split(lengths), strict=True):
            width = self.loss.noise * (self.loss.noise_tokens or len(sample_noise)) / max(1, len(sample_noise))
            generator = sample_generator(self.model.rng_key, sample, noise.device)
            sample_noise.uniform_(-width / 2, width / 2, generator=generator)
        return inputs.features + noise


def require_every_final(batch: PackedBatch) -> None:
    """Raise FormatError unless the final hidden itself is stored at every token of the pack."""
    rows = batch.final_rows.shape[0]
    if batch.topk is None and rows == batch.tokens:
        return
    what = "the target's top tokens" if batch.topk is not None else f"the final hidden of {rows} tokens"
    raise FormatError(
        f"the drafter reads the final hidden of every token, a pack of {batch.tokens} holds {what}",
        kind=Kind.FINAL_MISSING,
        hint="hiddenstore collect DATA -o STORE --target T --layers eagle1",
    )


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


class FeatureDrafter(Drafter):
    """A drafter that joins a final hidden of the target with the token after it, and then its own output with the next
    one. Embeddings, final norm and LM head are the target's, borrowed and never saved. Each kind has ``fc``, the layers
    and the norm at their end."""

    fc: Linear
    layers: nn.ModuleList
    norm: nn.Module
    _rotary: Rotary
    _head: HeadBundle

    def tie_weights(self, head: HeadBundle) -> None:
        """Read embeddings, final norm and head from this bundle. Engines share the table unscaled, hence so here."""
        self._head = head.to(self.fc.weight.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [n, D] in the drafter's dtype."""
        return F.embedding(ids, self._head.embed_tokens).to(self.fc.weight.dtype)

    def step(
        self, g: Tensor, next_ids: Tensor, positions: Tensor, cache: KVCache, last: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `trainer.drafters.live.Recurrent`: what the next step reads [n, D], and the head's logits [n, V]."""
        x, tables = self._fuse(g, next_ids, positions), self._rotary.at(positions)
        for index, layer in enumerate(self._decoder()):
            normed = layer.input_layernorm(x)
            q, k, v = layer.self_attn.project(normed)
            attended = attend_cached(self._turned(q, tables), self._turned(k, tables), v, cache, index)
            x = self._finish(layer, x, normed, attended)
        out: Tensor = self.norm(x)
        return self._fed_back(x, out), self._head.logits(out if last is None else out[-last:], norm_state="post_norm")

    def unrolled(self, batch: PackedBatch, g: Tensor, slot_map: SlotMap, steps: int) -> Tensor:
        """Outputs of the active slots, step by step: [steps * A, D]. g [T, D]: what the first step reads, at every
        token. From the second step on a slot reads its own output and the text's next token; it attends to the keys of
        true states before it and to its own later ones."""
        ids, ranges = F.pad(batch.input_ids, (0, steps + 1)), slot_map.ranges
        positions, documents = batch.positions[slot_map.active], document_ranges(batch.document)
        everywhere, active = self._rotary.at(batch.positions), self._rotary.at(positions)

        def first(layer: DecoderLayer, x: Tensor, is_last: bool) -> tuple[Tensor, Tensor, Tensor]:
            normed, tables, reads = layer.input_layernorm(x), everywhere, documents
            k, v = layer.self_attn.keys_values(normed)
            k = self._turned(k, everywhere)
            if is_last:
                # Only what is taught or proposed is computed past the last layer's keys.
                x, normed, tables, reads = gather_ranges(x, ranges), gather_ranges(normed, ranges), active, ranges
            attended = ttt_attention(self._turned(layer.self_attn.queries(normed), tables), k, v, [], reads)
            return self._finish(layer, x, normed, attended), k, v

        def later(i: int, g: Tensor, before: list[list[KeyValues]]) -> tuple[Tensor, list[KeyValues]]:
            x = self._fuse(g, ids[slot_map.active + 1 + i], positions + i)
            tables, step_keys = self._rotary.at(positions + i), []
            for layer, (text, *own) in zip(self._decoder(), before, strict=True):
                normed = layer.input_layernorm(x)
                q, k, v = layer.self_attn.project(normed)
                step_keys.append((self._turned(k, tables), v))
                attended = ttt_attention(self._turned(q, tables), *text, [*own, step_keys[-1]], ranges)
                x = self._finish(layer, x, normed, attended)
            return x, step_keys

        x = recomputed(self.recompute, self._fuse, g, ids[1 : batch.tokens + 1], batch.positions)
        keys: list[list[KeyValues]] = []
        for layer in self._decoder():
            x, k, v = recomputed(self.recompute, first, layer, x, len(keys) == len(self.layers) - 1)
            keys.append([(k, v)])
        outputs: list[Tensor] = [self.norm(x)]
        for i in range(1, steps):
            g = self._fed_back(x, outputs[-1])
            x, step_keys = recomputed(self.recompute, later, i, g, [list(pairs) for pairs in keys])
            for pairs, pair in zip(keys, step_keys, strict=True):
                pairs.append(pair)
            outputs.append(self.norm(x))
        return torch.cat(outputs)

    def _fuse(self, g: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
        """What the layers read [n, D], of states [n, D] at positions int64 [n] and the tokens after them int64 [n]."""
        out: Tensor = self.fc(torch.cat([self.embed(ids), g], -1))
        return out

    def _turned(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(x, *tables)

    def _finish(self, layer: Any, x: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Layer output [n, D] from its input, plain and normed, and attended values [n, N, E]."""
        out: Tensor = layer.finish(x, attended)
        return out

    def _fed_back(self, x: Tensor, out: Tensor) -> Tensor:
        """Which the next step reads: the last layer's output, or it after the norm."""
        return out

    def _decoder(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]


class Eagle1(FeatureDrafter):
    """The drafter."""

    config: Eagle1Config

    def __init__(self, config: Eagle1Config) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        if not config.first_norm:
            self._decoder()[0].input_layernorm = nn.Identity()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if config.last_norm else nn.Identity()
        self._rotary = Rotary.of(config)

    @classmethod
    def build(cls, config: Eagle1Config, head: HeadBundle, seed: int = 0) -> Self:
        """A fresh drafter, random from ``seed``. Raises ConfigError: the width or the vocabulary is not that of the
        frozen head."""
        with seeded(seed):
            model = cls(config)
        model.tie_weights(head)
        return model

    def begin(self, verified: Verified) -> Tensor:
        """Features of verified tokens: [T, D]."""
        is_normed = verified.final_norm == "post_norm"
        features = verified.final if is_normed else self._head.norm(verified.final)
        return features.to(self.fc.weight.dtype)

    def unroll(self, batch: PackedBatch, features: Tensor, slot_map: SlotMap, steps: int) -> Tensor:
        """Predicted features of the active slots, step by step: [steps * A, D]. features [T, D]: those of the target,
        at every token."""
        return self.unrolled(batch, features.to(self.fc.weight.dtype), slot_map, steps)


class _Eagle1Kind(RecurrentKind[Eagle1, Eagle1Config, RegressionLoss]):
    name = layers = "eagle1"
    config, loss = Eagle1Config, RegressionLoss
    export = EAGLE1_EXPORT

    def derive(self, facts: TargetFacts) -> dict[str, dict[str, Any]]:
        """The whole vocabulary: engines read what is predicted with the target's head."""
        return {"drafter": {"vocab_size": facts.vocab_size}}

    def needs(self, config: Eagle1Config, loss: RegressionLoss | None) -> Needs:
        return Needs((), "all", hidden=True)

    def build(self, config: Eagle1Config, target: TargetInterface, seed: int) -> Eagle1:
        require_width(config, target, "eagle1 predicts what the target's head reads")
        if not target.vocab.is_full:
            raise ConfigError(
                f"eagle1 is read by the target's whole head of {target.vocab.target_size} tokens, in training and in "
                f"every engine; a draft vocabulary of {target.vocab.size} has no place in it",
                kind=Kind.DRAFTER_SHAPE,
                hint=f"drafter.vocab_size={target.vocab.target_size}",
            )
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


EAGLE1 = _Eagle1Kind()
