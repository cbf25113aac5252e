"""Servers of other engines on this machine: how a Python that has one is found, and its process."""

import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.console.progress import Progress
from hiddenstore.console.text import seconds
from hiddenstore.errors import ConfigError, HiddenstoreError, InterruptError, Kind, StorageError
from hiddenstore.fs.seam import storage_errors
from hiddenstore.servers.http import HttpClient, ServerAccess
from hiddenstore.threads import usable_cores

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
        return self._succeeds("import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)")

    @property
    def can_compile(self) -> bool:
        """Whether torch's inductor finds what it compiles for a CPU with: a C++ compiler and this Python's headers."""
        return self._succeeds(
            "import os, shutil, sys, sysconfig; header = os.path.join(sysconfig.get_path('include'), 'Python.h'); "
            "sys.exit(not (shutil.which(os.environ.get('CXX', 'g++')) and os.path.isfile(header)))"
        )

    def _succeeds(self, code: str) -> bool:
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
        cores = usable_cores()
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


def flag_value(flags: Sequence[str], *names: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` among ``flags``; the last one counts."""
    value = None
    for i, flag in enumerate(flags):
        name, equals, text = flag.partition("=")
        if name in names:
            value = text if equals else (flags[i + 1] if i + 1 < len(flags) else None)
    return value


# Some compile their model first: a minute on cores of their own, a quarter of an hour on a share of one.
START_S = 1800
_POLL_S = 0.5
_HEALTH_S = 5.0
_LONGEST_FOLDER = 70
"""Linux takes 107 characters for the path of a socket, of which vLLM's names have 37."""
_WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True)
class ServerProcess:
    """A server to start: ``command`` without host and port, ``environment`` all of it; ``log``: what it says."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@contextmanager
def running(servers: Sequence[ServerProcess], stopping: Callable[[], bool] = lambda: False) -> Iterator[list[str]]:
    """Their URLs, on free ports of this machine, all up until the block ends or this process does. Raises StorageError:
    ``server-unreachable``: one ended, or is not up after half an hour; InterruptError: ``interrupted``: ``stopping``
    was true before they were up."""
    ports, began = _free_ports(len(servers)), time.monotonic()
    with ExitStack() as stack:
        started = [
            (f"http://127.0.0.1:{port}", stack.enter_context(_process(server, port)), server.log)
            for port, server in zip(ports, servers, strict=True)
        ]
        with Progress("start", total=len(servers), unit="servers") as progress:

            def waiting() -> bool:
                progress.advance(0, waited=seconds(time.monotonic() - began))
                for url, process, log in started:
                    if process.poll() is not None:
                        _wait_until_up(url, process, log)
                return stopping()

            for url, process, log in started:
                _wait_until_up(url, process, log, waiting)
                progress.advance()
        yield [url for url, _, _ in started]


@contextmanager
def _process(server: ServerProcess, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    with ExitStack() as stack:
        with storage_errors(server.log), server.log.open("w", encoding="utf-8") as said:
            # vLLM leaves its sockets there when it is killed.
            sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="hs-", ignore_cleanup_errors=True))
            own = {"VLLM_RPC_BASE_PATH": sockets} if len(sockets) <= _LONGEST_FOLDER else {}
            # A session of its own: Ctrl-C is for this process, whose end the other one notices.
            process = subprocess.Popen(
                [sys.executable, str(_WATCHED), *server.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**own, **server.environment},
            )
        yield stack.enter_context(process)


def _wait_until_up(
    url: str, process: "subprocess.Popen[bytes]", log: Path, stopping: Callable[[], bool] = lambda: False
) -> None:
    end = time.monotonic() + START_S
    with closing(HttpClient(ServerAccess(url, timeout_s=_HEALTH_S, tries=1))) as client:
        while time.monotonic() < end and process.poll() is None:
            with suppress(HiddenstoreError):
                return client.text("/health", lambda body: None)
            if stopping():
                raise InterruptError(
                    "stopped as asked, before the server was up",
                    kind=Kind.INTERRUPTED,
                    hint="the same command starts anew",
                )
            time.sleep(_POLL_S)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    how = f"is not up after {START_S} s" if process.poll() is None else f"ended with exit code {process.returncode}"
    # The reason of a validation's error stands below its name, and a page that explains it (`errors.…/value_error`)
    # below that.
    named = (line for line in reversed(lines) if re.search(r"(?<!_)[Ee]rror\b", line))
    last = next(named, lines[-1] if lines else "it said nothing")
    problem = f"the server that was started {how}: {last.strip()[-300:]}"
    raise StorageError(problem, kind=Kind.SERVER_UNREACHABLE, hint=shlex.join(["less", str(log)]))


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
