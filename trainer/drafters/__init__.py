"""The table of drafters: a new one is a file here, which defines a `DrafterKind`, and a line in ``DRAFTERS``."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.records import WITHOUT_IMAGES
from hiddenstore.registry import Registry
from hiddenstore.targets import LAYER_RULES
from hiddenstore.targets.identity import target_words

if TYPE_CHECKING:
    from schemas.capture import CaptureSpec
    from trainer.drafters.base import DrafterKind, Needs

DRAFTERS: "Registry[DrafterKind[Any, Any, Any]]" = Registry(
    "drafter",
    "hiddenstore.drafters",
    {
        "eagle1": "trainer.drafters.eagle1:EAGLE1",
        "eagle3": "trainer.drafters.eagle3:EAGLE3",
        "dflash": "trainer.drafters.dflash:DFLASH",
        "medusa": "trainer.drafters.medusa:MEDUSA",
        "peagle": "trainer.drafters.peagle:PEAGLE",
        "dspark": "trainer.drafters.dspark:DSPARK",
        "dflash2": "trainer.drafters.dflash2:DFLASH2",
        "domino": "trainer.drafters.domino:DOMINO",
        "xpress": "trainer.drafters.xpress:XPRESS",
        "mtp": "trainer.drafters.mtp:MTP",
    },
    "trainer.drafters.base:DrafterKind",
    option="--drafter",
)

ALIASES = {"eagle2": "eagle1"}
"""Names of kinds that are trained as another: EAGLE-2 is EAGLE-1's weights, drafting trees."""


def drafter_kind(name: str) -> "DrafterKind[Any, Any, Any]":
    """The drafter of that name; ConfigError ``drafter-unknown``, ``plugin-broken``."""
    kind = DRAFTERS[name]
    if kind.layers not in LAYER_RULES:
        raise DRAFTERS.broken(name, f"reads the layers {kind.layers!r}, of which there is no {LAYER_RULES.group}")
    return kind


def refuse_target(differences: Sequence[str], problem: str, hint: str | None = None) -> None:
    """Refuse another target than a drafter was trained for. Raises FormatError: ``target-mismatch``: ``problem``, then
    the differences; nothing where there are none."""
    if differences:
        raise FormatError(f"{problem}:\n" + "\n".join(differences), kind=Kind.TARGET_MISMATCH, hint=hint)


def refuse_images(name: str, capture: "CaptureSpec", where: str) -> None:
    """Refuse a store of samples with images where no engine is known to draft so beside them: ConfigError
    ``store-lacks-states``."""
    if capture.images is not None and not drafter_kind(name).takes_images:
        raise ConfigError(
            f"samples of {where} hold images, and no engine is known to draft beside them with {name}",
            kind=Kind.STORE_LACKS_STATES,
            hint=f"--drafter eagle3; or {WITHOUT_IMAGES}",
        )


def check_store(name: str, needs: "Needs", capture: "CaptureSpec", where: str) -> None:
    """Refuse a store that lacks what the drafter reads. Raises ConfigError: naming what is missing and the command that
    captures it."""
    refuse_images(name, capture, where)
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
            kind=Kind.STORE_LACKS_STATES,
            hint=f"hiddenstore collect DATA -o NEW_STORE {shlex.join(target_words(capture.target))} --layers {layers}"
            + words,
        )
