"""The collect job: prepared DATA through a target into a store, resumable, under any world size.

The main thread runs the target; one worker thread checks, encodes and commits the unit before. Which units a rank does
follows from the unit's index in the input alone, so a restart under another world size only changes who does the rest.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from collectors.calibrate import calibrate
from collectors.check import CheckSpec, RejectBudget, check_unit
from collectors.crosscheck import CrossCheck
from collectors.engines import Captured, CaptureEngine, CaptureRequest, open_engine
from collectors.estimate import short_of_room
from collectors.job_open import (
    AUTO,
    CollectOptions,
    create,
    create_advised,
    engine_options,
    require_data_fits,
    resolve_recipe,
    say,
    stored_codecs,
)
from collectors.launch.report import WorkerReport
from collectors.layer_profile import profile_target, typical_norms
from collectors.layers import choose_layers
from collectors.reference import open_reference, parse_check
from collectors.target import EngineTarget, LoadOptions
from collectors.target_folder import open_target
from collectors.template import read_template
from collectors.unit_records import records_of, requests_of
from hiddenstore.calibration import take_slice, write_slice
from hiddenstore.codecs import get_recipe
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.errors import InterruptError
from hiddenstore.inputs import PreparedInput, Unit, unit_tokens
from hiddenstore.layout import commit_path
from hiddenstore.look.inspect import raw_bytes_per_token
from hiddenstore.progress import Progress
from hiddenstore.rank import Drain, Rank
from hiddenstore.records import Record
from hiddenstore.registered import RegisteredInput
from hiddenstore.store import Store
from hiddenstore.verify.profile import write_profile
from hiddenstore.writer import pending_units, register_input, write_unit
from schemas.capture import CaptureSpec, FinalMode
from schemas.manifest import CommitRecord


@dataclass
class CollectReport:
    """What one process did, and what the store holds of this input now.

    ``compared_samples`` were recomputed with Hugging Face and agreed; ``workers`` are those of a launcher, whose
    ``forward_s`` and ``wait_s`` add up over all of them.
    """

    store: str
    input: str
    units: int = 0
    samples: int = 0
    tokens: int = 0
    bytes_stored: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    resumed_units: int = 0
    pending_units: int = 0
    seconds: float = 0.0
    compared_samples: int = 0
    forward_s: float = 0.0
    wait_s: float = 0.0
    workers: list[WorkerReport] = field(default_factory=list)

    def add(self, record: CommitRecord) -> None:
        """Count one committed unit."""
        self.units += 1
        self.samples += len(record.samples)
        self.tokens += record.tokens
        self.bytes_stored += record.bytes_stored
        self.rejects.update(reject.reason for reject in record.rejects)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def collect(
    options: CollectOptions, rank: Rank | None = None, drain: Drain | None = None, note: Callable[[str], None] = print
) -> CollectReport:
    """Capture every pending unit of this rank.

    Raises:
        ConfigError, FormatError, ConflictError: before anything is written.
        CaptureError: the target misbehaves, or its engine disagrees with Hugging Face; what is committed stays.
        InterruptError: ``drain`` asked to stop; the open unit is dropped, the same command resumes.
    """
    with open_job(options, rank or Rank(), drain or Drain(), note) as job:
        return job.run()


@contextmanager
def open_job(options: CollectOptions, rank: Rank, drain: Drain, note: Callable[[str], None]) -> Iterator["CollectJob"]:
    """Everything a job needs, opened: engine, store, input; raises as ``collect`` does, before its first unit."""
    say_once = note if rank.is_first else _nothing
    prepared = PreparedInput.open(options.data)
    template = None if options.template is None else read_template(options.template)
    folder = open_target(options.target, options.revision, template, options.trust_remote_code)
    require_data_fits(prepared.info, folder)
    choice = choose_layers(options.layers, options.final, folder.num_layers)
    recipe, wish = resolve_recipe(options.recipe, choice), parse_check(options.check)
    say_once(choice.explained)
    asked = engine_options(options, choice, prepared.info.longest, rank)
    with closing(open_engine(options.engine, EngineTarget(folder, options.dtype), asked)) as engine:
        target = engine.target
        reference = open_reference(wish, target, LoadOptions(options.dtype, options.device), rank)
        if reference.explained is not None:
            say_once(reference.explained)
        capture = CaptureSpec(
            target=target.identity,
            aux_layers=choice.aux_layers,
            final=choice.final,
            final_norm=engine.final_norm,
            codecs=get_recipe(recipe),
        )
        profile = None if reference.target is None else profile_target(reference.target, prepared, choice.final)
        norms = typical_norms(profile, choice.aux_layers, target.head.hidden_size)
        check = CheckSpec(choice.aux_layers, engine.final_norm, norms)
        if options.recipe != AUTO:
            store = create(options, target, capture)
        elif (settled := stored_codecs(options.store)) is not None:
            store = create(options, target, capture.model_copy(update={"codecs": settled}))
        else:
            found = calibrate(prepared, target, engine, check, capture, options.container, lambda: drain.requested)
            say(found.advice, raw_bytes_per_token(capture), say_once)
            store = create_advised(options, target, capture, found.advice)
            write_slice(store.fs, found.taken, capture)
        if profile is not None:
            write_profile(store.fs, profile)
        compare = None
        if reference.target is not None and reference.compares:
            compare = CrossCheck(reference.target, check, wish.samples)
        with CollectJob(store, prepared, engine, check, compare, choice.final, rank, drain) as job:
            if said := short_of_room(store, prepared.info, sum(job.pending().values())):
                say_once(said)
            yield job


def _nothing(_text: str) -> None:
    pass


@dataclass
class CollectJob:
    """One rank's share of one input, everything opened."""

    store: Store
    prepared: PreparedInput
    engine: CaptureEngine
    check: CheckSpec
    compare: CrossCheck | None
    final: FinalMode
    rank: Rank
    drain: Drain

    def __post_init__(self) -> None:
        self.digest = register_input(self.store, self.prepared)
        self._described = self.engine.describe()
        records = [record for record in self.store.commits() if record.input == self.digest]
        earlier = [reject for record in records for reject in record.rejects]
        self._budget = RejectBudget(self.prepared.info.samples, earlier)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._behind: Future[CommitRecord | None] | None = None
        self.report = CollectReport(self.store.path, self.digest)

    def __enter__(self) -> "CollectJob":
        return self

    def __exit__(self, *_error: object) -> None:
        self._worker.shutdown()

    def run(self) -> CollectReport:
        """Capture, check, encode and commit this rank's share; see ``collect`` for what it raises."""
        began = time.monotonic()
        mine, total_tokens = self._my_units()
        label = "collect" if self.rank.world_size == 1 else f"collect {self.rank}"
        with Progress(label, total_tokens, "tokens") as progress:
            try:
                for unit in self._units(mine):
                    self._show(self.capture(unit), progress)
            except InterruptError:
                # The open unit is dropped; the one in the worker is whole and is kept.
                self._show(self.settle(), progress)
                raise
            self._show(self.settle(), progress)
        self.report.pending_units = len(pending_units(self.store, self.digest))
        self.report.seconds = time.monotonic() - began
        return self.report

    def capture(self, unit: Unit) -> CommitRecord | None:
        """Run one unit and leave it to the worker thread; returns what ``settle`` says of the unit before it."""
        requests = requests_of(unit.samples, self.final)
        captured = self._forward(requests)
        self._compare(unit, requests, captured)
        record = self.settle()
        self._behind = self._worker.submit(self._commit, unit, requests, captured)
        return record

    def settle(self) -> CommitRecord | None:
        """Wait for the unit in the worker thread, so that at most two units are in memory, and count it.

        None where there was none, or where another job committed it first.
        """
        behind, self._behind = self._behind, None
        if behind is None:
            return None
        began = time.monotonic()
        record = behind.result()
        self.report.wait_s += time.monotonic() - began
        if record is not None:
            self.report.add(record)
        return record

    def is_committed(self, unit: str) -> bool:
        """Whether the store holds it now; a second job on the same store may have committed it since."""
        return self.store.fs.size(commit_path(unit)) is not None

    def _forward(self, requests: list[CaptureRequest]) -> Captured:
        began = time.monotonic()
        captured = self.engine.capture(requests, lambda: self.drain.requested)
        self.report.forward_s += time.monotonic() - began
        return captured

    def _compare(self, unit: Unit, requests: list[CaptureRequest], captured: Captured) -> None:
        """Before the unit reaches the worker, so that nothing of an engine that disagrees is ever committed."""
        if self.compare is not None:
            self.report.compared_samples += self.compare.unit(unit.samples, requests, captured)

    def _show(self, record: CommitRecord | None, progress: Progress) -> None:
        if record is not None:
            rejected_tokens = sum(reject.tokens for reject in record.rejects)
            more = {"samples": self.report.samples, "rejects": self.report.rejects.total()}
            progress.advance(record.tokens + rejected_tokens, **more)

    def _commit(self, unit: Unit, requests: list[CaptureRequest], captured: Captured) -> CommitRecord | None:
        """Check, encode and publish one unit; runs in the worker thread."""
        rows = [request.final_rows for request in requests]
        rejects = check_unit(unit.samples, captured, rows, self.engine.target.head, self.check)
        self._budget.spend(rejects)
        refused = {reject.id for reject in rejects}
        capture, head = self.store.capture, self.engine.target.head
        records = [
            record
            for record in records_of(unit.samples, requests, captured, self.final)
            if record.sample.id not in refused
        ]
        if unit.index == 0:
            self._keep_slice(records)
        records = [with_top_tokens(record, head, capture) for record in records]
        return write_unit(self.store, unit.name, self.digest, records, rejects, self._described)

    def _keep_slice(self, records: Sequence[Record]) -> None:
        """The first unit is where the slice comes from, whoever captures it and however often; once kept it stays."""
        taken = take_slice(records, self.store.capture)
        if taken is not None:
            write_slice(self.store.fs, taken, self.store.capture)

    def pending(self) -> dict[str, int]:
        """Tokens of every unit that has no commit record yet, in input order."""
        registered = RegisteredInput(self.store.fs, self.digest)
        without = set(pending_units(self.store, self.digest))
        self.report.resumed_units = len(registered.units) - len(without)
        tokens = {name: 0 for name in registered.units if name in without}
        rows = zip(registered.table["unit"].to_pylist(), registered.table["tokens"].to_pylist(), strict=True)
        for unit, count in rows:
            if unit in tokens:
                tokens[unit] += count
        return tokens

    def _my_units(self) -> tuple[frozenset[str], int]:
        """Names of this rank's pending units, and their tokens."""
        pending = self.pending()
        share = RegisteredInput(self.store.fs, self.digest).units[self.rank.rank :: self.rank.world_size]
        mine = frozenset(share) & pending.keys()
        return mine, sum(pending[name] for name in mine)

    def _units(self, mine: frozenset[str]) -> Iterator[Unit]:
        if not mine:
            return
        for unit in self.prepared.units(unit_tokens(self.store.capture)):
            if self.drain.requested:
                raise InterruptError("stopped by a signal", kind="interrupted")
            if unit.name in mine and not self.is_committed(unit.name):
                yield unit
