"""DFlash2 outside: DFlash's files, convolutions and a selector, under the names of z-lab's release, which all share.

Shapes: D target width, V target vocabulary, M selector rank, T taps, G groups of channels.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.formats import base
from trainer.formats.base import Checkpoint, Engine, Files, Lack, Quirks, Reads, Refused, Target, Tensors
from trainer.formats.dflash import (
    CAUSAL_BLOCK,
    DFLASH,
    OWN_HEAD_OF_ALL_TOKENS,
    SYMMETRIC_WINDOW,
    TARGET_HEAD_ONLY,
    WINDOW,
    wrapped,
)

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
NEUTRAL = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": 0.0}
"""What a ``config.json`` may have its logits and embeddings changed by, and the value that changes nothing."""

_LATTICE = Lack(
    lambda c: c.config.selector_top_k * (c.config.selector_top_k + 1) > c.config.hidden_size,
    "it keeps the candidates of a slot and their k x k scores in one row as wide as the drafter",
    "train with a smaller drafter.selector_top_k: k (k + 1) at most drafter.hidden_size",
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """Of every layer ``attention_conv`` and ``mlp_conv``: ``base_kernel`` [2, T, D], ``kernel_projection`` [2TG, D].
    ``candidate_selector``: two codebooks [V, M], ``hidden_projection`` [M, D]. Their sizes are in ``dflash_config``."""
    files = DFLASH.files(checkpoint, engine, reads, dtype)
    nested = files.config["dflash_config"] | {name: getattr(checkpoint.config, name) for name in SIZES}
    return replace(files, config={**files.config, "dflash_config": nested})


def _wrapped(config: dict[str, Any], checkpoint: Checkpoint, draft_len: int) -> dict[str, Any]:
    sizes = {name: config["dflash_config"][name] for name in SIZES}
    return wrapped(config, checkpoint, draft_len, "dflash2") | sizes


def _value(config: Mapping[str, Any], name: str) -> Any:
    return (config.get("dflash_config") or {}).get(name, config.get(name))


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    for name, neutral in NEUTRAL.items():
        if (_value(config, name) or neutral) != neutral:
            raise ValueError(f"{name} is {_value(config, name)}, and ours reads logits and embeddings as they are")
    facts, tensors = DFLASH.read(config, tensors, target)
    sizes = {name: _value(config, name) for name in SIZES}
    if lacking := [name for name, size in sizes.items() if size is None]:
        raise KeyError(lacking[0])
    return facts | sizes, tensors


_V2 = "DFlash2 runs in vLLM's V2 model runner only, which needs Triton: no CPU build has it"
_VLLM = Reads(
    "DFlash2DraftModel",
    "dflash",
    "qwen3_dflash2.py",
    since="0.32",
    lacks=(SYMMETRIC_WINDOW,),
    warn=lambda config: _V2,
)
_SGLANG = Reads(
    "DFlash2DraftModel",
    "DFLASH",
    "dflash.py",
    since="0.5.23",
    lacks=(SYMMETRIC_WINDOW, *TARGET_HEAD_ONLY),
)
_LLAMACPP = Reads(
    "dflash",
    "draft-dflash",
    "src/models/dflash.cpp",
    ran="11434",
    lacks=(WINDOW, CAUSAL_BLOCK, _LATTICE, *base.OF_LLAMACPP),
)
_SPECULATORS = Reads(
    "DFlash2DraftModel",
    "dflash2",
    "models/dflash2",
    ran="0.9",
    lacks=(WINDOW, CAUSAL_BLOCK, OWN_HEAD_OF_ALL_TOKENS),
    quirks=Quirks(wrap=_wrapped),
)

DFLASH2 = replace(
    DFLASH,
    drafter="dflash2",
    titles={"dflash2": "a DFlash2 drafter"},
    word=lambda flags: "dflash2",
    rows={
        ("vllm", "dflash2"): _VLLM.first_known("vLLM", "a DFlash drafter"),
        ("sglang", "dflash2"): _SGLANG.first_known("SGLang"),
        ("trtllm", "dflash2"): (
            Refused("its DFlash has no convolution and no selector", "--engine vllm, or a DFlash drafter"),
        ),
        ("llamacpp", "dflash2"): (_LLAMACPP,),
        ("speculators", "dflash2"): (_SPECULATORS,),
    },
    architectures=".*dflash2.*",
    signs=lambda config, tensors: bool(_value(config, "selector_rank")),
    files=_files,
    read=_read,
    variant_of="dflash",
)
