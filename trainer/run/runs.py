"""Finding what a trained run says about itself, without loading its weights."""

from dataclasses import dataclass
from pathlib import Path

from hiddenstore.documents import unseal
from hiddenstore.errors import CorruptionError, NotFoundError
from hiddenstore.store import Store
from schemas.manifest import Snapshot
from trainer.run.checkpoint import DRAFTER_JSON, DrafterSpec, latest

SNAPSHOT = "snapshot.json"


@dataclass(frozen=True)
class RunInfo:
    """A checkpoint folder and its ``drafter.json``."""

    checkpoint: Path
    spec: DrafterSpec

    @property
    def run(self) -> Path:
        """The run folder; checkpoints lie in RUN/checkpoints/step-N."""
        return self.checkpoint.parent.parent


def describe(run_or_checkpoint: str | Path) -> RunInfo:
    """The newest checkpoint of a run, or the one given.

    Raises:
        NotFoundError: no checkpoint there.
        CorruptionError: ``drafter.json`` is missing or damaged.
    """
    path = Path(run_or_checkpoint)
    folder = path if (path / DRAFTER_JSON).is_file() else latest(path)
    if folder is None:
        raise NotFoundError(
            f"{path} is no run with a checkpoint", kind="checkpoint-missing", hint=f"hiddenstore train STORE -o {path}"
        )
    document = folder / DRAFTER_JSON
    if not document.is_file():
        raise CorruptionError(f"{document} is missing", kind="checkpoint-corrupt", path=str(document))
    return RunInfo(folder, unseal(document.read_bytes(), DrafterSpec, str(document)))


def training_store(info: RunInfo) -> Store | None:
    """The store a run was trained on, at the run's snapshot; None when it is not there any more."""
    snapshot = info.run / SNAPSHOT
    if not snapshot.is_file():
        return None
    try:
        return Store.open(info.spec.store, unseal(snapshot.read_bytes(), Snapshot, str(snapshot)))
    except NotFoundError:
        return None
