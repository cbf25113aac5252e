"""How states become bytes: one file per codec and one line in ``CODECS``; recipes choose a codec per field."""

import difflib
from collections.abc import Iterable

from hiddenstore.codecs.base import Codec, CodeLayout, Encoded, RowPart, SmallField
from hiddenstore.codecs.bf16 import BF16
from hiddenstore.codecs.lossless import LOSSLESS
from hiddenstore.codecs.q4 import Q4
from hiddenstore.codecs.q8 import Q8
from hiddenstore.codecs.topk import TOPK_CODEC
from hiddenstore.errors import ConfigError
from schemas import Codecs

CODECS: dict[str, Codec] = {codec.name: codec for codec in (BF16, LOSSLESS, Q8, Q4)}
# What may stand at the final rows: states in any codec, or the target's top tokens.
LAYOUTS: dict[str, CodeLayout] = {**CODECS, TOPK_CODEC.name: TOPK_CODEC}

RECIPES: dict[str, tuple[str, str]] = {
    "raw": ("bf16", "bf16"),
    "lossless": ("lossless", "lossless"),
    "safe": ("q8", "q8"),
    "compact": ("q4", "q8"),
    "tiny": ("q4", "topk"),
}
DEFAULT_RECIPE = "safe"

_CHOICES: dict[str, Iterable[str]] = {"aux": CODECS, "final": LAYOUTS}


def get_codec(name: str) -> Codec:
    """The codec of states of that name; ConfigError ``codec-unknown`` with the nearest name otherwise."""
    return CODECS[_known(name, CODECS, "codec")]


def get_layout(name: str) -> CodeLayout:
    """The arrays of a codec, ``topk`` included; ConfigError ``codec-unknown`` with the nearest name otherwise."""
    return LAYOUTS[_known(name, LAYOUTS, "codec")]


def get_recipe(text: str) -> Codecs:
    """The codecs of a recipe, by name or per field: ``compact``, ``aux=q4,final=q8``, ``final=topk``.

    A field left out takes the codec of the default recipe.

    Raises:
        ConfigError: ``recipe-unknown`` or ``codec-unknown``, with the nearest name.
    """
    if "=" not in text:
        aux, final = RECIPES[_known(text, RECIPES, "recipe")]
        return Codecs(aux=aux, final=final)
    aux, final = RECIPES[DEFAULT_RECIPE]
    chosen: dict[str, str] = {}
    for word in text.split(","):
        field, _, codec = (piece.strip() for piece in word.partition("="))
        _known(field, _CHOICES, "recipe", f"{text!r}: ", "field")
        if field in chosen:
            raise ConfigError(f"recipe {text!r} names {field} twice", kind="recipe-unknown")
        chosen[field] = _known(codec, _CHOICES[field], "codec", f"recipe {text!r}, {field}: ")
    return Codecs(aux=chosen.get("aux", aux), final=chosen.get("final", final))


def recipe_name(codecs: Codecs) -> str:
    """The name of the recipe with these codecs, else one word per field: what ``get_recipe`` reads back."""
    named = {choice: name for name, choice in RECIPES.items()}
    return named.get((codecs.aux, codecs.final), f"aux={codecs.aux},final={codecs.final}")


def _known(name: str, table: Iterable[str], what: str, where: str = "", thing: str | None = None) -> str:
    """``name`` if the table has it; ``what`` is the kind of the error and, unless ``thing`` says more, what it is."""
    names = list(table)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"{where}unknown {thing or what} {name!r}, expected one of: {', '.join(names)}{guess}",
        kind=f"{what}-unknown",
        hint=f"--{what} {near[0] if near else DEFAULT_RECIPE}" if what == "recipe" and thing is None else None,
    )


__all__ = [
    "CODECS",
    "DEFAULT_RECIPE",
    "LAYOUTS",
    "RECIPES",
    "CodeLayout",
    "Codec",
    "Encoded",
    "RowPart",
    "SmallField",
    "get_codec",
    "get_layout",
    "get_recipe",
    "recipe_name",
]
