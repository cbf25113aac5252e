"""The folder of a run: its files, what it is trained on and starts from, and whether it may be made or continued."""

import re
import secrets
import shlex
import shutil
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from torch import Tensor

from hiddenstore import settings
from hiddenstore.console.output import output
from hiddenstore.data import Cursor
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.files.documents import seal, sha256_hex, unseal
from hiddenstore.files.layout import kind_of
from hiddenstore.files.lock import FolderLock
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.disk import read_whole
from hiddenstore.fs.publish import make_folder, new_folder, replace_file, tree_files
from hiddenstore.fs.seam import storage_error
from hiddenstore.index.catalog import saved_snapshots
from hiddenstore.index.table import SPLITS
from hiddenstore.records import facts_table
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import identity_differences
from hiddenstore.verify.profile import share_profile, target_differences, unstated_warning
from hiddenstore.verify.structure import require_files
from schemas.base import Document
from schemas.capture import CaptureSpec, NormState, TargetIdentity
from schemas.manifest import Snapshot
from trainer.config import DrafterConfig, LoopConfig, TrainConfig
from trainer.drafters import check_store, drafter_kind, refuse_target
from trainer.drafters.base import Drafter, DrafterInUse
from trainer.losses.teacher import TargetInterface
from trainer.presets import settings_file
from trainer.settings import config_class, load_config, refuse_overruled, with_precision
from trainer.train import checkpoint
from trainer.train.checkpoint import DrafterSpec
from trainer.train.epochs import branch_name, last_read, snapshot_of
from trainer.train.log import METRICS
from trainer.train.storage import CACHE_BYTES, Mirror, through_cache
from trainer.train.track import require_trackers
from trainer.vocab import DraftVocab

CONFIG, SNAPSHOT, RUN_JSON = "config.yaml", "snapshot.json", "run.json"

FROM_THE_TARGET = ("embed_tokens.weight",)
"""Tensors that start as the target's where the other drafter shared them with its target."""

_SEAL = "# sha256 of the lines above: "
"""Begins the last line of ``config.yaml``, a comment to every reader of YAML."""

EXPORTS = "exports"
"""Folder of a run that holds what ``hiddenstore serve`` exported of it."""

_HINT_FOLLOW = "leave the drafter.* settings out: they follow from the start"


@dataclass(frozen=True)
class TrainOptions:
    """How `train` was called. ``words`` are ``key.path=value`` settings, ``file`` a YAML file of them or a preset;
    ``snapshot``: of the store, what a new run begins with.

    ``cache``: a local folder of at most ``cache_bytes`` for what is read of a store on object storage. ``mirror``: an
    address that gets a copy of each checkpoint.
    """

    store: str | Path
    run: Path
    drafter: str | None = None
    file: str | Path | None = None
    words: Sequence[str] = ()
    resume: bool = False
    snapshot: str | None = None
    cache: str | Path | None = None
    cache_bytes: int = CACHE_BYTES
    mirror: str | None = None

    def command(self, *words: str, run: Path | str | None = None) -> str:
        """``hiddenstore train`` of this store into ``run``, its own where none is given, as a shell takes it."""
        return shlex.join(["hiddenstore", "train", str(self.store), "-o", str(run or self.run), *words])

    @property
    def resume_command(self) -> str:
        words = ["--resume"]
        words += [] if self.mirror is None else ["--mirror", self.mirror]
        words += [] if self.cache is None else ["--cache", str(self.cache)]
        words += [] if self.cache_bytes == CACHE_BYTES else ["--cache-bytes", str(self.cache_bytes)]
        return self.command(*words)

    def open_mirror(self) -> Mirror | None:
        """Where the checkpoints are copied to, None for nowhere."""
        names = (CONFIG, SNAPSHOT, checkpoint.VOCAB, RUN_JSON)
        return None if self.mirror is None else Mirror(self.run, self.mirror, names, (RUN_JSON, SNAPSHOT))

    def open_store(self, snapshot: Snapshot | str | None = None) -> Store:
        """The store, through the cache where there is one; raises as ``Store.open``."""
        return Store.open(through_cache(self.store, self.cache, self.cache_bytes), snapshot)


class StartFacts(Document):
    """The checkpoint a run started from, as ``run.json`` names it. ``sha256``: of its drafter.safetensors."""

    path: str
    step: int
    sha256: str


@dataclass(frozen=True)
class RunInfo:
    """A checkpoint folder and its ``drafter.json``."""

    checkpoint: Path
    spec: DrafterSpec

    @property
    def run(self) -> Path:
        """The run folder; checkpoints lie in RUN/checkpoints/step-N."""
        return self.checkpoint.parent.parent

    def _repr_html_(self) -> str:
        spec = self.spec
        drafter = spec.drafter
        facts = {"drafter": drafter.name, "step": spec.step, "target": spec.target.name, "store": spec.store}
        return facts_table(f"Run {self.run}", {**facts, "aux layers": ", ".join(map(str, drafter.aux_layers))})

    @property
    def lost_store(self) -> str:
        """What is said where ``training_store`` gives none."""
        return f"{self.spec.store} no longer holds what {self.run} was trained on"

    def vocab(self, target_size: int) -> DraftVocab:
        """Its draft vocabulary, out of the ``target_size`` tokens of its target; raises as ``vocab_of``."""
        return vocab_of(self.run, target_size)

    def start_facts(self) -> StartFacts:
        """What a run that starts from it records."""
        state = checkpoint.read_state(self.checkpoint)
        path = str(self.checkpoint.resolve())
        return StartFacts(path=path, step=state.step, sha256=state.files[checkpoint.DRAFTER])


def describe(run_or_checkpoint: str | Path) -> RunInfo:
    """The newest checkpoint of a run, or the one given. Raises NotFoundError: no checkpoint there; CorruptionError:
    ``drafter.json`` is missing or damaged."""
    path = checkpoint.resolve(Path(run_or_checkpoint))
    return RunInfo(path, checkpoint.read_spec(path))


def training_store(info: RunInfo) -> Store | None:
    """The store a run was trained on, at what its checkpoint has read; None when nothing or another store lies there
    now."""
    path = info.run / SNAPSHOT
    if not path.is_file():
        return None
    snapshot = run_snapshot(info.run)
    fs = open_filesystem(info.spec.store)
    try:
        cursor = Cursor.from_json(checkpoint.read_state(info.checkpoint).cursor)
        return Store.open(fs, snapshot_of(fs, snapshot.name, cursor) or snapshot)
    except NotFoundError:
        return None
    except CorruptionError as error:
        # The store itself knows the run by its snapshot, which keeps what it names.
        is_another = snapshot.name not in saved_snapshots(fs)
        if is_another and error.kind in (Kind.COMMIT_MISSING, Kind.SNAPSHOT_MISMATCH):
            return None
        raise


def run_snapshot(run: Path) -> Snapshot:
    """What a run began with: the commits of its first epoch, and the name they have as a snapshot of the store."""
    try:
        data = read_whole(run / SNAPSHOT)
    except FileNotFoundError as error:
        raise CorruptionError(f"{run} lacks {SNAPSHOT}", kind=Kind.RUN_CORRUPT, path=str(run)) from error
    return unseal(data, Snapshot, str(run / SNAPSHOT))


def configured_start(file: str | Path | None, words: Sequence[str]) -> RunInfo | None:
    """What ``train.init_from`` names in the settings file or the words."""
    values = [value for _, value in settings.assignments("train.init_from", file, words)]
    return describe(str(values[-1])) if values and values[-1] is not None else None


def check_start(start: RunInfo, store: Store, config: DrafterConfig) -> None:
    """Refuse to start from a drafter of another target, other layers or another vocabulary than ``config`` says. Raises
    ConfigError: ``init-differs``, naming what was expected and found."""
    trained_for, trained_on = start.spec.target, training_store(start)
    differences = [f"target.{line}" for line in target_differences(trained_for, store, trained_on)]
    for name in ("aux_layers", "vocab_size"):
        actual, expected = getattr(start.spec.drafter, name), getattr(config, name)
        if actual != expected:
            differences.append(f"drafter.{name}: {_text(expected)} asked for, {_text(actual)} found")
    if config.vocab_file is not None:
        differences.append(f"drafter.vocab_file: {config.vocab_file}, but the draft vocabulary is that of the start")
    if differences:
        problem = f"train.init_from={start.checkpoint} is not a start for this drafter"
        raise _differs(problem, differences, _HINT_FOLLOW)
    if warning := unstated_warning(trained_for, store.capture.target, share_profile(trained_on, store)):
        output().warn(warning)


def load_start(model: "Drafter", start: RunInfo) -> None:
    """Put the weights of ``start`` into a fresh drafter. Raises ConfigError: ``init-differs``, naming every tensor that
    does not fit."""
    problem = f"train.init_from={start.checkpoint} is not a start for this drafter"
    load_weights(model, checkpoint.load(start.checkpoint).drafter, problem, _HINT_FOLLOW)


def load_weights(model: "Drafter", weights: Mapping[str, Tensor], problem: str, hint: str | None = None) -> None:
    """Fill a fresh drafter; embeddings that ``weights`` lack stay the target's. Raises ConfigError: ``init-differs``:
    ``problem``, then every tensor that does not fit."""
    wrong = checkpoint.misfits(model, weights)
    differences = [f"{name}: {what}" for name, what in wrong.items() if name in weights or name not in FROM_THE_TARGET]
    if differences:
        raise _differs(problem, differences, hint)
    model.load_state_dict({**model.state_dict(), **weights})


def started_from(run: Path) -> RunInfo | None:
    """What a run was started from; None when it began at random. Raises NotFoundError: that is not there any more;
    ConflictError: it has changed since."""
    recorded = read_facts(run).init_from if (run / RUN_JSON).is_file() else None
    if recorded is None:
        return None
    start = describe(recorded.path)
    if start.start_facts() != recorded:
        raise ConflictError(f"{recorded.path} is not what {run} was started from any more", kind=Kind.INIT_CHANGED)
    return start


def _differs(problem: str, differences: Sequence[str], hint: str | None) -> ConfigError:
    return ConfigError(f"{problem}:\n" + "\n".join(differences), kind=Kind.INIT_DIFFERS, hint=hint)


def _text(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


class RunFacts(Document):
    """``run.json``: where the states came from. ``vocab_coverage``: share of supervised tokens the drafter knows.
    ``vocab_sha256``: of the file of its draft vocabulary, None of a run that named none. ``init_from``: the checkpoint
    whose weights it started from; ``imported_from``: the folder it was read from; ``id``: what trackers know it by."""

    store: str
    capture: CaptureSpec
    vocab_coverage: float
    vocab_sha256: str | None = None
    init_from: StartFacts | None = None
    imported_from: str | None = None
    id: str = ""


def refuse_existing(run: Path, hint: str) -> None:
    """ConflictError ``output-exists`` where a folder holds a run, or somebody's files under names that a run has, or is
    a store or DATA, which no command would take for a run."""
    if (other := kind_of(run)) in ("store", "data"):
        problem = (
            f"{run} holds {'a store' if other == 'store' else 'prepared data'}, and no run is looked for beside it"
        )
        raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint="give another -o folder")
    newest = checkpoint.latest(run)
    if newest is not None and not (run / RUN_JSON).exists():
        problem = f"{run} holds checkpoints, {newest.name} the newest, of a run whose {RUN_JSON} is missing"
        hint = f"put {RUN_JSON} back, or {shlex.join(['mv', str(run), f'{run}-aside'])}"
        raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=hint)
    if newest is not None or (run / RUN_JSON).exists():
        at = f"with {newest.name} its newest checkpoint" if newest is not None else "without a checkpoint yet"
        problem = f"{run} holds a run already, {at}; --resume continues it, another -o starts a new one"
        raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint=hint)
    # A run that was killed while it was made has its vocabulary, which comes first.
    others = [name for name in (CONFIG, SNAPSHOT, METRICS) if (run / name).exists()]
    if others and not (run / checkpoint.VOCAB).exists():
        problem = f"{run} holds {' and '.join(others)} that no run wrote, and a run would write over it"
        raise ConflictError(problem, kind=Kind.OUTPUT_EXISTS, hint="give another -o folder")


def open_new(options: TrainOptions) -> tuple[Store, TrainConfig]:
    """The store and the resolved settings of a run that does not exist yet; writes nothing."""
    refuse_existing(options.run, options.resume_command)
    store = options.open_store(options.snapshot)
    file = None if options.file is None else settings_file(options.file)
    start = configured_start(file, options.words)
    config = load_config(store, options.drafter, file, options.words, start.spec.drafter if start else None)
    if start is not None:
        check_start(start, store, config.drafter)
        # The very checkpoint: a resume must not start from what that run has become since.
        loop = config.train.model_copy(update={"init_from": str(start.checkpoint.resolve())})
        config = config.model_copy(update={"train": loop})
    kind = drafter_kind(config.drafter.name)
    needs = kind.needs(config.drafter, config.loss)
    check_store(config.drafter.name, needs, store.capture, store.path)
    if kind.begins_as_the_target_s and start is None:
        raise ConfigError(
            f"{kind.name} trains the target's own layer on, and nothing names the checkpoint that holds it",
            kind=Kind.START_MISSING,
            hint=options.command("--drafter", kind.name, "--target", "TARGET"),
        )
    require_files(store)
    require_trackers(config.train)
    _require_validation(store, config.train)
    return store, with_precision(config)


def create(
    path: Path,
    store: Store,
    config: TrainConfig,
    vocab: DraftVocab,
    covered: float,
    *,
    lock: FolderLock,
    imported_from: str | None = None,
) -> None:
    """Write what a run is before its first step; ``run.json`` last, which marks the folder as complete. The store gets
    the run's snapshot. Raises ConflictError: ``run-in-use``, ``output-exists``: another process came first;
    StorageError: ``store-read-only``, where the run is to follow the store."""
    start = None if config.train.init_from is None else describe(config.train.init_from)
    vocab_bytes = vocab.save_bytes()
    facts = RunFacts(
        store=store.fs.address,
        capture=store.capture,
        vocab_coverage=covered,
        vocab_sha256=sha256_hex(vocab_bytes),
        init_from=start and start.start_facts(),
        imported_from=imported_from,
        id=secrets.token_hex(8),
    )
    # Random digits: a folder that is emptied and trained in anew is another run.
    snapshot = store.snapshot(f"run-{re.sub('[^A-Za-z0-9._-]', '-', path.name)[:60]}-{secrets.token_hex(4)}")
    files = {
        checkpoint.VOCAB: vocab_bytes,
        CONFIG: _sealed(config),
        SNAPSHOT: seal(snapshot),
        RUN_JSON: seal(facts),
    }
    is_new = not path.exists()
    make_folder(path)
    try:
        lock.take()
    except OSError:
        # Without the lock nothing here is ours but an empty folder.
        with suppress(OSError):
            if is_new:
                path.rmdir()
        raise
    refuse_existing(path, "give another -o folder")
    (path / METRICS).unlink(missing_ok=True)
    try:
        pin(store, snapshot.name, must=config.train.follow)
        for name, data in files.items():
            replace_file(path / name, data)
    except OSError:
        for name in files:
            (path / name).unlink(missing_ok=True)
        if is_new:
            lock.release()
            path.rmdir()
        raise


def pin(store: Store, name: str, *, must: bool = False) -> None:
    """Publish what ``store`` sees as its snapshot ``name``, so that gc leaves the segments a run reads. Where the store
    cannot be written that is said. Raises StorageError: ``store-read-only``, where the run ``must``."""
    try:
        store.save_snapshot(name)
    except (StorageError, ConflictError) as error:
        if must:
            raise StorageError(
                f"{store.path} cannot be written ({error.message}), but a run that follows it publishes there what "
                "each epoch reads",
                kind=Kind.STORE_READ_ONLY,
                hint="train without --follow, or on a copy of the store that can be written",
            ) from error
        output().warn(
            f"{store.path} cannot be written ({error.message}): it does not know of this run, and "
            f"{shlex.join(['hiddenstore', 'gc', store.path])} may sweep what a repair replaces while it trains"
        )


def read_facts(run: Path) -> RunFacts:
    """``run.json``, checked."""
    return unseal(read_whole(run / RUN_JSON), RunFacts, str(run / RUN_JSON))


def vocab_of(run: Path, target_size: int) -> DraftVocab:
    """The draft vocabulary of a run, whose rows its drafter's head has. Raises as ``DraftVocab.load``; CorruptionError
    ``vocab-corrupt``: that of another run has taken its place."""
    path = run / checkpoint.VOCAB
    vocab = DraftVocab.load(path, target_size)
    expected = read_facts(run).vocab_sha256 if (run / RUN_JSON).is_file() else None
    actual = sha256_hex(read_whole(path))
    if expected not in (None, actual):
        raise CorruptionError(
            f"{path} is not the draft vocabulary of this run: sha256 {actual[:16]}…, expected {expected[:16]}… by "
            f"{RUN_JSON}",
            kind=Kind.VOCAB_CORRUPT,
            path=str(path),
            hint="put the file of this run back; a drafter's head has a row for each of its tokens",
        )
    return vocab


def reopen(options: TrainOptions) -> tuple[Store, TrainConfig]:
    """The store at the run's snapshot and its settings; ``train.*`` alone may change."""
    path, anew = options.run, f"{options.run}-2"
    if not (path / RUN_JSON).is_file():
        problem = f"{path} is no run to resume: {RUN_JSON} is missing"
        raise NotFoundError(
            problem,
            kind=Kind.RUN_MISSING,
            hint=options.command(),
        )
    refused = [word for word in options.words if not word.startswith("train.") or word.startswith("train.init_from")]
    if options.file is not None or refused:
        changes = ", ".join([*([f"-c {options.file}"] if options.file is not None else []), *refused])
        raise ConfigError(
            f"{changes}: a resumed run keeps its settings ({path / CONFIG}) and where it started from; only train.* "
            "may change",
            kind=Kind.RESUME_SETTINGS,
            hint=f"other settings are another run: {options.command(run=anew)} …",
        )
    name = drafter_name(path)
    if options.drafter not in (None, name):
        raise ConfigError(
            f"{path} trains {name}, not {options.drafter}",
            kind=Kind.RESUME_SETTINGS,
            hint=options.command("--drafter", str(options.drafter), run=anew),
        )
    store = _same_store(options)
    config = settings.load(config_class(name), path / CONFIG, options.words)
    refuse_overruled(options.words, config.train, options.resume_command)
    config = with_precision(config, measure=any(word.startswith("train.precision=") for word in options.words))
    require_trackers(config.train)
    _require_validation(store, config.train)
    pin(store, run_snapshot(path).name, must=config.train.follow)
    return store, config


def keep_settings(options: TrainOptions, config: TrainConfig) -> None:
    """Have a run go on with the ``train.*`` words that it was resumed with, once nothing refused them."""
    if options.resume and options.words:
        replace_file(options.run / CONFIG, _sealed(config))


def _sealed(config: TrainConfig) -> bytes:
    text = settings.dump(config)
    return f"{text}{_SEAL}{sha256_hex(text.encode())}\n".encode()


def settings_bytes(run: Path) -> bytes:
    """``config.yaml`` of a run; FileNotFoundError where there is none. Raises CorruptionError: ``run-corrupt``: it is
    not what the run wrote; runs of earlier versions did not say what that was."""
    data = read_whole(run / CONFIG)
    text, seal_mark, digest = data.rpartition(_SEAL.encode())
    if seal_mark and sha256_hex(text).encode() != digest.strip():
        raise CorruptionError(
            f"{run / CONFIG} is not what the run wrote: its last line gives another sha256 than its settings have",
            kind=Kind.RUN_CORRUPT,
            path=str(run / CONFIG),
            hint="put it back; --resume train.KEY=VALUE changes settings; without its last line it is taken as it is",
        )
    return data


def _require_validation(store: Store, config: LoopConfig) -> None:
    """Refuse to wait for validations that never come."""
    if config.patience is not None and not (store.catalog.table.split == SPLITS.index("validation")).any():
        raise ConfigError(
            f"train.patience waits for validations, but {store.path} holds no validation samples",
            kind=Kind.VALIDATION_MISSING,
            hint="hiddenstore prepare INPUT -o DATA --target T --val 1%",
        )


def drafter_name(run: Path) -> str:
    """The kind of drafter a run trains. Raises CorruptionError: ``run-corrupt``; StorageError: the disk refused."""
    try:
        name = settings.parse(settings_bytes(run))["drafter"]["name"]
        if not isinstance(name, str):
            raise TypeError(f"its name is a {type(name).__name__}")
        return name
    except (yaml.YAMLError, KeyError, TypeError, FileNotFoundError) as error:
        raise CorruptionError(f"{run / CONFIG} names no drafter: {error}", kind=Kind.RUN_CORRUPT) from error
    except OSError as error:
        raise storage_error(error, str(run / CONFIG)) from error


def _same_store(options: TrainOptions) -> Store:
    """The store the run was trained on, wherever it lies now, at the run's snapshot."""
    facts = read_facts(options.run)
    store = options.open_store(options.snapshot)
    problem = f"{store.path} is not the store {options.run} was trained on ({facts.store})"
    hint = shlex.join(["hiddenstore", "train", facts.store, "-o", str(options.run), "--resume"])
    differences = [f"target.{line}" for line in identity_differences(facts.capture.target, store.capture.target)]
    for name in ("aux_layers", "final", "final_norm", "state_dtype", "codecs"):
        expected, actual = getattr(facts.capture, name), getattr(store.capture, name)
        if expected != actual:
            differences.append(f"{name}: {expected} expected, {actual} found")
    if differences:
        raise ConflictError(f"{problem}:\n" + "\n".join(differences), kind=Kind.RESUME_STORE, hint=hint)
    try:
        return options.open_store(run_snapshot(options.run))
    except CorruptionError as error:
        if store.fs.address == facts.store:
            raise
        raise ConflictError(
            f"{problem}, nor a copy of it: {error.message}", kind=Kind.RESUME_STORE, hint=hint
        ) from error


@dataclass(frozen=True, eq=False)
class LoadedDrafter(DrafterInUse):
    """In evaluation mode, its frozen tables shared with the head bundle. ``step``: optimizer steps it was trained."""

    identity: TargetIdentity
    step: int

    @property
    def vocab(self) -> DraftVocab:
        return self.target.vocab

    @property
    def head(self) -> HeadBundle:
        return self.target.head


def load_drafter(
    run_or_checkpoint: str | Path,
    device: str | torch.device = "cpu",
    *,
    head: HeadBundle | None = None,
    final_norm: NormState = "pre_norm",
    untrained: bool = False,
) -> LoadedDrafter:
    """The drafter of a run (its newest checkpoint) or of one ``step-N`` folder. The head bundle comes from the store
    the run names unless ``head`` is given. ``final_norm`` is the norm state of the final hidden the drafter will be
    shown. ``untrained`` gives the drafter the run started from instead. Raises NotFoundError: no checkpoint there;
    CorruptionError: the checkpoint or vocabulary is damaged."""
    info = describe(run_or_checkpoint)
    saved, spec = checkpoint.load(info.checkpoint), info.spec
    head = head or _head_of_store(spec)
    target = TargetInterface(head, info.vocab(head.vocab_size), final_norm)
    kind = drafter_kind(spec.drafter.name)
    model = kind.build(spec.drafter, target, spec.seed)
    if not untrained:
        checkpoint.fill(model, saved)
    elif (start := started_from(info.run)) is not None:
        load_start(model, start)
    target = TargetInterface(head.to(device), target.vocab.to(device), final_norm)
    model.to(device).eval()
    model.tie_weights(target.head)
    return LoadedDrafter(kind, model, target, spec.target, 0 if untrained else saved.state.step)


def _head_of_store(spec: checkpoint.DrafterSpec) -> HeadBundle:
    store = Store.open(spec.store)
    found = store.capture.target.name
    problem = (
        f"{spec.store} now holds states of {found}, the drafter was trained for another capture of {spec.target.name}"
    )
    refuse_target(identity_differences(spec.target, store.capture.target), problem)
    return store.head()


def branch(earlier: Path, run: Path) -> None:
    """Make ``run`` what the run of the checkpoint ``earlier`` was when it was saved; a resume drops the metrics that
    came after. Its snapshot is of the same commits, under a name that says where it left the other run. Raises
    ConflictError: ``output-exists``: ``run`` holds a run; CorruptionError: the checkpoint is damaged. NotFoundError:
    ``checkpoint-missing``: there is none."""
    start = checkpoint.resolve(earlier)
    cursor = Cursor.from_json(checkpoint.load(start).state.cursor)
    snapshot = run_snapshot(start.parent.parent)
    name = branch_name(snapshot.name, last_read(cursor))
    with new_folder(run, lambda path: refuse_existing(path, "give another -o folder")) as folder:
        _copy_files(start.parent.parent, folder, left_out={checkpoint.FOLDER, EXPORTS, "wandb", "mlflow.db"})
        facts = read_facts(start.parent.parent).model_copy(update={"id": secrets.token_hex(8)})
        replace_file(folder / RUN_JSON, seal(facts))
        replace_file(folder / SNAPSHOT, seal(snapshot.model_copy(update={"name": name})))
        _copy_files(start, folder / checkpoint.FOLDER / start.name)
        (folder / checkpoint.FOLDER / checkpoint.LATEST).write_text(f"{start.name}\n", encoding="utf-8")


def _copy_files(source: Path, out: Path, left_out: Set[str] = frozenset()) -> None:
    """Copy a folder's files but hidden ones and what of the folder itself is ``left_out``. ``shutil.copytree`` would go
    on after an error, and not say its number."""
    for path in tree_files(source):
        name = path.relative_to(source)
        if name.parts[0] not in left_out and not any(part.startswith(".") for part in name.parts):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, out / name)
