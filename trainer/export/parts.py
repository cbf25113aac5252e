"""What the files of every drafter share: dimensions and rope of config.json, weights in a dtype, the draft vocabulary.

Shapes: V target vocabulary, U draft vocabulary, H drafter width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.export.base import Checkpoint

Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Files:
    """Contents of ``config.json`` and ``model.safetensors``."""

    config: dict[str, Any]
    tensors: Tensors


def weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Tensors:
    """The drafter's own weights under its own names, on the CPU."""
    state = checkpoint.model.state_dict()
    return {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in state.items()}


def llama_dimensions(checkpoint: Checkpoint, num_layers: int, dtype: str) -> dict[str, Any]:
    """Dimensions of a Llama-like drafter; rope in the old and the new form, because engines read either."""
    drafter = checkpoint.config
    scaling = drafter.rope_scaling.written() if drafter.rope_scaling else None
    return {
        "hidden_size": drafter.hidden_size,
        "intermediate_size": drafter.intermediate_size,
        "num_attention_heads": drafter.num_heads,
        "num_key_value_heads": drafter.num_kv_heads,
        "head_dim": drafter.head_dim,
        "num_hidden_layers": num_layers,
        "rms_norm_eps": drafter.rms_norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": drafter.max_position,
        "rope_theta": drafter.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": drafter.rope_theta, **(scaling or {})},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **vocabulary(checkpoint),
        **dtype_words(dtype),
    }


def vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Both sizes, always: an engine that lacks the second takes it for the first, or takes the file for no drafter."""
    return {"vocab_size": checkpoint.vocab.target_size, "draft_vocab_size": checkpoint.vocab.size}


def dtype_words(dtype: str) -> dict[str, str]:
    """Under the older name and the newer one."""
    return {"torch_dtype": dtype, "dtype": dtype}


def offsets(checkpoint: Checkpoint) -> Tensor:
    """``d2t`` int64 [U]: target id minus draft id."""
    return checkpoint.vocab.d2t.cpu().to(torch.int64).contiguous()


def known(checkpoint: Checkpoint) -> Tensor:
    """``t2d`` bool [V]: which target tokens the drafter knows."""
    return checkpoint.vocab.t2d.cpu().to(torch.bool).contiguous()


def shares_embeddings(checkpoint: Checkpoint) -> bool:
    """Whether the drafter's embeddings are the target's, so that an engine's shared copy is exact."""
    table = checkpoint.model.state_dict().get("embed_tokens.weight")
    target = checkpoint.head.embed_tokens
    if table is None:
        return True
    return table.shape == target.shape and bool(torch.equal(table.cpu().float(), target.cpu().float()))
