"""What a store keeps of its target: head bundle, identity, layer profile, calibration slice."""

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
