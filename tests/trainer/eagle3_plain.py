"""EAGLE-3's training-time test stated once more, token by token, with nothing shared with the trainer.

Every slot is computed on its own with Python loops and lists; far too slow for anything but a test.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

KeysValues = tuple[list[Tensor], list[Tensor], list[Tensor]]


def normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x / torch.sqrt((x * x).mean() + eps))


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """One head vector [E] rotated to a position: pairs (j, j + E/2) as complex numbers."""
    half = x.numel() // 2
    angle = torch.tensor([position * theta ** (-2 * j / x.numel()) for j in range(half)], dtype=x.dtype)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=x.dtype), angle)
    return torch.cat([z.real, z.imag])


class PlainEagle3:
    """weights: checkpoint names plus ``embed_tokens.weight``; ``shape``: heads, kv_heads, eps, theta."""

    def __init__(self, weights: dict[str, Tensor], *, heads: int, kv_heads: int, eps: float = 1e-5, theta: float = 1e4):
        self.w, self.heads, self.kv_heads, self.eps, self.theta = weights, heads, kv_heads, eps, theta
        self.norm_output = False

    def first(self, aux: list[Tensor]) -> Tensor:
        if "fc_norm.0.weight" in self.w:
            aux = [normalised(a, self.w[f"fc_norm.{k}.weight"], self.eps) for k, a in enumerate(aux)]
        return self.w["fc.weight"] @ torch.cat(aux)

    def projections(self, g: Tensor, token: int, position: int) -> KeysValues:
        """Layer 0: [embedding; hidden]."""
        w = self.w
        x = torch.cat(
            [
                normalised(w["embed_tokens.weight"][token], w["midlayer.input_layernorm.weight"], self.eps),
                normalised(g, w["midlayer.hidden_norm.weight"], self.eps),
            ]
        )
        return self.turned_projections("midlayer", x, position)

    def turned_projections(self, name: str, x: Tensor, position: int) -> KeysValues:
        w = self.w
        q = (w[f"{name}.self_attn.q_proj.weight"] @ x).chunk(self.heads)
        k = (w[f"{name}.self_attn.k_proj.weight"] @ x).chunk(self.kv_heads)
        v = (w[f"{name}.self_attn.v_proj.weight"] @ x).chunk(self.kv_heads)
        return [turned(h, position, self.theta) for h in q], [turned(h, position, self.theta) for h in k], list(v)

    def layer(
        self, name: str, g: Tensor, queries: list[Tensor], seen: list[tuple[list[Tensor], list[Tensor]]]
    ) -> Tensor:
        w, per_key = self.w, self.heads // self.kv_heads
        mixed = []
        for n, query in enumerate(queries):
            scores = torch.stack([query @ keys[n // per_key] for keys, _ in seen]) / math.sqrt(query.numel())
            share = scores.softmax(0)
            mixed.append(sum(s * values[n // per_key] for s, (_, values) in zip(share, seen, strict=True)))
        h = g + w[f"{name}.self_attn.o_proj.weight"] @ torch.cat(mixed)
        m = normalised(h, w[f"{name}.post_attention_layernorm.weight"], self.eps)
        gate, up = w[f"{name}.mlp.gate_proj.weight"] @ m, w[f"{name}.mlp.up_proj.weight"] @ m
        return h + w[f"{name}.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    @property
    def layer_names(self) -> list[str]:
        return ["midlayer", *sorted({".".join(n.split(".")[:2]) for n in self.w if n.startswith("layers.")})]

    def layer_projections(self, name: str, hidden: Tensor, token: int, position: int) -> KeysValues:
        if name == "midlayer":
            return self.projections(hidden, token, position)
        x = normalised(hidden, self.w[f"{name}.input_layernorm.weight"], self.eps)
        return self.turned_projections(name, x, position)

    def log_probabilities(self, tokens: list[int], aux: Tensor, steps: int) -> list[list[Tensor]]:
        """For one document: [step][slot] over the draft vocabulary; aux [L, T, D]. Slots past the text end early."""
        count = len(tokens)
        g = [self.first(list(aux[:, t])) for t in range(count)]
        names = self.layer_names
        prefix: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = {name: [] for name in names}
        own: dict[tuple[str, int], list[tuple[list[Tensor], list[Tensor]]]] = {
            (name, t): [] for name in names for t in range(count)
        }
        result = []
        for i in range(steps):
            row = []
            upcoming = list(g)
            for t in range(count - 1 - i):
                hidden = g[t]
                for name in names:
                    q, k, v = self.layer_projections(name, hidden, tokens[t + 1 + i], t + i)
                    (prefix[name] if i == 0 else own[name, t]).append((k, v))
                    hidden = self.layer(name, hidden, q, prefix[name][: t + 1] + own[name, t])
                out = normalised(hidden, self.w["norm.weight"], self.eps)
                row.append((self.w["lm_head.weight"] @ out).log_softmax(0))
                upcoming[t] = out if self.norm_output else hidden
            g = upcoming
            result.append(row)
        return result


class MixedEagle3(PlainEagle3):
    """Every step reads all rows again. ``choices[step][t]`` of the next document: which state its row t reads after
    that step, 0 the target's, k what step k-1 said at t-1, None the one it read before."""

    choices: Iterator[list[list[int | None]]]

    def log_probabilities(self, tokens: list[int], aux: Tensor, steps: int) -> list[list[Tensor]]:
        count, choices, result = len(tokens), next(self.choices), []
        history = [[self.first(list(aux[:, t])) for t in range(count)]]
        read = list(history[0])
        for i in range(steps):
            seen: dict[str, list[tuple[list[Tensor], list[Tensor]]]] = {name: [] for name in self.layer_names}
            said, row = [history[0][0]], []
            for t in range(count - 1):
                hidden = read[t]
                for name in self.layer_names:
                    q, k, v = self.layer_projections(name, hidden, tokens[t + 1], t)
                    seen[name].append((k, v))
                    hidden = self.layer(name, hidden, q, seen[name])
                out = normalised(hidden, self.w["norm.weight"], self.eps)
                row.append((self.w["lm_head.weight"] @ out).log_softmax(0))
                said.append(out if self.norm_output else hidden)
            result.append(row[i:])
            history.append(said)
            read = [read[t] if pick is None else history[pick][t] for t, pick in enumerate(choices[i])]
        return result


def plain_losses(
    model: PlainEagle3,
    documents: list[tuple[list[int], Tensor, Tensor, list[int]]],
    known: list[int],
    *,
    steps: int,
    mask_offset: int,
    drop: bool,
) -> tuple[list[Tensor], list[int]]:
    """Per-step mean losses and the slots they are taken over.

    documents: (tokens, aux [L, T, D], teacher logits over the whole vocabulary [T, V], mask) each; ``known``: target
    ids of the draft vocabulary, ascending.
    """
    sums: list[list[Tensor]] = [[] for _ in range(steps)]
    for tokens, aux, logits, mask in documents:
        predicted = model.log_probabilities(tokens, aux, steps)
        for i in range(steps):
            for t, log_p in enumerate(predicted[i]):
                p = t + 1 + i
                gate = p + mask_offset
                if not (0 <= gate < len(tokens) and mask[gate]):
                    continue
                if drop and int(logits[p].argmax()) not in known:
                    continue
                sums[i].append(-(logits[p][known].softmax(0) * log_p).sum())
    return [torch.stack(s).mean() for s in sums], [len(s) for s in sums]
