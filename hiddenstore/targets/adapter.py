"""A LoRA adapter in the form that peft writes, merged into the weights of a target as they are loaded.

``W + s B A`` in fp32, rounded to the dtype of W; ``s = alpha / r``, or ``alpha / √r`` with ``use_rslora``.
Shapes: W [out, in], A [r, in], B [out, r].
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.damage import raise_refusal
from hiddenstore.files.documents import foreign_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# With any of these the adapter was not trained as the formula above.
_OTHERWISE = (
    *("use_dora", "use_qalora", "modules_to_save", "fan_in_fan_out", "lora_bias", "target_parameters"),
    *("layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
)
_MERGE = "merge it where it was trained (merge_and_unload, save_pretrained), then --target MERGED without --adapter"


@dataclass(frozen=True, eq=False)
class Adapter:
    """Pairs (B, A) and their scale by module; ``sha256`` covers every tensor and scale."""

    label: str
    sha256: str
    pairs: Mapping[str, "tuple[Tensor, Tensor, float]"]

    def merge_into(self, model: Any) -> None:
        """Change the weights of a loaded model; ConfigError ``adapter-unfit``: it is not one of this target."""
        import torch
        from torch import nn

        tied = model.get_input_embeddings().weight
        for name, (up, down, scale) in self.pairs.items():
            try:
                module = model.get_submodule(name)
            except AttributeError:
                module = None
            expected = [up.shape[0], down.shape[1]]
            if not isinstance(module, nn.Linear) or list(module.weight.shape) != expected:
                found = "nothing" if module is None else f"{type(module).__name__} {list(module.weight.shape)}"
                raise _unfit(self.label, f"changes {name} {expected}, where the target has {found}")
            if module.weight is tied or module.weight.device.type == "meta":
                where = "is also the embedding" if module.weight is tied else "is not in memory"
                raise _unfit(self.label, f"changes {name}, whose weight {where}")
            weight, device = module.weight, module.weight.device
            with torch.no_grad():
                delta = up.to(device).float() @ down.to(device).float()
                weight.copy_(weight.float() + scale * delta)


def open_adapter(folder: str, packed: bool = False) -> Adapter:
    """Read the two files of an adapter; ``packed``: the weights it is for are quantised. Raises ConfigError:
    ``adapter-unfit``: a file is missing or damaged, or the adapter is more than such pairs."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    label = Path(folder).resolve().name
    if packed:
        raise _unfit(label, "would change quantised weights")
    try:
        settings = foreign_json((Path(folder) / CONFIG_FILE).read_bytes())
        tensors = load_file(Path(folder) / WEIGHTS_FILE)
        alpha, patterns = float(settings["lora_alpha"]), settings.get("alpha_pattern") or {}
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, SafetensorError) as error:
        raise_refusal(error, folder)
        reason = f"has no {CONFIG_FILE} and {WEIGHTS_FILE} that can be read: {error!r}"
        raise _unfit(label, reason) from error
    if (formula := _other_formula(settings)) is not None:
        raise _unfit(label, formula)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise _unfit(label, f"holds {name}, which is no A or B of a linear layer")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    pairs = {}
    for module, side in sorted(sides.items()):
        if len(side) < 2 or not 0 < (rank := side["A"].shape[0]) == side["B"].shape[1]:
            raise _unfit(label, f"has no fitting A and B for {module}")
        try:
            own = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), alpha)
            scale = float(own) / (rank**0.5 if settings.get("use_rslora") else rank)
        except (re.error, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise _unfit(label, f"has an alpha_pattern that cannot be used: {error}") from error
        pairs[module] = side["B"], side["A"], scale
    if not pairs:
        raise _unfit(label, "holds no tensors")
    return Adapter(label, _digest(pairs), pairs)


def _other_formula(settings: Mapping[str, Any]) -> str | None:
    kind, start = settings.get("peft_type"), settings.get("init_lora_weights", True)
    if kind != "LORA":
        return f"is of type {kind}, not LORA"
    if others := [name for name in _OTHERWISE if settings.get(name)]:
        return f"was trained with {', '.join(others)}"
    if settings.get("bias", "none") != "none":
        return f"was trained with bias={settings['bias']}"
    # Such a start (PiSSA, OLoRA, CorDA, LoftQ) changes the weights that the pairs are added to.
    if isinstance(start, str) and start not in ("gaussian", "orthogonal", "eva"):
        return f"was started with {start}, which changes the target's own weights"
    return None


def _digest(pairs: Mapping[str, "tuple[Tensor, Tensor, float]"]) -> str:
    import torch

    digest = hashlib.sha256()
    for module, (up, down, scale) in pairs.items():
        digest.update(f"{module}\t{scale!r}\n".encode())
        for tensor in (up, down):
            digest.update(f"{tensor.dtype}\t{list(tensor.shape)}\n".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _unfit(label: str, reason: str) -> ConfigError:
    return ConfigError(f"adapter {label} cannot be merged: it {reason}", kind=Kind.ADAPTER_UNFIT, hint=_MERGE)
