"""An engine's server as a process of this machine: started, waited for, and gone with the block that needed it."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from hiddenstore.errors import InterruptError, Kind, StorageError
from hiddenstore.fs.seam import storage_error

START_S = 600
_POLL_S = 0.5
_WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True)
class ServerProcess:
    """A server to start: ``command`` without host and port, ``environment`` all of it; ``log``: what it says."""

    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@contextmanager
def running(servers: Sequence[ServerProcess], stopping: Callable[[], bool] = lambda: False) -> Iterator[list[str]]:
    """Their URLs, on free ports of this machine, all up until the block ends or this process does.

    Raises:
        StorageError: ``server-unreachable``: one ended, or is not up after ten minutes.
        InterruptError: ``interrupted``: ``stopping`` was true before they were up.
    """
    ports = _free_ports(len(servers))
    with ExitStack() as stack:
        started = [
            (f"http://127.0.0.1:{port}", stack.enter_context(_process(server, port)), server.log)
            for port, server in zip(ports, servers, strict=True)
        ]
        for url, process, log in started:
            _wait_until_up(url, process, log, stopping)
        yield [url for url, _, _ in started]


@contextmanager
def _process(server: ServerProcess, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    try:
        with server.log.open("w", encoding="utf-8") as said:
            # A session of its own: Ctrl-C is for this process, whose end the other one notices.
            process = subprocess.Popen(
                [sys.executable, str(_WATCHED), *server.command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(server.environment),
            )
    except OSError as error:
        raise storage_error(error, str(server.log)) from error
    with process:
        yield process


def _wait_until_up(
    url: str, process: "subprocess.Popen[bytes]", log: Path, stopping: Callable[[], bool] = lambda: False
) -> None:
    end = time.monotonic() + START_S
    # No proxy of the environment reaches this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError, HTTPException), opener.open(f"{url}/health", timeout=5):
            return
        if stopping():
            raise InterruptError(
                "stopped as asked, before the server was up", kind=Kind.INTERRUPTED, hint="the same command starts anew"
            )
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
