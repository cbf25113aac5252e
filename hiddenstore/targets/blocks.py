"""The decoder blocks that bring states back: which they are, read from a checkpoint, and run as transformers has them.

Blocks run one sample at a time, so that neither its neighbours in a pack nor the pack's padding change a bit of it.

Shapes: T tokens of a sample, D target width.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from hiddenstore.errors import ConfigError, CorruptionError, Kind
from hiddenstore.files import layout
from hiddenstore.files.damage import raise_refusal
from hiddenstore.targets.attention import any_length
from hiddenstore.targets.checkpoint import damage, damaged, file_of_tensor, unreadable
from hiddenstore.targets.folder import TargetFolder, first_line
from hiddenstore.targets.matmul import widen_bf16, without_autocast
from hiddenstore.threads import Lock
from schemas.capture import REBUILT, CaptureSpec, Codecs, not_rebuildable

BLOCKS_FILE = layout.BLOCKS_NAME
MOST_BYTES = 4_000_000_000
"""Of all blocks together: those that are refused above it would cost a trainer more memory than its drafter."""

_SHARED = {
    "num_kv_shared_layers": "its blocks share keys and values",
    "cross_attention_layers": "some of its blocks wait for an image",
    "hidden_size_per_layer_input": "its blocks read embeddings of their own (per-layer embeddings)",
}


def require_plain_blocks(config: Any) -> None:
    """Refuse a text config whose blocks read more than the states before them: ConfigError ``blocks-unsupported``."""
    for member, reason in _SHARED.items():
        if getattr(config, member, None):
            raise _unsupported(config.model_type, f"{reason}: {member} is {getattr(config, member)}")
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) == "dynamic":
        raise _unsupported(config.model_type, "its dynamic rotary embedding depends on what was run before")


def recoded(capture: CaptureSpec, codecs: Codecs) -> CaptureSpec:
    """The same states under other codecs; raises as ``require_rebuildable``."""
    require_rebuildable(codecs, capture.aux_layers, capture.target.num_layers, capture.images is not None)
    return capture.with_codecs(codecs)


def require_rebuildable(codecs: Codecs, aux_layers: Sequence[int], num_layers: int, has_images: bool = False) -> None:
    """Refuse codecs of rebuilt states for layers that do not reach near enough, and beside images, whose states do not
    follow from tokens: ConfigError ``blocks-unsupported``."""
    if codecs.final == REBUILT and has_images:
        problem = "recipe rebuilt brings states back from tokens alone, and samples hold images"
        raise ConfigError(problem, kind=Kind.BLOCKS_UNSUPPORTED, hint="--recipe compact")
    if codecs.final == REBUILT and (reason := not_rebuildable(aux_layers, num_layers)) is not None:
        raise ConfigError(
            f"recipe rebuilt does not go with these layers: {reason}",
            kind=Kind.BLOCKS_UNSUPPORTED,
            hint="--recipe compact; or collect with --layers eagle3, whose top layer is near enough",
        )


def block_files(folder: TargetFolder, layers: Sequence[int], dtype: str) -> dict[str, bytes]:
    """What the bundle of a store keeps so that ``layers`` can run: ``blocks.safetensors``, in the target's ``dtype``
    but for tensors that transformers runs in float32. Raises ConfigError: ``blocks-unsupported``;
    ``target-unreadable``, ``target-incomplete``, ``target-damaged``."""
    wanted = getattr(torch, dtype)
    require_blocks(folder, layers, wanted.itemsize)
    (backbone, blocks), files = _empty(folder.config), file_of_tensor(folder)
    shapes = {
        f"{layer}.{name}": tensor.shape for layer in layers for name, tensor in blocks[layer].state_dict().items()
    }
    names = {name: _stored_name(folder, files, name) for name in shapes}
    dtypes = {name: torch.float32 if _stays_fp32(backbone, name, wanted) else wanted for name in shapes}
    tensors = {name: read_tensor(folder, files, names[name]).to(dtypes[name]).contiguous() for name in shapes}
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            found = list(tensors[name].shape)
            raise _unsupported(folder.config.model_type, f"{names[name]} is {found}, expected {list(shape)}")
    return {BLOCKS_FILE: bytes(save_tensors(tensors))} if tensors else {}


def block_parameters(config: Any, layers: Sequence[int], *, a_token: bool = False) -> int:
    """Parameters of decoder blocks, from the text config alone, or those that are multiplied for ``a_token``, which
    takes a few of the experts it is routed to; ConfigError ``blocks-unsupported``."""
    if not layers:
        return 0
    require_plain_blocks(config)
    blocks = _empty(config)[1]
    _require_only_weights(config, blocks, layers)
    sizes = [(name, x.numel()) for layer in layers for name, x in blocks[layer].state_dict().items()]
    return parameters_a_token(config, sizes) if a_token else sum(size for _, size in sizes)


def parameters_a_token(config: Any, sizes: Sequence[tuple[str, int]]) -> int:
    """Of parameters by name, those that are multiplied for a token, which takes a few of the experts it is routed to;
    ``config`` is the text config."""
    routed = sum(size for name, size in sizes if "experts" in name.split("."))
    return sum(size for _, size in sizes) - round(routed * (1 - _expert_share(config)))


def _expert_share(config: Any) -> float:
    """Of the experts of a block, those that a token is routed to; 1 where the config says neither number."""
    numbers = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    chosen, experts = getattr(config, "num_experts_per_tok", None), next(filter(None, numbers), None)
    return min(1.0, chosen / experts) if chosen and experts else 1.0


def require_blocks(folder: TargetFolder, layers: Sequence[int], value_bytes: int) -> None:
    """Refuse a target whose ``layers`` cannot be kept and run at so many bytes a value: ConfigError
    ``blocks-unsupported``. Nothing of the weights is read."""
    size = block_parameters(folder.config, layers) * value_bytes
    if layers and folder.quantised:
        raise _unsupported(folder.config.model_type, "its checkpoint is quantised")
    if layers and folder.adapter is not None:
        raise _unsupported(folder.config.model_type, f"the adapter {folder.adapter.label} is not in its checkpoint")
    if size > MOST_BYTES:
        need = f"blocks {', '.join(map(str, layers))} take {size / 1e9:.1f} GB"
        limit = f"more than the {MOST_BYTES / 1e9:.0f} GB that a store keeps and a trainer loads"
        raise _unsupported(folder.config.model_type, f"{need}, {limit}")


class TargetBlocks:
    """Some decoder blocks of a target on one device; safe to use from many threads, one of which runs at a time."""

    def __init__(self, config: Any, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        """``config``: the text config; ``weights``: tensors named ``<layer>.<name in the block>``. Raises ConfigError:
        ``blocks-unsupported``: this transformers cannot build them; CorruptionError: ``head-corrupt``: the weights are
        not those of the config."""
        require_plain_blocks(config)
        self._backbone, blocks = _empty(config)
        self._blocks, self._lock = blocks, Lock()
        self.device = torch.device(device)
        self.layers = tuple(sorted({int(name.partition(".")[0]) for name in weights}))
        _require_only_weights(config, blocks, [layer for layer in self.layers if layer < len(blocks)])
        for layer in self.layers:
            start = f"{layer}."
            state = {name.removeprefix(start): t for name, t in weights.items() if name.startswith(start)}
            try:
                blocks[layer].load_state_dict(state, assign=True)
            except (RuntimeError, IndexError) as error:
                message = f"target/{BLOCKS_FILE} does not fit target/config.json: {first_line(error)}"
                raise CorruptionError(message, kind=Kind.HEAD_CORRUPT, path=f"target/{BLOCKS_FILE}") from error
            blocks[layer].to(self.device).eval().requires_grad_(False)
            widen_bf16(blocks[layer])
        _build_rotary(self._backbone, config, self.device)
        dtypes = (t.dtype for name, t in weights.items() if not _stays_fp32(self._backbone, name, torch.float16))
        self._dtype = next(dtypes, torch.bfloat16)

    @classmethod
    def from_bytes(cls, config: bytes, data: bytes | None, device: torch.device | str = "cpu") -> "TargetBlocks":
        """Of the bytes of a bundle's ``config.json`` and ``blocks.safetensors``; raises as the constructor."""
        try:
            weights = {} if data is None else load_tensors(data)
        except SafetensorError as error:
            message = f"target/{BLOCKS_FILE} is no safetensors file: {error}"
            raise CorruptionError(message, kind=Kind.HEAD_CORRUPT, path=f"target/{BLOCKS_FILE}") from error
        return cls(text_config(config), weights, device)

    @torch.no_grad()
    def run(self, states: Tensor, first: int, stop: int) -> Tensor:
        """What blocks ``first`` … ``stop`` - 1 make of the states before them: bf16 [T, D] on the same device."""
        if first == stop or not len(states):
            return states
        with self._lock, _Detour(self._blocks, first, stop, states[None].to(self.device, self._dtype)) as detour:
            try:
                with without_autocast(self.device), any_length():
                    self._backbone(inputs_embeds=detour.states, use_cache=False)
            except _ArrivedError as arrived:
                return arrived.states[0].to(states.device, torch.bfloat16)
        raise AssertionError("the last block did not run")


def text_config(data: bytes) -> Any:
    """The text config in the bytes of a ``config.json``; ConfigError ``blocks-unsupported``: transformers lacks it."""
    from transformers import AutoConfig

    members = json.loads(data)
    model_type = members.pop("model_type", "unnamed")
    try:
        return AutoConfig.for_model(model_type, **members).get_text_config(decoder=True)
    except Exception as error:  # a config may hold anything, and transformers computes with it
        raise _unsupported(model_type, first_line(error)) from error


class _ArrivedError(Exception):
    """Ends a forward behind the last block wanted: what follows has no weights here."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class _Detour:
    """Sends ``states`` [1, T, D] into block ``first`` whatever the backbone made before it, and out behind the last."""

    def __init__(self, blocks: nn.ModuleList, first: int, stop: int, states: Tensor) -> None:
        self._blocks, self._first, self._stop = blocks, first, stop
        self.states = states

    def __enter__(self) -> "_Detour":
        for block in self._blocks[: self._first]:
            # The module stays: backbones read attributes of it, such as its kind of attention.
            block.forward = lambda hidden_states, *args, **kwargs: hidden_states
        self._handles = [
            self._blocks[self._first].register_forward_pre_hook(self._inject, with_kwargs=True),
            self._blocks[self._stop - 1].register_forward_hook(self._arrive),
        ]
        return self

    def __exit__(self, *_error: object) -> None:
        for handle in self._handles:
            handle.remove()
        for block in self._blocks[: self._first]:
            del block.forward

    def _inject(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.states}

    def _arrive(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        raise _ArrivedError(output[0] if isinstance(output, tuple) else output)


def _empty(config: Any) -> tuple[nn.Module, nn.ModuleList]:
    """A backbone without weights, and its decoder blocks."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            backbone = AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # as in ``text_config``
        raise _unsupported(config.model_type, first_line(error)) from error
    lists = [(name, module) for name, module in backbone.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in lists:
        if "." not in name and len(module) == config.num_hidden_layers:
            return backbone, module
    raise _unsupported(config.model_type, f"it has no list of {config.num_hidden_layers} decoder blocks")


def _require_only_weights(config: Any, blocks: nn.ModuleList, layers: Sequence[int]) -> None:
    """Refuse blocks with computed buffers, which are in no checkpoint and which empty tensors do not hold."""
    for layer in layers:
        known = blocks[layer].state_dict().keys()
        if computed := [name for name, _ in blocks[layer].named_buffers() if name not in known]:
            raise _unsupported(config.model_type, f"block {layer} computes {', '.join(computed)} when it is made")


def _stays_fp32(backbone: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """Whether transformers runs ``<layer>.<name>`` in float32 where it loads the model in ``dtype``."""
    members = {torch.bfloat16: ("_strict",), torch.float16: ("", "_strict")}.get(dtype, ())
    patterns = [part for end in members for part in getattr(backbone, f"_keep_in_fp32_modules{end}", None) or ()]
    return any(re.search(part.replace("*", ".*"), f"layers.{name}") for part in patterns)


def _build_rotary(backbone: nn.Module, config: Any, device: torch.device) -> None:
    """Modules that hold no weights but computed buffers, which a model of empty tensors lacks, are made again: one for
    all blocks, or a list of them with a config each (Granite SWA's, by base frequency)."""
    lists = [child for child in backbone.children() if isinstance(child, nn.ModuleList)]
    children = [(parent, name, module) for parent in (backbone, *lists) for name, module in parent.named_children()]
    for parent, name, module in children:
        if "rotary" in type(module).__name__.lower():
            try:
                setattr(parent, name, type(module)(getattr(module, "config", config)).to(device))
            except Exception as error:  # as in ``text_config``
                raise _unsupported(config.model_type, f"{type(module).__name__}: {first_line(error)}") from error


def _stored_name(folder: TargetFolder, files: Mapping[str, str], name: str) -> str:
    """What the checkpoint calls ``<layer>.<name>``: under whatever its text model lies."""
    ending = re.compile(rf"(^|\.)(layers|h|blocks)\.{re.escape(name)}$")
    names = [stored for stored in files if ending.search(stored) and not _BESIDE.search(stored)]
    if len(names) != 1:
        raise _unsupported(
            folder.config.model_type,
            f"its checkpoint has {len(names) or 'no'} tensors layers.{name}"
            + (f", {', '.join(names[:2])}" if names else "; its blocks are stored in another form than they run"),
        )
    return names[0]


_BESIDE = re.compile(r"(^|\.)(mtp|\w*(vision|visual|audio|image|speech)\w*)\.")


def read_tensor(folder: TargetFolder, files: Mapping[str, str], name: str) -> Tensor:
    """A tensor of the checkpoint as stored; ConfigError ``target-damaged``, ``target-unreadable``."""
    path = folder.file(files[name])
    if path is None:
        raise damaged(folder, files[name], "is named by the index and is not there")
    try:
        with safe_open(path, framework="pt") as handle:
            tensor: Tensor = handle.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise_refusal(error, path)
        raise damage(folder) or unreadable(folder, f"cannot be read: {path.name}: {error}") from error
    return tensor


def _unsupported(model_type: str, detail: str) -> ConfigError:
    problem = f"states of a {model_type} target cannot be rebuilt: {detail}"
    return ConfigError(problem, kind=Kind.BLOCKS_UNSUPPORTED, hint="--recipe compact, which stores every layer")
