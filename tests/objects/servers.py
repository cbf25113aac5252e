"""Object stores that run here, each a process of its own: moto's S3, s3rver's S3, which knows no conditions, and
Azurite, Microsoft's own emulator of blobs."""

import base64
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import pytest

BUCKET = "stores"
ACCOUNT = "canaryaccount"
ACCOUNT_KEY = base64.b64encode(b"canary-secret-canary").decode()
_ENVIRONMENT = Path(__file__).parents[2] / ".venv-objects"


def program(name: str) -> str:
    """The path of an installed server; skips the test where what would install it is not on this machine."""
    folder = _ENVIRONMENT / ("bin" if name == "moto_server" else "node_modules/.bin")
    if not (folder / name).is_file():
        if name != "moto_server" and shutil.which("npm") is None:
            pytest.skip(f"{name} comes from npm, which is not on this machine")
        pytest.fail(f"{name} is not installed; run: make test-objects")
    return str(folder / name)


@contextmanager
def running(words: Callable[[int], list[str]], bucket: Callable[[str], urllib.request.Request]) -> Iterator[str]:
    """The address of a server that ``words`` of a port starts, once it has the bucket that is asked for."""
    for _ in range(5):
        address = f"http://127.0.0.1:{_free_port()}"
        command = words(int(address.rpartition(":")[2]))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if _has_bucket(process, lambda address=address: bucket(address)):
                yield address
                return
        finally:
            process.terminate()
            process.wait()
    pytest.fail(f"{command[0]} did not start")


def s3_bucket(address: str) -> urllib.request.Request:
    return urllib.request.Request(f"{address}/{BUCKET}", method="PUT")


def azure_container(address: str) -> urllib.request.Request:
    """Signed with the account's key as Microsoft documents it ("Authorize with Shared Key")."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    text = (
        f"PUT{12 * chr(10)}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    )
    signature = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}",
        "Content-Length": "0",
    }
    return urllib.request.Request(f"{address}/{ACCOUNT}/{BUCKET}?restype=container", method="PUT", headers=headers)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_bucket(process: "subprocess.Popen[bytes]", request: Callable[[], urllib.request.Request]) -> bool:
    """Wait until the server makes the bucket; False when it ended, since somebody else took its port."""
    for _ in range(600):
        if process.poll() is not None:
            return False
        try:
            with urllib.request.urlopen(request()):
                return True
        except OSError:
            time.sleep(0.1)
    return False
