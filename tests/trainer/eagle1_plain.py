"""EAGLE-1 stated once more, token by token, with nothing shared with the trainer; and its two losses.

Every slot is computed on its own with Python loops and lists; far too slow for anything but a test.
"""

import math

import torch
from torch import Tensor

from tests.trainer.eagle3_plain import normalised, turned

KeyValue = tuple[list[Tensor], list[Tensor]]


class PlainEagle1:
    """weights: checkpoint names plus ``embed_tokens.weight``."""

    def __init__(self, weights: dict[str, Tensor], *, heads: int, kv_heads: int, eps: float = 1e-5, theta: float = 1e4):
        self.w, self.heads, self.kv_heads, self.eps, self.theta = weights, heads, kv_heads, eps, theta
        self.depth = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
        self.token_shift = 1

    def layer(self, x: Tensor, index: int, position: int, cache: list[KeyValue], before: list[KeyValue]) -> Tensor:
        """One layer at one slot, which sees ``before`` and ``cache``; its own keys are added to ``cache``."""
        w, at, per_key = self.w, f"layers.{index}.", self.heads // self.kv_heads
        norm = w.get(at + "input_layernorm.weight")
        h = x if norm is None else normalised(x, norm, self.eps)
        q, k, v = (w[f"{at}self_attn.{name}_proj.weight"] @ h for name in "qkv")
        cache.append(([turned(k, position, self.theta) for k in k.chunk(self.kv_heads)], list(v.chunk(self.kv_heads))))
        seen, mixed = before + cache, []
        for n, query in enumerate(q.chunk(self.heads)):
            query = turned(query, position, self.theta)
            scores = torch.stack([query @ keys[n // per_key] for keys, _ in seen]) / math.sqrt(query.numel())
            mixed.append(sum(s * values[n // per_key] for s, (_, values) in zip(scores.softmax(0), seen, strict=True)))
        h = x + w[at + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = normalised(h, w[at + "post_attention_layernorm.weight"], self.eps)
        gate, up = w[at + "mlp.gate_proj.weight"] @ m, w[at + "mlp.up_proj.weight"] @ m
        return h + w[at + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def predicted(self, tokens: list[int], features: Tensor, steps: int = 1) -> list[list[Tensor]]:
        """For one document: [step][slot] the feature predicted for token slot+1+step, fed back as it is."""
        count, g = len(tokens), list(features)
        text: list[list[KeyValue]] = [[] for _ in range(self.depth)]
        own: list[list[list[KeyValue]]] = [[[] for _ in range(self.depth)] for _ in range(count)]
        result = []
        for i in range(steps):
            row = []
            for t in range(count - 1 - i):
                x = self.w["fc.weight"] @ torch.cat(
                    [self.w["embed_tokens.weight"][tokens[t + self.token_shift + i]], g[t]]
                )
                for index in range(self.depth):
                    if i == 0:
                        x = self.layer(x, index, t, text[index], [])
                    else:
                        x = self.layer(x, index, t + i, own[t][index], text[index][: t + 1])
                row.append(normalised(x, self.w["norm.weight"], self.eps) if "norm.weight" in self.w else x)
            result.append(row)
            g = row
        return result


def plain_losses(
    model: PlainEagle1,
    documents: list[tuple[list[int], Tensor, list[int]]],
    head: tuple[Tensor, Tensor],
    *,
    mask_offset: int,
    squared: bool,
) -> tuple[Tensor, Tensor, int]:
    """Mean regression, mean cross-entropy and the slots they are taken over.

    documents: (tokens, features after the final norm [T, D], mask) each; head: weight [V, D] and bias [V].
    """
    weight, bias = head
    distances, crossed = [], []
    for tokens, features, mask in documents:
        for t, guess in enumerate(model.predicted(tokens, features)[0]):
            gate = t + 1 + mask_offset
            if not (0 <= gate < len(tokens) and mask[gate]):
                continue
            truth = features[t + 1]
            off = (guess - truth).abs()
            distances.append((off**2 if squared else torch.where(off < 1, off**2 / 2, off - 0.5)).mean())
            q, log_p = (weight @ truth + bias).softmax(0), (weight @ guess + bias).log_softmax(0)
            crossed.append(-(q * log_p).sum())
    return torch.stack(distances).mean(), torch.stack(crossed).mean(), len(crossed)
