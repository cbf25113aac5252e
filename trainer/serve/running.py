"""An engine's server as a process of this machine: started, waited for, and gone with the block that needed it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

from hiddenstore.errors import ConfigError, Kind, StorageError
from hiddenstore.fs.seam import storage_error
from trainer.serve.launch import plan_of, resolve
from trainer.serve.plan import ServeOptions, ServePlan, ServingEngine

START_S = 600
_POLL_S = 0.5
_MODULES = {"vllm": ("vllm", "vllm.entrypoints.openai.api_server")}
"""Engines that a Python starts by a module: the package it needs, the module."""
_OPENMP = "libiomp5.so"
_WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True)
class EnginePython:
    """A Python that has ``engine`` installed; ``path`` None: this one."""

    engine: ServingEngine
    path: str | None = None

    @property
    def program(self) -> str:
        return self.path or sys.executable

    def require(self) -> None:
        """Raises ConfigError: ``not-installed``: there is no such Python, or it lacks the engine; ``option-invalid``:
        the engine is not started by a Python."""
        if self.engine.name not in _MODULES:
            raise ConfigError(
                f"{self.engine.title} is not started here; start it yourself, and name it",
                kind=Kind.OPTION_INVALID,
                hint=f"hiddenstore eval --engine {self.engine.name} --server URL --baseline-server URL",
            )
        package = _MODULES[self.engine.name][0]
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
        try:
            is_there = not subprocess.run([self.program, "-c", code], check=False, capture_output=True).returncode
        except OSError:
            is_there = False
        if not is_there:
            raise ConfigError(
                f"{self.program} has no {self.engine.title}",
                kind=Kind.NOT_INSTALLED,
                hint=f"{self.engine.install}, and name that environment: --engine-python ENV/bin/python",
            )

    def command(self, plan: ServePlan) -> list[str]:
        """The command of ``plan`` under this Python: builds without the engine's own program have its module."""
        return [self.program, "-m", _MODULES[self.engine.name][1], "--model", *plan.command[2:]]

    def environment(self) -> dict[str, str]:
        """What a server needs to share the cores of this machine with its neighbour, where it computes on them; what is
        set already stays."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(cores)}
        # The CPU build is ten times slower under another OpenMP than its own, which has to be loaded first.
        own = Path(self.program).parent.parent / "lib" / _OPENMP
        return variables | ({"LD_PRELOAD": str(own)} if own.is_file() else {})


@contextmanager
def running(python: EnginePython, servers: Sequence[tuple[ServeOptions, Path]]) -> Iterator[list[str]]:
    """URLs of servers that the options describe, on free ports of this machine, all up until the block ends or this
    process does; what each says goes to the file beside its options.

    Raises:
        ConfigError: what cannot be served, as ``hiddenstore serve`` says it.
        StorageError: ``server-unreachable``: one ended, or is not up after ten minutes.
    """
    ports = _free_ports(len(servers))
    with ExitStack() as stack:
        started = [
            (f"http://127.0.0.1:{port}", stack.enter_context(_process(python, options, port, log)), log)
            for port, (options, log) in zip(ports, servers, strict=True)
        ]
        for url, process, log in started:
            _wait_until_up(url, process, log)
        yield [url for url, _, _ in started]


@contextmanager
def _process(python: EnginePython, options: ServeOptions, port: int, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    options = replace(options, flags=(*options.flags, "--host", "127.0.0.1", "--port", str(port)))
    plan = plan_of(python.engine, resolve(python.engine, options).request)
    environment = {**python.environment(), **os.environ, **plan.variables}
    try:
        with log.open("w", encoding="utf-8") as said:
            # A session of its own: Ctrl-C is for this process, whose end the other one notices.
            process = subprocess.Popen(
                [sys.executable, str(_WATCHED), *python.command(plan)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
    except OSError as error:
        raise storage_error(error, str(log)) from error
    with process:
        yield process


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    # No proxy of the environment reaches this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, HTTPException), opener.open(f"{url}/health", timeout=5):
            return
        time.sleep(_POLL_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    how = f"is not up after {START_S} s" if process.poll() is None else f"ended with exit code {process.returncode}"
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it said nothing")
    raise StorageError(
        f"the server that was started {how}: {last.strip()[-300:]}",
        kind=Kind.SERVER_UNREACHABLE,
        hint=f"less {log}",
    )


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
