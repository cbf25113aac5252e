"""EAGLE-1's files, which serve EAGLE-2 as well: a headless Llama layer over [embedding; feature].

Shapes: D target width.
"""

import torch

from trainer.export.base import Checkpoint, Engine, Reads
from trainer.export.parts import Files, llama_dimensions, weights


def files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``fc.weight`` [D, 2D] and the layers; embeddings and head stay with the target.

    Where the engine's ``fc`` has a bias, one of zeros is written rather than left as it was initialised.
    """
    tensors = weights(checkpoint, getattr(torch, dtype))
    if reads.quirks.fc_bias:
        tensors["fc.bias"] = torch.zeros_like(tensors["fc.weight"][:, 0]).contiguous()
    drafter = checkpoint.config
    config = {
        "architectures": [reads.architecture],
        "model_type": "llama",
        **llama_dimensions(checkpoint, drafter.num_layers, dtype),  # type: ignore[attr-defined]
    }
    return Files(config, tensors)
