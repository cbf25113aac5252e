"""The Hugging Face copy of a target that another engine's states, and those of a store, are compared with."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from collectors.checks.capture import MIN_PROFILED_TOKENS
from collectors.engines import CaptureEngine, CaptureRequest, raise_if_stopped
from collectors.targets.load import (
    EngineTarget,
    LoadedTarget,
    LoadOptions,
    empty_model,
    load_weights,
    probe_states,
    verify_parts,
)
from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.files import layout
from hiddenstore.fs import open_filesystem
from hiddenstore.inputs import PreparedInput
from hiddenstore.process import Rank, free_bytes
from hiddenstore.records import final_row_positions, is_text
from hiddenstore.store import Store
from hiddenstore.targets.blocks import parameters_a_token
from hiddenstore.targets.checkpoint import weights_bytes
from hiddenstore.targets.matmul import widen_bf16
from hiddenstore.verify.profile import (
    NORMED,
    LayerProfile,
    StatesOf,
    make_profile,
    read_profile,
    require_states,
    unstated_warning,
    write_profile,
)
from schemas.capture import FinalMode, TargetIdentity

CHECK_SAMPLES = 4
PROFILED_TEXT = 512
# What nobody asked for may keep an engine waiting so long at first, and for this share of the time later on.
MOST_MINUTES, WAITING_SHARE = 10.0, 0.05
# A product of this many rows and columns reaches the rate of a forward of a few hundred tokens.
_TIMED_ROWS, _TIMED_WIDTH = 256, 2048
MOST_WAITED_S, PROFILE_WAITED_S, _POLL_S = 20 * 60.0, 20.0, 0.5
"""How long other ranks wait for the first one's store, and then for its profile, which follows at once or never."""
# The copy, its activations and the pages of the checkpoint must not push out the states being written.
RAM_SHARE = 0.5


@dataclass(frozen=True)
class Check:
    """What ``--check`` asks: ``auto``, ``hf`` or ``none``, and how many samples of a checked unit."""

    mode: Literal["auto", "hf", "none"]
    samples: int = CHECK_SAMPLES

    @property
    def prefix(self) -> int | None:
        """How many tokens of a sample are compared at most."""
        return PROFILED_TEXT if self.mode == "auto" else None

    @property
    def share(self) -> float | None:
        """The share of the time that comparing may take."""
        return WAITING_SHARE if self.mode == "auto" else None


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


def open_reference(
    check: Check,
    target: EngineTarget,
    options: LoadOptions,
    rank: Rank,
    longest: int = PROFILED_TEXT,
    note: Callable[[str], None] = lambda _text: None,
) -> Reference:
    """Load the copy where ``--check`` wants one; an engine that is transformers is its own copy. ``note`` is told
    beforehand what it is for, or afterwards why there is none; ``longest`` is that of the samples to compare.

    It runs on the CPU unless ``options.device`` names another device, for the engine has the GPU. Raises ConfigError:
    as ``load_weights``, where the copy was asked for by name."""

    def left_out(why: str) -> Reference:
        explained = (
            f"not compared with Hugging Face: {why}; no layer profile is written, and a layer one off would go unseen. "
            f"--check hf compares all the same"
        )
        note(explained)
        return Reference(None, explained=explained)

    if isinstance(target, LoadedTarget):
        return Reference(target, compares=check.mode == "hf")
    if check.mode == "none" or (check.mode == "auto" and not rank.is_first):
        return Reference(None)
    device = "cpu" if options.device == "auto" else options.device
    if check.mode == "auto":
        needed, free = _copy_bytes(target, device), free_bytes()
        if needed is None:
            return left_out("its weights have no known size")
        if needed > RAM_SHARE * free:
            return left_out(f"its weights take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory is free")
    tokens = min(longest, PROFILED_TEXT) + check.samples * min(longest, check.prefix or longest)
    minutes = cpu_seconds(target, tokens) / 60 if device == "cpu" else 0.0
    if check.mode == "auto" and minutes > MOST_MINUTES:
        return left_out(f"it would take about {minutes:,.0f} min on this CPU at first, while the engine waits")
    explained = f"compared with Hugging Face on {device}: {_extent(check)}"
    if minutes >= 0.5:
        explained += f"; about {minutes:,.0f} min on the CPU at first, while the engine waits"
    note(explained)
    try:
        loaded = load_weights(target.folder, LoadOptions(options.dtype, device))
    except (ConfigError, StorageError) as error:
        # Where it does not fit is no fault; what cannot be read of the checkpoint is.
        is_fault = isinstance(error, StorageError) and error.kind != Kind.OUT_OF_MEMORY
        if check.mode == "hf" or is_fault:
            raise
        return left_out(error.message)
    return Reference(loaded, True, explained)


def cpu_seconds(target: EngineTarget, tokens: int) -> float:
    """How long transformers takes for ``tokens`` of a target on this CPU, about: two operations a weight that a token
    meets, at the rate of one large product in the target's dtype."""
    weights = parameters_a_token(target.config, _sizes(target))
    return 2 * weights * tokens / _operations_per_s(target.head.norm_weight.dtype)


def _copy_bytes(target: EngineTarget, device: str) -> int | None:
    """What the weights of a copy take; None where the checkpoint does not say. A CPU has no kernels for most quantised
    forms: transformers unpacks them."""
    if target.folder.quantised and device == "cpu":
        return target.head.norm_weight.dtype.itemsize * sum(size for _, size in _sizes(target))
    return weights_bytes(target.folder)


def _sizes(target: EngineTarget) -> list[tuple[str, int]]:
    return [(name, weight.numel()) for name, weight in empty_model(target.folder).named_parameters()]


def _operations_per_s(dtype: torch.dtype) -> float:
    rows = torch.ones(_TIMED_ROWS, _TIMED_WIDTH, dtype=dtype)
    layer = torch.nn.utils.skip_init(torch.nn.Linear, _TIMED_WIDTH, _TIMED_WIDTH, bias=False, dtype=dtype)
    torch.nn.init.ones_(layer.weight)
    # As the copy multiplies: without instructions for bf16, torch's own product takes a hundred times as long.
    widen_bf16(layer)
    seconds = []
    with torch.no_grad():
        for _ in range(3):
            began = time.perf_counter()
            layer(rows)
            seconds.append(time.perf_counter() - began)
    return 2 * _TIMED_ROWS * _TIMED_WIDTH**2 / min(seconds)


def _extent(check: Check) -> str:
    if check.prefix is None:
        return f"{check.samples} samples of the first unit, then now and then"
    return (
        f"the first {check.prefix} tokens of {check.samples} samples of the first unit, then now and then, within "
        f"{100 * WAITING_SHARE:.0f} % of the time"
    )


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


def await_first(location: str | Path, rank: Rank, stop: Callable[[], bool], note: Callable[[str], None]) -> None:
    """Let the first rank begin a store, with the layer profile that its copy of the target gives: what an engine gives
    otherwise is then refused on every rank before it commits anything. A rank that never comes is waited for so long
    and no longer. Raises InterruptError."""
    fs, until = open_filesystem(location), time.monotonic() + MOST_WAITED_S
    if fs.size(layout.STORE_JSON) is None:
        note(f"{rank} waits for rank 0 to begin the store: it may load the target in transformers first")
    while fs.size(layout.STORE_JSON) is None and time.monotonic() < until:
        raise_if_stopped(stop)
        time.sleep(_POLL_S)
    if fs.size(layout.STORE_JSON) is None:
        note(f"warning: rank 0 did not begin the store within {MOST_WAITED_S / 60:.0f} min; {rank} goes on unchecked")
        return
    until = time.monotonic() + PROFILE_WAITED_S
    while read_profile(fs) is None and not fs.list(layout.COMMITS_DIR) and time.monotonic() < until:
        raise_if_stopped(stop)
        time.sleep(_POLL_S)


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
