"""The store of a job: the one that is there, or a new one under the recipe that was named or measured first.

``--recipe auto`` captures the first tokens of the input and tries every recipe on them before a store exists.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from collectors.capture.estimate import final_rows
from collectors.capture.options import AUTO, CollectOptions
from collectors.capture.unit_records import capture_samples, records_of
from collectors.checks.capture import CheckSpec, check_unit
from collectors.engines import CaptureEngine
from collectors.targets.load import EngineTarget
from hiddenstore.codecs import DEFAULT_RECIPE, get_recipe, recipe_name
from hiddenstore.console.progress import Progress
from hiddenstore.errors import CaptureError, ConflictError, Kind, NotFoundError
from hiddenstore.inputs.prepared import PreparedInput
from hiddenstore.inspect.advice import smaller_line, table_lines, verdict, write_advice
from hiddenstore.inspect.advise import Extent, advise, trials
from hiddenstore.inspect.facts import raw_bytes_per_token
from hiddenstore.records import Sample
from hiddenstore.store import Store
from hiddenstore.targets.calibration import Slice, slice_tokens, take_slice, write_slice
from hiddenstore.writer import create_store
from schemas.advice import Advice
from schemas.capture import CaptureSpec, Codecs
from schemas.manifest import Container


def open_store(
    options: CollectOptions,
    prepared: PreparedInput,
    engine: CaptureEngine,
    check: CheckSpec,
    capture: CaptureSpec,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> Store:
    """The store of ``options``; with ``auto`` a new one has the recipe advised, an old one the recipe it began with.

    Raises:
        ConflictError: it holds another capture.
        CaptureError, InterruptError: as ``calibrate``.
    """
    if options.recipe != AUTO:
        return _create(options, engine.target, capture)
    codecs = _stored_codecs(options.store)
    if codecs is not None:
        return _create(options, engine.target, capture.model_copy(update={"codecs": codecs}))
    first, advice = calibrate(prepared, engine, check, capture, options.container, stop)
    for line in (*table_lines(advice, raw_bytes_per_token(capture)), verdict(advice), smaller_line(advice)):
        if line is not None:
            note(line)
    advised = capture.model_copy(update={"codecs": get_recipe(advice.chosen)})
    try:
        store = _create(options, engine.target, advised)
    except ConflictError:
        # Another rank on another device may have come to another recipe first; then that one holds.
        codecs = _stored_codecs(options.store)
        if codecs in (None, advised.codecs):
            raise
        store = _create(options, engine.target, capture.model_copy(update={"codecs": codecs}))
    write_advice(store.fs, advice)
    write_slice(store.fs, first, capture)
    return store


def calibrate(
    prepared: PreparedInput,
    engine: CaptureEngine,
    check: CheckSpec,
    capture: CaptureSpec,
    container: Container,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Slice, Advice]:
    """Capture the first samples of an input: a raw slice of them, and what the advisor makes of it.

    Every rank does the same work on the same samples, so all come to the same recipe without a word between them.

    Raises:
        CaptureError: ``calibration-rejected``: none of the samples may be stored; or as ``check_unit``.
        InterruptError: ``stop()`` turned true.
    """
    head = engine.target.head
    samples = list(_first(prepared.samples(), slice_tokens(capture)))
    unit = capture_samples(engine, samples, capture.final, stop)
    rejects = [*unit.rejects, *check_unit(unit.samples, unit.captured, unit.final_rows, head, check)]
    refused = {reject.id for reject in rejects}
    records = records_of(unit, capture.final)
    first = take_slice((record for record in records if record.sample.id not in refused), capture)
    if first is None:
        raise CaptureError(
            f"none of the first {len(samples)} samples may be stored: {rejects[0].detail}",
            kind=Kind.CALIBRATION_REJECTED,
            hint=f"--recipe {DEFAULT_RECIPE}, which measures nothing first",
        )
    extent = Extent(prepared.info.samples, prepared.info.tokens, final_rows(prepared.info, capture.final))
    with Progress("advise", total=trials(capture), unit="recipes") as progress:
        return first, advise(first, capture, head, extent, container=container, advance=progress.advance)


def _first(samples: Iterable[Sample], tokens: int) -> Iterator[Sample]:
    """Samples until they have so many tokens."""
    for sample in samples:
        yield sample
        tokens -= sample.tokens
        if tokens <= 0:
            return


def _create(options: CollectOptions, target: EngineTarget, capture: CaptureSpec) -> Store:
    recipe, files = recipe_name(capture.codecs), target.target_files()
    return create_store(options.store, capture, target.head.spec, recipe, files, options.container)


def _stored_codecs(location: str | Path) -> Codecs | None:
    """The codecs of the store that is there, None where there is none."""
    try:
        return Store.open(location, strict=False).capture.codecs
    except NotFoundError:
        return None
