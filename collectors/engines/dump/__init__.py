"""What other projects have dumped, as an engine. Adding a format is a class here and a line in ``FORMATS``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.registry import Registry

if TYPE_CHECKING:
    from collectors.engines.dump.peer import PeerSource

# Name to ``module:class``; the class says what its numbers mean.
_ROWS: dict[str, "str | type[PeerSource]"] = {
    "specforge-eagle3": "collectors.engines.dump.torch_dicts:Eagle3Features",
    "specforge-dflash": "collectors.engines.dump.torch_dicts:DFlashFeatures",
    "specforge-dspark": "collectors.engines.dump.torch_dicts:DSparkFeatures",
    "speculators": "collectors.engines.dump.speculators:SpeculatorsData",
    "vllm-extract": "collectors.engines.dump.speculators:ConnectorFiles",
    "modelopt-hf": "collectors.engines.dump.torch_dicts:ModelOptFiles",
    "modelopt-trtllm": "collectors.engines.dump.torch_dicts:ModelOptFiles",
    "modelopt-vllm": "collectors.engines.dump.torch_dicts:ModelOptVllmFiles",
    "trtllm-raw": "collectors.engines.dump.torch_dicts:TrtLlmFiles",
    "automodel-eagle3": "collectors.engines.dump.caches:Eagle3Cache",
    "automodel-dspark": "collectors.engines.dump.caches:DSparkCache",
    "deepspec": "collectors.engines.dump.caches:DeepSpecCache",
    "eagle1": "collectors.engines.dump.torch_dicts:EagleFiles",
}
FORMATS: "Registry[type[PeerSource]]" = Registry("format", "hiddenstore.dump_formats", _ROWS, option="--from")

# A project's name alone does not say what its files mean: message and hint.
AMBIGUOUS: Mapping[str, tuple[str, str]] = {
    "specforge": (
        "SpecForge writes other tensors per strategy: specforge-eagle3 (3 layers and the final hidden), "
        "specforge-dflash (layers only; domino too), specforge-dspark (layers and the final hidden)",
        "--from specforge-eagle3",
    ),
    "modelopt": (
        "ModelOpt writes the same files with three engines, and they mean different things: modelopt-hf and "
        "modelopt-trtllm (final hidden after its norm), modelopt-vllm (before it, layers counted by their input)",
        "--from modelopt-hf",
    ),
    "automodel": (
        "Automodel has two caches: automodel-eagle3 (shifted, target_probs) and automodel-dspark (final hidden)",
        "--from automodel-eagle3",
    ),
    "trtllm": (
        "TensorRT-LLM's own files are trtllm-raw, those that ModelOpt renamed modelopt-trtllm",
        "--from trtllm-raw",
    ),
    "vllm": (
        "vLLM connector files alone are vllm-extract, a speculators data folder is speculators",
        "--from vllm-extract",
    ),
    "eagle": ("EAGLE's ge_data is eagle1", "--from eagle1"),
}


def find_format(name: str) -> "type[PeerSource]":
    """The class of a format; ConfigError ``format-unknown``, or ``dump-unclear`` where a name fits several."""
    if name in AMBIGUOUS and name not in FORMATS:
        message, hint = AMBIGUOUS[name]
        raise ConfigError(message, kind=Kind.DUMP_UNCLEAR, hint=hint)
    return FORMATS[name]
