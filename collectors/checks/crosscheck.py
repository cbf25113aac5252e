"""The cross-engine parity test of collect: samples of a unit recomputed with Hugging Face before it is stored.

The mistakes it names have all happened to a published project: layer ids one off, a norm too many, requests paired by
counter, rows that a prefix cache kept, layers that an architecture never filled.

Shapes: T tokens of one sample, R final rows of it, n rows of one field, N decoder layers, D target width.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from collectors.checks.capture import CheckSpec, require_matching
from collectors.engines import Captured, CaptureRequest
from collectors.engines.hf import forward_with_images
from collectors.targets.load import LoadedTarget, Probe, probe_states
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Sample
from hiddenstore.targets.rope import rope_boundary
from schemas.capture import FINAL
from schemas.layers import field_name

NORMED = "normed"
# Half a unit in the last place of bf16, relative to the value.
_BF16_HALF_STEP = 2.0**-8
# Two samples may begin alike (a chat template); fewer rows than this beyond it prove nothing.
_MIN_ROWS = 2
_TRIED_ROWS = 9


@dataclass(frozen=True, eq=False)
class Field:
    """One captured field of one sample: states [n, D] at positions int [n]; ``layer`` is a number or ``normed``."""

    name: str
    layer: int | str
    positions: np.ndarray
    states: Tensor

    def error(self, probe: Probe, layer: int | str) -> float:
        """How far it is from the same rows of a layer as Hugging Face computed them: the median of ``row_errors``."""
        return float(row_errors(self.states, self.of(probe, layer)).median())

    def of(self, probe: Probe, layer: int | str) -> Tensor:
        """The same rows [n, D] of a layer as Hugging Face computed them."""
        states = _layer(probe, layer)
        return states[torch.from_numpy(self.positions.astype(np.int64)).to(states.device)]


@dataclass(frozen=True)
class Mistake:
    """What a wrong field looks like, and what to do."""

    looks_like: str
    hint: str


def row_errors(states: Tensor, expected: Tensor) -> Tensor:
    """|states - expected| / |expected| per row, fp32 [n], beyond half a step of bf16, which captured states lose."""
    a, b = states.float().cpu(), expected.float().cpu()
    excess = ((a - b).abs() - _BF16_HALF_STEP * b.abs()).clamp_min(0.0)
    size = torch.linalg.vector_norm(b, dim=-1)
    return torch.linalg.vector_norm(excess, dim=-1) / size.clamp_min(1e-30)


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


def _other_layer(field: Field, probe: Probe, tolerance: float) -> Mistake | None:
    last = len(probe.states) - 2
    names: list[int | str] = [*range(-1, last + 1), NORMED]
    errors = {name: field.error(probe, name) for name in names}
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


def _displaced(field: Field, probe: Probe, tolerance: float) -> Mistake | None:
    """Rows of this sample and layer at other positions: the first rows left out, or all of them late."""
    layer = _layer(probe, field.layer)
    for shift in _shifts(field, layer):
        positions = field.positions + shift
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


def _other_request(
    field: Field, sample: Sample, others: Iterable[tuple[int, Sample, Probe]], tolerance: float
) -> Mistake | None:
    ids = sample.input_ids
    for index, other, probe in others:
        theirs = other.input_ids
        shared = min(len(ids), len(theirs), probe.states.shape[1])
        differs = np.flatnonzero(ids[:shared] != theirs[:shared])
        begin = int(differs[0]) if len(differs) else shared
        rows = np.flatnonzero((field.positions >= begin) & (field.positions < shared))
        if len(rows) < _MIN_ROWS:
            continue
        rest = Field(field.name, field.layer, field.positions[rows], field.states[torch.from_numpy(rows)])
        if rest.error(probe, field.layer) <= tolerance:
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


@dataclass(frozen=True)
class Tolerance:
    """How far a row may be from Hugging Face's: |a - b| / |b| beyond bf16 rounding, and in which share of the rows.

    Two engines in fp32 differ by the order of their sums. In half precision every block rounds, and a mixture of
    experts may send a token elsewhere on a tie, so that a few rows differ by much.
    """

    error: float
    outliers: float


TOLERANCES = {
    torch.float32: Tolerance(1e-4, 0.0),
    torch.float16: Tolerance(2e-2, 0.1),
    torch.bfloat16: Tolerance(5e-2, 0.1),
}
# Hugging Face may multiply by the restored weights where an engine multiplies in 8 or 4 bits.
QUANTISED = Tolerance(0.15, 0.1)
# How many samples of the unit are recomputed to find whose states were handed out in place of the right ones.
SUSPECTS = 32
# Nobody minds comparisons that take less than this in all.
CHEAP_S = 10.0


_MOST_PROBED_BYTES = 4 << 30
"""Of the states of all layers of one sample: a target of 80 layers has as much in 3,000 tokens."""


class CrossCheck:
    """Compares ``samples`` samples of the 1st, 2nd, 4th, 8th … unit of this process with Hugging Face's states.

    ``prefix``: only the first so many tokens of a sample whose states no later token changes; not of one with images.
    None: as many as make 4 GiB of states of all layers.
    ``share``: a unit's turn is passed over where all comparisons would take more of the time since the beginning than
    this, and more than ``CHEAP_S``. The engine waits meanwhile; ``seconds`` says how long it did.
    """

    def __init__(
        self,
        reference: LoadedTarget,
        spec: CheckSpec,
        samples: int,
        prefix: int | None = None,
        share: float | None = None,
    ) -> None:
        self._reference = reference
        self._spec = spec
        self._samples = samples
        self._prefix, self._share = prefix, share
        self._boundary = rope_boundary(reference.config)
        self._units = 0
        self._began_s, self._last_s = time.monotonic(), 0.0
        self.seconds = 0.0
        by_dtype = TOLERANCES[reference.head.norm_weight.dtype]
        self._tolerance = QUANTISED if reference.folder.quantised else by_dtype

    def unit(self, samples: Sequence[Sample], requests: Sequence[CaptureRequest], captured: Captured) -> int:
        """Compare one unit when its turn has come; the number of samples compared. Raises CaptureError:
        ``cross-check``, naming the mistake it looks like; or as ``require_matching``."""
        self._units += 1
        began_s = time.monotonic()
        if self._units & (self._units - 1) or (self._units > 1 and self._is_dear(began_s)):
            return 0
        compared = self._compare(samples, requests, captured)
        self._last_s = time.monotonic() - began_s
        self.seconds += self._last_s
        return compared

    def _compare(self, samples: Sequence[Sample], requests: Sequence[CaptureRequest], captured: Captured) -> int:
        shape = len(self._spec.aux_layers), self._reference.head.hidden_size
        require_matching(samples, captured, [request.final_rows for request in requests], shape)
        # From the shortest to the longest sample.
        order = sorted(range(len(samples)), key=lambda i: (samples[i].tokens, i))
        ranks = np.linspace(0, len(order) - 1, min(self._samples, len(order))).round().astype(int)
        indices = [order[rank] for rank in dict.fromkeys(ranks.tolist())]
        for index in indices:
            fields = self._fields(index, requests, captured, self._compared_tokens(samples[index]))
            probe = self._probe(samples[index])
            for field in fields:
                self._require_equal(field, probe, index, samples)
        return len(indices)

    def _is_dear(self, now_s: float) -> bool:
        if self._share is None:
            return False
        return self.seconds + self._last_s > max(CHEAP_S, self._share * (now_s - self._began_s))

    def _compared_tokens(self, sample: Sample) -> int:
        if sample.images or (self._boundary is not None and sample.tokens > self._boundary):
            # So long a sample has another rotary embedding from its first token on.
            return sample.tokens
        blocks, width = len(self._reference.blocks), self._reference.head.hidden_size
        most = max(1, _MOST_PROBED_BYTES // (2 * (blocks + 2) * width))
        return min(sample.tokens, most if self._prefix is None else min(self._prefix, most))

    def _fields(
        self, index: int, requests: Sequence[CaptureRequest], captured: Captured, tokens: int
    ) -> Iterator[Field]:
        start = sum(len(request.input_ids) for request in requests[:index])
        final_start = sum(len(request.final_rows) for request in requests[:index])
        for slot, layer in enumerate(self._spec.aux_layers):
            yield Field(field_name(layer), layer, np.arange(tokens), captured.aux[slot, start : start + tokens])
        rows = requests[index].final_rows
        rows = rows[rows < tokens]
        layer = len(self._reference.blocks) - 1
        name = layer if self._spec.final_norm == "pre_norm" else NORMED
        yield Field(FINAL, name, rows, captured.final[final_start : final_start + len(rows)])

    def _require_equal(self, field: Field, probe: Probe, index: int, samples: Sequence[Sample]) -> None:
        if not len(field.positions):
            return
        errors = row_errors(field.states, field.of(probe, field.layer))
        allowed, outliers = self._tolerance.error, self._tolerance.outliers
        # A NaN compares false, so it counts as too far.
        far = 1.0 - float((errors <= allowed).float().mean())
        if far <= outliers and _is_nearest(field, probe, float(errors.median())):
            return
        # A mix-up mostly hands out a neighbour's states.
        nearest = sorted((i for i in range(len(samples)) if i != index), key=lambda i: (abs(i - index), i))[:SUSPECTS]
        others = ((other, samples[other], self._probe(samples[other])) for other in nearest)
        close = max(allowed, 1e-3)
        mistake = (
            _zeros(field)
            or _other_layer(field, probe, close)
            or _displaced(field, probe, close)
            or _other_request(field, samples[index], others, close)
            or _UNKNOWN
        )
        raise CaptureError(
            f"{field.name} of sample {samples[index].id[:12]} (request {index} of {len(samples)}, "
            f"{samples[index].tokens} tokens) differs from Hugging Face's by {float(errors.median()):.2g} of its size "
            f"in the median and {float(errors.max()):.2g} at most, {allowed:g} is allowed: {mistake.looks_like}",
            kind=Kind.CROSS_CHECK,
            hint=mistake.hint,
        )

    def _probe(self, sample: Sample) -> Probe:
        target, images = self._reference, list(zip(sample.images, sample.image_files, strict=True))
        ids = torch.from_numpy(sample.input_ids[: self._compared_tokens(sample)].astype(np.int64))[None].to(
            target.device
        )
        forward = partial(forward_with_images, target, sample.input_ids, images, sample.source) if images else None
        return probe_states(target.parts, ids, target.identity.model_type, forward)


def _is_nearest(field: Field, probe: Probe, error: float) -> bool:
    """In half precision a neighbouring layer may lie within the tolerance; then the named layer must be the nearest."""
    layers = (*range(-1, len(probe.states) - 1), NORMED)
    return error == 0 or all(error <= field.error(probe, layer) for layer in layers)
