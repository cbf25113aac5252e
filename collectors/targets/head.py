"""The head bundle of a target read from its safetensors, without building or reading a single decoder block.

The family's row says where embeddings, final norm and LM head are; a model of empty (``meta``) tensors says how the
norm computes, whether the head is tied and what shapes to expect.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.targets.families import find_parts, head_names
from collectors.targets.folder import TargetFolder, first_line
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_STORED = (torch.bfloat16, torch.float16, torch.float32)


def read_head(folder: TargetFolder, dtype: torch.dtype | None = None) -> HeadBundle:
    """Embeddings, final norm and LM head on the CPU; ``dtype`` None keeps the one the config names.

    Raises:
        ConfigError: ``target-incomplete``, ``family-unsupported``, or ``target-unreadable``: the checkpoint
            lacks one of them, or holds it in a form that only its own kernels read.
    """
    expected = find_parts(_empty_model(folder), folder.config).head
    config_dtype = getattr(folder.config, "dtype", None) or getattr(folder.config, "torch_dtype", None)
    dtype = dtype or (config_dtype if isinstance(config_dtype, torch.dtype) else None)
    files = _tensor_files(folder)
    weights: dict[str, Any] = {}
    for field, name in head_names(folder.config.model_type).items():
        weight = getattr(expected, field)
        weights[field] = None if weight is None else _read(folder, files, name, weight, dtype)
    return replace(expected, **weights)


def weights_bytes(folder: TargetFolder) -> int | None:
    """Size of all weights in the form the checkpoint holds them; None where it does not say."""
    index = folder.file(INDEX_FILE)
    if index is not None:
        total = json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size")
        return None if total is None else int(total)
    single = folder.file(WEIGHTS_FILE)
    return None if single is None else single.stat().st_size


def _empty_model(folder: TargetFolder) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(folder.config, trust_remote_code=folder.trust_remote_code)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cannot tell the parts of target {folder.label}: {first_line(error)}", kind=Kind.TARGET_UNREADABLE
        ) from error


def _tensor_files(folder: TargetFolder) -> dict[str, Path]:
    """Tensor name to the safetensors file that holds it."""
    index = folder.file(INDEX_FILE)
    if index is not None:
        table: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: Path(file) for name, file in table.items()}
    single = folder.file(WEIGHTS_FILE)
    if single is None:
        raise ConfigError(
            f"target {folder.label} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            kind=Kind.TARGET_INCOMPLETE,
            hint="load it with transformers and save_pretrained it to a folder, or --engine hf",
        )
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), Path(WEIGHTS_FILE))


def _read(
    folder: TargetFolder, files: dict[str, Path], name: str, expected: Tensor, dtype: torch.dtype | None
) -> Tensor:
    # A multimodal checkpoint keeps its text model one level deeper.
    names = [other for other in (name, f"language_model.{name}", f"model.language_{name}") if other in files]
    if not names:
        raise _unreadable(folder, f"has no tensor {name}")
    stored_name, file = names[0], files[names[0]]
    path = folder.file(str(file))
    if path is None:
        raise _unreadable(folder, f"names {file} for {name}, which is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(stored_name)
    except SafetensorError as error:
        raise _unreadable(folder, f"cannot be read: {path.name}: {error}") from error
    if tensor.dtype not in _STORED or tensor.shape != expected.shape:
        raise _unreadable(
            folder,
            f"holds {stored_name} as {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, expected bf16, "
            f"fp16 or fp32 {list(expected.shape)}",
        )
    return tensor if dtype is None else tensor.to(dtype)


def _unreadable(folder: TargetFolder, detail: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint of target {folder.label} {detail}",
        kind=Kind.TARGET_UNREADABLE,
        hint="--engine hf, which reads what transformers can",
    )
