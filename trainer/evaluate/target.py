"""The live target as decoding needs it: one call with a KV cache that returns logits and the states a drafter reads.

Only `decode` loads a target; training and `eval` never do.

Shapes: T new tokens of one forward, L aux layers, D target width, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig
from transformers.utils import logging as transformers_logging

from hiddenstore.errors import ConfigError, FormatError, Kind, NotFoundError
from hiddenstore.store import Store
from hiddenstore.targets.gguf import target_folder
from hiddenstore.targets.head import HeadBundle
from hiddenstore.targets.identity import (
    chat_template_sha256,
    config_sha256,
    identity_differences,
    target_argument,
    tokenizer_sha256,
    weights_sha256,
)
from hiddenstore.verify.profile import LayerProfile, first_true, match_layer, read_profile
from schemas.capture import HeadSpec, TargetIdentity
from trainer.drafters import refuse_target
from trainer.drafters.base import Verified

if TYPE_CHECKING:
    from trainer.drafters.base import DraftTree


SAME_LAYER = 1e-2
"""Distance (`match_layer`) up to which states are a layer's own: rounding to half precision makes 1e-3 of it, an update
of the weights that moves states by a quarter of their length 3e-2."""


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
        blocks = _backbone(model).layers
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
        _backbone(model).norm.register_forward_pre_hook(self._take_final)
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
        """Run ``root`` and below it every node of ``tree`` at once; a node sees the text and its own ancestors.

        Raises:
            ConfigError: the target has sliding-window layers, for which one mask does not do.
        """
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
        output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
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
    name: str, aux_layers: Sequence[int], expected: TargetIdentity, device: str, dtype: str | None = None
) -> LiveTarget:
    """Load a target from a folder or hub id and refuse another than the drafter was trained for. ``dtype`` defaults to
    float32 on a CPU and to the checkpoint's own elsewhere. Raises NotFoundError: ``target-missing``; ConfigError:
    ``target-incomplete``, ``target-unreadable``; FormatError: ``target-mismatch``, naming every difference."""
    name = target_folder(name)
    folder = Path(name)
    if not folder.exists() and name.startswith((".", "/", "~")):
        raise NotFoundError(f"target {name} does not exist", kind=Kind.TARGET_MISSING)
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"target folder {name} has no config.json", kind=Kind.TARGET_INCOMPLETE)
    torch_dtype = getattr(torch, dtype) if dtype else (torch.float32 if device == "cpu" else "auto")
    transformers_logging.disable_progress_bar()
    try:
        raw_config, _ = PretrainedConfig.get_config_dict(name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=torch_dtype)
    except (OSError, ValueError) as error:
        where = "" if folder.exists() else "is no folder here, and as a hub id "
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"target {name} {where}cannot be loaded: {reason}", kind=Kind.TARGET_UNREADABLE) from error
    model = model.to(device).eval()
    identity = identity_of(name, model, tokenizer, raw_config)
    problem = f"target {name} is not the target the drafter was trained for ({expected.name})"
    refuse_target(identity_differences(expected, identity), problem, _the_right_one(expected))
    return LiveTarget(model, tokenizer, identity, aux_layers)


def identity_of(name: str, model: Any, tokenizer: Any, raw_config: dict[str, Any]) -> TargetIdentity:
    """The fingerprint of a loaded target, as capture computes it."""
    text = model.config.get_text_config()
    embed = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    tied = head.data_ptr() == embed.data_ptr()
    return TargetIdentity(
        name=name,
        model_type=str(text.model_type),
        hidden_size=int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        vocab_size=int(head.shape[0]),
        dtype=str(model.dtype).removeprefix("torch."),
        config_sha256=config_sha256(raw_config),
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        chat_template_sha256=chat_template_sha256(tokenizer.chat_template),
        weights_sha256=weights_sha256(embed, _backbone(model).norm.weight, None if tied else head),
    )


def require_stored_states(target: LiveTarget, store: Store) -> bool:
    """Refuse a target whose decoder blocks are not those a store was captured with: its states of the first tokens of
    the stored layer profile are compared with those of the layers that are read. False where the store has no profile.
    Raises FormatError: ``target-mismatch``, naming the layer."""
    profile = read_profile(store.fs)
    count = 0 if profile is None else _leading(profile)
    if profile is None or not count:
        return False
    before = target.forwards
    states = target.forward(profile.tokens[:count], target.new_cache(), last_only=True)
    target.forwards = before
    last = target.identity.num_layers - 1
    for layer, rows in (*zip(target.aux_layers, states.aux, strict=True), (last, states.final)):
        distance = match_layer(profile, rows, range(count))[layer]
        # A distance that is no number is not small either.
        if not distance <= SAME_LAYER:
            raise FormatError(
                f"target {target.identity.name} is not the target {store.path} was captured from: config, tokenizer, "
                f"embeddings and head agree, but the states of layer {layer} are {distance:.3g} from the stored "
                f"profile's, expected at most {SAME_LAYER:g}",
                kind=Kind.TARGET_MISMATCH,
                hint=_the_right_one(store.capture.target),
            )
    return True


def target_differences(trained_for: TargetIdentity, store: Store, trained_on: Store | None) -> list[str]:
    """What tells the target of a store from the one a drafter was trained for: members of the identity, and layers that
    look otherwise on the first tokens that the layer profiles of the two stores share, where both have one."""
    differences = identity_differences(trained_for, store.capture.target)
    one, other = (None if at is None else read_profile(at.fs) for at in (trained_on, store))
    if differences or one is None or other is None or len(one.layers) != len(other.layers):
        return differences
    count = min(one.common_prefix(np.asarray(other.tokens)), _leading(other))
    for layer, (expected, actual) in enumerate(zip(one.layers, other.layers, strict=True) if count else (), -1):
        angle = np.square(np.subtract(expected.projections[:count], actual.projections[:count])).mean() / 2
        sizes = (np.maximum(sketches.rms[:count], 1e-12) for sketches in (expected, actual))
        scale = np.square(np.log(np.divide(*sizes))).mean()
        if not angle + scale <= SAME_LAYER:
            apart = f"{angle + scale:.3g} apart in the stored layer profiles, expected at most {SAME_LAYER:g}"
            return [f"states of layer {layer}: {apart}"]
    return []


def _leading(profile: LayerProfile) -> int:
    """How many of its positions are the first tokens of the sample."""
    return first_true(np.arange(len(profile.positions)) != np.asarray(profile.positions))


def _the_right_one(identity: TargetIdentity) -> str:
    return f"--target {target_argument(identity)}: the one called {identity.name}"


def bundle_of(model: Any, spec: HeadSpec) -> HeadBundle:
    """The head bundle of a loaded target whose spec is known from the store."""
    embed, head, norm = model.get_input_embeddings(), model.get_output_embeddings(), _backbone(model).norm
    return HeadBundle(
        spec,
        embed.weight.detach(),
        None if spec.tied else head.weight.detach(),
        norm.weight.detach(),
        _bias(norm),
        _bias(head),
    )


def _bias(module: nn.Module) -> Tensor | None:
    bias = getattr(module, "bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None


def _backbone(model: Any) -> Any:
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "model", None)
    if backbone is None or not hasattr(backbone, "layers") or not hasattr(backbone, "norm"):
        raise ConfigError(
            f"{type(model).__name__}: no decoder blocks `layers` and `norm` found", kind=Kind.FAMILY_UNSUPPORTED
        )
    return backbone
