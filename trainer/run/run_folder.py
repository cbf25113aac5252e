"""The folder of a run: what it was asked for, what it was trained on, and whether it may be made or continued."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from hiddenstore import config as settings
from hiddenstore.documents import seal, unseal
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError
from hiddenstore.identity import identity_differences
from hiddenstore.store import Store
from hiddenstore.verify.structure import require_files
from schemas.base import Document
from schemas.capture import CaptureSpec
from schemas.manifest import Snapshot
from trainer.config import TrainConfig, config_class, load_config
from trainer.drafters import check_store, drafter_kind
from trainer.recipes import settings_file
from trainer.run import checkpoint
from trainer.run.run_log import METRICS
from trainer.run.warm_start import StartFacts, asked_start, check_start, read_start
from trainer.vocab import DraftVocab

CONFIG, SNAPSHOT, RUN_JSON = "config.yaml", "snapshot.json", "run.json"


@dataclass(frozen=True)
class Asked:
    """What the caller of a run said. ``words`` are ``key.path=value`` settings, ``file`` a YAML file of them."""

    store: str | Path
    run: Path
    drafter: str | None = None
    file: str | Path | None = None
    words: Sequence[str] = ()
    resume: bool = False

    @property
    def to_resume(self) -> str:
        return f"hiddenstore train {self.store} -o {self.run} --resume"


class RunFacts(Document):
    """``run.json``: where the states came from. ``vocab_coverage``: share of supervised tokens the drafter knows.

    ``init_from``: the checkpoint whose weights it started from; ``imported_from``: the folder it was read from."""

    store: str
    capture: CaptureSpec
    vocab_coverage: float
    init_from: StartFacts | None = None
    imported_from: str | None = None


def open_new(asked: Asked) -> tuple[Store, TrainConfig]:
    """The store and the resolved settings of a run that does not exist yet; writes nothing."""
    newest = checkpoint.latest(asked.run)
    if newest is not None or (asked.run / RUN_JSON).exists():
        at = f"with {newest.name} its newest checkpoint" if newest is not None else "without a checkpoint yet"
        raise ConflictError(
            f"{asked.run} holds a run already, {at}; --resume continues it, another -o starts a new one",
            kind="run-exists",
            hint=asked.to_resume,
        )
    store = Store.open(asked.store)
    file = None if asked.file is None else settings_file(asked.file)
    start = asked_start(file, asked.words)
    config = load_config(store, asked.drafter, file, asked.words, start.spec.drafter if start else None)
    if start is not None:
        check_start(start, store, config.drafter)
        # The very checkpoint: a resume must not start from what that run has become since.
        config = config.model_copy(update={"train": config.train.model_copy(update={"init_from": start.facts.path})})
    needs = drafter_kind(config.drafter.name).needs(config.drafter, config.loss)
    check_store(config.drafter.name, needs, store.capture, store.path)
    require_files(store)
    return store, config


def create(
    path: Path,
    store: Store,
    config: TrainConfig,
    vocab: DraftVocab,
    covered: float,
    *,
    imported_from: str | None = None,
) -> None:
    """Write what a run is before its first step; ``run.json`` last, which marks the folder as complete."""
    start = None if config.train.init_from is None else read_start(config.train.init_from).facts
    facts = RunFacts(
        store=str(Path(store.path).resolve()),
        capture=store.capture,
        vocab_coverage=covered,
        init_from=start,
        imported_from=imported_from,
    )
    files = {
        checkpoint.VOCAB: vocab.save_bytes(),
        CONFIG: settings.dump(config).encode(),
        SNAPSHOT: seal(store.snapshot(f"run-{path.name}")),
        RUN_JSON: seal(facts),
    }
    is_new = not path.exists()
    path.mkdir(parents=True, exist_ok=True)
    (path / METRICS).unlink(missing_ok=True)
    try:
        for name, data in files.items():
            checkpoint.write_atomically(path / name, data)
    except OSError:
        for name in files:
            (path / name).unlink(missing_ok=True)
        if is_new:
            path.rmdir()
        raise


def read_facts(run: Path) -> RunFacts:
    """``run.json``, checked."""
    return unseal((run / RUN_JSON).read_bytes(), RunFacts, str(run / RUN_JSON))


def reopen(asked: Asked) -> tuple[Store, TrainConfig]:
    """The store at the run's snapshot and its settings; only ``train.*`` may be given anew, and is kept."""
    path = asked.run
    if not (path / RUN_JSON).is_file():
        raise NotFoundError(
            f"{path} is no run to resume: {RUN_JSON} is missing",
            kind="run-missing",
            hint=f"hiddenstore train {asked.store} -o {path}",
        )
    refused = [word for word in asked.words if not word.startswith("train.") or word.startswith("train.init_from")]
    if asked.file is not None or refused:
        given = ", ".join([*([f"-c {asked.file}"] if asked.file is not None else []), *refused])
        raise ConfigError(
            f"{given}: a resumed run keeps its settings ({path / CONFIG}) and where it started from; only train.* may "
            "change",
            kind="resume-settings",
            hint=f"other settings are another run: hiddenstore train {asked.store} -o {path}-2 …",
        )
    name = _drafter_name(path)
    if asked.drafter not in (None, name):
        raise ConfigError(
            f"{path} trains {name}, not {asked.drafter}",
            kind="resume-settings",
            hint=f"hiddenstore train {asked.store} -o {path}-2 --drafter {asked.drafter}",
        )
    store = _same_store(asked)
    config = settings.load(config_class(name), path / CONFIG, asked.words)
    if asked.words:
        checkpoint.write_atomically(path / CONFIG, settings.dump(config).encode())
    return store, config


def _drafter_name(run: Path) -> str:
    try:
        return str(yaml.safe_load((run / CONFIG).read_bytes())["drafter"]["name"])
    except (yaml.YAMLError, KeyError, TypeError, OSError) as error:
        raise CorruptionError(f"{run / CONFIG} names no drafter: {error}", kind="run-corrupt") from error


def _same_store(asked: Asked) -> Store:
    """The store the run was trained on, wherever it lies now, at the run's snapshot."""
    facts = read_facts(asked.run)
    trained_on, recorded = facts.store, facts.capture
    found = Store.open(asked.store)
    differences = [f"target.{line}" for line in identity_differences(recorded.target, found.capture.target)]
    for name in ("aux_layers", "final", "final_norm", "state_dtype", "codecs"):
        want, have = getattr(recorded, name), getattr(found.capture, name)
        if want != have:
            differences.append(f"{name}: {want} expected, {have} found")
    hint = f"hiddenstore train {trained_on} -o {asked.run} --resume"
    if differences:
        raise ConflictError(
            f"{found.path} is not the store {asked.run} was trained on ({trained_on}):\n" + "\n".join(differences),
            kind="resume-store",
            hint=hint,
        )
    snapshot = unseal((asked.run / SNAPSHOT).read_bytes(), Snapshot, str(asked.run / SNAPSHOT))
    try:
        return Store.open(asked.store, snapshot)
    except CorruptionError as error:
        if str(Path(found.path).resolve()) == trained_on:
            raise
        raise ConflictError(
            f"{found.path} is not the store {asked.run} was trained on ({trained_on}), nor a copy of it: "
            f"{error.message}",
            kind="resume-store",
            hint=hint,
        ) from error
