"""The collect job: prepared DATA through a target into a store, resumable, under any world size.

The main thread runs the target; one worker thread checks, encodes and commits the unit before. Which units a rank does
follows from the unit's index in the input alone, so a restart under another world size only changes who does the rest.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from collectors.calibrate import calibrate
from collectors.check import MIN_PROFILED_TOKENS, CheckSpec, RejectBudget, check_unit
from collectors.engines import Captured, CaptureEngine, CaptureRequest, EngineOptions, open_engine
from collectors.families import verify_parts
from collectors.layers import LayerChoice, choose_layers
from collectors.target import LoadedTarget, TargetFolder, load_target, open_target
from collectors.template import read_template
from collectors.unit_records import records_of, requests_of
from hiddenstore.advise.document import write_advice
from hiddenstore.advise.view import smaller_line, table_lines, verdict
from hiddenstore.calibration import take_slice, write_slice
from hiddenstore.codecs import DEFAULT_RECIPE, get_recipe, recipe_name
from hiddenstore.codecs.topk import with_top_tokens
from hiddenstore.errors import ConfigError, ConflictError, FormatError, InterruptError, NotFoundError
from hiddenstore.inputs import PreparedInput, RegisteredInput, Unit, unit_tokens
from hiddenstore.layout import commit_path
from hiddenstore.look.inspect import raw_bytes_per_token
from hiddenstore.progress import Progress
from hiddenstore.rank import Drain, Rank
from hiddenstore.records import Record, final_row_positions
from hiddenstore.store import Store
from hiddenstore.verify.profile import LayerProfile, make_profile, write_profile
from hiddenstore.writer import create_store, pending_units, register_input, write_unit
from schemas.advice import Advice
from schemas.capture import TOPK, CaptureSpec, Codecs, FinalMode
from schemas.manifest import CommitRecord, Container
from schemas.prepared import PreparedData

PROFILED_TEXT = 512
AUTO = "auto"


@dataclass(frozen=True)
class CollectOptions:
    """What a person asks of ``hiddenstore collect``.

    ``final`` None follows from ``layers``; ``template`` is the file given to ``prepare``, if one was.
    """

    data: str | Path
    store: str | Path
    target: str
    revision: str | None = None
    template: str | None = None
    engine: str = "hf"
    layers: str = "eagle3"
    final: FinalMode | None = None
    recipe: str = DEFAULT_RECIPE
    container: Container = "zarr"
    batch_tokens: int = 4096
    dtype: str | None = None
    device: str = "auto"


@dataclass
class CollectReport:
    """What one process did, and what the store holds of this input now."""

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
    forward_s: float = 0.0
    wait_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def resolve_recipe(recipe: str, choice: LayerChoice) -> str:
    """The recipe's own name for what was asked; ``auto``, while nothing is measured, counts as the default.

    Raises:
        ConfigError: ``recipe-unknown``, ``codec-unknown``; ``final-topk``: a drafter asked for reads the final hidden,
            and the recipe keeps the target's top tokens in its place.
    """
    codecs = get_recipe(DEFAULT_RECIPE if recipe == AUTO else recipe)
    if codecs.final == TOPK and choice.reads_final:
        raise ConfigError(
            f"recipe {recipe} keeps the target's top tokens instead of the final hidden, which these drafters read",
            kind="final-topk",
            hint=f"--recipe {recipe_name(codecs.model_copy(update={'final': 'q8'}))}",
        )
    return recipe_name(codecs)


def require_data_fits(info: PreparedData, folder: TargetFolder) -> None:
    """Refuse DATA that was tokenised for another target.

    Raises:
        FormatError: ``tokenizer-mismatch``, naming which of vocabulary and chat template differs.
    """
    pairs = (
        ("tokenizer", info.tokenizer_sha256, folder.tokenizer_sha256),
        ("chat template", info.chat_template_sha256, folder.chat_template_sha256),
    )
    wrong = [f"{what} {data[:8]}… in the data, {own[:8]}… of the target" for what, data, own in pairs if data != own]
    if not wrong:
        return
    hint = f"hiddenstore prepare INPUT -o DATA --target {folder.name}"
    if info.tokenizer_sha256 == folder.tokenizer_sha256:
        hint += "; or, if prepare was given a template, collect with the same --template FILE"
    raise FormatError(
        f"the data was prepared for {info.target} and does not fit target {folder.label}: {'; '.join(wrong)}",
        kind="tokenizer-mismatch",
        hint=hint,
    )


def collect(
    options: CollectOptions, rank: Rank | None = None, drain: Drain | None = None, note: Callable[[str], None] = print
) -> CollectReport:
    """Capture every pending unit of this rank.

    Raises:
        ConfigError, FormatError, ConflictError: before anything is written.
        CaptureError: the target misbehaves; what is committed stays.
        InterruptError: ``drain`` asked to stop; the open unit is dropped, the same command resumes.
    """
    rank, drain = rank or Rank(), drain or Drain()
    prepared = PreparedInput.open(options.data)
    template = None if options.template is None else read_template(options.template)
    folder = open_target(options.target, options.revision, template)
    require_data_fits(prepared.info, folder)
    choice = choose_layers(options.layers, options.final, folder.num_layers)
    recipe = resolve_recipe(options.recipe, choice)
    if rank.is_first:
        note(choice.explained)
    target = load_target(folder, options.dtype, _local_device(options.device, rank))
    profile = profile_target(target, prepared, choice.final)
    engine = open_engine(options.engine, target, EngineOptions(choice.aux_layers, options.batch_tokens))
    capture = CaptureSpec(
        target=target.identity,
        aux_layers=choice.aux_layers,
        final=choice.final,
        final_norm=engine.final_norm,
        codecs=get_recipe(recipe),
    )
    check = CheckSpec(choice.aux_layers, engine.final_norm, _typical_norms(profile, choice.aux_layers, target))
    if options.recipe != AUTO:
        store = _create(options, target, capture)
    elif (settled := _stored_codecs(options.store)) is not None:
        store = _create(options, target, capture.model_copy(update={"codecs": settled}))
    else:
        found = calibrate(prepared, target, engine, check, capture, options.container, lambda: drain.requested)
        if rank.is_first:
            _say(found.advice, raw_bytes_per_token(capture), note)
        chosen = capture.model_copy(update={"codecs": get_recipe(found.advice.chosen)})
        store = _create_first(options, target, chosen)
        write_slice(store.fs, found.taken, capture)
        write_advice(store.fs, found.advice)
    write_profile(store.fs, profile)
    return CollectJob(store, prepared, target, engine, check, choice.final, rank, drain).run()


def _create(options: CollectOptions, target: LoadedTarget, capture: CaptureSpec) -> Store:
    recipe, files = recipe_name(capture.codecs), target.target_files()
    return create_store(options.store, capture, target.head.spec, recipe, files, options.container)


def _create_first(options: CollectOptions, target: LoadedTarget, capture: CaptureSpec) -> Store:
    """As ``_create``; where another rank on another device came to another recipe first, that one holds."""
    try:
        return _create(options, target, capture)
    except ConflictError:
        settled = _stored_codecs(options.store)
        if settled in (None, capture.codecs):
            raise
        return _create(options, target, capture.model_copy(update={"codecs": settled}))


def _stored_codecs(location: str | Path) -> Codecs | None:
    """The codecs of the store that is there, None where there is none."""
    try:
        return Store.open(location, strict=False).capture.codecs
    except NotFoundError:
        return None


def _say(advice: Advice, bytes_raw: int, note: Callable[[str], None]) -> None:
    for line in (*table_lines(advice, bytes_raw), verdict(advice), smaller_line(advice)):
        if line is not None:
            note(line)


@dataclass
class CollectJob:
    """One rank's share of one input, everything opened."""

    store: Store
    prepared: PreparedInput
    target: LoadedTarget
    engine: CaptureEngine
    check: CheckSpec
    final: FinalMode
    rank: Rank
    drain: Drain

    def __post_init__(self) -> None:
        self._digest = register_input(self.store, self.prepared)
        self._described = self.engine.describe()
        records = [record for record in self.store.commits() if record.input == self._digest]
        earlier = [reject for record in records for reject in record.rejects]
        self._budget = RejectBudget(self.prepared.info.samples, earlier)
        self.report = CollectReport(self.store.path, self._digest)

    def run(self) -> CollectReport:
        """Capture, check, encode and commit; see ``collect`` for what it raises."""
        began = time.monotonic()
        mine, total_tokens = self._my_units()
        label = "collect" if self.rank.world_size == 1 else f"collect {self.rank}"
        with (
            Progress(label, total_tokens, "tokens") as progress,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit") as worker,
        ):
            behind: Future[CommitRecord | None] | None = None
            try:
                for unit in self._units(mine):
                    requests = requests_of(unit.samples, self.final)
                    captured = self._forward(requests)
                    self._settle(behind, progress)
                    behind = worker.submit(self._commit, unit, requests, captured)
                    del captured
            except InterruptError:
                # The open unit is dropped; the one in the worker is whole and is kept.
                self._settle(behind, progress)
                raise
            self._settle(behind, progress)
        self.report.pending_units = len(pending_units(self.store, self._digest))
        self.report.seconds = time.monotonic() - began
        return self.report

    def _forward(self, requests: list[CaptureRequest]) -> Captured:
        began = time.monotonic()
        captured = self.engine.capture(requests, lambda: self.drain.requested)
        self.report.forward_s += time.monotonic() - began
        return captured

    def _settle(self, behind: "Future[CommitRecord | None] | None", progress: Progress) -> None:
        """Wait for the unit in the worker, so that at most two units are in memory, and count it."""
        if behind is None:
            return
        began = time.monotonic()
        record = behind.result()
        self.report.wait_s += time.monotonic() - began
        if record is None:
            return
        report = self.report
        report.units += 1
        report.samples += len(record.samples)
        report.tokens += record.tokens
        report.bytes_stored += record.bytes_stored
        report.rejects.update(reject.reason for reject in record.rejects)
        rejected_tokens = sum(reject.tokens for reject in record.rejects)
        progress.advance(record.tokens + rejected_tokens, samples=report.samples, rejects=report.rejects.total())

    def _commit(self, unit: Unit, requests: list[CaptureRequest], captured: Captured) -> CommitRecord | None:
        """Check, encode and publish one unit; runs in the worker thread."""
        rows = [request.final_rows for request in requests]
        rejects = check_unit(unit.samples, captured, rows, self.target.head, self.check)
        self._budget.spend(rejects)
        refused = {reject.id for reject in rejects}
        capture, head = self.store.capture, self.target.head
        records = [
            record
            for record in records_of(unit.samples, requests, captured, self.final)
            if record.sample.id not in refused
        ]
        if unit.index == 0:
            self._keep_slice(records)
        records = [with_top_tokens(record, head, capture) for record in records]
        return write_unit(self.store, unit.name, self._digest, records, rejects, self._described)

    def _keep_slice(self, records: Sequence[Record]) -> None:
        """The first unit is where the slice comes from, whoever captures it and however often; once kept it stays."""
        taken = take_slice(records, self.store.capture)
        if taken is not None:
            write_slice(self.store.fs, taken, self.store.capture)

    def _my_units(self) -> tuple[frozenset[str], int]:
        """Names of this rank's pending units, and their tokens."""
        registered = RegisteredInput(self.store.fs, self._digest)
        pending = set(pending_units(self.store, self._digest))
        self.report.resumed_units = len(registered.units) - len(pending)
        share = registered.units[self.rank.rank :: self.rank.world_size]
        mine = frozenset(name for name in share if name in pending)
        rows = zip(registered.table["unit"].to_pylist(), registered.table["tokens"].to_pylist(), strict=True)
        return mine, sum(tokens for unit, tokens in rows if unit in mine)

    def _units(self, mine: frozenset[str]) -> Iterator[Unit]:
        if not mine:
            return
        for unit in self.prepared.units(unit_tokens(self.store.capture)):
            if self.drain.requested:
                raise InterruptError("stopped by a signal", kind="interrupted")
            # A second job on the same store may have committed it since.
            if unit.name in mine and self.store.fs.size(commit_path(unit.name)) is None:
                yield unit


def profile_target(target: LoadedTarget, prepared: PreparedInput, final: FinalMode) -> LayerProfile:
    """Run the first tokens of the first sample, verify the target's parts on them and sketch every layer.

    Enough of them to reach an answer, so that the rows of the final hidden that the store keeps are sketched too.

    Raises:
        ConfigError: ``data-empty``, or as ``verify_parts``.
        CaptureError: as ``verify_parts``.
    """
    sample = next(iter(prepared.samples()), None)
    if sample is None:
        raise ConfigError(f"{prepared.folder} holds no samples", kind="data-empty")
    ids = sample.input_ids[:PROFILED_TEXT]
    held = final_row_positions(sample.loss_mask, final)
    held = held[held < len(ids)]
    batch = torch.from_numpy(ids.astype(np.int64))[None].to(target.device)
    probe = verify_parts(target.model, target.parts, batch, target.identity.model_type)
    return make_profile(sample.id, ids, probe.states, probe.normed, held if len(held) else None)


def _typical_norms(profile: LayerProfile, layers: tuple[int, ...], target: LoadedTarget) -> tuple[float, ...]:
    """Median row norm of each layer without the first token; empty when the profile has too few tokens to tell."""
    if len(profile.tokens) < MIN_PROFILED_TOKENS:
        return ()
    width = target.head.hidden_size
    return tuple(float(np.median(profile.layers[layer + 1].rms[1:])) * width**0.5 for layer in layers)


def _local_device(device: str, rank: Rank) -> str:
    if device == "auto" and torch.cuda.is_available():
        return f"cuda:{rank.local_rank % torch.cuda.device_count()}"
    return device
