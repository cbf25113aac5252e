"""The drafter of a run, loaded for use beside the head bundle of its target."""

from dataclasses import dataclass
from pathlib import Path

import torch

from hiddenstore.errors import FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.head import HeadBundle
from schemas.capture import NormState, TargetIdentity
from trainer.drafters import drafter_kind
from trainer.drafters.base import DrafterInUse
from trainer.losses.teacher import TargetInterface
from trainer.train import checkpoint
from trainer.train.run_folder import describe, load_start, started_from
from trainer.vocab import DraftVocab


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
    """The drafter of a run (its newest checkpoint) or of one ``step-N`` folder.

    The head bundle comes from the store the run names unless ``head`` is given. ``final_norm`` is the norm state of the
    final hidden the drafter will be shown. ``untrained`` gives the drafter the run started from instead.

    Raises:
        NotFoundError: no checkpoint there.
        CorruptionError: the checkpoint or vocabulary is damaged.
    """
    info = describe(run_or_checkpoint)
    saved, spec = checkpoint.load(info.checkpoint), info.spec
    head = head or _head_of_store(spec)
    target = TargetInterface(head, info.vocab(head.vocab_size), final_norm)
    kind = drafter_kind(spec.drafter.name)
    model = kind.build(spec.drafter, target, spec.seed)
    if not untrained:
        model.load_state_dict(saved.drafter)
    elif (start := started_from(info.run)) is not None:
        load_start(model, start)
    target = TargetInterface(head.to(device), target.vocab.to(device), final_norm)
    model.to(device).eval()
    model.tie_weights(target.head)
    return LoadedDrafter(kind, model, target, spec.target, 0 if untrained else saved.state.step)


def _head_of_store(spec: checkpoint.DrafterSpec) -> HeadBundle:
    store = Store.open(spec.store)
    if store.capture.target != spec.target:
        raise FormatError(
            f"{spec.store} now holds states of {store.capture.target.name}, the drafter was trained for another "
            f"capture of {spec.target.name}",
            kind=Kind.TARGET_MISMATCH,
        )
    return store.head()
