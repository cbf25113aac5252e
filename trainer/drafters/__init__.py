"""The table of drafters: a new one is a file here and a line in ``DRAFTERS``.

A drafter's module gives a ``torch.nn.Module`` with ``build(config, head, vocab, seed)`` and an objective with ``plan``
(reads the teacher of a pack), ``divisors`` and ``losses`` (see `trainer.drafters.eagle3`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError
from hiddenstore.identity import target_word

if TYPE_CHECKING:
    from schemas.capture import CaptureSpec
    from trainer.config import TrainConfig
    from trainer.drafters.eagle3 import Eagle3, Eagle3Objective
    from trainer.teacher import Teacher


@dataclass(frozen=True)
class DrafterKind:
    """reads_aux, reads_final: what it needs of a store; layers: the ``--layers`` word that captures it."""

    model: "Callable[[], type[Eagle3]]"
    objective: "Callable[[Eagle3, Teacher, TrainConfig], Eagle3Objective]"
    reads_aux: bool
    reads_final: bool
    layers: str


def _eagle3() -> "type[Eagle3]":
    from trainer.drafters.eagle3 import Eagle3

    return Eagle3


def _eagle3_objective(model: "Eagle3", teacher: "Teacher", config: "TrainConfig") -> "Eagle3Objective":
    from trainer.drafters.eagle3 import Eagle3Objective

    return Eagle3Objective(model, teacher, config.loss)


DRAFTERS: dict[str, DrafterKind] = {
    "eagle3": DrafterKind(_eagle3, _eagle3_objective, reads_aux=True, reads_final=True, layers="eagle3"),
}


def drafter_kind(name: str) -> DrafterKind:
    """The drafter of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DRAFTERS:
        raise ConfigError(f"unknown drafter {name!r}; there are: {', '.join(DRAFTERS)}", kind="drafter-unknown")
    return DRAFTERS[name]


def check_store(name: str, aux_layers: tuple[int, ...], capture: "CaptureSpec", where: str) -> None:
    """Refuse a store that lacks what the drafter reads.

    Raises:
        ConfigError: naming what is missing and the command that captures it.
    """
    kind = drafter_kind(name)
    missing = [layer for layer in aux_layers if layer not in capture.aux_layers] if kind.reads_aux else []
    lacks = [f"aux layers {missing} (held: {list(capture.aux_layers)})"] if missing else []
    if kind.reads_aux and not aux_layers:
        lacks.append("any aux layer")
    if kind.reads_final and capture.final == "none":
        lacks.append("the final hidden")
    if lacks:
        layers = ",".join(str(layer) for layer in aux_layers) if missing else kind.layers
        raise ConfigError(
            f"{name} cannot be trained on {where}: it lacks {' and '.join(lacks)}",
            kind="store-lacks-states",
            hint=f"hiddenstore collect DATA -o NEW_STORE --target {target_word(capture.target)} --layers {layers}",
        )
