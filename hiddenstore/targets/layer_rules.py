"""Which layers each drafter reads of a target by default: what ``collect --layers NAME`` means."""

from typing import TYPE_CHECKING

from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from schemas.layers import LayerRule

LAYER_RULES: "Registry[LayerRule]" = Registry(
    "layer rule",
    "hiddenstore.layers",
    {
        "eagle3": "schemas.layers:EAGLE3",
        "dflash": "schemas.layers:DFLASH",
        "eagle1": "schemas.layers:EAGLE1",
        "medusa": "schemas.layers:MEDUSA",
    },
    "schemas.layers:LayerRule",
)
