"""Where each model family keeps its decoder blocks, final norm, embeddings and LM head, and how its head computes.

Adding a family is one row of ``FAMILIES``. A model type without a row is tried as Llama-like. Whatever the row says is
verified against the model's own forward on a probe before a store exists (``verify_parts``), so a wrong row is an
error and never a wrong store.

Shapes: T tokens, D target width, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hiddenstore.errors import CaptureError, ConfigError, Kind
from hiddenstore.targets.head import HeadBundle
from schemas.capture import HeadSpec, NormFlavour

Scale = Callable[[Any], float]


@dataclass(frozen=True)
class Family:
    """Attribute paths from the CausalLM (``blocks``, ``final_norm``, ``embeddings`` from the backbone) and head rules.

    ``embed_scale`` and ``logit_scale`` read a factor from the text config; ``softcap`` names the config attribute of
    the final logit cap.
    """

    backbone: str = "model"
    blocks: str = "layers"
    final_norm: str = "norm"
    embeddings: str = "embed_tokens"
    lm_head: str = "lm_head"
    norm: NormFlavour = "rms"
    embed_scale: Scale = lambda _config: 1.0
    logit_scale: Scale = lambda _config: 1.0
    softcap: str = "final_logit_softcapping"


LLAMA_LIKE = Family()
GEMMA = Family(norm="rms_plus_one", embed_scale=lambda config: float(config.hidden_size) ** 0.5)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "phi3", "qwen2", "qwen3", "olmo2"), LLAMA_LIKE),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), LLAMA_LIKE),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
    "granite": Family(
        embed_scale=lambda config: float(config.embedding_multiplier),
        logit_scale=lambda config: 1.0 / float(config.logits_scaling),
    ),
    "cohere": Family(norm="layer", logit_scale=lambda config: float(config.logit_scale)),
}


@dataclass(frozen=True, eq=False)
class Parts:
    """The modules that capture touches; ``backbone`` maps token ids to the post-norm last hidden without logits."""

    backbone: nn.Module
    blocks: list[nn.Module]
    final_norm: nn.Module
    head: HeadBundle


def find_parts(model: nn.Module, config: Any) -> Parts:
    """Locate the parts of a ``…ForCausalLM`` by its family's row; ConfigError ``family-unsupported``."""
    model_type = str(config.model_type)
    family = FAMILIES.get(model_type, LLAMA_LIKE)
    backbone = _module(model, family.backbone, model_type)
    embeddings = _module(backbone, family.embeddings, model_type)
    norm = _module(backbone, family.final_norm, model_type)
    lm_head = _module(model, family.lm_head, model_type)
    blocks = _module(backbone, family.blocks, model_type)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != config.num_hidden_layers:
        raise _unsupported(model_type, f"{family.blocks} is no list of {config.num_hidden_layers} decoder blocks")
    one, other = lm_head.weight, embeddings.weight
    # Tensors on the meta device all begin at address 0.
    tied = one is other or (one.device.type != "meta" and one.data_ptr() == other.data_ptr())
    cap = getattr(config, family.softcap, None)
    spec = HeadSpec(
        norm_flavour=family.norm,
        norm_eps=_norm_eps(norm, model_type),
        tied=tied,
        embed_scale=family.embed_scale(config),
        logit_scale=family.logit_scale(config),
        final_logit_softcap=None if cap is None else float(cap),
    )
    head = HeadBundle(
        spec,
        embeddings.weight.detach(),
        None if tied else lm_head.weight.detach(),
        norm.weight.detach(),
        _bias(norm),
        _bias(lm_head),
    )
    return Parts(backbone, list(blocks), norm, head)


def head_names(model_type: str) -> dict[str, str]:
    """What a checkpoint calls each tensor of the head bundle, by the bundle's field names."""
    family = FAMILIES.get(model_type, LLAMA_LIKE)
    return {
        "embed_tokens": f"{family.backbone}.{family.embeddings}.weight",
        "lm_head": f"{family.lm_head}.weight",
        "norm_weight": f"{family.backbone}.{family.final_norm}.weight",
        "norm_bias": f"{family.backbone}.{family.final_norm}.bias",
        "lm_head_bias": f"{family.lm_head}.bias",
    }


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
    wrote, the final norm reads the last block, and the bundle's logits of that final hidden are the model's.

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
        raise _unsupported(model_type, "block 0 does not read the (scaled) token embeddings")
    for layer in range(1, count + 1):
        if not torch.equal(outputs[layer - 1], inputs[layer]):
            reader = "the final norm" if layer == count else f"block {layer}"
            raise _unsupported(model_type, f"{reader} does not read the output of block {layer - 1}")
    if not _close(parts.head.logits(inputs[count]), answer.logits.to(token_ids.device), dtype):
        raise _unsupported(model_type, "logits of the head bundle differ from the model's own")
    return Probe(torch.cat(inputs), outputs[-1][0])


@torch.no_grad()
def probe_states(parts: Parts, token_ids: Tensor, model_type: str) -> Probe:
    """Every layer of one sample, int64 [1, T], from a plain forward: no padding, no batch, no LM head."""
    inputs, outputs, _ = _watch(parts, lambda: parts.backbone(input_ids=token_ids, use_cache=False), model_type)
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
        raise _unsupported(model_type, "a decoder block or the final norm did not run")
    return [inputs[index] for index in sorted(inputs)], [outputs[index] for index in sorted(outputs)], answer


def _close(states: Tensor, expected: Tensor, model_dtype: torch.dtype) -> bool:
    # Half-precision models round their logits to 8 or 11 bits; the bundle keeps fp32.
    tolerance = 1e-4 if model_dtype == torch.float32 else 2e-2
    states, expected = states.float(), expected.float()
    return bool((states - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-6))


def _module(root: nn.Module, path: str, model_type: str) -> Any:
    try:
        return root.get_submodule(path)
    except AttributeError as error:
        raise _unsupported(model_type, f"{type(root).__name__} has no {path}") from error


def _norm_eps(norm: nn.Module, model_type: str) -> float:
    for name in ("variance_epsilon", "eps"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise _unsupported(model_type, f"{type(norm).__name__} states no epsilon")


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def _unsupported(model_type: str, detail: str) -> ConfigError:
    return ConfigError(
        f"cannot capture model type {model_type!r}: {detail}",
        kind=Kind.FAMILY_UNSUPPORTED,
        hint="add a row to collectors/targets/families.py",
    )
