"""A drafter of a run, ready to use: its weights on a device, beside the head bundle of its target."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from hiddenstore.store import Store
from schemas.capture import NormState, TargetIdentity
from trainer.config import DrafterConfig
from trainer.run import checkpoint
from trainer.vocab import DraftVocab

if TYPE_CHECKING:
    from trainer.drafters.base import Drafter, DrafterInUse


@dataclass(frozen=True, eq=False)
class LoadedDrafter:
    """A drafter ready to use: model in evaluation mode with its frozen tables borrowed from the head bundle."""

    use: "DrafterInUse"
    identity: TargetIdentity
    step: int

    @property
    def model(self) -> "Drafter":
        return self.use.model

    @property
    def config(self) -> DrafterConfig:
        return self.use.config

    @property
    def vocab(self) -> DraftVocab:
        return self.use.side.vocab

    @property
    def head(self) -> HeadBundle:
        return self.use.side.head


def load_drafter(
    run_or_checkpoint: str | Path,
    device: str | torch.device = "cpu",
    *,
    head: HeadBundle | None = None,
    final_norm: NormState = "pre_norm",
    untrained: bool = False,
) -> LoadedDrafter:
    """The drafter of a run (its newest checkpoint) or of one ``step-N`` folder.

    The head bundle comes from the store the run names unless ``head`` is given. ``final_norm`` is the norm state of the
    final hidden the drafter will be shown. ``untrained`` gives the drafter the run started from instead.

    Raises:
        NotFoundError: no checkpoint there.
        CorruptionError: the checkpoint or vocabulary is damaged.
    """
    from trainer.drafters import drafter_kind
    from trainer.drafters.base import DrafterInUse, TargetSide
    from trainer.run.warm_start import load_start, started_from

    path = checkpoint.resolve(Path(run_or_checkpoint))
    found, spec = checkpoint.load(path), checkpoint.read_spec(path)
    head = head or _own_head(spec)
    side = TargetSide(head, DraftVocab.load(path.parent.parent / checkpoint.VOCAB, head.vocab_size), final_norm)
    kind = drafter_kind(str(spec.config.get("name")))
    model = kind.build(spec.drafter, side, spec.seed)
    if not untrained:
        model.load_state_dict(found.drafter)
    elif (began := started_from(path.parent.parent)) is not None:
        load_start(model, began)
    side = TargetSide(head.to(device), side.vocab.to(device), final_norm)
    model.to(device).eval()
    model.borrow(side.head)
    return LoadedDrafter(DrafterInUse(kind, model, side), spec.target, 0 if untrained else found.state.step)


def _own_head(spec: checkpoint.DrafterSpec) -> HeadBundle:
    store = Store.open(spec.store)
    if store.capture.target != spec.target:
        raise ConfigError(
            f"{spec.store} now holds states of {store.capture.target.name}, the drafter was trained for another "
            f"capture of {spec.target.name}",
            kind="target-mismatch",
        )
    return HeadBundle.load(store)
