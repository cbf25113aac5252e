"""What ``--layers`` and ``--final`` mean for one target, and the sentence that explains it."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import get_args

from hiddenstore.errors import ConfigError
from schemas.capture import FinalMode
from schemas.layers import DrafterName, default_aux_layers, published_aux_layers

ALL_DRAFTERS = "all-drafters"
# EAGLE-1 reads the final hidden of every token; a store for all drafters serves it too.
_NEEDS_EVERY_FINAL = ("eagle1", ALL_DRAFTERS)
# These read the final hidden itself: the target's top tokens do not stand in for it.
_READS_FINAL = ("eagle1", "medusa", ALL_DRAFTERS)


@dataclass(frozen=True)
class LayerChoice:
    """aux_layers ascending (-1 = embeddings); final mode; ``explained`` is for people.

    ``reads_final``: a drafter named needs the final hidden itself, not only what the target predicts from it.
    """

    aux_layers: tuple[int, ...]
    final: FinalMode
    explained: str
    reads_final: bool = False


def choose_layers(layers: str, final: FinalMode | None, num_layers: int) -> LayerChoice:
    """Resolve ``eagle3``, ``dflash``, ``eagle1``, ``medusa``, ``all-drafters`` or a list such as ``1,15,28``.

    Raises:
        ConfigError: ``layer-out-of-range``, ``layers-invalid``, ``layers-too-few``, ``final-too-small``.
    """
    if final is not None and final not in get_args(FinalMode):
        raise ConfigError(
            f"unknown final mode {final!r}, expected {', '.join(get_args(FinalMode))}", kind="final-invalid"
        )
    names = get_args(DrafterName)
    if layers == ALL_DRAFTERS:
        aux = sorted({k for name in names for k in _defaults(name, num_layers)})
        explained = f"aux layers {_listed(aux)} of {num_layers} (every drafter's defaults)"
    elif layers in names:
        aux = _defaults(layers, num_layers)
        explained = _explain(layers, aux, num_layers)
    else:
        aux = _parse(layers, num_layers)
        explained = f"aux layers {_listed(aux)} of {num_layers} (as asked)"
    implied: FinalMode = "all" if layers in _NEEDS_EVERY_FINAL else "supervised"
    if layers in _NEEDS_EVERY_FINAL and final not in (None, "all"):
        raise ConfigError(
            f"--layers {layers} needs the final hidden of every token, not --final {final}",
            kind="final-too-small",
            hint=f"--layers {layers} --final all",
        )
    chosen = final or implied
    if not aux and chosen == "none":
        raise ConfigError("no aux layer and no final hidden: nothing to capture", kind="layers-invalid")
    return LayerChoice(tuple(aux), chosen, f"{explained}; final hidden: {chosen}", layers in _READS_FINAL)


def _defaults(name: str, num_layers: int) -> list[int]:
    try:
        return default_aux_layers(name, num_layers)  # type: ignore[arg-type]
    except ValueError as error:
        raise ConfigError(str(error), kind="layers-too-few", hint="name them: --layers 0,1") from error


def _explain(name: str, aux: list[int], num_layers: int) -> str:
    published = published_aux_layers(name, num_layers)  # type: ignore[arg-type]
    if not aux:
        return f"no aux layers: {name} reads the final hidden only"
    if published == aux:
        return f"aux layers {_listed(aux)} of {num_layers} ({name}'s defaults)"
    return (
        f"aux layers {_listed(aux)} of {num_layers}: {name}'s defaults are {_listed(published)}, which collide on so "
        f"shallow a target, and a colliding id moves to the next free layer"
    )


def _parse(text: str, num_layers: int) -> list[int]:
    names = [*get_args(DrafterName), ALL_DRAFTERS]
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        found = [int(word) for word in words]
    except ValueError:
        found = []
    if not found:
        near = get_close_matches(text, names, n=1)
        raise ConfigError(
            f"--layers {text!r} is neither a drafter ({', '.join(names)}) nor layer numbers",
            kind="layers-invalid",
            hint=f"--layers {near[0] if near else 'eagle3'}",
        )
    outside = [k for k in found if not -1 <= k < num_layers]
    if outside:
        raise ConfigError(
            f"layers {_listed(outside)} are outside -1…{num_layers - 1}: the target has {num_layers} layers, counted "
            f"from 0, and -1 is the embedding output",
            kind="layer-out-of-range",
            hint="--layers eagle3",
        )
    if len(set(found)) != len(found):
        raise ConfigError(f"--layers {text} names a layer twice", kind="layers-invalid")
    return sorted(found)


def _listed(layers: list[int]) -> str:
    return ", ".join(str(layer) for layer in layers)
