"""Are the columns the layers they are named? Held against every layer of the target as Hugging Face computes it.

Shapes: T tokens, N decoder layers, D target width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from collectors.engines.dump.columns import Columns
from collectors.engines.dump.probe import Probed
from collectors.targets.families import probe_states
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import FormatError, Kind
from schemas.capture import FINAL, NormState
from schemas.layers import field_name

SAMPLES = 4
MOST_TOKENS = 512
# Another engine in another dtype, and FP8, move a row by a few percent; a neighbouring layer is further away.
FAR = 0.25


def check_layers(reference: LoadedTarget, probed: Sequence[Probed], columns: Columns, norm: NormState) -> int:
    """Recompute a few samples; returns how many.

    Raises:
        FormatError: ``layers-differ``, naming the layer that each column is nearest to.
    """
    last = len(reference.blocks) - 1
    names = [*columns.aux_layers]
    if probed[0].final is not None:
        names.append(last if norm == "pre_norm" else last + 1)
    errors = np.zeros((len(names), last + 3))
    compared = probed[:SAMPLES]
    for one in compared:
        candidates = _candidates(reference, one)
        fields = [*one.aux, *([] if one.final is None else [one.final])]
        for slot, states in enumerate(fields):
            rows = states[: candidates.shape[1]].float()
            errors[slot] += [_error(rows, candidate) / len(compared) for candidate in candidates]
    nearest = errors.argmin(axis=1) - 1
    wrong = [(slot, name) for slot, name in enumerate(names) if nearest[slot] != name or errors[slot, name + 1] > FAR]
    if wrong:
        raise _mismatch(wrong, errors, nearest, columns, last)
    return len(compared)


def _candidates(reference: LoadedTarget, one: Probed) -> Tensor:
    """Layers -1 … N-1 and the normed last one of the first tokens: fp32 [N+2, T, D] on the CPU."""
    ids = torch.from_numpy(one.sample.input_ids[:MOST_TOKENS].astype(np.int64))[None].to(reference.device)
    with torch.inference_mode():
        probe = probe_states(reference.parts, ids, reference.identity.model_type)
    return torch.cat([probe.states, probe.normed[None].to(probe.states.device)]).float().cpu()


def _error(states: Tensor, expected: Tensor) -> float:
    """Median over rows of |states - expected| / |expected|."""
    distance = torch.linalg.vector_norm(states - expected, dim=-1)
    return float((distance / torch.linalg.vector_norm(expected, dim=-1).clamp_min(1e-9)).median())


def _mismatch(
    wrong: Sequence[tuple[int, int]], errors: np.ndarray, nearest: np.ndarray, columns: Columns, last: int
) -> FormatError:
    lines = []
    for slot, name in wrong:
        best = int(nearest[slot])
        named = field_name(name) if slot < len(columns.aux_layers) else FINAL
        near = "the final hidden after its norm" if best > last else field_name(best)
        near += f" ({errors[slot, best + 1]:.1%} apart)"
        lines.append(f"what is named {named} is {errors[slot, name + 1]:.0%} from it, nearest to {near}")
    true_layers = {layer: int(nearest[slot]) for slot, layer in enumerate(columns.aux_layers)}
    order = [true_layers[layer] for layer in columns.layers if layer is not None]
    is_clear = errors.min(axis=1)[: len(columns.aux_layers)].max(initial=0.0) <= FAR and max(order, default=0) <= last
    hint = f"--layers {','.join(map(str, order))}" if is_clear and set(true_layers) != set(order) else None
    return FormatError(
        f"the states are not those of this target at these layers: {'; '.join(lines)}",
        kind=Kind.LAYERS_DIFFER,
        hint=hint or "check that --target is the dump's own, at its revision",
    )
