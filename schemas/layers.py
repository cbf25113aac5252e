"""Which layer an integer means: the one place where layer ids of other projects are converted.

Here **layer k** is the residual stream after decoder block k, counted from 0; layer -1 is the embedding output.
Conventions of others (sources: transformers 5.23, vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 documentation):

* ``hf``: index into ``output_hidden_states``; index k+1 is layer k (the last entry is post-norm, so it is no layer).
* ``vllm``: ``eagle_aux_hidden_state_layer_ids`` of vLLM and speculators; id k+1 is layer k, id n is pre-norm.
* ``output``: TensorRT-LLM, SpecForge, ModelOpt, Automodel, DFlash ``target_layer_ids``, SGLang's explicit ids.
"""

from collections.abc import Sequence
from typing import Literal

LayerConvention = Literal["hf", "vllm", "output"]
DrafterName = Literal["eagle3", "dflash", "eagle1", "medusa"]

_OFFSET: dict[LayerConvention, int] = {"hf": 1, "vllm": 1, "output": 0}


def to_convention(layers: Sequence[int], convention: LayerConvention) -> list[int]:
    """Our layer numbers written as ids of another convention, in the order given."""
    return [layer + _OFFSET[convention] for layer in layers]


def from_convention(ids: Sequence[int], convention: LayerConvention) -> list[int]:
    """Ids of another convention as our layer numbers, in the order given."""
    return [index - _OFFSET[convention] for index in ids]


def field_name(layer: int) -> str:
    """The array name of a captured layer in a segment: ``layer_15``; the embedding output is ``embeddings``."""
    return "embeddings" if layer == -1 else f"layer_{layer}"


def default_aux_layers(drafter: DrafterName, num_layers: int, count: int | None = None) -> list[int]:
    """The field's default aux layers, ascending and distinct.

    EAGLE-3: 1, n//2-1, n-4 (SafeAILab, vLLM, SGLang, TensorRT-LLM agree). DFlash: round(1 + i(n-4)/(m-1)) with m=5
    (z-lab). EAGLE-1 and Medusa read the final hidden only. On a shallow target a colliding or negative id moves up to
    the next free layer.

    Raises:
        ValueError: the target has fewer layers than the drafter reads.
    """
    wanted = published_aux_layers(drafter, num_layers, count)
    if len(wanted) > num_layers:
        raise ValueError(f"{drafter} reads {len(wanted)} aux layers, but the target has {num_layers} layers")
    return _separate(wanted, num_layers)


def published_aux_layers(drafter: DrafterName, num_layers: int, count: int | None = None) -> list[int]:
    """What the published formula gives, before colliding or negative ids are moved: 1, 2, 2 for EAGLE-3 on 6 layers."""
    n = num_layers
    if drafter == "eagle3":
        return [1, n // 2 - 1, n - 4]
    if drafter == "dflash":
        m = count or 5
        return [n // 2] if m == 1 else [round(1 + i * (n - 4) / (m - 1)) for i in range(m)]
    return []


def _separate(wanted: Sequence[int], num_layers: int) -> list[int]:
    taken: set[int] = set()
    for layer in sorted(max(0, layer) for layer in wanted):
        while layer in taken:
            layer += 1
        taken.add(layer)
    overflow = sorted(layer for layer in taken if layer >= num_layers)
    for layer in overflow:
        taken.remove(layer)
        taken.add(max(free for free in range(num_layers) if free not in taken))
    return sorted(taken)
