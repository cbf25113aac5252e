"""What a twin reads of a target."""

from schemas.layers import LayerRule

TWIN = LayerRule("twin", lambda num_layers, count: [num_layers // 2], "all", reads_final=True)
