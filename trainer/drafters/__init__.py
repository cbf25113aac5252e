"""The table of drafters: a new one is a file here, which defines a `DrafterKind`, and a line in ``DRAFTERS``."""

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import ConfigError
from hiddenstore.identity import target_word

if TYPE_CHECKING:
    from schemas.capture import CaptureSpec
    from trainer.drafters.base import DrafterKind, Needs

DRAFTERS: dict[str, str] = {
    "eagle1": "trainer.drafters.eagle1:EAGLE1",
    "eagle3": "trainer.drafters.eagle3:EAGLE3",
    "dflash": "trainer.drafters.dflash:DFLASH",
    "medusa": "trainer.drafters.medusa:MEDUSA",
}


def drafter_kind(name: str) -> "DrafterKind[Any, Any, Any]":
    """The drafter of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in DRAFTERS:
        near = difflib.get_close_matches(name, DRAFTERS, n=1)
        raise ConfigError(
            f"unknown drafter {name!r}; there are: {', '.join(DRAFTERS)}",
            kind="drafter-unknown",
            hint=f"--drafter {near[0]}" if near else None,
        )
    module, attribute = DRAFTERS[name].split(":")
    kind: DrafterKind[Any, Any, Any] = getattr(import_module(module), attribute)
    return kind


def check_store(name: str, needs: "Needs", capture: "CaptureSpec", where: str) -> None:
    """Refuse a store that lacks what the drafter reads.

    Raises:
        ConfigError: naming what is missing and the command that captures it.
    """
    missing = [layer for layer in needs.aux_layers if layer not in capture.aux_layers]
    lacks = [f"aux layers {missing} (held: {list(capture.aux_layers)})"] if missing else []
    final = None
    if needs.final != "none" and capture.final == "none":
        lacks.append("the final hidden")
        final = needs.final
    elif needs.final == "all" and capture.final != "all":
        lacks.append(f"the final hidden at every token (held: {capture.final} rows)")
        final = "all"
    if needs.hidden and capture.holds_topk:
        lacks.append("the final hidden itself (held: the target's top tokens)")
        final = "all" if needs.final == "all" else "supervised"
    if lacks:
        layers = ",".join(str(layer) for layer in needs.aux_layers) if missing else drafter_kind(name).layers
        words = f" --final {final}" if final else ""
        raise ConfigError(
            f"{name} cannot be trained on {where}: it lacks {' and '.join(lacks)}",
            kind="store-lacks-states",
            hint=f"hiddenstore collect DATA -o NEW_STORE --target {target_word(capture.target)} --layers {layers}"
            + words,
        )
