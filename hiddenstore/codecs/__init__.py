"""How states become bytes: one file per codec and one line in ``CODECS``."""

import difflib
from collections.abc import Mapping

from hiddenstore.codecs.base import Codec, Encoded, SmallField
from hiddenstore.codecs.bf16 import BF16
from hiddenstore.codecs.lossless import LOSSLESS
from hiddenstore.codecs.q8 import Q8
from hiddenstore.errors import ConfigError
from schemas import Codecs

CODECS: dict[str, Codec] = {codec.name: codec for codec in (BF16, LOSSLESS, Q8)}

RECIPES: dict[str, tuple[str, str]] = {
    "raw": ("bf16", "bf16"),
    "lossless": ("lossless", "lossless"),
    "safe": ("q8", "q8"),
}
DEFAULT_RECIPE = "safe"


def get_codec(name: str) -> Codec:
    """The codec of that name; ConfigError ``codec-unknown`` with the nearest name otherwise."""
    return CODECS[_known(name, CODECS, "codec")]


def get_recipe(name: str) -> Codecs:
    """The aux and final codec of a recipe; ConfigError ``recipe-unknown`` with the nearest name otherwise."""
    aux, final = RECIPES[_known(name, RECIPES, "recipe")]
    return Codecs(aux=aux, final=final)


def _known(name: str, table: Mapping[str, object], what: str) -> str:
    if name in table:
        return name
    near = difflib.get_close_matches(name, table, n=1, cutoff=0.4)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"unknown {what} {name!r}, expected one of: {', '.join(table)}{guess}",
        kind=f"{what}-unknown",
        hint=f"--{what} {near[0] if near else DEFAULT_RECIPE}" if what == "recipe" else None,
    )


__all__ = [
    "CODECS",
    "DEFAULT_RECIPE",
    "RECIPES",
    "Codec",
    "Encoded",
    "SmallField",
    "get_codec",
    "get_recipe",
]
