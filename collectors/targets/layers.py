"""What ``--layers`` and ``--final`` mean for one target, and the sentence that explains it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.registry import nearest
from hiddenstore.targets import LAYER_RULES
from schemas.capture import FinalMode

ALL_DRAFTERS = "all-drafters"


@dataclass(frozen=True)
class LayerChoice:
    """aux_layers ascending (-1 = embeddings); ``reads_final``: a drafter needs the final hidden itself."""

    aux_layers: tuple[int, ...]
    final: FinalMode
    explained: str
    reads_final: bool = False


def choose_layers(layers: str, final: FinalMode | None, num_layers: int) -> LayerChoice:
    """Resolve a name of ``LAYER_RULES``, ``all-drafters`` or a list such as ``1,15,28``. Raises ConfigError:
    ``layers-invalid``, ``final-unfit``."""
    if final is not None and final not in get_args(FinalMode):
        raise ConfigError(
            f"unknown final mode {final!r}, expected {', '.join(get_args(FinalMode))}", kind=Kind.FINAL_UNFIT
        )
    names = [*LAYER_RULES] if layers == ALL_DRAFTERS else [layers] if layers in LAYER_RULES else []
    if layers == ALL_DRAFTERS:
        aux = sorted({k for name in names for k in _defaults(name, num_layers)})
        explained = f"aux layers {listed(aux)} of {num_layers} (every drafter's defaults)"
    elif names:
        aux = _defaults(layers, num_layers)
        explained = _explain(layers, aux, num_layers)
    else:
        aux = _numbers(layers)
        require_inside(aux, num_layers, _way(num_layers))
        explained = f"aux layers {listed(aux)} of {num_layers} (as asked)"
    # A store for all drafters serves those too that read the final hidden of every token.
    implied: FinalMode = "all" if any(LAYER_RULES[name].final == "all" for name in names) else "supervised"
    if implied == "all" and final not in (None, "all"):
        problem = f"--layers {layers} needs the final hidden of every token, not --final {final}"
        raise ConfigError(problem, kind=Kind.FINAL_UNFIT, hint=f"--layers {layers} --final all")
    final_mode = final or implied
    if not aux and final_mode == "none":
        problem, hint = "no aux layer and no final hidden: nothing to capture", f"--layers {layers} --final supervised"
        raise ConfigError(problem, kind=Kind.LAYERS_INVALID, hint=hint)
    return LayerChoice(
        tuple(aux),
        final_mode,
        f"{explained}; final hidden: {final_mode}",
        any(LAYER_RULES[name].reads_final for name in names),
    )


def _defaults(name: str, num_layers: int) -> list[int]:
    try:
        return LAYER_RULES[name].layers(num_layers)
    except ValueError as error:
        raise ConfigError(str(error), kind=Kind.LAYERS_INVALID, hint=_way(num_layers)) from error


def _way(num_layers: int) -> str:
    """What any target has: EAGLE-3's three layers, or by number those of a target with fewer."""
    return "--layers eagle3" if num_layers > 2 else f"--layers {','.join(map(str, range(num_layers)))}"


def _explain(name: str, aux: list[int], num_layers: int) -> str:
    published = LAYER_RULES[name].published(num_layers, None)
    if not aux:
        return f"no aux layers: {name} reads the final hidden only"
    if published == aux:
        return f"aux layers {listed(aux)} of {num_layers} ({name}'s defaults)"
    return (
        f"aux layers {listed(aux)} of {num_layers}: {name}'s defaults are {listed(published)}, which collide on so "
        f"shallow a target, and a colliding id moves to the next free layer"
    )


def layer_names() -> list[str]:
    """What ``--layers`` takes beside numbers."""
    return [*LAYER_RULES, ALL_DRAFTERS]


def require_layers(text: str) -> None:
    """Refuse what no target could have; ConfigError ``layers-invalid``."""
    if text not in layer_names():
        _numbers(text)


def _numbers(text: str) -> list[int]:
    names = layer_names()
    words = [word.strip() for word in text.split(",") if word.strip()]
    try:
        numbers = [int(word) for word in words]
    except ValueError:
        numbers = []
    if not numbers:
        problem = f"--layers {text!r} is neither a drafter ({', '.join(names)}) nor layer numbers"
        raise ConfigError(problem, kind=Kind.LAYERS_INVALID, hint=f"--layers {nearest(text, names) or 'eagle3'}")
    if len(set(numbers)) != len(numbers):
        raise ConfigError(f"--layers {text} names a layer twice", kind=Kind.LAYERS_INVALID)
    return sorted(numbers)


def require_inside(layers: Sequence[int], num_layers: int, hint: str) -> None:
    """Refuse layers that the target does not have; ConfigError ``layers-invalid``."""
    outside = [layer for layer in layers if not -1 <= layer < num_layers]
    if outside:
        text = f"layers {listed(outside)} are outside -1…{num_layers - 1}: the target has {num_layers} layers, "
        text += "counted from 0 by their output, and -1 is the embedding output"
        raise ConfigError(text, kind=Kind.LAYERS_INVALID, hint=hint)


def listed(layers: Sequence[int]) -> str:
    """``1, 15, 28``."""
    return ", ".join(map(str, layers))
