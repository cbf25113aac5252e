"""EAGLE-3's and 3.1's files: a Llama of as many layers with EAGLE-3's flags (drafters.md sections 1.2 and 1.3).

Shapes: D target width, H drafter width, L aux layers.
"""

from typing import cast

import torch

from schemas.layers import to_convention
from trainer.drafters.eagle3 import Eagle3Config
from trainer.export.base import Checkpoint, Engine, Quirks, Reads
from trainer.export.parts import Files, known, llama_dimensions, offsets, shares_embeddings, weights

IDS = "eagle_aux_hidden_state_layer_ids"


def files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """Layer ids are always explicit, because an engine that guesses them drafts from the wrong layers; ascending, as
    states are stored and captured.

    ``embed_tokens`` [V, H] is left out where it equals the target's, which most engines share; ``d2t`` and ``t2d``
    where the vocabulary is whole, because vLLM 0.32 has no place for them then.
    """
    drafter = cast(Eagle3Config, checkpoint.config)
    ids = to_convention(sorted(drafter.aux_layers), engine.convention)
    torch_dtype = getattr(torch, dtype)
    tensors = weights(checkpoint, torch_dtype)
    quirks = reads.quirks
    if quirks.embeddings:
        tensors.setdefault("embed_tokens.weight", checkpoint.head.embed_tokens.detach().to("cpu", torch_dtype).clone())
    elif shares_embeddings(checkpoint):
        tensors.pop("embed_tokens.weight", None)
    several = drafter.num_layers > 1
    tensors = {_layer_name(name, quirks, several): tensor for name, tensor in tensors.items()}
    if not checkpoint.vocab.is_full:
        tensors["d2t"] = offsets(checkpoint)
        if quirks.t2d:
            tensors["t2d"] = known(checkpoint)
    config = {
        "architectures": [reads.architecture],
        "model_type": "llama",
        **llama_dimensions(checkpoint, drafter.num_layers, dtype),
        "eagle_config": {"use_aux_hidden_state": True, IDS: ids},
    }
    if quirks.top_level_ids:
        config[IDS] = ids
    if drafter.hidden_size != checkpoint.identity.hidden_size:
        config["target_hidden_size"] = checkpoint.identity.hidden_size
    if drafter.norm_before_residual:
        config["norm_before_residual"] = True
    if drafter.fc_norm or drafter.norm_output:
        flags = {"fc_norm": drafter.fc_norm, "norm_output": drafter.norm_output}
        config |= {**flags, "num_aux_hidden_states": len(ids)}
    return Files(config, tensors)


def _layer_name(name: str, quirks: Quirks, several: bool) -> str:
    """A weight under the engine's name for its layer, one of ``several`` or the only one."""
    first, _, rest = name.partition(".")
    is_stacked = quirks.stacked and several
    if first == "midlayer":
        return f"midlayer.0.{rest}" if is_stacked else f"{quirks.first_layer}.{rest}"
    if first == "layers":
        rest = rest.replace("input_layernorm", quirks.later_norm)
        return f"midlayer.{rest}" if is_stacked else f"layers.{rest}"
    return name
