"""A real vLLM server in a process of its own, on a free port of this machine."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_S = 240


@contextlib.contextmanager
def vllm_server(target: str, log: Path, speculative: dict[str, Any] | None = None, *flags: str) -> Iterator[str]:
    """URL of a server of a target, named ``target`` there, up until the block ends; what it says goes to ``log``."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target]
    command += ["--served-model-name", "target", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager", "--seed", "0", *flags]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    with log.open("w", encoding="utf-8") as said:
        # A group of its own: the server starts an engine process that has to go with it.
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True, env=dict(os.environ)
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(url, process, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not come up:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
