"""The cross-engine parity test as part of collect: samples of a unit recomputed with Hugging Face before it is stored.

Shapes: T tokens of one sample, R final rows of it, n compared rows, N decoder layers, D target width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from collectors.checks.capture import CheckSpec, require_matching
from collectors.checks.mistakes import Field, Suspect, likely_mistake, row_errors
from collectors.engines import Captured, CaptureRequest
from collectors.targets.families import Probe, probe_states
from collectors.targets.load import LoadedTarget
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Sample
from schemas.capture import FINAL
from schemas.layers import field_name


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


class CrossCheck:
    """Compares ``samples`` samples of the 1st, 2nd, 4th, 8th … unit of this process with Hugging Face's states."""

    def __init__(self, reference: LoadedTarget, spec: CheckSpec, samples: int) -> None:
        self._reference = reference
        self._spec = spec
        self._samples = samples
        self._units = 0
        by_dtype = TOLERANCES[reference.head.norm_weight.dtype]
        self._tolerance = QUANTISED if reference.folder.quantised else by_dtype

    def unit(self, samples: Sequence[Sample], requests: Sequence[CaptureRequest], captured: Captured) -> int:
        """Compare one unit when its turn has come; the number of samples compared.

        Raises:
            CaptureError: ``cross-check``, naming field, sample and which known mistake it looks like; or as
                ``require_matching``.
        """
        self._units += 1
        if self._units & (self._units - 1):
            return 0
        require_matching(samples, captured, [request.final_rows for request in requests], self._spec)
        indices = _spread(samples, self._samples)
        for index in indices:
            fields = self._fields(index, requests, captured)
            probe = self._probe(samples[index])
            for field in fields:
                self._require_equal(field, probe, index, samples)
        return len(indices)

    def _fields(self, index: int, requests: Sequence[CaptureRequest], captured: Captured) -> Iterator[Field]:
        start = sum(len(request.input_ids) for request in requests[:index])
        final_start = sum(len(request.final_rows) for request in requests[:index])
        request = requests[index]
        positions = np.arange(len(request.input_ids))
        for slot, layer in enumerate(self._spec.aux_layers):
            yield Field(field_name(layer), layer, positions, captured.aux[slot, start : start + len(positions)])
        rows = request.final_rows
        layer = len(self._reference.blocks) - 1
        name = layer if self._spec.final_norm == "pre_norm" else "normed"
        yield Field(FINAL, name, rows, captured.final[final_start : final_start + len(rows)])

    def _require_equal(self, field: Field, probe: Probe, index: int, samples: Sequence[Sample]) -> None:
        if not len(field.positions):
            return
        errors = row_errors(field.states, field.of(probe))
        allowed, outliers = self._tolerance.error, self._tolerance.outliers
        # A NaN compares false, so it counts as too far.
        far = 1.0 - float((errors <= allowed).float().mean())
        if far <= outliers and _is_nearest(field, probe, float(errors.median())):
            return
        suspects = ((other, self._probe(samples[other])) for other in _suspects(index, len(samples)))
        mistake = likely_mistake(Suspect(field, probe, index, samples), suspects, max(allowed, 1e-3))
        raise CaptureError(
            f"{field.name} of sample {samples[index].id[:12]} (request {index} of {len(samples)}, "
            f"{samples[index].tokens} tokens) differs from Hugging Face's by {float(errors.median()):.2g} of its size "
            f"in the median and {float(errors.max()):.2g} at most, {allowed:g} is allowed: {mistake.looks_like}",
            kind=Kind.CROSS_CHECK,
            hint=mistake.hint,
        )

    def _probe(self, sample: Sample) -> Probe:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None].to(self._reference.device)
        return probe_states(self._reference.parts, ids, self._reference.identity.model_type)


def _is_nearest(field: Field, probe: Probe, error: float) -> bool:
    """In half precision a neighbouring layer may lie within the tolerance; then the named layer must be the nearest."""
    if error == 0:
        return True
    rows = torch.from_numpy(np.asarray(field.positions, dtype=np.int64)).to(probe.states.device)
    return all(
        error <= float(row_errors(field.states, states[rows]).median()) for states in (*probe.states, probe.normed)
    )


def _spread(samples: Sequence[Sample], count: int) -> list[int]:
    """Up to ``count`` indices from the shortest to the longest sample."""
    order = sorted(range(len(samples)), key=lambda i: (samples[i].tokens, i))
    ranks = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [order[rank] for rank in dict.fromkeys(ranks.tolist())]


def _suspects(index: int, count: int) -> list[int]:
    """Other requests of the unit, the nearest first: a mix-up mostly hands out a neighbour's states."""
    order = sorted((other for other in range(count) if other != index), key=lambda other: (abs(other - index), other))
    return order[:SUSPECTS]
