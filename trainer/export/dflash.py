"""DFlash's files, as z-lab publishes them and engines read them.

Shapes: D target width, U draft vocabulary.
"""

from typing import cast

import torch

from schemas.layers import to_convention
from trainer.drafters.dflash import DFlash, DFlashConfig
from trainer.export.base import Checkpoint, Engine, Reads
from trainer.export.parts import Files, known, llama_dimensions, offsets, weights


def files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``target_layer_ids`` are numbers of layer outputs in every engine.

    A restricted draft vocabulary needs a head of its own rows [U, D] and ``d2t``, where the engine reads them.
    """
    model, drafter = cast(DFlash, checkpoint.model), cast(DFlashConfig, checkpoint.config)
    torch_dtype = getattr(torch, dtype)
    tensors = weights(checkpoint, torch_dtype)
    if not checkpoint.vocab.is_full:
        tensors |= {"d2t": offsets(checkpoint), "t2d": known(checkpoint)}
        tensors["lm_head.weight"] = model.head_weight().detach().to("cpu", torch_dtype).contiguous()
    own = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": to_convention(sorted(drafter.aux_layers), "output"),
        "block_size": drafter.block_size,
    }
    if drafter.sliding_window is not None:
        own |= {"use_swa": True, "swa_window_size": drafter.sliding_window, "causal": False}
    config = {
        "architectures": [reads.architecture],
        "model_type": "qwen3",
        **llama_dimensions(checkpoint, drafter.num_layers, dtype),
        "block_size": drafter.block_size,
        "num_target_layers": checkpoint.identity.num_layers,
        "layer_types": ["full_attention"] * drafter.num_layers,
        "use_sliding_window": False,
        "dflash_config": own,
    }
    return Files(config, tensors)
