"""A Python environment with vLLM: whether it has it, and how its server is started there."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.errors import ConfigError, Kind

_OPENMP = "libiomp5.so"


@dataclass(frozen=True)
class VllmPython:
    """``path`` None: the Python that runs this."""

    path: str | None = None

    @property
    def program(self) -> str:
        return self.path or sys.executable

    @property
    def has_vllm(self) -> bool:
        code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
        try:
            return not subprocess.run([self.program, "-c", code], check=False, capture_output=True).returncode
        except OSError:
            return False

    def require(self) -> None:
        """Raises ConfigError: ``not-installed``: there is no such Python, or it lacks vLLM."""
        if not self.has_vllm:
            raise ConfigError(
                f"{self.program} has no vLLM",
                kind=Kind.NOT_INSTALLED,
                hint="install vLLM into an environment of its own, and name it: --engine-python ENV/bin/python",
            )

    def command(self, model: str, flags: Sequence[str]) -> tuple[str, ...]:
        """The command of a server of ``model``: builds without the engine's own program have its module."""
        return (self.program, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags)

    def environment(self) -> dict[str, str]:
        """What a server needs to share the cores of this machine with its neighbour, where it computes on them; what is
        set already stays."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        # The engine's own process spins on a core beside its worker: with a thread on every core a token of
        # SmolLM2 takes 1.6 times as long (two cores, benchmarks/results/demo-llm-2026-11-22.md).
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(max(1, cores - 1))}
        # The CPU build is ten times slower under another OpenMP than its own, which has to be loaded first.
        own = Path(self.program).parent.parent / "lib" / _OPENMP
        return {**variables, **({"LD_PRELOAD": str(own)} if own.is_file() else {}), **os.environ}


def engine_flags(words: Iterable[str]) -> tuple[str, ...]:
    """``KEY=VALUE`` words as flags of an engine; a switch is ``KEY`` or ``KEY=true``."""
    flags: list[str] = []
    for name, equals, value in (word.partition("=") for word in words):
        flags += [f"--{name}"] if value == "true" or not equals else [f"--{name}", value]
    return tuple(flags)
