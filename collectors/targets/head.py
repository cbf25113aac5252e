"""The head bundle of a checkpoint, read without building a decoder block.

The family's row says where embeddings, final norm and LM head are; a model of empty (``meta``) tensors says how the
norm computes, whether the head is tied and what shapes to expect.
"""

from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.checkpoint import damage, damaged, file_of_tensor, unreadable
from hiddenstore.targets.families import find_parts, head_names
from hiddenstore.targets.folder import TargetFolder, first_line
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.load import model_class

_STORED = (torch.bfloat16, torch.float16, torch.float32)


def read_head(folder: TargetFolder, dtype: torch.dtype | None = None) -> HeadBundle:
    """Embeddings, final norm and LM head on the CPU; ``dtype`` None keeps the one the config names.

    Raises:
        ConfigError: ``target-incomplete``, ``family-unsupported``, ``target-unreadable``.
    """
    expected = find_parts(_empty_model(folder), folder.config).head
    config_dtype = getattr(folder.config, "dtype", None) or getattr(folder.config, "torch_dtype", None)
    dtype = dtype or (config_dtype if isinstance(config_dtype, torch.dtype) else None)
    files = file_of_tensor(folder)
    weights: dict[str, Any] = {}
    for field, name in head_names(folder.config.model_type).items():
        weight = getattr(expected, field)
        weights[field] = None if weight is None else _read(folder, files, name, weight, dtype)
    return replace(expected, **weights)


def _empty_model(folder: TargetFolder) -> Any:
    try:
        with torch.device("meta"):
            return model_class(folder).from_config(folder.whole, trust_remote_code=folder.trust_remote_code)
    except Exception as error:  # a config may hold anything, and transformers computes with it
        raise ConfigError(
            f"cannot tell the parts of target {folder.label}: {first_line(error)}", kind=Kind.TARGET_UNREADABLE
        ) from error


def _read(
    folder: TargetFolder, files: dict[str, str], name: str, expected: Tensor, dtype: torch.dtype | None
) -> Tensor:
    # A multimodal checkpoint keeps its text model one level deeper, Nemotron-H calls it otherwise than transformers.
    inside = (f"language_model.{name}", f"model.language_{name}", name.replace("model.", "backbone.", 1))
    names = [other for other in (name, *inside) if other in files]
    if not names:
        raise unreadable(folder, f"has no tensor {name}")
    stored_name, file = names[0], files[names[0]]
    path = folder.file(file)
    if path is None:
        raise damaged(folder, file, "is named by the index and is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(stored_name)
    except (SafetensorError, OSError) as error:
        raise damage(folder) or unreadable(folder, f"cannot be read: {path.name}: {error}") from error
    if tensor.dtype not in _STORED or tensor.shape != expected.shape:
        raise unreadable(
            folder,
            f"holds {stored_name} as {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, expected bf16, "
            f"fp16 or fp32 {list(expected.shape)}",
        )
    return tensor if dtype is None else tensor.to(dtype)
