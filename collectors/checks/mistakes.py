"""What wrong states look like: the known ways in which engines hand out states of something else.

Every one of these has happened to a published project (layer ids one off, a norm too many, requests paired by counter,
rows that a prefix cache kept, layers that an architecture never filled).

Shapes: n rows of one field, T tokens of its sample, D target width.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from collectors.targets.families import Probe
from hiddenstore.records import Sample
from schemas.layers import field_name

NORMED = "normed"
# Half a unit in the last place of bf16, relative to the value.
_BF16_HALF_STEP = 2.0**-8
# Two samples may begin alike (a chat template); fewer rows than this beyond it prove nothing.
_MIN_ROWS = 2
_TRIED_ROWS = 9


@dataclass(frozen=True, eq=False)
class Field:
    """One captured field of one sample: states [n, D] at token positions [n].

    ``layer`` is the number of a layer, or ``normed`` for the last one after the final norm.
    """

    name: str
    layer: int | str
    positions: np.ndarray
    states: Tensor

    def of(self, probe: Probe, layer: int | str | None = None) -> Tensor:
        """The same rows [n, D] of a layer (by default this field's) as Hugging Face computed them."""
        states = _layer(probe, self.layer if layer is None else layer)
        return states[torch.from_numpy(np.asarray(self.positions, dtype=np.int64)).to(states.device)]


@dataclass(frozen=True, eq=False)
class Suspect:
    """A field that disagrees, what Hugging Face computed for its sample, and the unit it is request ``index`` of."""

    field: Field
    probe: Probe
    index: int
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Mistake:
    """What a wrong field looks like, and what to do."""

    looks_like: str
    hint: str


def row_errors(states: Tensor, expected: Tensor) -> Tensor:
    """|states - expected| / |expected| per row, fp32 [n]; a value of ``states`` may be off by half a step of bf16.

    What is captured is rounded to bf16, what Hugging Face computed is not.
    """
    a, b = states.float().cpu(), expected.float().cpu()
    excess = ((a - b).abs() - _BF16_HALF_STEP * b.abs()).clamp_min(0.0)
    size = torch.linalg.vector_norm(b, dim=-1)
    return torch.linalg.vector_norm(excess, dim=-1) / size.clamp_min(1e-30)


def likely_mistake(suspect: Suspect, others: Iterable[tuple[int, Probe]], tolerance: float) -> Mistake:
    """The first known mistake that explains the field; ``others`` are (index, probe) of other requests of the unit."""
    return (
        _zeros(suspect.field)
        or _other_layer(suspect, tolerance)
        or _displaced(suspect, tolerance)
        or _other_request(suspect, others, tolerance)
        or _UNKNOWN
    )


def _zeros(field: Field) -> Mistake | None:
    zero = (field.states == 0).all(dim=-1).cpu()
    if not bool(zero.any()):
        return None
    if bool(zero.all()):
        return Mistake(
            "every row is zero, so the engine never filled this layer",
            "the engine's model code does not hand out this layer's states; try another engine or version",
        )
    return Mistake(f"{int(zero.sum())} of {len(zero)} rows are zero, {_CUT}", _CUT_HINT)


_CUT = "as where a prefix cache or a chunked prefill left rows out"
_CUT_HINT = "turn prefix caching and chunked prefill off: --engine-arg enable_prefix_caching=false"


def _other_layer(suspect: Suspect, tolerance: float) -> Mistake | None:
    field, last = suspect.field, suspect.probe.states.shape[0] - 2
    names: list[int | str] = [*range(-1, last + 1), NORMED]
    errors = {name: float(row_errors(field.states, field.of(suspect.probe, name)).median()) for name in names}
    best = min(errors, key=lambda name: errors[name])
    if best == field.layer or errors[best] > tolerance:
        return None
    if NORMED in (best, field.layer) and last in (best, field.layer):
        stated, real = ("before", "after") if best == NORMED else ("after", "before")
        return Mistake(
            f"it is the final hidden {real} the final norm, stored as the one {stated} it",
            "the engine's final_norm is declared wrongly, or its version changed what it hands out",
        )
    what = "the final hidden after the norm" if isinstance(best, str) else field_name(best)
    if isinstance(best, int) and isinstance(field.layer, int):
        off = best - field.layer
        return Mistake(
            f"it matches {what}, so layer ids are off by {off:+d}",
            "ids of other projects count from elsewhere: schemas/layers.py converts them",
        )
    return Mistake(f"it matches {what}", "check which layers the engine was started for")


def _displaced(suspect: Suspect, tolerance: float) -> Mistake | None:
    """Rows of this sample and layer at other positions: the first rows left out, or all of them late."""
    field = suspect.field
    layer = _layer(suspect.probe, field.layer)
    for shift in _shifts(field, layer):
        positions = np.asarray(field.positions) + shift
        inside = np.flatnonzero((positions >= 0) & (positions < len(layer)))
        if len(inside) < _MIN_ROWS:
            continue
        rows = torch.from_numpy(inside).to(field.states.device)
        expected = layer[torch.from_numpy(positions[inside]).to(layer.device)]
        if float(row_errors(field.states[rows], expected).median()) <= tolerance:
            if shift > 0:
                return Mistake(f"the first {shift} positions are missing and the rest moved up, {_CUT}", _CUT_HINT)
            return Mistake(f"every row is {-shift} positions late", "check how the engine pads and aligns its rows")
    return None


def _shifts(field: Field, layer: Tensor) -> list[int]:
    """Displacements that would put a row of the field where Hugging Face has it; a repeated token may mislead one."""
    shifts = []
    for row in np.linspace(0, len(field.positions) - 1, _TRIED_ROWS).astype(int).tolist():
        errors = row_errors(field.states[row].expand(len(layer), -1), layer)
        shifts.append(int(errors.argmin()) - int(field.positions[row]))
    return [shift for shift in dict.fromkeys(shifts) if shift]


def _other_request(suspect: Suspect, others: Iterable[tuple[int, Probe]], tolerance: float) -> Mistake | None:
    field, ids = suspect.field, suspect.samples[suspect.index].input_ids
    for index, probe in others:
        theirs = suspect.samples[index].input_ids
        shared = min(len(ids), len(theirs))
        differs = np.flatnonzero(ids[:shared] != theirs[:shared])
        begin = int(differs[0]) if len(differs) else shared
        rows = np.flatnonzero((np.asarray(field.positions) >= begin) & (np.asarray(field.positions) < shared))
        if len(rows) < _MIN_ROWS:
            continue
        rest = Field(field.name, field.layer, np.asarray(field.positions)[rows], field.states[torch.from_numpy(rows)])
        if float(row_errors(rest.states, rest.of(probe)).median()) <= tolerance:
            return Mistake(
                f"it matches request {index}, so answers were paired with the wrong requests",
                "pair answers by request id and token ids, never by the order they come in",
            )
    return None


_UNKNOWN = Mistake(
    "it matches no layer of this sample, nor another request near it",
    "check that engine and --target are the same weights in the same dtype; --dtype float32 tells rounding from "
    "mistakes",
)


def _layer(probe: Probe, layer: int | str) -> Tensor:
    return probe.normed if isinstance(layer, str) else probe.states[layer + 1]
