"""The states of one unit: what is asked of an engine for its samples, put together in request order whatever order it
hands them over in, and the records that come of it.

Shapes: N tokens of the unit, R final rows of the unit, L aux layers, T tokens of one request, D target width.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from collectors.engines import Captured, CaptureEngine, CaptureRequest, Done, nobody
from hiddenstore.codecs.memory import fresh
from hiddenstore.errors import CaptureError, Kind
from hiddenstore.records import Record, Sample, final_row_positions
from schemas.capture import FinalMode
from schemas.manifest import Reject

UnitTensors = tuple[np.ndarray, Tensor, Tensor]
"""Where the states of a unit are put: token_ids int32 [N], aux bfloat16 [L, N, D], final bfloat16 [R, D]."""


class Assembly:
    """The states of one unit while its requests come in."""

    def __init__(
        self,
        requests: Sequence[CaptureRequest],
        layers: int,
        width: int,
        tensors: UnitTensors | None = None,
        done: Done = nobody,
    ) -> None:
        """``tensors`` None: new memory of this process. ``done`` as ``CaptureEngine.capture`` has it."""
        self._done = done
        self._requests = requests
        self._starts = list(accumulate((len(request.input_ids) for request in requests), initial=0))
        self._final_starts = list(accumulate((len(request.final_rows) for request in requests), initial=0))
        self._missing = set(range(len(requests)))
        self._next: dict[int, int] = {}
        tokens, rows = self._starts[-1], self._final_starts[-1]
        self._token_ids, self._aux, self._final = tensors or (
            np.empty(tokens, dtype=np.int32),
            fresh((layers, tokens, width), torch.bfloat16),
            fresh((rows, width), torch.bfloat16),
        )

    def put(self, index: int, token_ids: np.ndarray, aux: Tensor, final: Tensor, next_token: int | None = None) -> None:
        """Take the states of request ``index``: token_ids int [T] as run; aux [L, T, D]; final [T, D], any dtype.
        Raises CaptureError: ``engine-tokens``, ``engine-shape``, ``engine-request`` (answered twice)."""
        request, where = self._requests[index], f"request {index} of {len(self._requests)}"
        tokens = len(request.input_ids)
        self._require_missing(index)
        if not np.array_equal(token_ids, request.input_ids):
            raise CaptureError(
                f"the engine ran {len(token_ids)} tokens for {where} that are not the {tokens} it was given",
                kind=Kind.ENGINE_TOKENS,
            )
        layers, _, width = self._aux.shape
        for name, states, expected in (("aux", aux, (layers, tokens, width)), ("final", final, (tokens, width))):
            if tuple(states.shape) != expected:
                raise CaptureError(
                    f"the engine gave {name} states {list(states.shape)} for {where}, expected {list(expected)}; fewer "
                    f"positions than tokens are what a prefix cache or a chunked prefill leaves behind",
                    kind=Kind.ENGINE_SHAPE,
                )
        start, final_start = self._starts[index], self._final_starts[index]
        self._token_ids[start : start + tokens] = token_ids
        self._aux[:, start : start + tokens].copy_(aux)
        rows = torch.from_numpy(request.final_rows.astype(np.int64)).to(final.device)
        self._final[final_start : final_start + len(rows)].copy_(final[rows])
        self.note(index, next_token)

    def note(self, index: int, next_token: int | None) -> None:
        """Count request ``index``, whose states are in place; CaptureError ``engine-request`` if they were before."""
        self._require_missing(index)
        self._missing.remove(index)
        self._done(len(self._requests[index].input_ids))
        rows = self._requests[index].final_rows
        if next_token is not None and len(rows) and int(rows[-1]) == len(self._requests[index].input_ids) - 1:
            self._next[self._final_starts[index] + len(rows) - 1] = next_token

    def _require_missing(self, index: int) -> None:
        if index not in self._missing:
            where = f"request {index} of {len(self._requests)}"
            raise CaptureError(f"the engine answered {where} twice", kind=Kind.ENGINE_REQUEST)

    def captured(self) -> Captured:
        """The whole unit. Raises CaptureError ``engine-request``: requests that the engine never answered."""
        if self._missing:
            first = min(self._missing)
            raise CaptureError(
                f"the engine never answered {len(self._missing)} of {len(self._requests)} requests, first {first}",
                kind=Kind.ENGINE_REQUEST,
            )
        rows = sorted(self._next)
        tokens = torch.tensor([self._next[row] for row in rows], dtype=torch.long)
        return Captured(self._token_ids, self._aux, self._final, torch.tensor(rows, dtype=torch.long), tokens)


@dataclass(frozen=True, eq=False)
class UnitStates:
    """Samples of a unit that have states, the request for each, and their states; ``rejects`` have none."""

    samples: Sequence[Sample]
    requests: Sequence[CaptureRequest]
    captured: Captured
    rejects: Sequence[Reject]

    @property
    def final_rows(self) -> list[np.ndarray]:
        """Positions of the final rows of each sample."""
        return [request.final_rows for request in self.requests]


def capture_samples(
    engine: CaptureEngine, samples: Sequence[Sample], final: FinalMode, stop: Callable[[], bool], done: Done = nobody
) -> UnitStates:
    """Run samples, with ``final`` none one final row of each for the top-1 check; InterruptError on ``stop()``."""
    requests = requests_of(samples, final, engine.final_norm is not None)
    captured = engine.capture(requests, stop, done)
    # An engine that forgot no_grad would keep its graph alive, and numpy takes no tensor of one.
    captured = replace(captured, aux=captured.aux.detach(), final=captured.final.detach())
    refused = {refusal.index for refusal in captured.refusals}
    rejects = [
        Reject(id=samples[one.index].id, tokens=samples[one.index].tokens, reason=one.reason, detail=one.detail)
        for one in captured.refusals
    ]
    indices = [index for index in range(len(samples)) if index not in refused]
    return UnitStates([samples[k] for k in indices], [requests[k] for k in indices], captured, rejects)


def requests_of(samples: Sequence[Sample], final: FinalMode, has_final: bool = True) -> list[CaptureRequest]:
    """What to run; with ``final`` none the last row of each sample, where the engine has a final hidden."""
    if final == "none" and has_final:
        rows = [np.array([sample.tokens - 1], dtype=np.int32) for sample in samples]
    else:
        rows = [final_row_positions(sample.loss_mask, final) for sample in samples]
    return [
        CaptureRequest(sample.input_ids, row, sample.source, tuple(zip(sample.images, sample.image_files, strict=True)))
        for sample, row in zip(samples, rows, strict=True)
    ]


def records_of(unit: UnitStates, final: FinalMode) -> Iterator[Record]:
    """A record per sample, views of what was captured."""
    captured, start, final_start = unit.captured, 0, 0
    for sample, request in zip(unit.samples, unit.requests, strict=True):
        end, final_end = start + sample.tokens, final_start + len(request.final_rows)
        if final == "none":
            states, rows = captured.final[:0], np.zeros(0, dtype=np.int32)
        else:
            states, rows = captured.final[final_start:final_end], request.final_rows
        yield Record(sample, captured.aux[:, start:end], states, rows)
        start, final_start = end, final_end
