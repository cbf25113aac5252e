"""Published EAGLE-3 and DFlash checkpoints, read into our drafters: names, layer ids and vocabularies of every engine.

Sources: drafters.md sections 1.2, 1.4 and 2. safetensors only, nothing of a checkpoint is executed.

Shapes: V target vocabulary, U draft vocabulary, D target width, H drafter width.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.head import HeadBundle
from schemas.layers import LayerConvention, default_aux_layers, from_convention
from trainer.config import DrafterConfig
from trainer.drafters import drafter_kind
from trainer.drafters.rope import published_rope
from trainer.vocab import DraftVocab

Tensors = dict[str, Tensor]
IDS = "eagle_aux_hidden_state_layer_ids"
_NOT_OURS = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, eq=False)
class Published:
    """A checkpoint in our terms: settings, weights fp32 under our names, draft vocabulary."""

    config: DrafterConfig
    weights: Tensors
    vocab: DraftVocab


def read_published(
    folder: Path, head: HeadBundle, num_layers: int, convention: LayerConvention | None = None
) -> Published:
    """The drafter that config.json and the safetensors files of ``folder`` describe, for a target of ``num_layers``.

    ``convention`` says what the layer ids mean where the checkpoint leaves it open.

    Raises:
        NotFoundError: a file is missing.
        ConfigError: ``import-*``: not a drafter that can be read, or not one of this target.
    """
    config, tensors = _config(folder), _tensors(folder)
    name = _which(config, tensors, folder)
    tensors = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    vocab, order = _vocabulary(tensors, config, head)
    tensors = {key: value.float() for key, value in tensors.items() if key not in _NOT_OURS}
    if "lm_head.weight" in tensors and order is not None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
    try:
        facts, tensors = _READERS[name](config, tensors, _Target(head, vocab, num_layers, convention))
        theta, scaling = published_rope(config)
        settings = drafter_kind(name).config.model_validate(
            {**_dimensions(config), "rope_theta": theta, "rope_scaling": scaling, "vocab_size": vocab.size, **facts}
        )
    except KeyError as error:
        raise ConfigError(f"{folder}: config.json or weights lack {error}", kind="import-incomplete") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{folder}: {where} {first['msg']}, found {first['input']!r}", kind="import-unfit") from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}", kind="import-unfit") from error
    return Published(settings, tensors, vocab)


@dataclass(frozen=True, eq=False)
class _Target:
    head: HeadBundle
    vocab: DraftVocab
    num_layers: int
    convention: LayerConvention | None


def _eagle3(config: Mapping[str, Any], tensors: Tensors, target: _Target) -> tuple[dict[str, Any], Tensors]:
    tensors = {
        f"midlayer.{key.removeprefix('layers.0.')}" if key.startswith("layers.0.") else key: tensor
        for key, tensor in tensors.items()
    }
    _share_embeddings(tensors, target.head)
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = target.head.output_weight[target.vocab.target_ids].float().cpu()
    layers = _eagle3_layers(config, target)
    facts = {
        "aux_layers": layers,
        "num_layers": int(config.get("num_hidden_layers", 1)),
        "fc_norm": any(key.startswith("fc_norm.") for key in tensors),
        "norm_output": bool(config.get("norm_output", False)),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
        "train_embeddings": "embed_tokens.weight" in tensors,
    }
    return facts, tensors


def _dflash(config: Mapping[str, Any], tensors: Tensors, target: _Target) -> tuple[dict[str, Any], Tensors]:
    own = config.get("dflash_config") or {}
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types has sliding_attention, which engines make causal; windows here are symmetric")
    if own.get("sample_from_anchor") or config.get("sample_from_anchor"):
        raise ValueError("sample_from_anchor is set: its first slot predicts too, ours repeats the anchor")
    _share_embeddings(tensors, target.head)
    if "embed_tokens.weight" in tensors:
        raise ValueError("embed_tokens.weight differs from the target's, which DFlash shares")
    count = tensors["fc.weight"].shape[1] // target.head.hidden_size
    facts = {
        "aux_layers": _dflash_layers(config, target, count),
        "num_layers": int(config["num_hidden_layers"]),
        "block_size": int(config.get("block_size") or own["block_size"]),
        "mask_token_id": int(own.get("mask_token_id", config.get("mask_token_id", -1))),
        "sliding_window": own.get("swa_window_size") if own.get("use_swa") else None,
        "train_head": "lm_head.weight" in tensors,
    }
    return facts, tensors


_READERS: dict[str, Callable[[Mapping[str, Any], Tensors, _Target], tuple[dict[str, Any], Tensors]]] = {
    "eagle3": _eagle3,
    "dflash": _dflash,
}


def _which(config: Mapping[str, Any], tensors: Tensors, folder: Path) -> str:
    names = " ".join(map(str, config.get("architectures") or ()))
    if "DFlash" in names or "dflash_config" in config:
        return "dflash"
    if "eagle3" in names.lower() or any(key.endswith(("midlayer.hidden_norm.weight", "d2t")) for key in tensors):
        return "eagle3"
    raise ConfigError(
        f"{folder} is neither an EAGLE-3 nor a DFlash checkpoint: architectures is {names or 'not set'}",
        kind="import-unknown",
    )


def _eagle3_layers(config: Mapping[str, Any], target: _Target) -> tuple[int, ...]:
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


_WHOSE = {"vllm": "vLLM's convention", "output": "that of SGLang, TensorRT-LLM, ModelOpt and SpecForge"}


def _dflash_layers(config: Mapping[str, Any], target: _Target, count: int) -> tuple[int, ...]:
    as_vllm = config.get(IDS) or config.get("aux_hidden_state_layer_ids")
    if as_vllm:
        return tuple(from_convention(as_vllm, target.convention or "vllm"))
    ids = (config.get("dflash_config") or {}).get("target_layer_ids") or config.get("target_layer_ids")
    if ids:
        return tuple(from_convention(ids, target.convention or "output"))
    return tuple(default_aux_layers("dflash", target.num_layers, count))


def _dimensions(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position": config["max_position_embeddings"],
    }


def _vocabulary(tensors: Tensors, config: Mapping[str, Any], head: HeadBundle) -> tuple[DraftVocab, Tensor | None]:
    """The draft vocabulary, and how the rows of its head are put in ascending order of target ids."""
    if "d2t" not in tensors:
        rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else head.vocab_size
        if rows != head.vocab_size:
            raise ConfigError(
                f"the drafter says {rows} tokens and has no d2t, but the target has {head.vocab_size}",
                kind="import-unfit",
            )
        return DraftVocab.full(head.vocab_size), None
    offsets = tensors["d2t"].long()
    ids = torch.arange(len(offsets)) + offsets
    known = config.get("draft_vocab_size", len(ids))
    if known != len(ids):
        raise ConfigError(f"draft_vocab_size is {known}, but d2t names {len(ids)} tokens", kind="import-unfit")
    order = ids.argsort()
    return DraftVocab.of_ids(ids, head.vocab_size), None if torch.equal(ids[order], ids) else order


def _share_embeddings(tensors: Tensors, head: HeadBundle) -> None:
    """Drop embeddings that are the target's own."""
    own = tensors.get("embed_tokens.weight")
    if own is not None and own.shape == head.embed_tokens.shape and torch.equal(own, head.embed_tokens.float().cpu()):
        del tensors["embed_tokens.weight"]


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError as error:
        raise NotFoundError(f"{folder} holds no config.json", kind="import-missing") from error
    except ValueError as error:
        raise ConfigError(f"{folder / 'config.json'} is no JSON: {error}", kind="import-unfit") from error
    inner = found.get("transformer_layer_config")
    return {**inner, **found} if isinstance(inner, dict) else dict(found)


def _tensors(folder: Path) -> Tensors:
    files = sorted(folder.glob("*.safetensors"))
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if not files and pickled:
        code = (
            "import sys, torch, safetensors.torch as s; found = torch.load(sys.argv[1], weights_only=True); "
            "s.save_file({k: v.contiguous() for k, v in found.items()}, sys.argv[2])"
        )
        raise ConfigError(
            f"{folder} holds {pickled[0].name}, a pickle, which may run code when read; only safetensors is taken",
            kind="import-pickle",
            hint=shlex.join(["python", "-c", code, str(pickled[0]), str(folder / "model.safetensors")]),
        )
    if not files:
        raise NotFoundError(f"{folder} holds no .safetensors file", kind="import-missing")
    found: Tensors = {}
    for file in files:
        try:
            found |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is no safetensors file: {error}", kind="import-unfit") from error
    return found
