"""Samples to what an engine is asked, and what it captured back to records."""

from collections.abc import Iterator, Sequence

import numpy as np

from collectors.engines import Captured, CaptureRequest
from hiddenstore.records import Record, Sample, final_row_positions
from schemas.capture import FinalMode


def requests_of(samples: Sequence[Sample], final: FinalMode) -> list[CaptureRequest]:
    """What to run; with ``final`` none one final row of each sample all the same, for the top-1 check."""
    return [CaptureRequest(sample.input_ids, _rows(sample.loss_mask, final)) for sample in samples]


def records_of(
    samples: Sequence[Sample], requests: Sequence[CaptureRequest], captured: Captured, final: FinalMode
) -> Iterator[Record]:
    """A record per sample, views of what was captured."""
    start = final_start = 0
    for sample, request in zip(samples, requests, strict=True):
        end, final_end = start + sample.tokens, final_start + len(request.final_rows)
        if final == "none":
            held, rows = captured.final[:0], np.zeros(0, dtype=np.int32)
        else:
            held, rows = captured.final[final_start:final_end], request.final_rows
        yield Record(sample, captured.aux[:, start:end], held, rows)
        start, final_start = end, final_end


def _rows(loss_mask: np.ndarray, final: FinalMode) -> np.ndarray:
    if final == "none":
        return np.array([len(loss_mask) - 1], dtype=np.int32)
    return final_row_positions(loss_mask, final)
