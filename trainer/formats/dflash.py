"""DFlash outside, as z-lab publishes it and engines read it.

Shapes: D target width, U draft vocabulary.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from schemas.layers import default_aux_layers, from_convention, to_convention
from trainer.formats import base
from trainer.formats.base import Checkpoint, DrafterExport, Engine, Files, Lack, Quirks, Reads, Refused, Target, Tensors

if TYPE_CHECKING:
    from torch import Tensor

SYMMETRIC_WINDOW = Lack(
    lambda c: c.config.sliding_window is not None and not c.config.is_causal(c.config.sliding_window),
    "it has no sliding window that is symmetric inside a block",
    "train with drafter.sliding_causal=true or drafter.sliding_window=none",
)
WINDOW = Lack(
    lambda c: c.config.sliding_window is not None,
    "its windows are not measured from each slot backwards",
    "--engine vllm, or train with drafter.sliding_window=none",
)
CAUSAL_BLOCK = Lack(
    lambda c: c.config.causal,
    "its slots see their whole block",
    "--engine vllm, or train with drafter.causal=false",
)
_OWN_HEAD = Lack(
    lambda c: c.config.train_head,
    "it reads the drafter's states with the target's head only",
    "train with drafter.train_head=false",
)
OWN_HEAD_OF_ALL_TOKENS = Lack(
    lambda c: c.config.train_head and c.vocab.is_full,
    "it replaces a head over the whole vocabulary by the target's when it loads one",
    "train with drafter.train_head=false or a smaller drafter.vocab_size, or --engine vllm",
)
_SMALL_VOCABULARY = Lack(
    lambda c: not c.vocab.is_full,
    "it has no draft vocabulary for this drafter",
    "train with drafter.vocab_size= the target's",
)
TARGET_HEAD_ONLY = (_OWN_HEAD, _SMALL_VOCABULARY, base.EMBEDDINGS_AS_A_LAYER)


def _files(checkpoint: Checkpoint, engine: Engine, reads: Reads, dtype: str) -> Files:
    """``target_layer_ids`` are numbers of layer outputs in every engine. A restricted draft vocabulary needs a head of
    its own rows [U, D] and ``d2t``, where the engine reads them. SGLang reads ``is_causal`` alone, vLLM either word."""
    drafter = checkpoint.config
    tensors = base.weights(checkpoint, dtype)
    if not checkpoint.vocab.is_full:
        tensors["lm_head.weight"] = base.like(tensors, checkpoint.model.head_weight())
        tensors |= base.draft_vocabulary(checkpoint)
    dflash: dict[str, Any] = {
        "mask_token_id": drafter.mask_token_id,
        "target_layer_ids": to_convention(sorted(drafter.aux_layers), "output"),
        "block_size": drafter.block_size,
    }
    if drafter.causal:
        dflash["causal"] = True
    config = {
        "architectures": [reads.architecture],
        "model_type": "qwen3",
        **base.llama_dimensions(checkpoint, dtype),
        "block_size": drafter.block_size,
        "num_target_layers": checkpoint.identity.num_layers,
        **window_words(drafter),
        "dflash_config": dflash,
    }
    if drafter.causal and engine.name == "sglang":
        config["is_causal"] = True
    return Files(config, tensors)


def window_words(drafter: Any) -> dict[str, Any]:
    """Windows as engines read them: causal inside a block unless something says otherwise."""
    types = ["full_attention" if window is None else "sliding_attention" for window in drafter.windows]
    window = drafter.sliding_window if "sliding_attention" in types else None
    return {"layer_types": types, "use_sliding_window": window is not None} | (
        {"sliding_window": window} if window else {}
    )


def wrapped(
    config: dict[str, Any], checkpoint: Checkpoint, draft_len: int, algorithm: str = "dflash"
) -> dict[str, Any]:
    """DFlash's ``config.json`` inside that of speculators."""
    dflash = config["dflash_config"]
    flags = {
        "block_size": dflash["block_size"],
        "mask_token_id": dflash["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in dflash["target_layer_ids"]],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
    }
    return base.speculators_config(config, checkpoint, draft_len, algorithm, flags)


def block_size(config: Mapping[str, Any]) -> int | None:
    """Slots of a block as ``config.json`` states them, the newest token's included; None where it does not."""
    size: int | None = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    return size


def _read(config: Mapping[str, Any], tensors: Tensors, target: Target) -> tuple[dict[str, Any], Tensors]:
    dflash = config.get("dflash_config") or {}
    if dflash.get("sample_from_anchor") or config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is set: its first slot predicts too, ours repeats the anchor")
    _require_plain(config, dflash)
    base.require_shared_embeddings(tensors, target.head, "DFlash")
    output = target.head.output_weight
    base.drop_shared(tensors, "lm_head.weight", output[target.vocab.target_ids.to(output.device)])
    mask = dflash.get("mask_token_id", config.get("mask_token_id"))
    facts = {
        "aux_layers": _published_layers(config, target, tensors["fc.weight"].shape[1] // target.head.hidden_size),
        "num_layers": int(config["num_hidden_layers"]),
        "block_size": int(config.get("block_size") or dflash["block_size"]),
        "mask_token_id": -1 if mask is None else int(mask),
        **_windows(config, dflash),
        "train_head": "lm_head.weight" in tensors,
    }
    return base.dimensions(config) | facts, tensors


def _require_plain(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    """ValueError where attention computes otherwise than ours, as vLLM's ``qwen3_dflash.py`` and SGLang's ``dflash.py``
    read it, or another head follows the states."""
    if (head := _foreign_head(dflash)) is not None:
        raise ValueError(f"its projector_type is {head}, a head after DFlash's states that is not known here")
    scale = dflash.get("attention_value_scale")
    if scale not in (None, 1.0):
        raise ValueError(f"attention_value_scale is {scale}, and ours takes values as they are")
    if config.get("use_gemma_norm"):
        raise ValueError("use_gemma_norm is set: its norms multiply by 1 + weight, ours by the weight")
    for word in ("rope_is_neox_style", "is_neox_style"):
        if not config.get(word, True):
            raise ValueError(f"{word} is false: it rotates neighbouring channels, ours the halves of a head")


def _foreign_head(dflash: Mapping[str, Any]) -> str | None:
    """What ``projector_type`` says follows the states in a file of DFlash's class; None where nothing does."""
    head = dflash.get("projector_type")
    return None if head in (None, "dflash") else str(head)


_PLAIN_CLASS = re.compile(r".*dflash.*|MuseGlimmerAssistantModel", re.IGNORECASE)
_HEADS = {"LiLiCorr": {"vllm": "0.32", "sglang": "0.5.23"}}
"""What follows DFlash's states in files of a class with this word, and since when an engine has that class (vLLM's
``registry.py``, SGLang's ``lilicorr.py``)."""


def _unread(config: Mapping[str, Any], engine: str) -> Refused | None:
    """Whatever has a ``dflash_config`` passes for a DFlash here, and a loader that drops what it does not know
    (SGLang's ``dflash.py``, TensorRT-LLM's) drafts with the rest of it."""
    more = next(_beside_dflash(config), None)
    if more is None:
        return _unread_causal(config, engine)
    classes = " ".join(map(str, config.get("architectures") or ()))
    readers = next((readers for word, readers in _HEADS.items() if word in classes), {})
    nearest = " or ".join(f"--engine {name} --engine-version {first}" for name, first in readers.items())
    reason = f"its {more}: it computes more than the engine's DFlash does"
    return Refused(reason, nearest or "a DFlash drafter", before=readers.get(engine))


def _unread_causal(config: Mapping[str, Any], engine: str) -> Refused | None:
    """Of the words of `_causal` vLLM reads the first two, SGLang (``dflash.py``) the first alone: by the others it
    would fill blocks as if their slots saw each other."""
    dflash = config.get("dflash_config") or {}
    known = config.get("is_causal"), (None if engine == "sglang" else dflash.get("causal"))
    if not _causal(config) or any(word is not None for word in known):
        return None
    word = "causal" if dflash.get("causal") else "causal_head"
    return Refused(f"its block is causal by dflash_config.{word}, which the engine does not read", import_first(engine))


def import_first(engine: str) -> str:
    """The commands that write a published drafter as an engine reads it."""
    return f"hiddenstore import-drafter DIR -o RUN --store STORE, then hiddenstore export RUN --engine {engine} -o OUT"


def _beside_dflash(config: Mapping[str, Any]) -> Iterator[str]:
    """The words of a ``config.json`` by which it is more than a DFlash."""
    dflash = config.get("dflash_config") or {}
    if (head := _foreign_head(dflash)) is not None:
        yield f"projector_type is {head}"
    for name in map(str, config.get("architectures") or ()):
        if not _PLAIN_CLASS.fullmatch(name):
            yield f"class is {name}"
    for key in (*config, *dflash):
        if key.startswith("lilicorr_") and dflash.get("lilicorr_enabled") is not False:
            yield f"config.json has {key}"


def _causal(config: Mapping[str, Any]) -> bool | None:
    """What one word says of all layers: vLLM's in its order, then that of JetSpec's own trainer; None without one."""
    dflash = config.get("dflash_config") or {}
    words = (config.get("is_causal"), dflash.get("causal"), dflash.get("causal_head"))
    return next((bool(word) for word in words if word is not None), None)


def _windows(config: Mapping[str, Any], dflash: Mapping[str, Any]) -> dict[str, Any]:
    """Windows and what is causal, as vLLM resolves them: one word for all layers, else layers of a sliding type are."""
    types = list(config.get("layer_types") or ())
    override = _causal(config)
    by_type = "sliding_attention" in types
    window = dflash.get("swa_window_size") or config.get("sliding_window") if by_type or dflash.get("use_swa") else None
    return {
        "causal": bool(override),
        "sliding_window": window,
        "layer_types": types if by_type and len(set(types)) > 1 else (),
        "sliding_causal": by_type and override is None and not config.get("sliding_window_non_causal"),
    }


def _published_layers(config: Mapping[str, Any], target: Target, count: int) -> tuple[int, ...]:
    as_vllm = config.get(base.LAYER_IDS) or config.get("aux_hidden_state_layer_ids")
    if as_vllm:
        return tuple(from_convention(as_vllm, target.convention or "vllm"))
    ids = (config.get("dflash_config") or {}).get("target_layer_ids") or config.get("target_layer_ids")
    if ids:
        return tuple(from_convention(ids, target.convention or "output"))
    return tuple(default_aux_layers("dflash", target.num_layers, count))


def _probe(model: Any, checkpoint: Checkpoint) -> "Tensor":
    """The logits of one block after a text."""
    import torch

    from trainer.slots import Blocks

    aux, ids = base.probe_states(checkpoint, len(model.config.aux_layers)), base.probe_ids(checkpoint)
    context = model.context(aux, torch.arange(base.PROBE_TOKENS))
    blocks = Blocks.of([(0, base.PROBE_TOKENS)], torch.device("cpu"))
    slots = (model.first_slot, model.first_slot + model.config.longest)
    states = model.fill(ids[:1], torch.tensor([base.PROBE_TOKENS]), context, blocks, slots)
    logits: Tensor = model.logits(states, model.before(ids[None, : model.config.longest]))
    return logits


def _mixed_attention(config: Mapping[str, Any]) -> str | None:
    if len(set(config.get("layer_types") or [])) < 2:
        return None
    return "sliding and full attention layers together need VLLM_USE_V2_MODEL_RUNNER=1 in vLLM's environment"


_SGLANG = Reads("DFlashDraftModel", "DFLASH", "dflash.py", since="0.5.23", lacks=(SYMMETRIC_WINDOW, *TARGET_HEAD_ONLY))
_TRTLLM = Reads(
    "DFlashDraftModel",
    "DFlash",
    "modeling_dflash.py",
    since="1.3",
    lacks=(WINDOW, *TARGET_HEAD_ONLY, base.ATTENTION_FACTOR),
)
_VLLM = Reads(
    "DFlashDraftModel",
    "dflash",
    "qwen3_dflash.py",
    ran="0.32",
    since="0.32",
    lacks=(SYMMETRIC_WINDOW,),
    warn=_mixed_attention,
)
_LLAMACPP = Reads("dflash", "draft-dflash", "src/models/dflash.cpp", ran="11434", lacks=(WINDOW, *base.OF_LLAMACPP))
_SPECULATORS = Reads(
    "DFlashSpeculator",
    "dflash",
    "models/dflash",
    ran="0.9",
    lacks=(WINDOW, OWN_HEAD_OF_ALL_TOKENS),
    quirks=Quirks(wrap=wrapped),
)

_NO_CAUSAL = Refused(
    "the slots of its blocks see later ones", "--engine vllm, sglang or llamacpp, or train with drafter.causal=false"
)


def _word(flags: Mapping[str, Any]) -> str:
    """By our settings or a ``config.json``."""
    return "jetspec" if flags.get("causal") or _causal(flags) else "dflash"


DFLASH = DrafterExport(
    drafter="dflash",
    titles={"dflash": "a DFlash drafter", "jetspec": "a JetSpec drafter, a causal DFlash"},
    word=_word,
    rows={
        ("vllm", "dflash"): _VLLM.first_known("vLLM", "an EAGLE-3 drafter"),
        ("sglang", "dflash"): _SGLANG.first_known("SGLang"),
        ("trtllm", "dflash"): _TRTLLM.preceded_by(
            "DFlash came with 1.3", "--engine-version 1.3, --engine vllm or --engine sglang"
        ),
        ("llamacpp", "dflash"): (_LLAMACPP,),
        ("speculators", "dflash"): (_SPECULATORS,),
        ("vllm", "jetspec"): _VLLM.first_known("vLLM", what="dflash_config.causal"),
        ("sglang", "jetspec"): _SGLANG.first_known("SGLang", what="is_causal"),
        ("llamacpp", "jetspec"): (_LLAMACPP,),
        **{(engine, "jetspec"): (_NO_CAUSAL,) for engine in ("trtllm", "speculators")},
    },
    architectures=".*dflash.*",
    signs=lambda config, tensors: bool(config.get("dflash_config")),
    longest=lambda config: size - 1 if (size := block_size(config)) else None,
    ids_follow_engine=False,
    has_positions=True,
    files=_files,
    our_name=lambda name: name,
    read=_read,
    probe=_probe,
    unread=_unread,
)
