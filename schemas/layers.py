"""Which layer an integer means: the one place where layer ids of other projects are converted.

Here **layer k** is the residual stream after decoder block k, counted from 0; layer -1 is the embedding output.
Conventions of others (sources: transformers 5.23, vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.2 documentation):

* ``hf``: index into ``output_hidden_states``; index k+1 is layer k (the last entry is post-norm, so it is no layer).
* ``vllm``: ``eagle_aux_hidden_state_layer_ids`` of vLLM and speculators; id k+1 is layer k, id n is pre-norm.
* ``output``: TensorRT-LLM, SpecForge, ModelOpt, Automodel, AngelSlim, DFlash ``target_layer_ids``, SGLang's explicit
  ids.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

LayerConvention = Literal["hf", "vllm", "output"]

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


@dataclass(frozen=True)
class LayerRule:
    """What a drafter reads of a target unless told otherwise: a row of ``hiddenstore.targets``.

    ``published``: the field's formula for its aux layers, of the target's number of layers and of how many are read
    (None: as many as is usual). ``final``: rows of the final hidden; ``reads_final``: it reads that hidden itself, so
    that the target's top tokens do not stand in for it.
    """

    name: str
    published: Callable[[int, int | None], list[int]]
    final: Literal["supervised", "all"]
    reads_final: bool

    def layers(self, num_layers: int, count: int | None = None) -> list[int]:
        """The default aux layers, ascending and distinct: on a shallow target a colliding or negative id moves up to
        the next free layer. Raises ValueError: the target has fewer layers than the drafter reads."""
        published = self.published(num_layers, count)
        if len(published) > num_layers:
            raise ValueError(f"{self.name} reads {len(published)} aux layers, but the target has {num_layers} layers")
        return _separate(published, num_layers)


def _dflash(n: int, count: int | None) -> list[int]:
    m = count or 5
    return [n // 2] if m == 1 else [round(1 + i * (n - 4) / (m - 1)) for i in range(m)]


# SafeAILab, vLLM, SGLang and TensorRT-LLM agree on EAGLE-3; DFlash: z-lab.
EAGLE3 = LayerRule("eagle3", lambda n, count: [1, n // 2 - 1, n - 4], "supervised", reads_final=False)
DFLASH = LayerRule("dflash", _dflash, "supervised", reads_final=False)
EAGLE1 = LayerRule("eagle1", lambda n, count: [], "all", reads_final=True)
MEDUSA = LayerRule("medusa", lambda n, count: [], "supervised", reads_final=True)
_RULES = {rule.name: rule for rule in (EAGLE3, DFLASH, EAGLE1, MEDUSA)}


def default_aux_layers(drafter: str, num_layers: int, count: int | None = None) -> list[int]:
    """``LayerRule.layers`` of one of our drafters."""
    return _RULES[drafter].layers(num_layers, count)


def published_aux_layers(drafter: str, num_layers: int, count: int | None = None) -> list[int]:
    """What the published formula gives, before colliding or negative ids are moved: 1, 2, 2 for EAGLE-3 on 6 layers."""
    return _RULES[drafter].published(num_layers, count)


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
