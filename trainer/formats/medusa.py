"""Medusa outside, as FasterDecoding publishes it and vLLM reads it: ``blocks.{head}.layers.{block}``.

Shapes: D target width, V target vocabulary, U draft vocabulary.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.formats import base
from trainer.formats.base import Checkpoint, DrafterExport, Engine, Files, Lack, Reads, Refused, Target, Tensors

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
    (re.compile(r"(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"(\d+)\.lm_head\.weight"), r"lm_heads.\1.weight"),
)
_ORIGINAL_HEAD_BIAS = Lack(
    lambda c: c.head.lm_head_bias is not None and c.config.original_head,
    "it reads the drafter's states with the target's head without its bias",
    "train with drafter.original_head=false",
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """The loader leaves biases out unless told of them. With the original head the file holds the target's rows [V, D]
    once: the engine keeps a copy of its own. vLLM 0.32 loads heads of V rows only, and takes the most probable token. A
    token that the drafter does not know gets the mean of the known rows: its logit is the mean of theirs, which is
    never the largest. ``t2d`` tells import apart."""
    drafter = checkpoint.config
    tensors = base.weights(checkpoint, dtype)
    if drafter.original_head:
        tensors["lm_heads.0.weight"] = base.like(tensors, checkpoint.head.output_weight)
    if not checkpoint.vocab.is_full:
        heads = {name: _widened(rows, checkpoint) for name, rows in tensors.items() if name.startswith("lm_heads.")}
        tensors |= {**heads, **base.draft_vocabulary(checkpoint)}
    config = {
        "architectures": [reads.architecture],
        "model_type": "medusa",
        "hidden_size": drafter.hidden_size,
        "num_heads": drafter.medusa_heads,
        "num_hidden_layers": drafter.medusa_layers,
        "medusa_fc_bias": True,
        "original_lm_head": drafter.original_head,
        **base.vocabulary(checkpoint),
        "truncated_vocab_size": checkpoint.vocab.target_size,
        **base.dtype_words(dtype),
    }
    return Files(config, tensors)


def _widened(rows: "Tensor", checkpoint: Checkpoint) -> "Tensor":
    """Head rows [U, D] of the draft vocabulary as rows [V, D] of the target's."""
    wide = rows.float().mean(0).to(rows.dtype).repeat(checkpoint.vocab.target_size, 1)
    wide[checkpoint.vocab.target_ids.cpu()] = rows
    return wide.contiguous()


def _our_name(name: str) -> str:
    """As vLLM calls them."""
    name = name.removeprefix("medusa_heads.")
    for pattern, ours in _NAMES:
        if pattern.fullmatch(name):
            return pattern.sub(ours, name)
    return name


def _signs(config: Mapping[str, Any], tensors: Tensors) -> bool:
    has_blocks = any(_our_name(name) == "blocks.0.layers.0.weight" for name in tensors)
    return has_blocks or config.get("model_type") == "medusa"


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    """Everything is said by the tensors: FasterDecoding's config.json names neither width nor vocabulary."""
    first = tensors["blocks.0.layers.0.weight"]
    blocks = [name.split(".") for name in tensors if name.startswith("blocks.")]
    heads, layers = (1 + max(int(name[place]) for name in blocks) for place in (1, 3))
    for name in [name for name in tensors if name.startswith("blocks.") and name.endswith(".weight")]:
        tensors.setdefault(name.removesuffix("weight") + "bias", first.new_zeros(len(first)))
    vocab = target.vocab
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        if not vocab.is_full and len(tensors[name]) == vocab.target_size:
            tensors[name] = tensors[name][vocab.target_ids]
    is_original = False
    if config.get("original_lm_head"):
        shared = tensors["lm_heads.0.weight"]
        base.drop_shared(tensors, "lm_heads.0.weight", target.head.output_weight)
        is_original = "lm_heads.0.weight" not in tensors
        if not is_original:
            tensors |= {f"lm_heads.{k}.weight": shared for k in range(heads)}
    facts = {
        "aux_layers": (),
        "medusa_heads": heads,
        "medusa_layers": layers,
        "original_head": is_original,
        # No attention, so no heads: what the settings need to be filled with.
        "hidden_size": len(first),
        "intermediate_size": len(first),
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
    }
    return facts, tensors


def _probe(model: Any, checkpoint: Checkpoint) -> "Tensor":
    import torch

    features = base.probe_states(checkpoint, 1)[0]
    heads = range(model.config.medusa_heads)
    return torch.cat([model.states(features, k).float() @ model.head_weight(k).float().T for k in heads])


_NEAREST = "--engine vllm --engine-version 0.32, or an EAGLE-3 drafter"
_VLLM = Reads("MedusaModel", "medusa", "medusa.py", ran="0.32", before="0.33", lacks=(_ORIGINAL_HEAD_BIAS,))
_LATER_VLLM = Refused(
    "vLLM 0.33 removed Medusa",
    "--engine-version 0.32, or an EAGLE-3 drafter: hiddenstore train STORE --drafter eagle3",
    since="0.33",
)

MEDUSA = DrafterExport(
    drafter="medusa",
    titles={"medusa": "a Medusa drafter"},
    word=lambda flags: "medusa",
    rows={
        ("vllm", "medusa"): (_VLLM, _LATER_VLLM),
        ("sglang", "medusa"): (Refused("SGLang has no Medusa", _NEAREST),),
        ("trtllm", "medusa"): (
            Refused("Medusa belongs to its TensorRT backend; the PyTorch backend has none", _NEAREST),
        ),
        ("speculators", "medusa"): (Refused("speculators has no Medusa", _NEAREST),),
    },
    architectures=".*medusa.*",
    signs=_signs,
    longest=lambda config: config.get("num_heads") or config.get("medusa_num_heads"),
    ids_follow_engine=False,
    has_positions=False,
    files=_files,
    our_name=_our_name,
    read=_read,
    probe=_probe,
)
