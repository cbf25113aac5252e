"""The Hugging Face copy of a target that another engine's states, and those of a store, are compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from collectors.checks.capture import MIN_PROFILED_TOKENS
from collectors.engines import CaptureEngine, CaptureRequest
from collectors.targets.load import EngineTarget, LoadedTarget, LoadOptions, load_weights
from collectors.targets.probe import probe_states, verify_parts
from hiddenstore.errors import ConfigError, Kind
from hiddenstore.images import is_text
from hiddenstore.inputs import PreparedInput
from hiddenstore.process import Rank, free_bytes
from hiddenstore.records import final_row_positions
from hiddenstore.store import Store
from hiddenstore.targets.checkpoint import weights_bytes
from hiddenstore.verify.profile import (
    NORMED,
    LayerProfile,
    StatesOf,
    make_profile,
    require_states,
    unstated_warning,
    write_profile,
)
from schemas.capture import FinalMode, TargetIdentity

CHECK_SAMPLES = 4
PROFILED_TEXT = 512
# The copy, its activations and the pages of the checkpoint must not push out the states being written.
RAM_SHARE = 0.5


@dataclass(frozen=True)
class Check:
    """What ``--check`` asks: ``auto``, ``hf`` or ``none``, and how many samples of a checked unit."""

    mode: Literal["auto", "hf", "none"]
    samples: int = CHECK_SAMPLES


@dataclass(frozen=True)
class Reference:
    """The target as transformers runs it, if loaded; ``compares``: with units too, beyond the layer profile."""

    target: LoadedTarget | None
    compares: bool = False
    explained: str | None = None


def parse_check(text: str) -> Check:
    """Read ``auto``, ``none``, ``hf`` or ``hf=N``.

    >>> parse_check("hf=16")
    Check(mode='hf', samples=16)
    """
    word, _, count = text.partition("=")
    if word == "hf" and (not count or (count.isdigit() and int(count) > 0)):
        return Check("hf", int(count) if count else CHECK_SAMPLES)
    if text == "auto":
        return Check("auto")
    if text == "none":
        return Check("none")
    raise ConfigError(
        f"--check {text!r} is none of auto, hf, hf=N, none", kind=Kind.OPTION_INVALID, hint="--check hf=16"
    )


def open_reference(check: Check, target: EngineTarget, options: LoadOptions, rank: Rank) -> Reference:
    """Load the copy where ``--check`` wants one; an engine that is transformers is its own copy.

    It runs on the CPU unless ``options.device`` names another device, for the engine has the GPU. Raises ConfigError:
    as ``load_weights``, where the copy was asked for by name."""
    if isinstance(target, LoadedTarget):
        return Reference(target, compares=check.mode == "hf")
    if check.mode == "none" or (check.mode == "auto" and not rank.is_first):
        return Reference(None)
    if check.mode == "auto":
        needed, free = weights_bytes(target.folder), free_bytes()
        if needed is None:
            return _left_out("its weights have no known size")
        if needed > RAM_SHARE * free:
            return _left_out(f"its weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory is free")
    device = "cpu" if options.device == "auto" else options.device
    try:
        loaded = load_weights(target.folder, LoadOptions(options.dtype, device))
    except ConfigError as error:
        if check.mode == "hf":
            raise
        return _left_out(error.message)
    explained = f"compared with Hugging Face on {device}: {check.samples} samples of the first unit, then now and then"
    return Reference(loaded, True, explained)


def profile_target(target: LoadedTarget, prepared: PreparedInput, final: FinalMode) -> LayerProfile:
    """Sketch every layer over the first tokens of the first sample, enough of them to reach an answer. Raises
    ConfigError: ``input-empty``; ConfigError, CaptureError: as ``verify_parts``."""
    sample = next(iter(prepared.samples()), None)
    if sample is None:
        raise ConfigError(f"{prepared.folder} holds no samples", kind=Kind.INPUT_EMPTY)
    # The profile is of text: what the target computes from tokens alone.
    text = is_text(sample.tokens, sample.images)
    ids = sample.input_ids[text][:PROFILED_TEXT]
    final_rows = final_row_positions(sample.loss_mask[text], final)
    final_rows = final_rows[final_rows < len(ids)]
    batch = torch.from_numpy(ids.astype(np.int64))[None].to(target.device)
    probe = verify_parts(target.model, target.parts, batch, target.identity.model_type)
    return make_profile(sample.id, ids, probe.states, probe.normed, final_rows if len(final_rows) else None)


def typical_norms(profile: LayerProfile | None, layers: tuple[int, ...], width: int) -> tuple[float, ...]:
    """Median row norm of each layer without the first token; empty without a profile or with too few tokens in it."""
    if profile is None or len(profile.tokens) < MIN_PROFILED_TOKENS:
        return ()
    return tuple(float(np.median(profile.layers[layer + 1].rms[1:])) * width**0.5 for layer in layers)


def _left_out(why: str) -> Reference:
    explained = (
        f"not compared with Hugging Face: {why}; no layer profile is written, and a layer one off would go unseen. "
        f"--check hf compares all the same"
    )
    return Reference(None, explained=explained)


def compare_with_store(
    store: Store,
    target: TargetIdentity,
    states_of: StatesOf,
    profile: LayerProfile | None,
    note: Callable[[str], None],
) -> None:
    """Refuse a target that gives other states than the profile of ``store``; a store without one gets ``profile``.
    Raises FormatError: as ``require_states``."""
    is_compared = require_states(store, target, states_of)
    if profile is not None:
        write_profile(store.fs, profile)
    if warning := unstated_warning(store.capture.target, target, is_compared or profile is not None):
        note(f"warning: {warning}")


def engine_states(engine: CaptureEngine, aux_layers: Sequence[int], longest: int, stop: Callable[[], bool]) -> StatesOf:
    """What an engine captures of at most ``longest`` tokens: the aux layers and the final hidden."""
    last = NORMED if engine.final_norm == "post_norm" else engine.target.folder.num_layers - 1

    def states_of(tokens: Sequence[int]) -> dict[int | str, Tensor]:
        ids = np.array(tokens[:longest], dtype=np.int32)
        captured = engine.capture([CaptureRequest(ids, np.arange(len(ids), dtype=np.int32))], stop)
        if captured.refusals:
            return {}
        final = {} if engine.final_norm is None else {last: captured.final}
        return {**dict(zip(aux_layers, captured.aux, strict=True)), **final}

    return states_of


def reference_states(target: LoadedTarget | None) -> StatesOf:
    """Every layer of a target that transformers runs; nothing without one."""

    def states_of(tokens: Sequence[int]) -> dict[int | str, Tensor]:
        if target is None:
            return {}
        ids = torch.tensor([list(tokens)], device=target.device)
        probe = probe_states(target.parts, ids, target.identity.model_type)
        return {**dict(enumerate(probe.states, -1)), NORMED: probe.normed}

    return states_of
