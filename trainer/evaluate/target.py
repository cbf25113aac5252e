"""The live target as decoding needs it: one call with a KV cache that returns logits and the states a drafter reads.

Only `decode` loads a target; training and `eval` never do.

Shapes: T new tokens of one forward, L aux layers, D target width, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from hiddenstore.console.output import output
from hiddenstore.errors import ConfigError, FormatError, Kind
from hiddenstore.store import Store
from hiddenstore.targets.attention import any_length
from hiddenstore.targets.checkpoint import checkpoint_sha256
from hiddenstore.targets.families import Parts, find_parts, on_top_of
from hiddenstore.targets.folder import TargetFolder, open_target
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import captured_from, cast_hint, identity_differences, weights_sha256
from hiddenstore.targets.load import load_model
from hiddenstore.targets.matmul import bf16_pays
from hiddenstore.verify.profile import require_states
from schemas.capture import HeadSpec, TargetIdentity
from trainer.drafters import refuse_target
from trainer.drafters.base import DraftTree, Verified

CHECKED_ROWS = 4
"""Rows of the product that decides about bf16: a check of three drafted tokens."""


@dataclass(frozen=True, eq=False)
class Forward:
    """What one target forward returns: logits fp32 [T or 1, V]; aux bf16 [L, T, D] and final bf16 [T, D] before the
    final norm, rounded as a store rounds them."""

    logits: Tensor
    aux: Tensor
    final: Tensor

    def states(self, next_ids: Sequence[int]) -> Verified:
        """What a drafter reads of the first ``len(next_ids)`` tokens; ``next_ids`` are those after each."""
        return Verified(self.aux[:, : len(next_ids)], self.final[: len(next_ids)], next_ids)


class LiveTarget:
    """A loaded target with hooks on the aux layers. ``forwards`` counts what really ran, whoever called it."""

    def __init__(self, model: Any, tokenizer: Any, identity: TargetIdentity, aux_layers: Sequence[int]) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.identity = identity
        self.forwards = 0
        self.device = next(model.parameters()).device
        self.aux_layers = tuple(aux_layers)
        self._aux: dict[int, Tensor] = {}
        self._final = torch.empty(0)
        self._require_undoable()
        parts = _parts(model)
        blocks = parts.blocks
        outside = [layer for layer in self.aux_layers if not -1 <= layer < len(blocks)]
        if outside:
            raise FormatError(
                f"the drafter reads layers {outside}, the target has 0…{len(blocks) - 1}", kind=Kind.TARGET_MISMATCH
            )
        for layer in self.aux_layers:
            if layer == -1:
                blocks[0].register_forward_pre_hook(self._take_input, with_kwargs=True)
            else:
                blocks[layer].register_forward_hook(self._take_output(layer))
        parts.final_norm.register_forward_pre_hook(self._take_final)
        model.register_forward_pre_hook(self._count)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every token id that ends an answer, by the generation config, the config or the tokenizer."""
        ids: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for source in (generation, self.model.config, self.tokenizer):
            value = getattr(source, "eos_token_id", None)
            ids |= {int(i) for i in value} if isinstance(value, list | tuple) else set() if value is None else {value}
        return frozenset(ids)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the target was made for, where its config says so."""
        value = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(value) if value else None

    def _require_undoable(self) -> None:
        """Refuse layers that keep a running state: rejected tokens cannot be taken out of it."""
        kinds = getattr(self.model.config.get_text_config(decoder=True), "layer_types", None) or ()
        running = sorted({kind for kind in kinds if "attention" not in kind or "linear" in kind})
        if running or getattr(self.model, "_is_stateful", False):
            raise ConfigError(
                f"decode cannot take rejected tokens back from the running state of {type(self.model).__name__}"
                f"{' (' + ', '.join(running) + ')' if running else ''}",
                kind=Kind.FAMILY_UNSUPPORTED,
                hint="hiddenstore export RUN, hiddenstore serve, then hiddenstore eval --engine with --server",
            )

    def new_cache(self) -> DynamicCache:
        # Without a config every layer keeps all keys, so sliding-window layers can be cropped too (masks still slide).
        return DynamicCache()

    def _has_windows(self) -> bool:
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            # Mistral and Phi-3 name no kinds of layers: under a window all of them slide.
            return getattr(config, "sliding_window", None) is not None
        return any("sliding" in kind or "chunked" in kind for kind in kinds)

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], cache: DynamicCache, last_only: bool = False) -> Forward:
        """Run new tokens [T] on top of ``cache``; ``last_only`` computes the logits of the last one alone."""
        return self._forward(token_ids, cache, logits_to_keep=1 if last_only else 0)

    @torch.inference_mode()
    def forward_tree(self, root: int, tree: "DraftTree", cache: DynamicCache) -> Forward:
        """Run ``root`` and below it every node of ``tree`` at once; a node sees the text and its own ancestors. Raises
        ConfigError: the target has sliding-window layers, for which one mask does not do."""
        if self._has_windows():
            raise ConfigError(
                "a target with sliding-window layers checks no trees", kind=Kind.NO_TREE, hint="--draft-len 3"
            )
        past, nodes, dtype = cache.get_seq_length(), len(tree.tokens), self.model.dtype
        visible = torch.ones(nodes + 1, past + nodes + 1, dtype=torch.bool)
        visible[0, past + 1 :] = False
        visible[1:, past + 1 :] = tree.visible()
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
        positions = torch.tensor([0, *tree.depths()]) + past
        return self._forward(
            [root, *tree.tokens],
            cache,
            attention_mask=mask[None, None].to(self.device),
            position_ids=positions[None].to(self.device),
        )

    @staticmethod
    def keep_rows(cache: DynamicCache, new: int, path: Sequence[int]) -> None:
        """Of the newest ``new`` rows keep those of ``path``, ascending, and forget the others."""
        past = cache.get_seq_length() - new
        for layer in cache.layers:
            rows = torch.tensor([*range(past), *(past + row for row in path)], device=layer.keys.device)
            layer.keys, layer.values = layer.keys.index_select(-2, rows), layer.values.index_select(-2, rows)

    @staticmethod
    def drop_last(cache: DynamicCache, tokens: int) -> None:
        """Forget the newest ``tokens``; ``crop`` of transformers 5 takes the count as a negative number."""
        if tokens:
            cache.crop(-tokens)

    def _forward(self, token_ids: Sequence[int], cache: DynamicCache, **inputs: Any) -> Forward:
        ids = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        self._aux.clear()
        with any_length():
            output = self.model(input_ids=ids, **on_top_of(cache, self.model), **inputs)
        final = self._final[0].to(torch.bfloat16)
        aux = [self._aux[layer][0].to(torch.bfloat16) for layer in self.aux_layers]
        return Forward(output.logits[0].float(), torch.stack(aux) if aux else final.new_empty(0, *final.shape), final)

    def _count(self, _module: nn.Module, _args: tuple[Any, ...]) -> None:
        self.forwards += 1

    def _take_final(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._final = args[0]

    def _take_output(self, layer: int) -> Any:
        def take(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
            self._aux[layer] = output[0] if isinstance(output, tuple) else output

        return take

    def _take_input(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._aux[-1] = args[0] if args else kwargs["hidden_states"]


def load_live_target(
    target: str | TargetFolder,
    aux_layers: Sequence[int],
    expected: TargetIdentity,
    device: str,
    dtype: str | None = None,
    same_target: bool = False,
) -> LiveTarget:
    """Load a target and refuse another than the drafter was trained for. ``dtype`` defaults to `decoding_dtype`, which
    is said. ``same_target`` takes another checkpoint of it, for `require_stored_states` to judge. Raises as
    `open_target` and `load_model`; ConfigError: ``family-unsupported``; FormatError: ``target-mismatch``, naming every
    difference."""
    folder = target if isinstance(target, TargetFolder) else open_target(target)
    if dtype is None and device == "cpu":
        dtype, why = decoding_dtype(folder)
        output().note(f"the target runs in {dtype}: {why}")
    torch_dtype = getattr(torch, dtype) if dtype else "auto"
    model = load_model(folder, device, "hiddenstore serve, then eval --engine with --server", dtype=torch_dtype).eval()
    identity = identity_of(folder, model)
    problem = f"target {folder.label} is not the target the drafter was trained for ({expected.name})"
    differences = identity_differences(expected, identity, same_target)
    refuse_target(differences, problem, cast_hint(differences, captured_from(expected)))
    return LiveTarget(model, folder.tokenizer, identity, aux_layers)


def decoding_dtype(folder: TargetFolder) -> tuple[str, str]:
    """The dtype in which this CPU decodes a target best, and why: the checkpoint's bf16, in which engines serve it,
    where the CPU multiplies that markedly faster, else float32."""
    kept, config = folder.dtype, folder.config
    if kept != "bfloat16" or folder.quantised:
        return "float32", f"the checkpoint is {'quantised' if folder.quantised else kept or 'of no stated dtype'}"
    width = int(config.hidden_size)
    times = bf16_pays(width, int(getattr(config, "intermediate_size", None) or 4 * width), CHECKED_ROWS)
    if times is None:
        return "float32", "the checkpoint is bfloat16, which this CPU does not multiply markedly faster at its width"
    return kept, f"the checkpoint's own, which this CPU multiplies {times:.1f} times as fast as float32"


def identity_of(folder: TargetFolder, model: Any) -> TargetIdentity:
    """The fingerprint of a loaded target, as capture computes it."""
    head = _parts(model).head
    return folder.identity(
        head.hidden_size,
        head.vocab_size,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_sha256=weights_sha256(head.embed_tokens, head.norm_weight, head.lm_head),
        checkpoint_sha256=checkpoint_sha256(folder),
    )


def require_stored_states(target: LiveTarget, store: Store) -> bool:
    """Refuse a target whose decoder blocks are not those a store was captured with, by the layers that are read, as
    `require_states` does."""

    def states_of(tokens: Sequence[int]) -> dict[int | str, Tensor]:
        before = target.forwards
        states = target.forward(tokens, target.new_cache(), last_only=True)
        target.forwards = before
        return {**dict(zip(target.aux_layers, states.aux, strict=True)), target.identity.num_layers - 1: states.final}

    return require_states(store, target.identity, states_of)


def bundle_of(model: Any, spec: HeadSpec) -> HeadBundle:
    """The head bundle of a loaded target whose spec is known from the store."""
    head = _parts(model).head
    return replace(head, spec=spec, lm_head=None if spec.tied else head.output_weight)


def _parts(model: Any) -> Parts:
    return find_parts(model, model.config.get_text_config(decoder=True))
