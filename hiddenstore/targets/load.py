"""The weights of a target as transformers loads them, and only if all of them are the checkpoint's."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hiddenstore.console.output import output
from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.targets.checkpoint import damage, inapplicable, require_applied, require_complete
from hiddenstore.targets.folder import TargetFolder, first_line
from hiddenstore.threads import keep_freed_memory

if TYPE_CHECKING:
    import torch


def pick_device(name: str) -> str:
    """``auto`` is the GPU where there is one, else the CPU; ConfigError ``device-unavailable``: it is not here."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
    except RuntimeError as error:
        problem = f"unknown device {name!r}, expected auto, cpu, cuda or cuda:1"
        raise ConfigError(problem, kind=Kind.DEVICE_UNAVAILABLE) from error
    if kind == "cuda" and not torch.cuda.is_available():
        is_built = torch.version.cuda is not None or torch.version.hip is not None
        reason = "torch finds no GPU here" if is_built else "this torch is built for CPUs alone"
        other = "" if is_built else "; pip install --force-reinstall torch brings the build for one"
        hint = f"auto, which takes a GPU where there is one{other}"
        raise ConfigError(f"device {name!r}: {reason}", kind=Kind.DEVICE_UNAVAILABLE, hint=hint)
    return name


def load_model(folder: TargetFolder, device: "str | torch.device", other_way: str, **settings: Any) -> Any:
    """The ``…ForCausalLM`` of a target on ``device``, quantised as the checkpoint's own config says.

    ``settings`` reach ``from_pretrained``; with ``device_map`` accelerate places the blocks. ``other_way`` is what to
    do about a quantisation that transformers leaves out. Raises ConfigError: ``not-installed``, ``target-unreadable``;
    as ``damage``, ``require_applied``, ``require_complete``."""
    import torch
    from transformers.utils import logging

    from hiddenstore.targets.matmul import widen_bf16

    if folder.quantised and "device_map" not in settings:
        # A quantised model cannot be moved once it is made.
        settings |= {"device_map": {"": device}, **_unpacked(folder, device)}
    if "device_map" in settings and find_spec("accelerate") is None:
        problem = "a target over several devices, or a quantised one, needs accelerate"
        raise ConfigError(problem, kind=Kind.NOT_INSTALLED, hint="pip install 'hiddenstore[hf]'")
    require_applied(folder, other_way, is_decoded="quantization_config" in settings)
    logging.disable_progress_bar()
    keep_freed_memory()
    settings |= {"revision": folder.revision, "trust_remote_code": folder.trust_remote_code}
    try:
        # Tensors of another shape are reported with the rest, by name, and refused.
        model, report = model_class(folder).from_pretrained(
            folder.name, output_loading_info=True, ignore_mismatched_sizes=True, **settings
        )
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise _too_large(folder, device, error) from error
    except Exception as error:  # a damaged file may raise anything
        raise damage(folder) or ConfigError(
            f"cannot load the weights of target {folder.name}: {first_line(error)}", kind=Kind.TARGET_UNREADABLE
        ) from error
    require_complete(folder, report)
    if folder.quantised:
        _require_runs(folder, model, other_way)
    if folder.adapter is not None:
        folder.adapter.merge_into(model)
    widen_bf16(model)
    if "device_map" in settings:
        _say_offloaded(folder, model)
        return model
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise _too_large(folder, device, error) from error


def _too_large(folder: TargetFolder, device: "str | torch.device", error: Exception) -> StorageError:
    return StorageError(
        f"the weights of target {folder.name} do not fit into the memory of {device}: {first_line(error)}",
        kind=Kind.OUT_OF_MEMORY,
        hint="a device that no other process uses; --device-map auto spreads the layers over all GPUs",
    )


def _say_offloaded(folder: TargetFolder, model: Any) -> None:
    """Warn of layers that accelerate left out of the GPUs there are."""
    import torch

    places: Mapping[str, Any] = getattr(model, "hf_device_map", {})
    offloaded = sorted({str(place) for place in places.values()} & {"cpu", "disk"})
    if offloaded and torch.cuda.is_available() and len(set(places.values())) > 1:
        count = sum(str(place) in offloaded for place in places.values())
        output().warn(
            f"{count} of {len(places)} parts of target {folder.name} did not fit into the GPUs and lie in "
            f"{' and '.join(offloaded)}: a forward brings them each time, orders of magnitude slower"
        )


def _unpacked(folder: TargetFolder, device: "str | torch.device") -> dict[str, Any]:
    """What has fp8 weights unpacked for a CPU, which transformers does by itself only where there is no GPU either; its
    kernels are a GPU's."""
    import torch
    from transformers import FineGrainedFP8Config

    stated = folder.quantisation
    if not isinstance(stated, Mapping) or stated.get("quant_method") != "fp8" or torch.device(device).type != "cpu":
        return {}
    return {"quantization_config": FineGrainedFP8Config(**{**stated, "dequantize": True})}


def _require_runs(folder: TargetFolder, model: Any, other_way: str) -> None:
    """Call the whole model once: some forms (compressed-tensors) unpack their weights then, where engines call only the
    part below the head; and a form's kernels may refuse this machine or a shape."""
    import torch

    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device))
    except (MemoryError, torch.OutOfMemoryError):
        # The machine is too small for it, which says nothing of the form.
        raise
    except Exception as error:  # every form has its own kernels
        raise inapplicable(folder, error, other_way) from error


def model_class(folder: TargetFolder) -> Any:
    """The auto class that makes a target's model: with its vision tower where transformers has no text model alone."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = type(folder.whole)
    is_text = config in AutoModelForCausalLM._model_mapping
    is_whole = config in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if is_whole and not is_text else AutoModelForCausalLM
