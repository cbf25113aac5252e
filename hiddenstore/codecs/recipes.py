"""Recipes: a codec per field, by name; the one that is taken unless another is named."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from hiddenstore.codecs import CODECS, FITTED, LAYOUTS, kind_of
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.registry import unknown

if TYPE_CHECKING:
    from schemas.capture import Codecs

RECIPES: dict[str, tuple[str, str]] = {
    "raw": ("bf16", "bf16"),
    "lossless": ("lossless", "lossless"),
    "safe": ("q8", "q8"),
    "compact": ("q4", "q8"),
    "tiny": ("q4", "topk"),
    "rebuilt": ("q4", "rebuilt"),
    "rebuilt-q3": ("q4q3", "rebuilt"),
    "rebuilt-q3-all": ("q3", "rebuilt"),
    "rebuilt-klt": ("klt", "rebuilt"),
}
DEFAULT_RECIPE = "safe"
RECIPE_HELP = f"{', '.join(RECIPES)}; per field: aux=q4,final=q8"
"""What ``--recipe`` takes, for help texts."""


def get_recipe(text: str) -> "Codecs":
    """The codecs of a recipe, by name or per field: ``compact``, ``aux=q4,final=q8``, ``final=topk``.

    A field left out takes the codec of the default recipe. Raises ConfigError: ``name-unknown``, with the
    nearest name."""
    from schemas.capture import Codecs

    if "=" not in text:
        if text not in RECIPES:
            raise unknown("recipe", text, RECIPES, "--recipe", DEFAULT_RECIPE)
        aux, final = RECIPES[text]
        return Codecs(aux=aux, final=final)
    words = [word.strip() for word in text.split(",")]
    recipes = [word for word in words if word in RECIPES]
    codecs: dict[str, str] = {}
    for word in words:
        if word in recipes:
            continue
        field, _, codec = (piece.strip() for piece in word.partition("="))
        if field in codecs:
            raise ConfigError(f"recipe {text!r} names {field} twice", kind=Kind.NAME_UNKNOWN)
        codecs[field] = _codec_of_field(text, field, codec)
    codecs = {**dict(zip(_choices(), RECIPES[[*recipes, DEFAULT_RECIPE][0]], strict=True)), **codecs}
    if recipes:
        raise ConfigError(
            f"recipe {text!r}: {recipes[0]} is a recipe, which stands alone; beside fields name its own",
            kind=Kind.NAME_UNKNOWN,
            hint=f"--recipe {','.join(f'{field}={codec}' for field, codec in codecs.items())}",
        )
    return Codecs(**codecs)


def _choices() -> dict[str, Collection[str]]:
    return {"aux": (*CODECS, *FITTED), "final": LAYOUTS}


def _codec_of_field(text: str, field: str, codec: str) -> str:
    choices = _choices()
    if field not in choices:
        error = unknown("field", field, choices)
        raise ConfigError(f"recipe {text!r}: {error}", kind=Kind.NAME_UNKNOWN)
    if codec not in choices[field]:
        error = unknown("codec", codec, choices[field])
        raise ConfigError(f"recipe {text!r}, {field}: {error}", kind=error.kind)
    return codec


def recipe_name(codecs: "Codecs") -> str:
    """The name of the recipe with these codecs, else one word per field: what ``get_recipe`` reads back."""
    names = {choice: name for name, choice in RECIPES.items()}
    aux = kind_of(codecs.aux)
    return names.get((aux, codecs.final), f"aux={aux},final={codecs.final}")
