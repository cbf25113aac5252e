"""What other projects have dumped, as samples of a store. Adding a format is a file here and a line in ``FORMATS``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hiddenstore.errors import ConfigError, NotFoundError
from schemas.capture import NormState
from schemas.layers import DrafterName, LayerConvention

if TYPE_CHECKING:
    from collectors.importers.peer import PeerSource
    from collectors.importers.torch_files import TorchFiles


@dataclass(frozen=True)
class PeerFormat:
    """What a format means, as far as its name alone decides it.

    ``numbering``: how the peer counts layers. ``layers``: whose default its columns are when nobody names them, None
    where nothing may be assumed. ``final``: norm state of its final hidden, None where it has none. ``opener``:
    ``module:function`` of (folder, width, torch files).
    """

    name: str
    opener: str
    numbering: LayerConvention
    layers: DrafterName | None
    final: NormState | None


_PACKAGE = "collectors.importers"

FORMATS: dict[str, PeerFormat] = {
    row.name: row
    for row in (
        PeerFormat("specforge-eagle3", f"{_PACKAGE}.specforge:open_eagle3", "output", "eagle3", "post_norm"),
        PeerFormat("specforge-dflash", f"{_PACKAGE}.specforge:open_dflash", "output", None, None),
        PeerFormat("specforge-dspark", f"{_PACKAGE}.specforge:open_dspark", "output", None, "post_norm"),
        PeerFormat("speculators", f"{_PACKAGE}.speculators:open_speculators", "vllm", "eagle3", "pre_norm"),
        PeerFormat("vllm-extract", f"{_PACKAGE}.speculators:open_vllm_extract", "vllm", "eagle3", "pre_norm"),
        PeerFormat("modelopt-hf", f"{_PACKAGE}.modelopt:open_modelopt", "output", "eagle3", "post_norm"),
        PeerFormat("modelopt-trtllm", f"{_PACKAGE}.modelopt:open_modelopt", "output", "eagle3", "post_norm"),
        PeerFormat("modelopt-vllm", f"{_PACKAGE}.modelopt:open_modelopt", "vllm", None, "pre_norm"),
        PeerFormat("trtllm-raw", f"{_PACKAGE}.trtllm_raw:open_trtllm_raw", "output", "eagle3", "post_norm"),
        PeerFormat("automodel-eagle3", f"{_PACKAGE}.automodel:open_eagle3", "output", None, None),
        PeerFormat("automodel-dspark", f"{_PACKAGE}.automodel:open_dspark", "output", None, "post_norm"),
        PeerFormat("deepspec", f"{_PACKAGE}.deepspec:open_deepspec", "output", None, "post_norm"),
        PeerFormat("eagle1", f"{_PACKAGE}.eagle1:open_eagle1", "output", "eagle1", "post_norm"),
    )
}

# A project's name alone does not say what its files mean.
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


def find_format(name: str) -> PeerFormat:
    """The row of a format.

    Raises:
        ConfigError: ``format-ambiguous``: the name fits several, and which one decides what the numbers mean;
            ``format-unknown``.
    """
    if name in FORMATS:
        return FORMATS[name]
    if name in AMBIGUOUS:
        message, hint = AMBIGUOUS[name]
        raise ConfigError(message, kind="format-ambiguous", hint=hint)
    near = get_close_matches(name, FORMATS, n=1)
    raise ConfigError(
        f"unknown format {name!r}, expected one of: {', '.join(FORMATS)}",
        kind="format-unknown",
        hint=f"--from {near[0]}" if near else None,
    )


def open_source(peer: PeerFormat, folder: Path, width: int, files: "TorchFiles") -> "PeerSource":
    """Open a dump of a target of ``width``.

    Raises:
        NotFoundError: ``source-missing``.
        ConfigError: ``source-unreadable``. FormatError: ``source-version``.
    """
    if not folder.is_dir():
        raise NotFoundError(f"{folder} is no folder", kind="source-missing")
    module, _, function = peer.opener.partition(":")
    opener: Callable[[Path, int, TorchFiles], PeerSource] = getattr(import_module(module), function)
    return opener(folder, width, files)
