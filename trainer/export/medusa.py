"""Medusa's files, as vLLM reads them: ``blocks.{head}.layers.{block}`` and ``lm_heads.{head}``.

Shapes: D target width, V target vocabulary, U draft vocabulary.
"""

from typing import cast

import torch
from torch import Tensor

from trainer.drafters.medusa_heads import MedusaConfig
from trainer.export.base import Checkpoint, Engine, Reads
from trainer.export.parts import Files, dtype_words, known, offsets, vocabulary, weights


def files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """The loader leaves biases out unless told of them. With the original head the file holds the target's rows [V, D]
    once: the engine keeps a copy of its own.

    vLLM 0.32 loads heads of V rows only, and takes the most probable token. A token that the drafter does not know gets
    the mean of the known rows: its logit is the mean of theirs, which is never the largest. ``t2d`` tells import apart.
    """
    drafter = cast(MedusaConfig, checkpoint.config)
    torch_dtype = getattr(torch, dtype)
    tensors = weights(checkpoint, torch_dtype)
    if drafter.original_head:
        tensors["lm_heads.0.weight"] = checkpoint.head.output_weight.detach().to("cpu", torch_dtype).clone()
    if not checkpoint.vocab.is_full:
        heads = {name: _widened(rows, checkpoint) for name, rows in tensors.items() if name.startswith("lm_heads.")}
        tensors |= {**heads, "d2t": offsets(checkpoint), "t2d": known(checkpoint)}
    config = {
        "architectures": [reads.architecture],
        "model_type": "medusa",
        "hidden_size": drafter.hidden_size,
        "num_heads": drafter.medusa_heads,
        "num_hidden_layers": drafter.medusa_layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.original_head,
        **vocabulary(checkpoint),
        "truncated_vocab_size": checkpoint.vocab.target_size,
        **dtype_words(dtype),
    }
    return Files(config, tensors)


def _widened(rows: Tensor, checkpoint: Checkpoint) -> Tensor:
    """Head rows [U, D] of the draft vocabulary as rows [V, D] of the target's."""
    whole = rows.float().mean(0).to(rows.dtype).repeat(checkpoint.vocab.target_size, 1)
    whole[checkpoint.vocab.target_ids.cpu()] = rows
    return whole.contiguous()
