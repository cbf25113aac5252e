"""The parts of a target proved on a probe: what its blocks read and write, and the head bundle's logits.

Shapes: B batch, T tokens, N decoder blocks, D target width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hiddenstore.errors import CaptureError, Kind
from hiddenstore.targets.families import Parts, unsupported


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
        raise unsupported(model_type, "block 0 does not read the (scaled) token embeddings")
    for layer in range(1, count + 1):
        if not torch.equal(outputs[layer - 1], inputs[layer]):
            reader = "the final norm" if layer == count else f"block {layer}"
            raise unsupported(model_type, f"{reader} does not read the output of block {layer - 1}")
    if not _close(parts.head.logits(inputs[count]), answer.logits.to(token_ids.device), dtype):
        raise unsupported(model_type, "logits of the head bundle differ from the model's own")
    return Probe(torch.cat(inputs), outputs[-1][0])


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
    return bool((states - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-6))
