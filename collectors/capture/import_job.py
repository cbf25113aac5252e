"""The import: a dump, read as prepared DATA and then collected with the dump as the engine; the same command goes on.

Nothing of the dump is touched unless ``delete_source`` asks for it, and then only files that still hold what a unit was
committed from that has been read back.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import torch

from collectors.capture.estimate import shortage
from collectors.capture.job import CollectJob, CollectReport, JobSettings, new_store, pending_tokens
from collectors.capture.options import require_data_fits
from collectors.checks.capture import CheckSpec
from collectors.checks.reference import (
    compare_with_store,
    open_reference,
    parse_check,
    profile_target,
    reference_states,
)
from collectors.engines.dump import find_format
from collectors.engines.dump.engine import Claims, DumpEngine
from collectors.engines.dump.matching import Matcher, PreparedTokens, exported_turns
from collectors.engines.dump.meaning import DumpMeaning, Evidence, check_layers, settle_meaning
from collectors.engines.dump.peer import PeerSource, Unusable
from collectors.engines.dump.scan import (
    SKIPPED,
    FileFacts,
    Scan,
    count_refused,
    covered_locations,
    dump_files,
    file_facts,
    files_read,
    finished_scans,
    scan_key,
)
from collectors.targets.load import EngineTarget, LoadedTarget, LoadOptions
from collectors.tokenize.template import read_template
from hiddenstore.codecs import get_codec
from hiddenstore.codecs.recipes import DEFAULT_RECIPE, get_recipe
from hiddenstore.errors import ConfigError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.inputs import PreparedInput
from hiddenstore.process import Drain, Rank
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.targets.blocks import require_rebuildable
from hiddenstore.targets.folder import open_target
from hiddenstore.targets.identity import CHECKPOINT
from schemas.capture import CaptureSpec, NormState
from schemas.manifest import CommitRecord, Container


@dataclass(frozen=True)
class ImportOptions:
    """What a person asks of ``hiddenstore import``.

    ``layers`` and ``peer_layers`` name the dump's columns, in our numbers or the peer's. ``tokens_from`` is prepared
    DATA of the same conversations; ``loss_on`` ``all`` supervises every token, whatever the dump masks. ``check`` as in
    ``collectors.checks.reference``: whether the layers are held against Hugging Face's.
    """

    source: str | Path
    peer: str
    store: str | Path
    target: str
    revision: str | None = None
    trust_remote_code: bool = False
    template: str | None = None
    layers: str | None = None
    peer_layers: str | None = None
    norm: NormState | None = None
    recipe: str = DEFAULT_RECIPE
    container: Container | None = None
    tokens_from: str | Path | None = None
    loss_on: str | None = None
    validation: float = 0.01
    max_rejects: float = 0.001
    check: str = "auto"
    delete_source: bool = False


@dataclass
class ImportReport(CollectReport):
    """What this run did over all ``inputs``; ``rounded`` samples were wider than bf16, ``padding`` rows left out;
    ``changed_files`` of those that remain hold something else than when they were read."""

    peer: str = ""
    explained: str = ""
    inputs: list[str] = field(default_factory=list)
    evidence: Evidence = field(default_factory=Evidence)
    final_norm: NormState | None = None
    skipped: Counter[str] = field(default_factory=Counter)
    padding: int = 0
    rounded: int = 0
    deleted_files: int = 0
    remaining_files: int = 0
    changed_files: int = 0

    def add_job(self, job: CollectReport) -> None:
        """Count the job of one pass over the dump."""
        self.input = job.input
        self.inputs.append(job.input)
        for name in ("units", "samples", "tokens", "bytes_stored", "rejects", "resumed_units", "pending_units"):
            setattr(self, name, getattr(self, name) + getattr(job, name))


def import_dump(
    options: ImportOptions, drain: Drain | None = None, note: Callable[[str], None] = print
) -> ImportReport:
    """Import every sample of a dump that the store does not hold yet. Raises ConfigError, FormatError, NotFoundError,
    ConflictError: before anything is written; CaptureError: ``too-many-rejects``; what is committed stays;
    InterruptError: ``drain`` asked to stop; the same command goes on."""
    began = time.monotonic()
    make_source, check = find_format(options.peer), parse_check(options.check)
    template = read_template(options.template)
    folder = open_target(options.target, options.revision, template, options.trust_remote_code)
    target = EngineTarget(replace(folder, runs_elsewhere=True), None)
    source = make_source(options.peer, Path(options.source), target.head.hidden_size)
    claims = Claims(options.layers, options.peer_layers, options.norm)
    meaning = settle_meaning(source, claims, target, _matcher(options, target), note)
    reference = open_reference(check, target, LoadOptions(None, "auto"), Rank())
    if reference.target is not None:
        count = check_layers(reference.target, meaning.probed, meaning.columns, meaning.norm)
        note(f"{count} samples recomputed with Hugging Face: every column is the layer it is named")
    elif reference.explained is not None:
        note(reference.explained)
    engine = DumpEngine(target, source, meaning.columns, meaning.norm if source.final else None)
    report = ImportReport(str(options.store), "", peer=source.name, explained=meaning.explained)
    report.evidence, report.final_norm = meaning.evidence, engine.final_norm
    job = ImportJob(options, meaning, engine, drain or Drain(), report)
    job.collect(reference.target, note)
    report.seconds = time.monotonic() - began
    return report


@dataclass(frozen=True)
class ImportJob:
    """A dump whose meaning is settled, on its way into a store; ``report`` is what was done so far."""

    options: ImportOptions
    meaning: DumpMeaning
    engine: DumpEngine
    drain: Drain
    report: ImportReport

    def _passes(self) -> Iterator[PreparedInput]:
        """The passes made before, and when they are collected one over what they do not cover: only then the store says
        of a file that has changed whether it holds its sample."""
        options, source, matcher = self.options, self.engine.source, self.meaning.matcher
        store = open_filesystem(options.store)
        key = scan_key(source.name, Path(options.source), *matcher.settings)
        scans, known = finished_scans(store, key), dump_files(source, self.meaning.locations)
        yield from scans
        covered = covered_locations(scans, source, known)
        locations = [location for location in self.meaning.locations if location not in covered]
        if not locations:
            return
        stop, target = lambda: self.drain.requested, self.engine.target
        scan = Scan(source, target, matcher, store, key, _membership(store), options.max_rejects, stop)
        prepared = scan.run(locations, known)
        self.report.padding = scan.tally.padding
        for reason, rows in scan.tally.rejects.items():
            (self.report.skipped if reason in SKIPPED else self.report.rejects)[reason] += rows
        if prepared is not None:
            yield prepared

    def collect(self, reference: LoadedTarget | None, note: Callable[[str], None]) -> None:
        """What is pending of every pass, through the collect job."""
        passes = self._passes()
        # A first pass that is refused leaves no store behind.
        first = next(passes, None)
        if first is None:
            return
        engine, report, meaning, options = self.engine, self.report, self.meaning, self.options
        layers, codecs = meaning.columns.aux_layers, get_recipe(options.recipe)
        # Nothing says which checkpoint made a dump, so nobody is warned that it was not compared.
        identity = engine.target.identity.model_copy(update={CHECKPOINT: None})
        require_rebuildable(codecs, layers, identity.num_layers)
        capture = CaptureSpec(
            target=identity, aux_layers=layers, final=meaning.final, final_norm=meaning.norm, codecs=codecs
        )
        store = new_store(options.store, options.container, engine.target, capture)
        profile = None if reference is None else profile_target(reference, first, meaning.final)
        compare_with_store(store, identity, reference_states(reference), profile, lambda _warning: None)
        check = CheckSpec(layers, meaning.norm, meaning.evidence.typical_norms, names_source=True)
        deleter = SourceDeleter(store, engine.source, meaning) if options.delete_source else None
        for prepared in chain([first], passes):
            allowed = max(1, int(prepared.info.rows_read * options.max_rejects)) - count_refused(prepared)
            settings = JobSettings("import", max(0, allowed), None if deleter is None else deleter.on_commit)
            with CollectJob(store, prepared, engine, check, None, Rank(), self.drain, settings) as job:
                if deleter is not None:
                    deleter.catch_up(prepared, job.digest)
                elif warning := shortage(store, prepared, pending_tokens(store, job.digest), "import"):
                    note(warning)
                report.add_job(job.run())
        report.rounded = engine.rounded
        if deleter is not None:
            report.deleted_files, report.remaining_files = deleter.deleted, deleter.remaining
            report.changed_files = deleter.changed


def _matcher(options: ImportOptions, target: EngineTarget) -> Matcher:
    if options.tokens_from is not None and options.loss_on is not None:
        raise ConfigError("masks come from --tokens-from or from --loss-on all, not both", kind=Kind.OPTION_INVALID)
    prepared = None
    if options.tokens_from is not None:
        data = PreparedInput.open(options.tokens_from)
        require_data_fits(data.info, target.folder)
        if data.info.images is not None:
            problem = f"{data.folder} holds images, and no dump says which image its states are of"
            hint = shlex.join(["hiddenstore", "collect", str(data.folder), "-o", "STORE"])
            raise ConfigError(problem, kind=Kind.OPTION_INVALID, hint=hint)
        prepared = PreparedTokens(data)
    return Matcher(prepared, exported_turns(Path(options.source)), options.loss_on == "all", options.validation)


def _membership(store: Filesystem) -> Callable[[str], bool]:
    try:
        return Store.open(store).__contains__
    except NotFoundError:
        return lambda _name: False


class SourceDeleter:
    """Knows what is only in each file of a dump: ``deleted`` files are gone, ``remaining`` are not all imported, or
    ``changed`` since they were read."""

    def __init__(self, store: Store, source: PeerSource, meaning: DumpMeaning) -> None:
        self._store, self._source, self._matcher = store, source, meaning.matcher
        self._left: dict[Path, set[str]] = {}
        for location in meaning.locations:
            self._left.setdefault(source.file_of(location), set()).add(location)
        # Ids by location, of files that hold more than what is committed so far.
        self._committed: dict[Path, dict[str, str]] = {}
        self._changed: set[Path] = set()
        self._read: dict[Path, FileFacts] | None = None
        self.deleted = 0

    @property
    def remaining(self) -> int:
        return sum(path.is_file() for path in self._left)

    @property
    def changed(self) -> int:
        return sum(path.is_file() for path in self._changed & self._left.keys())

    def on_commit(self, commit: CommitRecord, records: Sequence[Record]) -> None:
        """Read a unit back that was just committed; files that hold no sample outside the store are deleted."""
        read_back(self._store, commit, records)
        self._release((record.sample.source, record.sample.id) for record in records)

    def catch_up(self, prepared: PreparedInput, digest: str) -> None:
        """The same for units of an input that were committed before this run; what is committed next is of it too."""
        self._read = files_read(prepared, self._source.folder)
        locations = {sample.id: sample.source for sample in prepared.samples()}
        for commit in Store.open(self._store.fs).commits():
            if commit.input == digest:
                sources = [(locations[sample.id], sample.id) for sample in commit.samples if sample.id in locations]
                if any(self._is_as_read(self._source.file_of(location)) for location, _ in sources):
                    read_back(self._store, commit, ())
                self._release(sources)

    def _release(self, sources: Iterable[tuple[str, str]]) -> None:
        for location, name in sources:
            path = self._source.file_of(location)
            if (left := self._left.get(path)) is None or not self._is_as_read(path):
                continue
            left.discard(location)
            committed = self._committed.setdefault(path, {})
            committed[location] = name
            if left:
                continue
            # The time of a file may be copied with it, and older passes noted none.
            if others := {location for location, name in committed.items() if not self._holds(location, name)}:
                left |= others
                self._changed.add(path)
                continue
            del self._left[path], self._committed[path]
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                problem = f"{path} is imported but cannot be deleted: {error}"
                raise StorageError(problem, kind=Kind.SOURCE_UNDELETED) from error
            self.deleted += 1

    def _is_as_read(self, path: Path) -> bool:
        """Whether a file is there, and as the pass at hand read it as far as that says."""
        now = file_facts(path)
        is_same = now is not None and (self._read is None or self._read.get(path) == now)
        if now is not None and not is_same:
            self._changed.add(path)
        return is_same

    def _holds(self, location: str, name: str) -> bool:
        try:
            return self._matcher.sample(self._source.read(location, states=False), location).id == name
        except Unusable:
            return False


def read_back(store: Store, commit: CommitRecord, records: Sequence[Record]) -> None:
    """Decode every sample of a committed unit, compare exact codecs with ``records``; CorruptionError ``read-back``."""
    if not commit.samples:
        return
    capture, reader = store.capture, store.open_unit(commit)
    exact_aux = get_codec(capture.codecs.aux).exact
    exact_final = capture.stores_final and get_codec(capture.codecs.final).exact
    slots = [capture.aux_layers.index(layer) for layer in capture.stored_layers]
    written = {record.sample.id: record for record in records}
    counts = Counter(entry.id for entry in commit.samples)
    for index, entry in enumerate(commit.samples):
        stored, expected = reader.read(index), written.get(entry.id)
        if expected is None or counts[entry.id] > 1:
            continue
        same = not exact_aux or _equal(stored.aux, expected.aux[slots])
        if not same or (exact_final and not _equal(stored.final, expected.final)):
            raise CorruptionError(
                f"{store.path}/{commit.segment} does not give back sample {entry.id} as it was written",
                kind=Kind.READ_BACK,
                path=commit.segment,
                samples=(entry.id,),
                hint=f"check the disk; the source stays. hiddenstore verify {shlex.quote(store.path)} --full",
            )


def _equal(stored: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(stored.contiguous().view(torch.int16), expected.cpu().contiguous().view(torch.int16))
