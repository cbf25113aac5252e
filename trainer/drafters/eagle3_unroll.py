"""EAGLE-3's training-time test: the layers over a pack, unrolled over their own output.

Step 0 makes keys and values at every token. With several layers those of layer l come of layer l-1 at every token, so
only the last layer's queries are confined to the active slots there; at later steps all work is. In every layer a slot
attends to the keys of step 0 up to itself and to its own later ones.

Shapes: T tokens, H drafter width, K TTT steps, A active slots, N query heads, G key heads, E head width.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from hiddenstore.products import linear
from trainer.attention.ttt_attention import ttt_attention
from trainer.drafters.blocks import DecoderLayer, Piece, gather_pieces, rotate
from trainer.objectives.shift import Run, SlotPlan, document_runs
from trainer.scale.context import whole_prefix
from trainer.scale.recompute import recomputed

if TYPE_CHECKING:
    from trainer.drafters.eagle3 import Eagle3

KeyValue = tuple[Tensor, Tensor]


def unrolled(model: "Eagle3", batch: PackedBatch, plan: SlotPlan, steps: int) -> Tensor:
    """States after the final norm at every TTT step, step by step: [K*A, H]."""
    stages = _stages(model)
    attention, width = model.midlayer.self_attn, model.config.hidden_size
    token_weight = torch.cat([p.weight[:, :width] for p in (attention.q_proj, attention.k_proj, attention.v_proj)])
    # The embedding half of the projection depends on the token alone, so one product serves every step.
    ids = F.pad(batch.input_ids, (0, steps + 1))
    from_tokens = linear(model.midlayer.input_layernorm(model.embed(ids)), token_weight)
    hidden, normed = _prefix(model, stages, batch, plan, from_tokens[1 : batch.input_ids.shape[0] + 1])
    positions = batch.positions[plan.active]

    def first(hidden: Tensor, normed: Tensor) -> Tensor:
        stage = stages[-1]
        tokens = gather_pieces(from_tokens, _pieces(plan.runs, 1)) if len(stages) == 1 else None
        q = rotate(stage.queries(normed, tokens), *model.rotary.at(positions))
        return stage.finish(hidden, normed, ttt_attention(q, *stage.known, [], stage.runs))

    def later(i: int, hidden: Tensor, before: list[list[KeyValue]]) -> tuple[Tensor, list[KeyValue]]:
        tokens: Tensor | None = gather_pieces(from_tokens, _pieces(plan.runs, 1 + i))
        tables, own = model.rotary.at(positions + i), []
        for stage, held in zip(stages, before, strict=True):
            normed = stage.norm(hidden)
            q, k, v = stage.layer.self_attn.split(stage.project(normed, tokens))
            own.append((rotate(k, *tables), v))
            attended = ttt_attention(rotate(q, *tables), *stage.known, [*held, own[-1]], stage.runs)
            hidden, tokens = stage.finish(hidden, normed, attended), None
        return hidden, own

    outputs = []
    held: list[list[KeyValue]] = [[] for _ in stages]
    for i in range(steps):
        if i == 0:
            hidden = recomputed(model.recompute, first, hidden, normed)
        else:
            hidden, own = recomputed(model.recompute, later, i, hidden, [list(keys) for keys in held])
            for keys, more in zip(held, own, strict=True):
                keys.append(more)
        out = model.norm(hidden)
        outputs.append(out)
        hidden = out if model.config.norm_output else hidden
    return torch.cat(outputs)


@dataclass(eq=False)
class _Stage:
    """A layer during an unroll. weight [(N+2G)E, H]: its joint projection of the normed hidden, made once. known: keys
    and values of step 0 [T, G, E]; runs: where the active slots lie among them."""

    layer: DecoderLayer
    norm: torch.nn.Module
    weight: Tensor
    residual_normed: bool
    known: KeyValue = field(init=False)
    runs: tuple[Run, ...] = ()

    def project(self, normed: Tensor, tokens: Tensor | None) -> Tensor:
        """Joint projection [n, (N+2G)E]; ``tokens``: what the embeddings add to it."""
        out = linear(normed, self.weight)
        return out if tokens is None else out + tokens

    def queries(self, normed: Tensor, tokens: Tensor | None) -> Tensor:
        """[n, N, E]."""
        attention = self.layer.self_attn
        wide = attention.heads * attention.head_dim
        q = linear(normed, self.weight[:wide])
        return (q if tokens is None else q + tokens[:, :wide]).unflatten(-1, (-1, attention.head_dim))

    def keys_values(self, normed: Tensor, tokens: Tensor | None) -> KeyValue:
        """Two of [n, G, E]."""
        attention = self.layer.self_attn
        wide = attention.heads * attention.head_dim
        kv = linear(normed, self.weight[wide:])
        kv = kv if tokens is None else kv + tokens[:, wide:]
        k, v = kv.unflatten(-1, (-1, attention.head_dim)).chunk(2, 1)
        return k, v

    def finish(self, hidden: Tensor, normed: Tensor, attended: Tensor) -> Tensor:
        """Layer output [n, H]."""
        return self.layer.finish(normed if self.residual_normed else hidden, attended)


def _stages(model: "Eagle3") -> list[_Stage]:
    width, stages = model.config.hidden_size, []
    for layer in model.decoder_layers():
        attention = layer.self_attn
        joint = [p.weight[:, -width:] for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        stages.append(_Stage(layer, layer.input_layernorm, torch.cat(joint), False))
    stages[0].norm, stages[0].residual_normed = model.midlayer.hidden_norm, model.config.norm_before_residual
    return stages


def _prefix(
    model: "Eagle3", stages: list[_Stage], batch: PackedBatch, plan: SlotPlan, tokens_in: Tensor
) -> tuple[Tensor, Tensor]:
    """Give every stage the keys and values of step 0; returns the last one's input at the active slots [A, H], plain
    and normed."""
    tables, tokens = model.rotary.at(batch.positions), tokens_in
    everyone = document_runs(batch.document) if len(stages) > 1 else ()
    hidden = model.start(batch.aux)
    for index, stage in enumerate(stages):
        added = tokens if index == 0 else None
        normed = stage.norm(hidden)
        k, v = stage.keys_values(normed, added)
        k, v, runs = whole_prefix(batch, rotate(k, *tables), v, (*everyone, *plan.runs))
        stage.known, stage.runs = (k, v), runs[len(everyone) :]
        if index < len(stages) - 1:
            q = rotate(stage.queries(normed, added), *tables)
            hidden = stage.finish(hidden, normed, ttt_attention(q, k, v, [], runs[: len(everyone)]))
    here = _pieces(plan.runs, 0)
    return gather_pieces(hidden, here), gather_pieces(normed, here)


def _pieces(runs: tuple[Run, ...], shift: int) -> list[Piece]:
    return [Piece(run.begin + shift, run.length, run.at) for run in runs]
