"""What is known to go wrong silently with a published drafter: the server is healthy and nothing is accepted."""

import json
from pathlib import Path

from schemas.layers import LayerConvention, published_aux_layers, to_convention
from trainer.export.support import engine_named
from trainer.serve.drafter import CONFIG_FILE, ServedDrafter
from trainer.serve.plan import ServingEngine

IDS = "eagle_aux_hidden_state_layer_ids"


def traps(drafter: ServedDrafter, engine: ServingEngine, target: str) -> list[str]:
    """Warnings about a drafter that we did not export; ``target`` is looked into where it is a local folder."""
    if drafter.engine is not None:
        return []
    return [*_other_numbering(drafter, engine, target), *_mixed_layers(drafter, engine)]


def _other_numbering(drafter: ServedDrafter, engine: ServingEngine, target: str) -> list[str]:
    """vLLM counts aux layers one higher than SGLang and TensorRT-LLM; the usual three layers show whose list it is."""
    if not drafter.method.startswith("eagle3"):
        return []
    ids = drafter.config.get(IDS) or (drafter.config.get("eagle_config") or {}).get(IDS)
    depth = _layers_of(target)
    if not ids or depth is None:
        return []
    own = engine_named(engine.name).convention
    usual = published_aux_layers("eagle3", depth)
    other: LayerConvention = "output" if own == "vllm" else "vllm"
    if list(ids) != to_convention(usual, other) or to_convention(usual, own) == to_convention(usual, other):
        return []
    return [
        f"layers {list(ids)} are the usual ones in another engine's numbering; {engine.title} would read each a layer "
        f"off: hiddenstore import-drafter {drafter.path} -o RUN --store STORE, then hiddenstore export RUN --engine "
        f"{engine.name} -o DIR"
    ]


def _mixed_layers(drafter: ServedDrafter, engine: ServingEngine) -> list[str]:
    kinds = set(drafter.config.get("layer_types") or [])
    if engine.name == "vllm" and drafter.method == "dflash" and len(kinds) > 1:
        return ["sliding and full attention layers together need VLLM_USE_V2_MODEL_RUNNER=1 in vLLM's environment"]
    return []


def _layers_of(target: str) -> int | None:
    file = Path(target) / CONFIG_FILE
    if not file.is_file():
        return None
    config = json.loads(file.read_bytes())
    depth = (config.get("text_config") or config).get("num_hidden_layers")
    return depth if isinstance(depth, int) else None
