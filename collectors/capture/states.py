"""States of some samples, as an engine gives them: what is asked of it, and the records that come of it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from collectors.engines import Captured, CaptureEngine, CaptureRequest, Done, nobody
from hiddenstore.records import Record, Sample, final_row_positions
from schemas.capture import FinalMode
from schemas.manifest import Reject


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
    refused = {refusal.index for refusal in captured.refusals}
    rejects = []
    for refusal in captured.refusals:
        sample = samples[refusal.index]
        rejects.append(Reject(id=sample.id, tokens=sample.tokens, reason=refusal.reason, detail=refusal.detail))
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
