"""A real S3 server for the tests of object storage: moto's, a process of its own, and a proxy before it that fails."""

import secrets
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.objects.proxy import FaultProxy

PROGRAM = Path(__file__).parents[2] / ".venv-objects" / "bin" / "moto_server"
BUCKET = "stores"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIACANARYCANARY", "AWS_SECRET_ACCESS_KEY": "canary-secret-canary"}


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of a running server with a bucket."""
    if not PROGRAM.is_file():
        pytest.fail("moto is not installed; run: make test-objects")
    for _ in range(5):
        address = f"http://127.0.0.1:{_free_port()}"
        process = subprocess.Popen(
            [str(PROGRAM), "-H", "127.0.0.1", "-p", address.rpartition(":")[2]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if _has_bucket(process, address):
            yield address
            process.terminate()
            process.wait()
            return
        process.terminate()
        process.wait()
    pytest.fail("moto's server did not start")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_bucket(process: "subprocess.Popen[bytes]", address: str) -> bool:
    """Wait until the server makes the bucket; False when it ended, since somebody else took its port."""
    for _ in range(600):
        if process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")):
                return True
        except OSError:
            time.sleep(0.1)
    return False


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What the environment names as the endpoint; without a fault until a test sets one."""
    with FaultProxy(server) as running:
        for name, value in {
            **SECRETS,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": running.address,
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def place(proxy: FaultProxy) -> str:
    """An address under which nothing lies."""
    return f"s3://{BUCKET}/{secrets.token_hex(6)}"
