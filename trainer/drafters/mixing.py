"""Mixed hidden states: which row's next step reads a state of the target, and which one of the drafter's own.

Model Optimizer's ``eagle_mix_hidden_states`` with its ``eagle_hsm_mode`` (docs/design/009): every step is a causal pass
over all rows, so that keys too come from mixed states. What a step says at row t-1 is what row t may read next. The
first row of a sample has none before it and reads the target's state throughout.

Shapes: T tokens of a pack, H drafter width, K steps.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hiddenstore.data import PackedBatch
from trainer.drafters.base import sample_generator
from trainer.slots import document_ranges, document_starts

Mixing = Literal["none", "sparse_replace", "uniform_layer_sample", "no_replace"]


def draw_shares(batch: PackedBatch, steps: int, rng_key: tuple[int, int]) -> Tensor:
    """Numbers in [0, 1) that follow from step of the run and sample alone: fp32 [K, T]."""
    lengths = torch.bincount(batch.document, minlength=len(batch.sample_ids)).tolist()
    # Drawn on the CPU, so that a device changes nothing of what is drawn.
    parts = [
        torch.rand(steps, length, generator=sample_generator(rng_key, name, torch.device("cpu")))
        for name, length in zip(batch.sample_ids, lengths, strict=True)
    ]
    return torch.cat(parts, 1).to(batch.aux.device)


def moved(outputs: Tensor) -> Tensor:
    """Outputs [T, H] at the row after their own; row 0 is zero."""
    return F.pad(outputs, (0, 0, 1, -1))


def mixed(how: Mixing, read: Tensor, history: Sequence[Tensor], shares: Tensor, document: Tensor) -> Tensor:
    """What the next step reads [T, H], after a step that read ``read``. ``history``: the target's states, then `moved`
    outputs of every step so far [T, H] each; shares fp32 [T]; document int64 [T]."""
    at = torch.arange(len(document), device=document.device)
    inner = at > document_starts(document)
    if how == "uniform_layer_sample":
        chosen = (shares * len(history)).long().clamp(max=len(history) - 1)
        return torch.stack(list(history))[torch.where(inner, chosen, 0), at]
    taken = inner if how == "no_replace" else replaced_rows(len(history) - 2, shares, document)
    return torch.where(taken[:, None], history[-1], read)


def replaced_rows(step: int, shares: Tensor, document: Tensor) -> Tensor:
    """Rows whose state gives way to an output of ``step``: bool [T]. Of a sample's n rows n // (2^step + 1), one at the
    least, those of the lowest shares."""
    taken = torch.zeros_like(document, dtype=torch.bool)
    for sample in document_ranges(document):
        first = sample.begin + 1
        count = max(1, sample.length // (2**step + 1))
        taken[first + shares[first : sample.end].argsort()[:count]] = True
    return taken
