"""What a published checkpoint of each drafter says: names of its weights, its layers, its flags.

Sources: drafters.md sections 1.1 to 1.5 and 2; SafeAILab, FasterDecoding, z-lab, speculators, ModelOpt and what engines
load. A new drafter is a function here and a line in ``READERS``.

Shapes: V target vocabulary, U draft vocabulary, D target width, H drafter width.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hiddenstore.errors import ConfigError
from hiddenstore.head import HeadBundle
from schemas.layers import LayerConvention, default_aux_layers, from_convention
from trainer.drafters.rope import published_rope
from trainer.vocab import DraftVocab

Tensors = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
_WHOSE = {"vllm": "vLLM's convention", "output": "that of SGLang, TensorRT-LLM, ModelOpt and SpecForge"}
_MEDUSA_NAMES = (
    (re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
    (re.compile(r"(\d+)\.medusa_layers\.(\d+)\.linear\.(weight|bias)"), r"blocks.\1.layers.\2.\3"),
    (re.compile(r"(\d+)\.lm_head\.weight"), r"lm_heads.\1.weight"),
)


@dataclass(frozen=True, eq=False)
class TheirTarget:
    """The target a checkpoint is read for; ``convention`` of its layer ids where it leaves that open."""

    head: HeadBundle
    vocab: DraftVocab
    num_layers: int
    convention: LayerConvention | None


Read = tuple[dict[str, Any], Tensors]
"""Settings of the drafter, and its weights under our names."""


def plain_name(key: str) -> str:
    """A tensor's name without the prefixes that some publish it under; Medusa's as vLLM calls them."""
    key = key.removeprefix("model.").removeprefix("medusa_heads.")
    for pattern, ours in _MEDUSA_NAMES:
        if pattern.fullmatch(key):
            return pattern.sub(ours, key)
    return key


def which(config: Mapping[str, Any], tensors: Tensors) -> str | None:
    """The drafter a checkpoint holds: by its architecture, else by tensors that only one kind has."""
    names = " ".join(map(str, config.get("architectures") or ()))
    if "DFlash" in names or "dflash_config" in config:
        return "dflash"
    if "medusa" in names.lower() or config.get("model_type") == "medusa" or "blocks.0.layers.0.weight" in tensors:
        return "medusa"
    if "eagle3" in names.lower() or any(key.endswith("hidden_norm.weight") or key == "d2t" for key in tensors):
        return "eagle3"
    fused = tensors.get("fc.weight")
    if fused is not None and fused.shape[1] == 2 * fused.shape[0] and "layers.0.mlp.up_proj.weight" in tensors:
        return "eagle1"
    return None


def _eagle1(config: Mapping[str, Any], tensors: Tensors, target: TheirTarget) -> Read:
    _share_embeddings(tensors, target.head)
    if "embed_tokens.weight" in tensors:
        raise ValueError("embed_tokens.weight differs from the target's, which EAGLE-1 shares")
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
    return _dimensions(config) | facts, tensors


def _eagle3(config: Mapping[str, Any], tensors: Tensors, target: TheirTarget) -> Read:
    tensors = _eagle3_names(tensors)
    _share_embeddings(tensors, target.head)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.head.output_weight[target.vocab.target_ids].float().cpu()
    facts = {
        "aux_layers": _eagle3_layers(config, target),
        "num_layers": int(config.get("num_hidden_layers", 1)),
        "fc_norm": any(key.startswith("fc_norm.") for key in tensors),
        "norm_output": bool(config.get("norm_output", False)),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "train_embeddings": "embed_tokens.weight" in tensors,
    }
    return _dimensions(config) | facts, tensors


def _eagle3_names(tensors: Tensors) -> Tensors:
    """``midlayer`` for layer 0 and ``layers`` for later ones, whose only norm SGLang and TensorRT-LLM call
    ``hidden_norm``."""
    named = {}
    for key, tensor in tensors.items():
        place = re.fullmatch(r"(?:layers|midlayer)\.(\d+)\.(.*)", key)
        if place is None:
            named[key] = tensor
        elif place[1] == "0":
            named[f"midlayer.{place[2]}"] = tensor
        else:
            named[f"layers.{place[1]}.{place[2]}".replace("hidden_norm", "input_layernorm")] = tensor
    return named


def _dflash(config: Mapping[str, Any], tensors: Tensors, target: TheirTarget) -> Read:
    own = config.get("dflash_config") or {}
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types has sliding_attention, which engines make causal; windows here are symmetric")
    if own.get("sample_from_anchor") or config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is set: its first slot predicts too, ours repeats the anchor")
    _share_embeddings(tensors, target.head)
    if "embed_tokens.weight" in tensors:
        raise ValueError("embed_tokens.weight differs from the target's, which DFlash shares")
    count = tensors["fc.weight"].shape[1] // target.head.hidden_size
    mask = own.get("mask_token_id", config.get("mask_token_id"))
    facts = {
        "aux_layers": _dflash_layers(config, target, count),
        "num_layers": int(config["num_hidden_layers"]),
        "block_size": int(config.get("block_size") or own["block_size"]),
        "mask_token_id": -1 if mask is None else int(mask),
        "sliding_window": own.get("swa_window_size") if own.get("use_swa") else None,
        "train_head": "lm_head.weight" in tensors,
    }
    return _dimensions(config) | facts, tensors


def _medusa(config: Mapping[str, Any], tensors: Tensors, target: TheirTarget) -> Read:
    """Everything is said by the tensors: FasterDecoding's config.json names neither width nor vocabulary."""
    width = tensors["blocks.0.layers.0.weight"].shape[0]
    heads = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("blocks."))
    layers = 1 + max(int(key.split(".")[3]) for key in tensors if key.startswith("blocks."))
    for name in [key for key in tensors if key.startswith("blocks.") and key.endswith(".weight")]:
        tensors.setdefault(name.removesuffix("weight") + "bias", torch.zeros(width))
    vocab = target.vocab
    for name in [key for key in tensors if key.startswith("lm_heads.")]:
        if not vocab.is_full and tensors[name].shape[0] == vocab.target_size:
            tensors[name] = tensors[name][vocab.target_ids]
    is_original = False
    if config.get("original_lm_head"):
        shared = tensors.pop("lm_heads.0.weight")
        is_original = _is_the_target_s(shared, target.head.output_weight)
        if not is_original:
            tensors |= {f"lm_heads.{k}.weight": shared for k in range(heads)}
    facts = {
        "aux_layers": (),
        "medusa_heads": heads,
        "medusa_layers": layers,
        "original_head": is_original,
        # No attention, so no heads: what the settings need to be filled with.
        "hidden_size": width,
        "intermediate_size": width,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 2,
    }
    return facts, tensors


READERS: dict[str, Callable[[Mapping[str, Any], Tensors, TheirTarget], Read]] = {
    "eagle1": _eagle1,
    "eagle3": _eagle3,
    "dflash": _dflash,
    "medusa": _medusa,
}


def _eagle3_layers(config: Mapping[str, Any], target: TheirTarget) -> tuple[int, ...]:
    """Nothing in a file says whether its ids are vLLM's or SGLang's: only what is certain is taken."""
    top, nested = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    ids = top or nested
    if not ids:
        return tuple(default_aux_layers("eagle3", target.num_layers))
    if target.convention is not None:
        return tuple(from_convention(ids, target.convention))
    is_vllm_beside_sglang = bool(nested) and list(ids) == [index + 1 for index in nested or ()]
    if is_vllm_beside_sglang or "speculators_config" in config or "speculators_version" in config:
        return tuple(from_convention(ids, "vllm"))
    readings: dict[str, list[int]] = {name: from_convention(ids, name) for name in ("vllm", "output")}
    fitting = {name: read for name, read in readings.items() if all(-1 <= k < target.num_layers for k in read)}
    usual = [read for read in fitting.values() if read == default_aux_layers("eagle3", target.num_layers)]
    if usual or len(fitting) == 1:
        return tuple((usual or list(fitting.values()))[0])
    said = ", ".join(f"{read} in {_WHOSE[name]}" for name, read in readings.items())
    raise ConfigError(
        f"layer ids {list(ids)} are ambiguous: they mean layers {said}, and the wrong ones draft badly in silence",
        kind="import-layers",
        hint="--layer-convention vllm, or --layer-convention output",
    )


def _dflash_layers(config: Mapping[str, Any], target: TheirTarget, count: int) -> tuple[int, ...]:
    as_vllm = config.get(IDS) or config.get("aux_hidden_state_layer_ids")
    if as_vllm:
        return tuple(from_convention(as_vllm, target.convention or "vllm"))
    ids = (config.get("dflash_config") or {}).get("target_layer_ids") or config.get("target_layer_ids")
    if ids:
        return tuple(from_convention(ids, target.convention or "output"))
    return tuple(default_aux_layers("dflash", target.num_layers, count))


def _dimensions(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    theta, scaling = published_rope(config)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position": config["max_position_embeddings"],
    }


def _share_embeddings(tensors: Tensors, head: HeadBundle) -> None:
    """Drop embeddings that are the target's own."""
    own = tensors.get("embed_tokens.weight")
    if own is not None and _is_the_target_s(own, head.embed_tokens):
        del tensors["embed_tokens.weight"]


def share_head(tensors: Tensors, head: HeadBundle, vocab: DraftVocab) -> None:
    """Drop an LM head whose rows are the target's own, as far as the file's dtype tells."""
    own = tensors.get("lm_head.weight")
    rows = head.output_weight[vocab.target_ids.to(head.output_weight.device)].cpu()
    if own is not None and own.shape == rows.shape and torch.equal(own, rows.to(own.dtype)):
        del tensors["lm_head.weight"]


def _is_the_target_s(own: Tensor, rows: Tensor) -> bool:
    """Whether a table is the target's [V, D], in the target's dtype or rounded to one of a file."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    return own.shape == rows.shape and any(torch.equal(own, rows.cpu().to(dtype).float()) for dtype in dtypes)
