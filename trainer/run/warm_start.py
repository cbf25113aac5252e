"""Starting from the weights of another run, of one of its checkpoints, or of an imported drafter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from hiddenstore import config as settings
from hiddenstore.documents import unseal
from hiddenstore.errors import ConfigError, ConflictError
from hiddenstore.identity import identity_differences
from schemas.base import Document
from trainer.config import DrafterConfig
from trainer.run import checkpoint
from trainer.vocab import DraftVocab

if TYPE_CHECKING:
    from hiddenstore.store import Store
    from trainer.drafters.base import Drafter

MAY_BE_NEW = ("embed_tokens.weight",)
"""Tensors that start from the target where the other drafter borrowed them."""


class StartFacts(Document):
    """What ``run.json`` keeps of it. ``sha256``: of its drafter.safetensors."""

    path: str
    step: int
    sha256: str


@dataclass(frozen=True)
class Start:
    """A checkpoint to start from."""

    path: Path
    spec: checkpoint.DrafterSpec
    facts: StartFacts

    def vocab(self, target_size: int) -> DraftVocab:
        """Its draft vocabulary: the rows of its head mean nothing under another."""
        return DraftVocab.load(self.path.parent.parent / checkpoint.VOCAB, target_size)

    def weights(self) -> dict[str, Tensor]:
        """Its weights, checked against their digest."""
        return checkpoint.load(self.path).drafter


def asked_start(file: str | Path | None, words: Sequence[str]) -> Start | None:
    """What ``train.init_from`` names in the settings file or the words."""
    said = settings.said("train.init_from", file, words)
    return read_start(str(said[-1][1])) if said and said[-1][1] is not None else None


def read_start(run_or_checkpoint: str | Path) -> Start:
    """The newest checkpoint of a run, or the one given.

    Raises:
        NotFoundError: no checkpoint there.
    """
    path = checkpoint.resolve(Path(run_or_checkpoint))
    document = path / checkpoint.DRAFTER_JSON
    spec = unseal(document.read_bytes(), checkpoint.DrafterSpec, str(document))
    state = checkpoint.read_state(path)
    facts = StartFacts(path=str(path.resolve()), step=state.step, sha256=state.files[checkpoint.DRAFTER])
    return Start(path, spec, facts)


def check_start(start: Start, store: "Store", wanted: DrafterConfig) -> None:
    """Refuse a drafter of another target, other layers or another vocabulary than the run is to have.

    Raises:
        ConfigError: ``init-differs``, naming what was expected and found.
    """
    differences = [f"target.{line}" for line in identity_differences(start.spec.target, store.capture.target)]
    other = start.spec.drafter
    for name in ("aux_layers", "vocab_size"):
        have, asked = getattr(other, name), getattr(wanted, name)
        if have != asked:
            differences.append(f"drafter.{name}: {_said(asked)} asked for, {_said(have)} found")
    if wanted.vocab_file is not None:
        differences.append(f"drafter.vocab_file: {wanted.vocab_file}, but the draft vocabulary is that of the start")
    if differences:
        problem = f"train.init_from={start.path} is not a start for this drafter"
        raise _differs(problem, differences, _FOLLOW)


def load_start(model: "Drafter", start: Start) -> None:
    """Put the weights of ``start`` into a fresh drafter.

    Raises:
        ConfigError: ``init-differs``, naming every tensor that does not fit.
    """
    load_weights(model, start.weights(), f"train.init_from={start.path} is not a start for this drafter", _FOLLOW)


def load_weights(model: "Drafter", found: Mapping[str, Tensor], problem: str, hint: str | None = None) -> None:
    """Fill a fresh drafter; embeddings that ``found`` borrowed stay the target's.

    Raises:
        ConfigError: ``init-differs``: ``problem``, then every tensor that does not fit.
    """
    own = model.state_dict()
    differences = [f"{name}: missing" for name in own if name not in found and name not in MAY_BE_NEW]
    differences += [f"{name}: not a tensor of this drafter" for name in found if name not in own]
    for name in sorted(found.keys() & own.keys()):
        if found[name].shape != own[name].shape:
            differences.append(f"{name}: {list(own[name].shape)} expected, {list(found[name].shape)} found")
    if differences:
        raise _differs(problem, differences, hint)
    model.load_state_dict({**own, **found})


def started_from(run: Path) -> Start | None:
    """What a run was started from; None when it began at random.

    Raises:
        NotFoundError: that is not there any more.
        ConflictError: it has changed since.
    """
    from trainer.run.run_folder import RUN_JSON, read_facts

    recorded = read_facts(run).init_from if (run / RUN_JSON).is_file() else None
    if recorded is None:
        return None
    start = read_start(recorded.path)
    if start.facts != recorded:
        raise ConflictError(f"{recorded.path} is not what {run} was started from any more", kind="init-changed")
    return start


_FOLLOW = "leave the drafter.* settings out: they follow from the start"


def _differs(problem: str, differences: Sequence[str], hint: str | None) -> ConfigError:
    return ConfigError(f"{problem}:\n" + "\n".join(differences), kind="init-differs", hint=hint)


def _said(value: object) -> str:
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)
