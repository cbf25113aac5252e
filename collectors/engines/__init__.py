"""What a capture engine is: token ids in, named states out. Adding one is a file here and a line in ``ENGINES``.

Shapes: N tokens of the unit end to end, R final rows of the unit, L aux layers, D target width, C checked rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from hiddenstore.errors import ConfigError
from schemas.capture import NormState
from schemas.manifest import Engine

if TYPE_CHECKING:
    from collectors.target import EngineTarget


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """One sample to run: input_ids int32 [T]; final_rows int32 [r], ascending positions of the final hidden."""

    input_ids: np.ndarray
    final_rows: np.ndarray


@dataclass(frozen=True, eq=False)
class Captured:
    """States of one unit, samples end to end in request order.

    token_ids int32 [N] as the engine read them; aux bfloat16 [L, N, D], layers ascending; final bfloat16 [R, D];
    next_rows int64 [C] rows of ``final`` for which the engine said which token it would emit next, next_tokens
    int64 [C] those tokens; both empty where it said nothing.
    """

    token_ids: np.ndarray
    aux: Tensor
    final: Tensor
    next_rows: Tensor
    next_tokens: Tensor


class CaptureEngine(Protocol):
    """Runs a target over token ids and hands out its states.

    ``target`` is the target as the engine holds it; ``final_norm`` says what ``Captured.final`` is.
    """

    target: "EngineTarget"
    final_norm: NormState

    def describe(self) -> Engine:
        """Name, version, what it stands on, and the settings that decide what its states are."""
        ...

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool]) -> Captured:
        """Capture one unit, into memory that is never used again: the unit before may still be on its way to disk.

        Raises InterruptError soon after ``stop()`` turns true.
        """
        ...

    def close(self) -> None:
        """End the engine's processes and remove its scratch files; the engine is not used afterwards."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """What every engine is asked.

    aux_layers ascending, -1 = embeddings; batch_tokens = most tokens in one forward; longest = tokens of the longest
    sample, 0 where unknown; dtype and device as ``collectors.target`` reads them; tensor_parallel = devices per
    engine; extra = the engine's own settings; scratch = folder for engines that hand states over in files, None for
    one in memory; server = URL of a running server in place of an engine in this process; local_rank = which of the
    processes on this machine, for engines that take devices of their own.
    """

    aux_layers: tuple[int, ...]
    batch_tokens: int
    longest: int = 0
    dtype: str | None = None
    device: str = "auto"
    tensor_parallel: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)
    scratch: Path | None = None
    server: str | None = None
    local_rank: int = 0


ENGINES: dict[str, str] = {
    "hf": "collectors.engines.hf:HfEngine",
    "trtllm": "collectors.engines.trtllm:TrtllmEngine",
    "vllm": "collectors.engines.vllm:open_vllm",
}


def open_engine(name: str, target: "EngineTarget", options: EngineOptions) -> CaptureEngine:
    """Start the engine ``name`` for a target.

    Raises:
        ConfigError: ``engine-unknown``; ``engine-missing``: its package is not installed here; ``engine-arg``.
    """
    if name not in ENGINES:
        near = get_close_matches(name, ENGINES, n=1)
        raise ConfigError(
            f"unknown engine {name!r}, expected one of: {', '.join(ENGINES)}",
            kind="engine-unknown",
            hint=f"--engine {near[0] if near else 'hf'}",
        )
    module, _, attribute = ENGINES[name].partition(":")
    engine: CaptureEngine = getattr(import_module(module), attribute)(target, options)
    return engine


def take_settings(engine: str, extra: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """``known`` names with their defaults, overridden by ``extra``; for engines whose settings are a closed list.

    Raises:
        ConfigError: ``engine-arg``: a name that the engine does not know.
    """
    for name in extra:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            raise ConfigError(
                f"engine {engine} has no setting {name!r}, it has: {', '.join(known) or 'none'}",
                kind="engine-arg",
                hint=f"--engine-arg {near[0]}=…" if near else None,
            )
    return {**known, **extra}


def no_server(engine: str, options: EngineOptions) -> None:
    """Refuse ``--server`` for an engine that runs in this process only."""
    if options.server is not None:
        raise ConfigError(f"engine {engine} runs in this process and takes no --server", kind="engine-arg")
