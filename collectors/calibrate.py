"""``--recipe auto``: the first tokens of an input captured, and every recipe measured on them before a store exists."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from collectors.check import CheckSpec, check_unit
from collectors.engines import CaptureEngine
from collectors.estimate import final_rows
from collectors.target import EngineTarget
from collectors.unit_records import records_of, requests_of
from hiddenstore.advise.run import Extent, advise, trials
from hiddenstore.calibration import Slice, slice_tokens, take_slice
from hiddenstore.errors import CaptureError
from hiddenstore.inputs import PreparedInput
from hiddenstore.progress import Progress
from hiddenstore.records import Sample
from schemas.advice import Advice
from schemas.capture import CaptureSpec
from schemas.manifest import Container


@dataclass(frozen=True, eq=False)
class Calibrated:
    """A raw slice, and what the advisor made of it."""

    taken: Slice
    advice: Advice


def calibrate(
    prepared: PreparedInput,
    target: EngineTarget,
    engine: CaptureEngine,
    check: CheckSpec,
    capture: CaptureSpec,
    container: Container,
    stop: Callable[[], bool] = lambda: False,
) -> Calibrated:
    """Capture the first samples of an input and advise on them.

    Every rank does the same work on the same samples, so all come to the same recipe without a word between them.

    Raises:
        CaptureError: ``calibration-rejected``: none of the samples may be stored; or as ``check_unit``.
        InterruptError: ``stop()`` turned true.
    """
    samples = list(_first(prepared.samples(), slice_tokens(capture)))
    requests = requests_of(samples, capture.final)
    captured = engine.capture(requests, stop)
    rejects = check_unit(samples, captured, [request.final_rows for request in requests], target.head, check)
    refused = {reject.id for reject in rejects}
    records = records_of(samples, requests, captured, capture.final)
    taken = take_slice((record for record in records if record.sample.id not in refused), capture)
    if taken is None:
        raise CaptureError(
            f"none of the first {len(samples)} samples may be stored: {rejects[0].detail}",
            kind="calibration-rejected",
            hint="--recipe safe, which measures nothing first",
        )
    extent = Extent(prepared.info.samples, prepared.info.tokens, final_rows(prepared.info, capture.final))
    with Progress("advise", total=trials(capture), unit="recipes") as progress:
        advice = advise(taken, capture, target.head, extent, container=container, advance=progress.advance)
    return Calibrated(taken, advice)


def _first(samples: Iterable[Sample], tokens: int) -> Iterable[Sample]:
    """Samples until they have so many tokens."""
    for sample in samples:
        yield sample
        tokens -= sample.tokens
        if tokens <= 0:
            return
