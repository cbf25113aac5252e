"""How states become bytes: a codec is one file and one line in ``CODECS``; recipes choose a codec per field.

Importing this loads no codec, so that names are known before torch is.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.registry import Registry, unknown

if TYPE_CHECKING:
    from hiddenstore.codecs.base import Codec, CodeLayout
    from schemas.capture import Codecs

_STATES = {
    "bf16": "hiddenstore.codecs.verbatim:BF16",
    "lossless": "hiddenstore.codecs.verbatim:LOSSLESS",
    "q8": "hiddenstore.codecs.affine:Q8",
    "q4": "hiddenstore.codecs.affine:Q4",
}
_GROUP = "hiddenstore.codecs"
CODECS: "Registry[Codec]" = Registry("codec", _GROUP, {**_STATES}, "hiddenstore.codecs.base:Codec")
# What may stand at the final rows: states in any codec, or the target's top tokens.
LAYOUTS: "Registry[CodeLayout]" = Registry(
    "codec", _GROUP, {**_STATES, "topk": "hiddenstore.codecs.topk:TOPK_CODEC"}, "hiddenstore.codecs.base:CodeLayout"
)

RECIPES: dict[str, tuple[str, str]] = {
    "raw": ("bf16", "bf16"),
    "lossless": ("lossless", "lossless"),
    "safe": ("q8", "q8"),
    "compact": ("q4", "q8"),
    "tiny": ("q4", "topk"),
}
DEFAULT_RECIPE = "safe"
RECIPE_HELP = f"{', '.join(RECIPES)}; per field: aux=q4,final=q8"
"""What ``--recipe`` takes, for help texts."""


def get_codec(name: str) -> "Codec":
    """The codec of states of that name; ConfigError ``codec-unknown`` with the nearest name otherwise."""
    return CODECS[name]


def get_layout(name: str) -> "CodeLayout":
    """The arrays of a codec, ``topk`` included; ConfigError ``codec-unknown`` with the nearest name otherwise."""
    return CODECS[name] if name in CODECS else LAYOUTS[name]


def get_recipe(text: str) -> "Codecs":
    """The codecs of a recipe, by name or per field: ``compact``, ``aux=q4,final=q8``, ``final=topk``.

    A field left out takes the codec of the default recipe.

    Raises:
        ConfigError: ``name-unknown`` or ``codec-unknown``, with the nearest name.
    """
    from schemas.capture import Codecs

    if "=" not in text:
        if text not in RECIPES:
            raise unknown("recipe", text, RECIPES, "--recipe", DEFAULT_RECIPE)
        aux, final = RECIPES[text]
        return Codecs(aux=aux, final=final)
    codecs: dict[str, str] = {}
    for word in text.split(","):
        field, _, codec = (piece.strip() for piece in word.partition("="))
        if field in codecs:
            raise ConfigError(f"recipe {text!r} names {field} twice", kind=Kind.NAME_UNKNOWN)
        codecs[field] = _codec_of_field(text, field, codec)
    return Codecs(**{**dict(zip(_CHOICES, RECIPES[DEFAULT_RECIPE], strict=True)), **codecs})


_CHOICES: dict[str, Collection[str]] = {"aux": CODECS, "final": LAYOUTS}


def _codec_of_field(text: str, field: str, codec: str) -> str:
    if field not in _CHOICES:
        error = unknown("field", field, _CHOICES)
        raise ConfigError(f"recipe {text!r}: {error}", kind=Kind.NAME_UNKNOWN)
    if codec not in _CHOICES[field]:
        error = unknown("codec", codec, _CHOICES[field])
        raise ConfigError(f"recipe {text!r}, {field}: {error}", kind=error.kind)
    return codec


def recipe_name(codecs: "Codecs") -> str:
    """The name of the recipe with these codecs, else one word per field: what ``get_recipe`` reads back."""
    names = {choice: name for name, choice in RECIPES.items()}
    return names.get((codecs.aux, codecs.final), f"aux={codecs.aux},final={codecs.final}")
