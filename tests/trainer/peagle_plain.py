"""P-EAGLE stated once more, slot by slot, over the plain EAGLE-3 layer, with nothing shared with the trainer."""

import torch
from torch import Tensor

from tests.trainer.eagle3_plain import PlainEagle3, normalised

Slot = tuple[int, int]
"""Token whose own slot a chain stands behind, and depth."""


def log_probabilities(
    model: PlainEagle3, mask_id: int, tokens: list[int], aux: Tensor, chains: dict[int, int], normed_residual: bool
) -> dict[Slot, Tensor]:
    """Of one document, over the draft vocabulary, of every slot; aux [L, T, D]; chains: mask slots behind a token."""
    slots = [(t, 0) for t in range(len(tokens) - 1)]
    slots += [(t, d) for t in sorted(chains) for d in range(1, chains[t] + 1)]
    instead = list(model.w["mask_hidden"].view(aux.shape[0], aux.shape[2]))
    hidden = {(t, d): model.first(list(aux[:, t]) if d == 0 else instead) for t, d in slots}
    for name in ["midlayer", *sorted({".".join(n.split(".")[:2]) for n in model.w if n.startswith("layers.")})]:
        made = {}
        for t, d in slots:
            if name == "midlayer":
                made[t, d] = model.projections(hidden[t, d], tokens[t + 1] if d == 0 else mask_id, t + d)
            else:
                x = normalised(hidden[t, d], model.w[f"{name}.input_layernorm.weight"], model.eps)
                made[t, d] = model.turned_projections(name, x, t + d)
        if name == "midlayer" and normed_residual:
            norm = model.w["midlayer.hidden_norm.weight"]
            hidden = {slot: normalised(x, norm, model.eps) for slot, x in hidden.items()}
        hidden = {
            (t, d): model.layer(
                name,
                hidden[t, d],
                made[t, d][0],
                [made[s][1:] for s in slots if (s[1] == 0 and s[0] <= t) or (s[0] == t and s[1] <= d)],
            )
            for t, d in slots
        }
    head, last = model.w["lm_head.weight"], model.w["norm.weight"]
    return {slot: (head @ normalised(x, last, model.eps)).log_softmax(0) for slot, x in hidden.items()}


def plain_loss(
    found: dict[Slot, Tensor], logits: Tensor, taught: set[int], known: list[int]
) -> tuple[list[Tensor], list[int]]:
    """Losses by slot, and their depths; logits [T, V] of the target, ``taught``: rows that teach."""
    losses, depths = [], []
    for (t, d), log_p in found.items():
        row = t + 1 + d
        if row in taught:
            losses.append(-(logits[row][known].softmax(0) * log_p).sum())
            depths.append(d)
    return losses, depths


def as_chains(lengths: Tensor) -> dict[int, int]:
    """Mask slots int64 [T] by token, where there are any."""
    return {t: int(n) for t, n in enumerate(lengths.tolist()) if n}


def mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()
