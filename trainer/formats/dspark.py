"""DSpark outside: DFlash's files and two heads, under the names of DeepSeek's release, speculators and llama.cpp.
ModelOpt's are read.

Shapes: D target width, V target vocabulary, U draft vocabulary, M Markov rank.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer.formats import base
from trainer.formats.base import Checkpoint, Engine, Files, Quirks, Reads, Refused, Target, Tensors
from trainer.formats.dflash import (
    CAUSAL_BLOCK,
    DFLASH,
    OWN_HEAD_OF_ALL_TOKENS,
    SYMMETRIC_WINDOW,
    WINDOW,
    block_size,
    import_first,
)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``markov_head.markov_w1`` [V, M], ``markov_w2`` [U, M], ``confidence_head.proj`` [1, D+M] with a bias. Mask token
    and layers stand at the top and in ``dflash_config``: vLLM reads the former, SGLang and llama.cpp the latter. vLLM
    refuses ``sample_from_anchor`` there, where it is a DFlash's."""
    made, drafter = DFLASH.files(checkpoint, engine, reads, dtype), checkpoint.config
    flags = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": made.config["dflash_config"]["target_layer_ids"],
        "sample_from_anchor": drafter.sample_from_anchor,
        "dspark_bonus_anchor": not drafter.sample_from_anchor,
        **_heads(drafter),
    }
    nested = made.config["dflash_config"] | {"projector_type": "dspark"}
    if engine.name != "vllm":
        nested["sample_from_anchor"] = drafter.sample_from_anchor
    return replace(made, config={**made.config, **flags, "dflash_config": nested})


def _heads(drafter: Any) -> dict[str, Any]:
    return {
        "markov_rank": drafter.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": drafter.confidence_head,
        "confidence_head_with_markov": drafter.confidence_head,
    }


def _wrapped(config: dict[str, Any], checkpoint: Checkpoint, draft_len: int) -> dict[str, Any]:
    flags = {
        "block_size": config["block_size"],
        "mask_token_id": config["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config["target_layer_ids"]],
        "sample_from_anchor": config["sample_from_anchor"],
        "sliding_window_non_causal": True,
        **_heads(checkpoint.config),
    }
    inner = {key: value for key, value in config.items() if key not in ("target_layer_ids", "dspark_bonus_anchor")}
    return base.speculators_config(inner, checkpoint, draft_len, "dspark", flags)


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    nested = config.get("dflash_config") or {}
    kind = config.get("markov_head_type", nested.get("markov_head_type", "vanilla"))
    if kind != "vanilla":
        raise ValueError(f"markov_head_type is {kind!r}; only 'vanilla' is known here")
    # speculators fills blocks either way, and says by these words alone that a file is of its DSpark.
    silent = "sample_from_anchor" not in config.keys() | nested.keys()
    if silent and "aux_hidden_state_layer_ids" in config and config.get("speculators_model_type") != "dspark":
        raise ValueError("it does not say sample_from_anchor: true where its first slot proposes, else false")
    has_confidence = "confidence_head.proj.weight" in tensors
    rank = tensors["markov_head.markov_w1.weight"].shape[1]
    if has_confidence and tensors["confidence_head.proj.weight"].shape[1] != target.head.hidden_size + rank:
        raise ValueError("its confidence head does not read the Markov embedding, ours does")
    if has_confidence and "confidence_head.proj.bias" not in tensors:
        tensors["confidence_head.proj.bias"] = tensors["confidence_head.proj.weight"].new_zeros(1)
    of_dflash = {**nested, "sample_from_anchor": False, "projector_type": None}
    plain = {**config, "dflash_config": of_dflash, "sample_from_anchor": False}
    facts, tensors = DFLASH.read(plain, tensors, target)
    heads = {"markov_rank": rank, "confidence_head": has_confidence}
    return facts | heads | {"sample_from_anchor": _every_slot_proposes(config)}, tensors


def _every_slot_proposes(config: Mapping[str, Any]) -> bool:
    """Whether the newest token's slot proposes too, as engines take it where nothing is said; else it is filled in as a
    DFlash's."""
    nested = config.get("dflash_config") or {}
    return bool(config.get("sample_from_anchor", nested.get("sample_from_anchor", True)))


def _longest(config: Mapping[str, Any]) -> int | None:
    return block_size(config) if _every_slot_proposes(config) else DFLASH.longest(config)


def _signs(config: Mapping[str, Any], tensors: Tensors) -> bool:
    rank = config.get("markov_rank") or (config.get("dflash_config") or {}).get("markov_rank")
    return bool(rank) or "markov_head.markov_w1.weight" in tensors


_MODELOPT = {
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "confidence_proj": "confidence_head.proj",
}


def _our_name(name: str) -> str:
    """ModelOpt has its heads beside the layers: ``markov_w1``, ``markov_w2``, ``confidence_proj``."""
    first, dot, rest = name.removeprefix("logit_head.").partition(".")
    return _MODELOPT.get(first, first) + dot + rest


def _unread(config: Mapping[str, Any], engine: str) -> Refused | None:
    """As ModelOpt 0.47's ``DSparkExporter`` writes it: by its class a DFlash, whose slots engines take one place
    further on, and without heads."""
    names = map(str, config.get("architectures") or ())
    if not any(re.fullmatch(DFLASH.architectures, name, re.IGNORECASE) for name in names):
        return None
    return Refused(
        "it is a DSpark under DFlash's class, and its heads have names that no engine looks for",
        import_first(engine),
    )


def _no_confidence(config: Mapping[str, Any]) -> str | None:
    """``build_confidence_head`` of SGLang's ``dspark.py`` asks for the mode alone, and its loader for the weights."""
    if config.get("enable_confidence_head", True):
        return None
    return (
        "without a confidence head SGLang drafts with SGLANG_RAGGED_VERIFY_MODE=static alone, its default: in another "
        "mode it asks for one and does not start, whatever enable_confidence_head says"
    )


_V2 = "DSpark runs in vLLM's V2 model runner only, which needs Triton: no CPU build has it"
_VLLM = Reads(
    "Qwen3DSparkModel",
    "dspark",
    "qwen3_dspark.py",
    since="0.32",
    lacks=(SYMMETRIC_WINDOW,),
    warn=lambda config: _V2,
)
_SGLANG = Reads(
    "DSparkDraftModel",
    "DSPARK",
    "dspark.py",
    since="0.5.23",
    lacks=DFLASH.rows["sglang", "dflash"][-1].lacks,  # type: ignore[union-attr]
    warn=_no_confidence,
)
_LLAMACPP = Reads("dflash", "draft-dspark", "src/models/dflash.cpp", ran="11434", lacks=(WINDOW, *base.OF_LLAMACPP))
_SPECULATORS = Reads(
    "DSparkSpeculator",
    "dspark",
    "models/dspark",
    ran="0.9",
    lacks=(WINDOW, CAUSAL_BLOCK, OWN_HEAD_OF_ALL_TOKENS),
    quirks=Quirks(wrap=_wrapped),
)

DSPARK = replace(
    DFLASH,
    drafter="dspark",
    titles={"dspark": "a DSpark drafter"},
    word=lambda flags: "dspark",
    rows={
        ("vllm", "dspark"): _VLLM.first_known("vLLM", "a DFlash drafter"),
        ("sglang", "dspark"): _SGLANG.first_known("SGLang"),
        ("trtllm", "dspark"): (
            Refused(
                "1.2 has no DSpark, 1.3 has DeepSeek-V4's inside its target, and its main branch's was not compared",
                "--engine vllm, or a DFlash drafter",
            ),
        ),
        ("llamacpp", "dspark"): (_LLAMACPP,),
        ("speculators", "dspark"): (_SPECULATORS,),
    },
    architectures=".*dspark.*",
    signs=_signs,
    longest=_longest,
    files=_files,
    our_name=_our_name,
    read=_read,
    variant_of="dflash",
    unread=_unread,
)
