"""The collect job: prepared DATA through a target into a store, resumable, under any world size.

The main thread runs the target; one worker thread checks, encodes and commits the unit before. Which units a rank does
follows from the unit's index in the input alone, so a restart under another world size only changes who does the rest.
``--recipe auto`` captures the first tokens and tries every recipe on them before a store exists.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

from torch import Tensor

from collectors.capture.estimate import final_rows, repetition, shortage
from collectors.capture.options import (
    AUTO,
    CollectOptions,
    engine_options,
    require_data_fits,
    require_engine_fits,
    resolve_recipe,
)
from collectors.checks.capture import CheckSpec, RejectBudget, check_unit
from collectors.checks.crosscheck import CrossCheck
from collectors.checks.reference import (
    await_first,
    compare_with_store,
    engine_states,
    open_reference,
    parse_check,
    profile_target,
    typical_norms,
)
from collectors.engines import CaptureEngine, Done, nobody, open_engine
from collectors.engines.assembly import UnitStates, capture_samples, records_of
from collectors.targets.layers import choose_layers
from collectors.targets.load import EngineTarget, LoadOptions
from collectors.tokenize.template import read_template
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.codecs.fitted import fit, is_unfitted, require_encodes, spread
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, get_recipe, recipe_name
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.commit import DAMAGED
from hiddenstore.console.progress import Progress
from hiddenstore.errors import (
    CaptureError,
    ConfigError,
    ConflictError,
    CorruptionError,
    InterruptError,
    Kind,
    NotFoundError,
)
from hiddenstore.files.layout import TARGET_DIR, commit_path, fitted_name, parse_commit
from hiddenstore.fs import open_filesystem
from hiddenstore.index.publish import IndexWriter
from hiddenstore.inputs import PreparedInput, RegisteredInput, Unit
from hiddenstore.inspect.advise import Extent, Rebuilding, advise, table_lines, trials, write_advice
from hiddenstore.inspect.choice import RecipeLimits, refusal_lines, verdict
from hiddenstore.inspect.facts import raw_bytes_per_token, stored_bytes
from hiddenstore.process import Drain, Rank
from hiddenstore.records import Record, Sample
from hiddenstore.segments import default_container
from hiddenstore.segments.base import unit_tokens
from hiddenstore.store import Store, load_manifest
from hiddenstore.targets.blocks import BLOCKS_FILE, TargetBlocks, block_files, recoded
from hiddenstore.targets.calibration import Slice, slice_tokens, take_slice, write_slice
from hiddenstore.targets.folder import CONFIG_FILE, open_target
from hiddenstore.targets.identity import CHECKPOINT
from hiddenstore.targets.rebuild import Rebuilder
from hiddenstore.threads import Threads
from hiddenstore.writer import (
    PendingUnit,
    create_store,
    pending_units,
    register_input,
    require_place,
    restore_input,
    write_unit,
)
from schemas.advice import Advice
from schemas.capture import REBUILT, CaptureSpec, Codecs
from schemas.manifest import CommitRecord, Container, Reject
from schemas.prepared import PreparedData

_SAMPLES_TO_FIT = 64


def open_store(
    options: CollectOptions,
    prepared: PreparedInput,
    engine: CaptureEngine,
    check: CheckSpec,
    capture: CaptureSpec,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> Store:
    """The store of ``options``: a new one, under ``auto`` of the recipe advised, or the old one. Raises ConflictError:
    it holds another capture; or as ``calibrate``."""
    restore_input(options.store, prepared)
    create = partial(new_store, options.store, options.container, engine.target)
    codecs = _stored_codecs(options.store)
    if is_unfitted(capture):
        if codecs is not None and recipe_name(codecs) != recipe_name(capture.codecs):
            return create(capture)
        if codecs is None or _lost(options.store, codecs):
            return _fitted_store(options.store, create, fit(capture, _mix(prepared, engine, capture, stop, note)))
        return create(recoded(capture, codecs))
    if options.recipe != AUTO:
        return create(capture)
    if codecs is not None:
        return create(recoded(capture, codecs))
    container = options.container or default_container(open_filesystem(options.store))
    first, advice = calibrate(prepared, engine, check, capture, container, stop, note)
    refused = refusal_lines(advice, has_limits=False)
    for line in (*table_lines(advice, raw_bytes_per_token(capture)), verdict(advice), *refused):
        note(line)
    advised = recoded(capture, get_recipe(advice.chosen))
    try:
        store = create(advised)
    except ConflictError:
        # Another rank on another device may have come to another recipe first; then that one holds.
        codecs = _stored_codecs(options.store)
        if codecs in (None, advised.codecs):
            raise
        store = create(recoded(capture, codecs))
    write_advice(store.fs, advice)
    write_slice(store.fs, first, capture)
    return store


def _fitted_store(
    location: str | Path, create: Callable[..., Store], fitted: tuple[CaptureSpec, dict[str, bytes]]
) -> Store:
    capture, files = fitted
    try:
        return create(capture, files)
    except ConflictError:
        # Another rank on another device may have fitted to slightly other states first; then its codec holds.
        codecs = _stored_codecs(location)
        if codecs is None or recipe_name(codecs) != recipe_name(capture.codecs):
            raise
        if _lost(location, codecs):
            path, name = open_filesystem(location).root, f"{TARGET_DIR}/{fitted_name(codecs.aux)}"
            raise CorruptionError(
                f"{path}/{name} is damaged: it is gone, and the states of this input are fitted by another; without it "
                "no layer can be read",
                kind=Kind.TARGET_FILE_CORRUPT,
                hint=shlex.join(["hiddenstore", "copy", "ANOTHER_COPY", path]),
                path=name,
            ) from None
        return create(recoded(capture, codecs))


def _lost(location: str | Path, codecs: Codecs) -> bool:
    """Whether the file of a store's fitted codec is gone, as a repair leaves it that found it damaged."""
    return open_filesystem(location).size(f"{TARGET_DIR}/{fitted_name(codecs.aux)}") is None


def _mix(
    prepared: PreparedInput,
    engine: CaptureEngine,
    capture: CaptureSpec,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> Iterator[Tensor]:
    """The stored layers of samples that are spread evenly over an input: bfloat16 [L, t, D] on the CPU."""
    step = spread(prepared.info.tokens, prepared.info.samples, capture)
    note(f"{capture.codecs.aux} is fitted to one sample of {step:,} first; they are captured again in their units")
    slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
    samples = islice(prepared.samples(), 0, None, step)
    while some := list(islice(samples, _SAMPLES_TO_FIT)):
        for record in records_of(capture_samples(engine, some, "none", stop), "none"):
            yield record.aux[slots].cpu()


def calibrate(
    prepared: PreparedInput,
    engine: CaptureEngine,
    check: CheckSpec,
    capture: CaptureSpec,
    container: Container,
    stop: Callable[[], bool],
    note: Callable[[str], None],
) -> tuple[Slice, Advice]:
    """The first samples of an input: a raw slice of them, and what the advisor makes of it; ``rebuilt`` is among the
    recipes where the target's blocks bring the slice back.

    Every rank does the same work on the same samples, so all come to the same recipe. Raises CaptureError:
    ``calibration-rejected``: none of the samples may be stored; or as ``check_unit``."""
    head = engine.target.head
    samples, wanted = [], slice_tokens(capture)
    for sample in prepared.samples():
        samples.append(sample)
        wanted -= sample.tokens
        if wanted <= 0:
            break
    unit = capture_samples(engine, samples, capture.final, stop)
    rejects = [*unit.rejects, *check_unit(unit.samples, unit.captured, unit.final_rows, head, check)]
    refused = {reject.id for reject in rejects}
    records = [record for record in records_of(unit, capture.final) if record.sample.id not in refused]
    first = take_slice(records, capture, from_first=True)
    if first is not None and capture.final != "none" and not len(first.final):
        # Stored states can be judged on any window, and need final rows for it.
        first = take_slice(records, capture)
    if first is None:
        raise CaptureError(
            f"none of the first {len(samples)} samples may be stored: {rejects[0].detail}",
            kind=Kind.CALIBRATION_REJECTED,
            hint=f"--recipe {DEFAULT_RECIPE}, which measures nothing first",
        )
    extent = Extent(prepared.info.samples, prepared.info.tokens, final_rows(prepared.info, capture.final))
    rebuilding = _rebuilding(engine.target, capture, first, [record.sample for record in records], note)
    with Progress("advise", total=trials(capture, rebuilding is not None), unit="recipes") as progress:
        limits = RecipeLimits()
        return first, advise(first, capture, head, extent, limits, container, progress.advance, rebuilding)


def _rebuilding(
    target: EngineTarget, capture: CaptureSpec, first: Slice, samples: Sequence[Sample], note: Callable[[str], None]
) -> Rebuilding | None:
    """What the recipe ``rebuilt`` is tried with; None, with a note of why, where the target does not allow it."""
    try:
        rebuilt = recoded(capture, get_recipe(REBUILT))
        files = block_files(target.folder, rebuilt.blocks, capture.target.dtype)
        blocks = TargetBlocks.from_bytes(target.folder.text_files()[CONFIG_FILE], files.get(BLOCKS_FILE))
        rebuilder = Rebuilder(rebuilt, target.head.to("cpu"), blocks)
        count = rebuilder.require_close(first, samples)
    except (ConfigError, CaptureError) as error:
        # A checkpoint without safetensors runs in transformers, and its blocks cannot be read from it.
        if error.kind not in (Kind.BLOCKS_UNSUPPORTED, Kind.CROSS_CHECK, Kind.TARGET_INCOMPLETE):
            raise
        note(f"rebuilt is not measured: {error.message}")
        return None
    if not count:
        note("rebuilt is not measured: the first sample has no final row within the tokens that a slice may take")
        return None
    return Rebuilding(rebuilder, samples)


def new_store(
    location: str | Path,
    container: Container | None,
    target: EngineTarget,
    capture: CaptureSpec,
    fitted: dict[str, bytes] | None = None,
) -> Store:
    """The store for a capture of a target, made or found, with the file of a codec that was fitted; raises as
    ``create_store``."""
    recipe, files = recipe_name(capture.codecs), target.target_files() | (fitted or {})
    if capture.blocks:
        files |= block_files(target.folder, capture.blocks, capture.target.dtype)
    return create_store(location, capture, target.head.spec, recipe, files, container)


def _stored_codecs(location: str | Path) -> Codecs | None:
    stored = _stored_capture(location)
    return None if stored is None else stored.codecs


def _stored_capture(location: str | Path) -> CaptureSpec | None:
    """What the store that is there holds, None where there is none."""
    try:
        return load_manifest(open_filesystem(location)).capture
    except NotFoundError:
        return None


@dataclass
class CollectReport:
    """What one process did, and what the store holds of this input now.

    ``compared_samples`` were recomputed with Hugging Face and agreed; ``workers`` are those of a launcher, 0 without,
    whose ``forward_s``, ``compare_s`` and ``wait_s`` add up over all of them; ``pending_ranks``: whose units are left.
    """

    store: str
    input: str
    units: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_stored: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    rejected_tokens: int = 0
    resumed_units: int = 0
    pending_units: int = 0
    pending_ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    compared_samples: int = 0
    forward_s: float = 0.0
    compare_s: float = 0.0
    wait_s: float = 0.0
    workers: int = 0
    workers_lost: int = 0

    def add(self, record: CommitRecord, before: CommitRecord | None = None) -> None:
        """Count one committed unit; of one that replaces ``before``, what was captured again."""
        stored = {entry.id for entry in before.samples} if before is not None else set()
        rejects = new_rejects(record, before)
        self.units += 1
        self.samples += len(record.samples) - len(stored)
        self.tokens += sum(entry.tokens for entry in record.samples if entry.id not in stored)
        self.bytes_stored += record.bytes_stored
        self.rejects.update(reject.reason for reject in rejects)
        self.rejected_tokens += sum(reject.tokens for reject in rejects)

    def show(self, progress: Progress, **more: int) -> None:
        """Bring a bar of tokens to what is committed and rejected."""
        done = self.tokens + self.rejected_tokens
        progress.update(done, samples=self.samples, rejects=self.rejects.total(), **more)

    @cached_property
    def bytes_in_all(self) -> dict[str, int]:
        """What the whole store takes now: ``stored_bytes``; nothing where nothing could be used and none was made."""
        try:
            return stored_bytes(Store.open(self.store))
        except NotFoundError:
            return dict.fromkeys(("bytes_stored", "bytes_target", "bytes_calibration", "bytes_on_disk"), 0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def collect(
    options: CollectOptions, rank: Rank | None = None, drain: Drain | None = None, note: Callable[[str], None] = print
) -> CollectReport:
    """Capture every pending unit of this rank. Raises ConfigError, FormatError, ConflictError: before anything is
    written; CaptureError: the target misbehaves, or its engine disagrees with Hugging Face; what is committed stays;
    InterruptError: ``drain`` asked to stop; the open unit is dropped, the same command resumes."""
    with open_job(options, rank or Rank(), drain or Drain(), note) as job:
        return job.run()


@contextmanager
def open_job(options: CollectOptions, rank: Rank, drain: Drain, note: Callable[[str], None]) -> Iterator["CollectJob"]:
    """Everything a job needs, opened: engine, store, input; raises as ``collect`` does, before its first unit."""
    say_once = note if rank.is_first else lambda _text: None
    prepared = PreparedInput.open(options.data)
    require_place(options.store)
    template = read_template(options.template)
    adapter = None if options.adapter is None else str(options.adapter)
    folder = open_target(options.target, options.revision, template, options.trust_remote_code, adapter)
    folder = replace(folder, runs_elsewhere=options.server is not None)
    require_data_fits(prepared.info, folder)
    require_engine_fits(options.engine, prepared.info)
    choice = choose_layers(options.layers, options.final, folder.num_layers)
    recipe = resolve_recipe(options.recipe, choice, folder.num_layers, prepared.info.images is not None)
    parity = parse_check(options.check)
    say_once(choice.explained)
    settings = engine_options(options, choice, prepared.info.longest, rank)
    with closing(open_engine(options.engine, EngineTarget(folder, options.dtype), settings)) as engine:
        target = engine.target
        copied = LoadOptions(options.dtype, options.device)
        reference = open_reference(parity, target, copied, rank, prepared.info.longest, say_once)
        if parity.mode == "auto" and not rank.is_first and reference.target is None:
            await_first(options.store, rank, lambda: drain.requested, note)
        stored, identity = _stored_capture(options.store), target.identity
        if options.same_target and stored is not None:
            # ``compare_with_store`` judges by states.
            identity = identity.model_copy(update={CHECKPOINT: stored.target.checkpoint_sha256})
        # Text may join a store that holds images.
        beside = None if stored is None else stored.images
        capture = CaptureSpec(
            target=identity,
            aux_layers=choice.aux_layers,
            final=choice.final,
            final_norm=engine.final_norm or "pre_norm",
            codecs=get_recipe(recipe),
            images=beside if prepared.info.images is None else prepared.info.images.spec,
        )
        profile = None if reference.target is None else profile_target(reference.target, prepared, choice.final)
        norms = typical_norms(profile, choice.aux_layers, target.head.hidden_size)
        check = CheckSpec(choice.aux_layers, capture.final_norm, norms)
        store = open_store(options, prepared, engine, check, capture, lambda: drain.requested, say_once)
        states_of = engine_states(engine, choice.aux_layers, prepared.info.longest, lambda: drain.requested)
        compare_with_store(store, target.identity, states_of, profile, say_once)
        compare = None
        if reference.target is not None and reference.compares:
            compare = CrossCheck(reference.target, check, parity.samples, parity.prefix, parity.share)
        with CollectJob(store, prepared, engine, check, compare, rank, drain) as job:
            if left := pending_tokens(store, job.digest):
                require_encodes(store.capture, store.path)
            if warning := shortage(store, prepared, left):
                say_once(warning)
            if rank.is_first and (warning := repetition(store, job.digest, pending_units(store, job.digest))):
                say_once(warning)
            yield job


@dataclass(frozen=True)
class JobSettings:
    """Where a job that computes states and one that takes them from a dump differ.

    ``label`` names the work to people; ``allowed_rejects`` None is the default of ``RejectBudget``; ``on_commit`` is
    told of every committed unit and the records it was made from, in the worker thread.
    """

    label: str = "collect"
    allowed_rejects: int | None = None
    on_commit: Callable[[CommitRecord, Sequence[Record]], None] | None = None


@dataclass
class CollectJob:
    """One rank's share of one input, everything opened."""

    store: Store
    prepared: PreparedInput
    engine: CaptureEngine
    check: CheckSpec
    compare: CrossCheck | None
    rank: Rank
    drain: Drain
    settings: JobSettings = field(default_factory=JobSettings)

    def __post_init__(self) -> None:
        self.digest = register_input(self.store, self.prepared)
        self._described = self.engine.describe()
        self.report, self._budget = begin_report(self.store, self.prepared.info, self.settings.allowed_rejects)
        self._worker = Threads(max_workers=1, thread_name_prefix="commit")
        self._index = IndexWriter(self.store.fs, self.store.catalog)
        self._pending = pending_units(self.store, self.digest)
        self._behind: Future[CommitRecord | None] | None = None
        self._last, self._is_proven = "", False
        self._open_tokens = self._behind_tokens = 0

    def __enter__(self) -> "CollectJob":
        return self

    def __exit__(self, *_error: object) -> None:
        self._worker.shutdown()
        self._index.close()

    def run(self) -> CollectReport:
        """Capture, check, encode and commit this rank's share; see ``collect`` for what it raises."""
        began = time.monotonic()
        pending = pending_tokens(self.store, self.digest)
        units, ranks = RegisteredInput(self.store.fs, self.digest).units, self.rank.world_size
        names = frozenset(units[self.rank.rank :: ranks]) & pending.keys() & self._pending.keys()
        label = self.settings.label if ranks == 1 else f"{self.settings.label} {self.rank}"
        with Progress(label, sum(pending[name] for name in names), "tokens") as progress:
            try:
                for unit in self._units(names):
                    self.capture(unit, partial(self._show, progress))
                    self._show(progress)
            except InterruptError:
                # The open unit is dropped; the one in the worker is complete and is committed.
                self._open_tokens = 0
                self.settle()
                self._show(progress)
                raise
            self.settle()
            self._show(progress)
        left = pending_units(self.store, self.digest)
        self.report.pending_units = len(left)
        self.report.pending_ranks = tuple(sorted({n % ranks for n, name in enumerate(units) if name in left}))
        self.report.seconds = time.monotonic() - began
        return self.report

    def _show(self, progress: Progress, tokens: int = 0) -> None:
        """``tokens`` more of the open unit are here; like those of the unit in the worker they count for the rate."""
        self._open_tokens += tokens
        progress.underway = self._open_tokens + self._behind_tokens
        self.report.show(progress)

    def capture(self, unit: Unit, done: Done = nobody) -> Future[CommitRecord | None]:
        """Run one unit and leave it to the worker thread; its result is None where another job committed it first."""
        began = time.monotonic()
        final, stop = self.store.capture.final, lambda: self.drain.requested
        states = capture_samples(self.engine, unit.samples, final, stop, done)
        self.report.forward_s += time.monotonic() - began
        if self.compare is not None:
            # Before the unit reaches the worker, so that nothing of an engine that disagrees is ever committed.
            self.report.compared_samples += self.compare.unit(states.samples, states.requests, states.captured)
            self.report.compare_s = self.compare.seconds
        self.settle()
        self._behind = self._worker.submit(self._commit, unit, states)
        self._behind_tokens, self._open_tokens = sum(sample.tokens for sample in unit.samples), 0
        return self._behind

    def capture_named(self, name: str) -> Future[CommitRecord | None] | None:
        """Find a unit by name and capture it, None where it is committed; going back reads the input anew."""
        pending = self._pending.get(name)
        if pending is None or self._is_committed(pending):
            return None
        if name <= self._last or not self._last:
            self._stream = self.prepared.units(unit_tokens(self.store.capture))
        self._last = name
        return self.capture(_part(next(unit for unit in self._stream if unit.name == name), pending))

    def settle(self) -> None:
        """Wait for the unit in the worker thread, so that at most two units are in memory, and count it."""
        behind, self._behind, self._behind_tokens = self._behind, None, 0
        if behind is None:
            return
        began = time.monotonic()
        record = behind.result()
        self.report.wait_s += time.monotonic() - began
        if record is not None:
            self.report.add(record, self._pending[record.unit].replaces)

    def _is_committed(self, unit: PendingUnit) -> bool:
        """Whether the store holds it now; a second job on the same store may have committed it since."""
        return self.store.fs.size(commit_path(unit.name, unit.revision)) is not None

    def _commit(self, unit: Unit, states: UnitStates) -> CommitRecord | None:
        """Check, encode and publish one unit; runs in the worker thread."""
        capture, head = self.store.capture, self.engine.target.head
        checked = check_unit(states.samples, states.captured, states.final_rows, head, self.check)
        rejects = [*states.rejects, *checked]
        if rejects and self.rank.world_size > 1:
            # What the other ranks have rejected meanwhile counts too.
            allowed = self.settings.allowed_rejects
            _, self._budget = begin_report(Store.open(self.store.fs), self.prepared.info, allowed)
        self._budget.spend(rejects)
        refused = {reject.id for reject in rejects}
        records = [record for record in records_of(states, capture.final) if record.sample.id not in refused]
        self._keep_slice(unit, records)
        records = [with_top_tokens(record, head, capture) for record in records]
        pending = self._pending[unit.name]
        if pending.replaces is None:
            record = write_unit(self.store, unit.name, self.digest, records, rejects, self._described, pending.revision)
        else:
            record = recapture_unit(self.store, pending, records, rejects, self._described)
        if record is not None:
            self._index.add(unit.name, pending.revision)
        if record is not None and self.settings.on_commit is not None:
            self.settings.on_commit(record, records)
        return record

    def _keep_slice(self, unit: Unit, records: Sequence[Record]) -> None:
        """Before a process commits anything: CaptureError ``cross-check`` where blocks do not bring its states back."""
        capture, rebuilder = self.store.capture, None if self._is_proven else self.store.rebuilder()
        # The slice comes from the first unit, whoever captures it and however often; once written it stays.
        if unit.index != 0 and rebuilder is None:
            return
        if (first := take_slice(records, capture)) is None:
            return
        if rebuilder is not None:
            self._is_proven = rebuilder.require_close(first, [record.sample for record in records]) > 0
        if unit.index == 0:
            write_slice(self.store.fs, first, capture)

    def _units(self, names: frozenset[str]) -> Iterator[Unit]:
        if not names:
            return
        for unit in self.prepared.units(unit_tokens(self.store.capture)):
            if self.drain.requested:
                raise InterruptError("stopped by a signal", kind=Kind.INTERRUPTED)
            if unit.name in names and not self._is_committed(self._pending[unit.name]):
                yield _part(unit, self._pending[unit.name])


def _part(unit: Unit, pending: PendingUnit) -> Unit:
    """The samples of a unit that are to be captured."""
    return Unit(unit.name, unit.index, [sample for sample in unit.samples if pending.lacks(sample.id)])


def begin_report(
    store: Store, info: PreparedData, allowed_rejects: int | None = None
) -> tuple[CollectReport, RejectBudget]:
    """What a job on a registered input begins with: a report of nothing but earlier units, and the rejects left."""
    units = set(RegisteredInput(store.fs, info.digest).units)
    names = [parsed.unit if (parsed := parse_commit(name)) else "" for name in store.catalog.names]
    own = [number for number, name in enumerate(names) if name in units]
    refused = [store.commits()[number] for number in own if store.catalog.facts["rejects"][number]]
    report = CollectReport(store.path, info.digest, resumed_units=len(own))
    return report, RejectBudget(info.samples, capture_rejects(refused), allowed_rejects)


def new_rejects(record: CommitRecord, before: CommitRecord | None) -> list[Reject]:
    """What the capture of a unit refused that the record it replaces did not."""
    known = {reject.id for reject in capture_rejects([] if before is None else [before])}
    return [reject for reject in capture_rejects([record]) if reject.id not in known]


def capture_rejects(records: Iterable[CommitRecord]) -> list[Reject]:
    """What engine and checks refused, without what was lost on disk since."""
    return [reject for record in records for reject in record.rejects if reject.reason != DAMAGED]


def pending_tokens(store: Store, digest: str) -> dict[str, int]:
    """Tokens that are to be captured of every unit of a registered input, in input order."""
    table, pending = RegisteredInput(store.fs, digest).table, pending_units(store, digest)
    tokens = dict.fromkeys(pending, 0)
    for name, unit, count in zip(*(table[c].to_pylist() for c in ("sample_id", "unit", "tokens")), strict=True):
        if unit in tokens and pending[unit].lacks(name):
            tokens[unit] += count
    return tokens
