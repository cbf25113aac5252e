"""How states become bytes: a codec is one file and one line in ``CODECS``; `recipes` choose one per field.

Importing this loads no codec, so that names are known before torch is.
"""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from hiddenstore.codecs.base import Codec, CodeLayout, FittedCodec

_STATES = {
    "bf16": "hiddenstore.codecs.verbatim:BF16",
    "lossless": "hiddenstore.codecs.verbatim:LOSSLESS",
    "q8": "hiddenstore.codecs.affine:Q8",
    "q4": "hiddenstore.codecs.affine:Q4",
}
_GROUP = "hiddenstore.codecs"
_AUX = {**_STATES, "q4q3": "hiddenstore.codecs.masked:Q4Q3", "q3": "hiddenstore.codecs.masked:Q3"}
CODECS: "Registry[Codec]" = Registry("codec", _GROUP, {**_AUX}, "hiddenstore.codecs.base:Codec")
# What may stand at the final rows: states in any codec, the target's top tokens, or nothing that is not rebuilt.
LAYOUTS: "Registry[CodeLayout]" = Registry(
    "codec",
    _GROUP,
    {**_STATES, "topk": "hiddenstore.codecs.topk:TOPK_CODEC", "rebuilt": "hiddenstore.codecs.verbatim:NOTHING"},
    "hiddenstore.codecs.base:CodeLayout",
)
# What is fitted to the states of a store, and then has a name of its own: that here, a hyphen and a digest.
FITTED: "Registry[FittedCodec]" = Registry(
    "codec", f"{_GROUP}.fitted", {"klt": "hiddenstore.codecs.klt:KLT"}, "hiddenstore.codecs.base:FittedCodec"
)


def kind_of(name: str) -> str:
    """The name without the digest of what it was fitted to: what recipes call it."""
    kind, _, digest = name.rpartition("-")
    return kind if digest and kind in FITTED else name


def get_codec(name: str) -> "Codec":
    """The codec of states of that name; ConfigError ``name-unknown`` with the nearest one otherwise."""
    return CODECS[name]


def get_layout(name: str) -> "CodeLayout":
    """The arrays of a codec, ``topk`` included; ConfigError ``name-unknown`` with the nearest one otherwise."""
    if name in CODECS:
        return CODECS[name]
    return FITTED[name] if name in FITTED else LAYOUTS[name]
