"""The files of a checkpoint: which holds what, are they whole, and the head bundle, without building a decoder block.

The family's row says where embeddings, final norm and LM head are; a model of empty (``meta``) tensors says how the
norm computes, whether the head is tied and what shapes to expect.
"""

import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from collectors.targets.families import find_parts, head_names
from collectors.targets.folder import TargetFolder, beginning_of_another, first_line
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.targets.head import HeadBundle

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_FILE = "pytorch_model.bin"
QUANTISATION_FILE = "hf_quant_config.json"
_STORED = (torch.bfloat16, torch.float16, torch.float32)
_MOST_NAMED = 4
_LONGEST_HEADER = 100_000_000
_PICKLES = {b"\x80": "is a pickle, not safetensors", b"PK\x03\x04": "is a torch file, not safetensors"}
# Tensors that the decoder blocks of a text model do not read: buffers of old checkpoints, other modalities, drafting
# layers, scales of a KV cache that a forward without one never fills.
_BESIDE_THE_BLOCKS = re.compile(
    r"rotary_emb\.inv_freq$|position_ids$|masked_bias$"
    r"|(^|\.)\w*(vision|visual|audio|image|speech|multi_modal|mm_projector)\w*\."
    r"|(^|\.)mtp\w*\."
    r"|\.(k|v|kv|q|prob)_scale$"
)


def read_head(folder: TargetFolder, dtype: torch.dtype | None = None) -> HeadBundle:
    """Embeddings, final norm and LM head on the CPU; ``dtype`` None keeps the one the config names.

    Raises:
        ConfigError: ``target-incomplete``, ``family-unsupported``, ``target-unreadable``.
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
    index = _index(folder)
    if index is not None:
        total = index.get("metadata", {}).get("total_size")
        return None if total is None else int(total)
    single = folder.file(WEIGHTS_FILE)
    return None if single is None else single.stat().st_size


def _empty_model(folder: TargetFolder) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(folder.config, trust_remote_code=folder.trust_remote_code)
    except Exception as error:  # a config may hold anything, and transformers computes with it
        raise ConfigError(
            f"cannot tell the parts of target {folder.label}: {first_line(error)}", kind=Kind.TARGET_UNREADABLE
        ) from error


def _tensor_files(folder: TargetFolder) -> dict[str, Path]:
    """Tensor name to the safetensors file that holds it."""
    index = _index(folder)
    if index is not None:
        return {name: Path(file) for name, file in index["weight_map"].items()}
    single = folder.file(WEIGHTS_FILE)
    if single is None:
        raise ConfigError(
            f"target {folder.label} has neither {WEIGHTS_FILE} nor {INDEX_FILE}",
            kind=Kind.TARGET_INCOMPLETE,
            hint="load it with transformers and save_pretrained it to a folder, or --engine hf",
        )
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), Path(WEIGHTS_FILE))
    except (SafetensorError, OSError) as error:
        raise damage(folder) or _unreadable(folder, f"cannot be read: {single.name}: {error}") from error


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
        raise _damaged(folder, str(file), "is named by the index and is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(stored_name)
    except (SafetensorError, OSError) as error:
        raise damage(folder) or _unreadable(folder, f"cannot be read: {path.name}: {error}") from error
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


def require_applied(folder: TargetFolder) -> None:
    """Refuse a checkpoint whose quantisation transformers would leave out: ConfigError ``quantisation-unsupported``."""
    from transformers.quantizers.auto import AutoHfQuantizer

    stated, path = folder.quantisation or {}, folder.file(QUANTISATION_FILE)
    stated = stated if isinstance(stated, Mapping) else {"quant_method": stated}
    with suppress(ValueError):
        if stated and AutoHfQuantizer.supports_quant_method(stated):
            return
    if path is not None and not stated:
        document = _object(path) or {}
        stated = {"quant_method": "modelopt"} | document.get("quantization", {})
    if stated:
        name = (
            " ".join(str(stated[key]) for key in ("quant_method", "quant_algo") if key in stated) or "without a method"
        )
        raise ConfigError(
            f"target {folder.label} is quantised ({name}), which transformers does not apply: its scales would be lost",
            kind=Kind.QUANTISATION_UNSUPPORTED,
            hint="--engine vllm, or --engine trtllm, with --check none; or name the checkpoint it was made from",
        )


def require_complete(folder: TargetFolder, report: Mapping[str, Any]) -> None:
    """Refuse a model whose weights are not the checkpoint's: ConfigError ``target-incomplete`` names the tensors.

    ``report`` is what transformers says of loading; tied tensors and those it knows to be harmless are not in it.
    """
    blocks = folder.num_layers
    more = getattr(folder.config, "num_nextn_predict_layers", 0)
    drafting = range(blocks, blocks + (more if isinstance(more, int) else 0))

    def is_read(name: str) -> bool:
        block = re.search(r"\.layers\.(\d+)\.", name)
        return not _BESIDE_THE_BLOCKS.search(name) and not (block and int(block[1]) in drafting)

    unread, shapes = filter(is_read, report["unexpected_keys"]), {_name(entry) for entry in report["mismatched_keys"]}
    parts = [
        f"{fault} {_listed(sorted(names))}"
        for fault, names in (
            ("it lacks", {*report["missing_keys"]} - shapes),
            ("nothing of the model reads its", [*unread]),
            ("of another shape are", shapes),
        )
        if names
    ]
    if parts:
        raise ConfigError(
            f"config and checkpoint of target {folder.label} do not belong together: {'; '.join(parts)}",
            kind=Kind.TARGET_INCOMPLETE,
            hint=_fetch(folder),
        )


def _name(entry: Any) -> str:
    """transformers 4 gives the name alone, later ones name and shapes."""
    return entry if isinstance(entry, str) else str(entry[0])


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def damage(folder: TargetFolder) -> ConfigError | None:
    """``target-damaged``: the first file of weights that is not what its name says; None where all look whole."""
    index = _index(folder)
    names = [*dict.fromkeys(index["weight_map"].values())] if index else [WEIGHTS_FILE]
    if index is None and folder.file(WEIGHTS_FILE) is None:
        names = [TORCH_FILE]
    for name in names:
        path = folder.file(name)
        if path is None and index is not None:
            return _damaged(folder, name, "is named by the index and is not there")
        if path is not None and (fault := _fault(path)):
            return _damaged(folder, name, fault)
    return None


def _fault(path: Path) -> str | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        if other := beginning_of_another(start):
            return f"is {other}"
        if path.suffix != ".safetensors":
            is_cut = start.startswith(b"PK") and not zipfile.is_zipfile(path)
            return "is no whole torch file: the directory at its end is missing" if is_cut else None
        fault = next((words for text, words in _PICKLES.items() if start.startswith(text)), None)
        length = int.from_bytes(start[:8], "little")
        if fault or size < 8 or length > min(_LONGEST_HEADER, 1 << 62):
            return fault or "has no safetensors header"
        file.seek(8)
        header = file.read(length)
    try:
        table = json.loads(header) if len(header) == length else None
        ends = [entry["data_offsets"][1] for name, entry in table.items() if name != "__metadata__"] if table else [0]
    except (ValueError, LookupError, TypeError, AttributeError):
        return "has no safetensors header that can be read"
    whole = 8 + length + max(ends, default=0)
    return f"states {whole:,} bytes, of which it has {size:,}: a download that ended early" if size < whole else None


def _damaged(folder: TargetFolder, file: str, fault: str) -> ConfigError:
    message = f"the weights of target {folder.label} are damaged: {file} {fault}"
    return ConfigError(message, kind=Kind.TARGET_DAMAGED, hint=_fetch(folder))


def _fetch(folder: TargetFolder) -> str:
    if Path(folder.name).exists():
        return f"hf download ORG/NAME --local-dir {folder.name}; in a Git clone: git lfs pull"
    return f"hf download {folder.name} --force-download"


def _index(folder: TargetFolder) -> dict[str, Any] | None:
    """The index of a checkpoint in several files; ConfigError ``target-damaged``."""
    path = folder.file(INDEX_FILE)
    if path is None:
        return None
    document = _object(path)
    if document is None or not isinstance(document.get("weight_map"), dict):
        other = beginning_of_another(path.read_bytes()[:64])
        raise _damaged(folder, INDEX_FILE, f"is {other}" if other else "holds no weight_map")
    return document


def _object(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_bytes())
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
