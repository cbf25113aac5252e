"""EAGLE-1, which serves EAGLE-2 as well, outside: a headless Llama layer over [embedding; feature].

Shapes: D target width.
"""

from collections.abc import Mapping
from typing import Any

from trainer.formats import base
from trainer.formats.base import Checkpoint, DrafterExport, Engine, Files, Lack, Quirks, Reads, Refused, Target, Tensors

_LACKS = (
    Lack(lambda c: c.config.first_norm, "its layer 0 has no input_layernorm", "train with drafter.first_norm=false"),
    Lack(lambda c: c.config.last_norm, "it has no norm after the last layer", "train with drafter.last_norm=false"),
    Lack(
        lambda c: c.head.lm_head_bias is not None,
        "it reads the drafter's states with the target's head without its bias",
    ),
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``fc.weight`` [D, 2D] and the layers; embeddings and head stay with the target. Where the engine's ``fc`` has a
    bias, one of zeros is written rather than left as it was initialised."""
    tensors = base.weights(checkpoint, dtype)
    if reads.quirks.fc_bias:
        tensors["fc.bias"] = tensors["fc.weight"].new_zeros(len(tensors["fc.weight"]))
    names = {"architectures": [reads.architecture], "model_type": "llama"}
    return Files({**names, **base.llama_dimensions(checkpoint, dtype)}, tensors)


def _signs(config: Mapping[str, Any], tensors: Tensors) -> bool:
    fused = tensors.get("fc.weight")
    doubles = fused is not None and fused.shape[1] == 2 * fused.shape[0]
    return doubles and "layers.0.mlp.up_proj.weight" in tensors


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    base.require_shared_embeddings(tensors, target.head, "EAGLE-1")
    tensors.pop("lm_head.weight", None)
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bool(bias.any()):
        raise ValueError("fc.bias is not zero: vLLM would drop it, and drafters here have none")
    facts = {
        "aux_layers": (),
        "num_layers": int(config.get("num_hidden_layers", 1)),
        "first_norm": "layers.0.input_layernorm.weight" in tensors,
        "last_norm": "norm.weight" in tensors,
    }
    return base.dimensions(config) | facts, tensors


_VLLM = Reads("EagleLlamaForCausalLM", "eagle", "llama_eagle.py", ran="0.32", lacks=_LACKS)
_SGLANG = Reads("LlamaForCausalLMEagle", "EAGLE", "llama_eagle.py", lacks=_LACKS, quirks=Quirks(fc_bias=True))
_TRTLLM = Refused(
    reason="its PyTorch backend has no EAGLE-1 or EAGLE-2 model",
    nearest="--engine vllm or --engine sglang, or an EAGLE-3 drafter",
)

EAGLE1 = DrafterExport(
    drafter="eagle1",
    titles={"eagle1": "an EAGLE-1/2 drafter"},
    word=lambda flags: "eagle1",
    rows={
        ("vllm", "eagle1"): (_VLLM,),
        ("sglang", "eagle1"): (_SGLANG,),
        ("trtllm", "eagle1"): (_TRTLLM,),
        ("speculators", "eagle1"): (Refused("speculators has no EAGLE-1", "--engine vllm, or an EAGLE-3 drafter"),),
    },
    architectures="EagleLlamaForCausalLM|LlamaForCausalLMEagle|EagleSpeculator",
    signs=_signs,
    longest=lambda config: None,
    ids_follow_engine=False,
    has_positions=True,
    files=_files,
    our_name=lambda name: name,
    read=_read,
    probe=base.probe_chain,
)
