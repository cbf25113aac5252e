"""What a capture engine is: token ids in, named states out. Adding one is a file here and a row in ``ENGINES``.

Shapes: N tokens of the unit end to end, R final rows of the unit, L aux layers, D target width, C checked rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hiddenstore.errors import ConfigError, InterruptError, Kind
from hiddenstore.registry import Registry, nearest
from schemas.capture import NormState
from schemas.manifest import Engine

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from collectors.targets.load import EngineTarget
    from schemas.manifest import ImageEntry


@dataclass(frozen=True, eq=False)
class CaptureRequest:
    """input_ids int32 [T]; final_rows int32 [r], ascending positions; ``source``: where the sample came from;
    ``images`` in order, each with its file."""

    input_ids: "np.ndarray"
    final_rows: "np.ndarray"
    source: str = ""
    images: "Sequence[tuple[ImageEntry, bytes]]" = ()


@dataclass(frozen=True)
class Refusal:
    """A request without states: its ``index``, a kebab-case ``reason`` and a sentence for people."""

    index: int
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class Captured:
    """States of one unit, samples end to end in request order, without those of the requests in ``refusals``.

    token_ids int32 [N] as the engine read them; aux bfloat16 [L, N, D], layers ascending; final bfloat16 [R, D];
    next_rows int64 [C] rows of ``final`` for which the engine said which token it would emit next, next_tokens
    int64 [C] those tokens; both empty where it said nothing.
    """

    token_ids: "np.ndarray"
    aux: "Tensor"
    final: "Tensor"
    next_rows: "Tensor"
    next_tokens: "Tensor"
    refusals: tuple[Refusal, ...] = ()


Done = Callable[[int], None]


def nobody(_tokens: int) -> None:
    """Told of tokens, and nobody looks."""


class CaptureEngine(Protocol):
    """Runs a target over token ids; ``final_norm`` says what ``Captured.final`` is, None where the engine has none."""

    target: "EngineTarget"

    @property
    def final_norm(self) -> "NormState | None": ...

    def describe(self) -> "Engine":
        """Name, version, what it stands on, and the settings that decide what its states are."""
        ...

    def capture(self, requests: Sequence[CaptureRequest], stop: Callable[[], bool], done: "Done" = nobody) -> Captured:
        """Capture one unit, into memory that is never used again: the unit before may still be on its way to disk.

        ``done`` is told the tokens of what has come in since it was last told. Raises InterruptError soon after
        ``stop()`` turns true (``raise_if_stopped``).
        """
        ...

    def close(self) -> None:
        """End the engine's processes and remove its scratch files; the engine is not used afterwards."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """What every engine is started with.

    aux_layers ascending, -1 = embeddings; batch_tokens = most tokens in one forward; longest = tokens of the longest
    sample, 0 where unknown; dtype and device as ``collectors.targets.load`` reads them; tensor_parallel = devices per
    engine; extra = the settings of this engine alone; scratch = folder for states that are handed over in files, None
    for one in memory; server = URL of a running server in place of an engine of this process; local_rank = which of
    the processes on this machine, for engines that take devices of their own.
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


@dataclass(frozen=True)
class EngineRow:
    """What ``collect`` and ``doctor`` know of an engine before anything of it is imported.

    ``opener``: ``module:callable`` of (EngineTarget, EngineOptions). ``doctor``: ``module:function`` that yields its
    checks. ``flags``: settings of this engine that are options of ``collect`` too, with their help. ``server`` and
    ``tensor_parallel``: whether it takes these options; ``server`` is the help of ``--server``. ``images``: whether it
    runs samples with images.
    """

    opener: str
    doctor: str
    flags: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    tensor_parallel: bool = False
    images: bool = False


_ROWS: dict[str, str | EngineRow] = {
    "hf": EngineRow(
        "collectors.engines.hf:HfEngine",
        "collectors.engines.hf:checks",
        flags={
            "device_map": "auto spreads the blocks over every GPU (accelerate).",
            "attention": "sdpa, eager or flash_attention_2; default: transformers' own choice.",
        },
        images=True,
    ),
    "vllm": EngineRow(
        "collectors.engines.vllm:open_vllm",
        "collectors.engines.vllm:checks",
        server="a server that runs already.",
        tensor_parallel=True,
    ),
    "trtllm": EngineRow(
        "collectors.engines.trtllm:TrtllmEngine", "collectors.engines.trtllm:checks", tensor_parallel=True
    ),
}
ENGINES: Registry[EngineRow] = Registry(
    "engine", "hiddenstore.engines", _ROWS, "collectors.engines:EngineRow", option="--engine", default="hf"
)


def load_attribute(reference: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def open_engine(name: str, target: "EngineTarget", options: EngineOptions) -> CaptureEngine:
    """Start an engine; ConfigError ``engine-unknown``, ``not-installed``, ``engine-arg`` or ``plugin-broken``."""
    row = ENGINES[name]
    if options.server is not None and not row.server:
        raise ConfigError(f"engine {name} runs in this process and takes no --server", kind=Kind.ENGINE_ARG)
    if target.folder.adapter is not None and name != ENGINES.default:
        raise ConfigError(
            f"engine {name} does not merge --adapter into what it loads",
            kind=Kind.ENGINE_ARG,
            hint="--engine hf; or merge_and_unload(), save_pretrained(MERGED) and --target MERGED",
        )
    engine: CaptureEngine = load_attribute(row.opener)(target, options)
    ENGINES.check(name, engine, "collectors.engines:CaptureEngine")
    return engine


def read_settings(engine: str, extra: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``defaults`` overridden by ``extra``; ConfigError ``engine-arg`` for a name the engine does not know."""
    for name in extra:
        if name not in defaults:
            near = nearest(name, defaults)
            problem = f"engine {engine} has no setting {name!r}, it has: {', '.join(defaults) or 'none'}"
            raise ConfigError(problem, kind=Kind.ENGINE_ARG, hint=f"--engine-arg {near}=…" if near else None)
    return {**defaults, **extra}


def refuse_scratch(engine: str, options: EngineOptions) -> None:
    """For engines that hand their states over in memory; ConfigError ``engine-arg``."""
    if options.scratch is not None:
        problem = f"engine {engine} hands states over in memory and takes no --scratch"
        raise ConfigError(problem, kind=Kind.ENGINE_ARG, hint="leave --scratch out")


def raise_if_stopped(stop: Callable[[], bool]) -> None:
    """InterruptError ``interrupted`` once ``stop()`` is true; the open unit is dropped."""
    if stop():
        raise InterruptError("stopped by a signal; the open unit was dropped", kind=Kind.INTERRUPTED)
