"""A target as engines get it, and as transformers loads it: its identity, then its weights and parts, proved on a
probe: what its blocks read and write, and the logits of the head bundle.

Shapes: B batch, T tokens, N decoder blocks, D target width, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collectors.targets.images import TargetImages
from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.targets.blocks import read_tensor
from hiddenstore.targets.checkpoint import checkpoint_sha256, file_of_tensor, unreadable
from hiddenstore.targets.families import Parts, find_parts, head_names, unsupported
from hiddenstore.targets.folder import TargetFolder, first_line, open_target
from hiddenstore.targets.head import HEAD_FILE, HeadBundle
from hiddenstore.targets.identity import weights_sha256
from hiddenstore.targets.load import load_model, model_class, pick_device
from schemas.capture import TargetIdentity

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
ATTENTION = ("sdpa", "eager", "flash_attention_2")
_PREFIX, _MOST_DISTANCE = 32, 0.1
"""Tokens that are run again without those behind them, and how far half of their rows may then be from what they were,
in their own length: rounding makes a hundredth, attention to what follows nine tenths (a tiny PaliGemma)."""


@dataclass(frozen=True, eq=False)
class EngineTarget:
    """A target whose decoder blocks stay on disk: what every engine gets. ``dtype`` as ``parse_dtype`` reads it."""

    folder: TargetFolder
    dtype: str | None

    @property
    def config(self) -> Any:
        return self.folder.config

    @property
    def tokenizer(self) -> Any:
        return self.folder.tokenizer

    @cached_property
    def head(self) -> HeadBundle:
        """Read from the safetensors on first use, on the CPU; raises as ``read_head``."""
        dtype = parse_dtype(self.dtype)
        return read_head(self.folder, dtype if isinstance(dtype, torch.dtype) else None)

    @cached_property
    def identity(self) -> TargetIdentity:
        head = self.head
        return self.folder.identity(
            head.hidden_size,
            head.vocab_size,
            dtype=str(head.norm_weight.dtype).removeprefix("torch."),
            weights_sha256=weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head),
            checkpoint_sha256=checkpoint_sha256(self.folder),
        )

    def target_files(self) -> dict[str, bytes]:
        """The bytes a store keeps under ``target/``: config, tokenizer, chat template, head bundle."""
        return self.folder.text_files() | {HEAD_FILE: self.head.save_bytes()}


@dataclass(frozen=True, eq=False)
class LoadedTarget(EngineTarget):
    """A target that transformers runs: frozen, in evaluation mode; ``device`` is where its final hidden comes out."""

    model: Any
    parts: Parts
    device: torch.device

    @cached_property
    def head(self) -> HeadBundle:
        return self.parts.head

    @property
    def blocks(self) -> list[nn.Module]:
        return self.parts.blocks

    @property
    def lm_head(self) -> nn.Module:
        """The model's own LM head module: final hidden after the norm [..., D] to raw logits [..., V]."""
        module: nn.Module = self.model.get_output_embeddings()
        return module

    @cached_property
    def images(self) -> TargetImages:
        """How it reads images, where it does."""
        return TargetImages(self.folder)

    def eos_token_ids(self) -> list[int]:
        """Every token that ends an answer: of the generation config, the config and the tokenizer."""
        ids: set[int] = set()
        for value in (self.model.generation_config.eos_token_id, self.tokenizer.eos_token_id):
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        return sorted(ids)


@dataclass(frozen=True)
class LoadOptions:
    """How transformers loads a target; ``device_map``: accelerate's word, ``attention``: of ``ATTENTION`` or None."""

    dtype: str | None = None
    device: str = "auto"
    device_map: str | None = None
    attention: str | None = None


def load_target(target: str | TargetFolder, dtype: str | None = None, device: str = "auto") -> LoadedTarget:
    """``load_weights`` by name, on one device."""
    folder = target if isinstance(target, TargetFolder) else open_target(target)
    return load_weights(folder, LoadOptions(dtype, device))


def load_weights(folder: TargetFolder, options: LoadOptions) -> LoadedTarget:
    """Load the weights, quantised as the checkpoint's own config says, and find the parts. Raises ConfigError:
    ``option-invalid``, ``device-unavailable``, ``family-unsupported``; as ``load_model``."""
    dtype, device = parse_dtype(options.dtype), torch.device(pick_device(options.device))
    settings: dict[str, Any] = {"dtype": dtype}
    if options.attention is not None:
        if options.attention not in ATTENTION:
            message = f"unknown attention {options.attention!r}, expected {', '.join(ATTENTION)}"
            raise ConfigError(message, kind=Kind.OPTION_INVALID)
        settings["attn_implementation"] = options.attention
    if options.device_map is not None:
        settings["device_map"] = options.device_map
    other_way = "--engine vllm, or --engine trtllm, with --check none"
    return wrap_model(folder, load_model(folder, device, other_way, **settings))


def wrap_model(folder: TargetFolder, model: Any) -> LoadedTarget:
    """A LoadedTarget around a model that is in memory already."""
    model.eval().requires_grad_(False)
    parts = find_parts(model, folder.config)
    parts = replace(parts, head=_gathered(folder, parts.head))
    dtype = str(parts.head.norm_weight.dtype).removeprefix("torch.")
    return LoadedTarget(folder, dtype, model, parts, parts.head.norm_weight.device)


def parse_dtype(dtype: str | None) -> torch.dtype | str:
    """A torch dtype, or ``"auto"`` for the checkpoint's own."""
    if dtype in (None, "auto"):
        return "auto"
    name = DTYPE_ALIASES.get(str(dtype), str(dtype))
    if name not in DTYPES:
        raise ConfigError(
            f"unknown dtype {dtype!r}, expected auto, {', '.join(DTYPES)} or {', '.join(DTYPE_ALIASES)}",
            kind=Kind.OPTION_INVALID,
        )
    return DTYPES[name]


def _gathered(folder: TargetFolder, head: HeadBundle) -> HeadBundle:
    """The bundle on one device, that of the final norm, where the model's blocks lie on several or on disk."""
    devices = {tensor.device for tensor in (head.embed_tokens, head.output_weight, head.norm_weight)}
    if len(devices) == 1 and "meta" not in {device.type for device in devices}:
        return head
    if any(device.type == "meta" for device in devices):
        return read_head(folder, head.norm_weight.dtype)
    return head.to(head.norm_weight.device)


def read_head(folder: TargetFolder, dtype: torch.dtype | None = None) -> HeadBundle:
    """Embeddings, final norm and LM head on the CPU, without a decoder block; ``dtype`` None keeps the one the config
    names. The family's row says where they are; a model of empty (``meta``) tensors says how the norm computes, whether
    the head is tied and what shapes to expect. Raises ConfigError: ``target-incomplete``, ``family-unsupported``,
    ``target-unreadable``."""
    expected = find_parts(empty_model(folder), folder.config).head
    config_dtype = getattr(folder.config, "dtype", None) or getattr(folder.config, "torch_dtype", None)
    dtype = dtype or (config_dtype if isinstance(config_dtype, torch.dtype) else None)
    files = file_of_tensor(folder)
    weights: dict[str, Any] = {}
    for field, name in head_names(folder.config.model_type).items():
        weight = getattr(expected, field)
        weights[field] = None if weight is None else _read(folder, files, name, weight, dtype)
    return replace(expected, **weights)


def empty_model(folder: TargetFolder) -> Any:
    """The ``…ForCausalLM`` of a target in shapes alone (``meta``). Raises ConfigError: ``target-unreadable``."""
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
    stored_name = names[0]
    tensor = read_tensor(folder, files, stored_name)
    if tensor.dtype not in DTYPES.values() or tensor.shape != expected.shape:
        raise unreadable(
            folder,
            f"holds {stored_name} as {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, expected bf16, "
            f"fp16 or fp32 {list(expected.shape)}",
        )
    return tensor if dtype is None else tensor.to(dtype)


def first_tensor(output: Any) -> Tensor:
    """The hidden states [B, T, D] of a block's output: bare in transformers 5, maybe in a tuple in 4.57."""
    states = output[0] if isinstance(output, tuple) else output
    assert isinstance(states, Tensor)
    return states


@dataclass(frozen=True, eq=False)
class Probe:
    """Every layer of a few tokens in the model's dtype: states [N+1, T, D] of layers -1 … N-1, normed [T, D]."""

    states: Tensor
    normed: Tensor


@torch.no_grad()
def verify_parts(model: nn.Module, parts: Parts, token_ids: Tensor, model_type: str) -> Probe:
    """Prove on a probe that the parts and the head bundle are the model's own.

    One forward with logits: the first block reads the bundle's embeddings, each block reads what the one before it
    wrote, the final norm reads the last block, and the bundle's logits of that final hidden are the model's. A second
    one over the first tokens alone: their states are the same, so that the padding behind a sample changes none.

    Args:
        token_ids: int64 [1, T].

    Raises:
        CaptureError: ``non-finite``: the target computes NaN or infinity, naming the first layer.
        ConfigError: ``family-unsupported``: the architecture computes something else than the family's row says.
    """
    count, dtype = len(parts.blocks), parts.head.norm_weight.dtype
    inputs, outputs, answer = _watch(parts, lambda: model(input_ids=token_ids, use_cache=False), model_type)
    for layer, states in enumerate([inputs[0], *outputs[:count]], start=-1):
        if not bool(torch.isfinite(states).all()):
            raise CaptureError(
                f"the target ({model_type}) computes NaN or infinity in layer {layer} on the first sample",
                kind=Kind.NON_FINITE,
                hint="try --dtype float32 or bfloat16, or check the target's weights",
            )
    if not _close(inputs[0], parts.head.embed(token_ids), dtype):
        raise unsupported(model_type, "block 0 does not read the (scaled) token embeddings")
    for layer in range(1, count + 1):
        if not torch.equal(outputs[layer - 1], inputs[layer]):
            reader = "the final norm" if layer == count else f"block {layer}"
            raise unsupported(model_type, f"{reader} does not read the output of block {layer - 1}")
    if not _close(parts.head.logits(inputs[count]), answer.logits.to(token_ids.device), dtype):
        raise unsupported(model_type, "logits of the head bundle differ from the model's own")
    _require_causal(parts, token_ids, inputs[count][0], model_type)
    return Probe(torch.cat(inputs), outputs[-1][0])


def _require_causal(parts: Parts, token_ids: Tensor, expected: Tensor, model_type: str) -> None:
    """Refuse a model whose last block, which wrote ``expected`` [T, D], writes something else of the first tokens where
    none follow. Of most rows: a router, or an indexer of keys, may decide a tie otherwise."""
    if not (count := min(token_ids.shape[1] // 2, _PREFIX)):
        return
    expected = expected[:count].float()
    states = probe_states(parts, token_ids[:, :count], model_type).states[-1].float()
    distance = (states - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-6)
    if distance.median() > _MOST_DISTANCE:
        raise unsupported(model_type, "states of a token depend on the tokens behind it")


@torch.no_grad()
def probe_states(
    parts: Parts, token_ids: Tensor, model_type: str, forward: Callable[[], object] | None = None
) -> Probe:
    """Every layer of one sample, int64 [1, T], from a plain forward: no padding, no batch, no LM head. ``forward``: one
    that reads more than the tokens."""
    plain = partial(parts.backbone, input_ids=token_ids, use_cache=False)
    inputs, outputs, _ = _watch(parts, forward or plain, model_type)
    return Probe(torch.cat(inputs), outputs[-1][0])


def _watch(parts: Parts, forward: Callable[[], Any], model_type: str) -> tuple[list[Tensor], list[Tensor], Any]:
    """What every block and then the final norm read and wrote in one forward [1, T, D], and what it returned."""
    # Blocks may lie on several devices; what they hold is compared on one.
    device = parts.head.norm_weight.device
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    handles: list[RemovableHandle] = []

    def keep_input(index: int, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[index] = first_tensor(args if args else kwargs["hidden_states"]).to(device)

    def keep_output(index: int, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        outputs[index] = first_tensor(output).to(device)

    modules = [*parts.blocks, parts.final_norm]
    for index, module in enumerate(modules):
        handles.append(module.register_forward_pre_hook(partial(keep_input, index), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(keep_output, index)))
    try:
        answer = forward()
    finally:
        for handle in handles:
            handle.remove()
    if len(inputs) != len(modules) or len(outputs) != len(modules):
        raise unsupported(model_type, "a decoder block or the final norm did not run")
    for index, (before, module) in enumerate(pairwise(modules), start=1):
        if module is before:
            inputs[index] = outputs[index - 1]
    return [inputs[index] for index in sorted(inputs)], [outputs[index] for index in sorted(outputs)], answer


def _close(states: Tensor, expected: Tensor, model_dtype: torch.dtype) -> bool:
    # Half-precision models round their logits to 8 or 11 bits; the bundle keeps fp32.
    tolerance = 1e-4 if model_dtype == torch.float32 else 2e-2
    states, expected = states.float(), expected.float()
    return states.shape == expected.shape and bool(
        (states - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-6)
    )
