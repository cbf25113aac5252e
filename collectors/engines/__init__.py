"""What a capture engine is: token ids in, named states out. Adding one is a file here and a line in ``ENGINES``.

Shapes: N tokens of the unit end to end, R final rows of the unit, L aux layers, D target width, C checked rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from hiddenstore.errors import ConfigError
from schemas.capture import NormState
from schemas.manifest import Engine

if TYPE_CHECKING:
    from collectors.target import LoadedTarget


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
    int64 [C] those tokens.
    """

    token_ids: np.ndarray
    aux: Tensor
    final: Tensor
    next_rows: Tensor
    next_tokens: Tensor


class CaptureEngine(Protocol):
    """Runs a target over token ids and hands out its states."""

    final_norm: NormState

    def describe(self) -> Engine: ...

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool]) -> Captured:
        """Capture one unit. Raises InterruptError soon after ``stop()`` turns true."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """aux_layers ascending; batch_tokens = most padded tokens in one forward."""

    aux_layers: tuple[int, ...]
    batch_tokens: int


ENGINES: dict[str, str] = {
    "hf": "collectors.engines.hf:HfEngine",
}


def open_engine(name: str, target: "LoadedTarget", options: EngineOptions) -> CaptureEngine:
    """Make the engine ``name`` for a loaded target.

    Raises:
        ConfigError: ``engine-unknown``.
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
