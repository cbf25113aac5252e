"""Real servers of object storage for the tests, and a proxy before each that fails."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.objects.proxy import FaultProxy, GoogleProxy
from tests.objects.servers import ACCOUNT, ACCOUNT_KEY, BUCKET, azure_container, program, running, s3_bucket

SECRETS = {"AWS_ACCESS_KEY_ID": "AKIACANARYCANARY", "AWS_SECRET_ACCESS_KEY": "canary-secret-canary"}


every_scheme = pytest.mark.parametrize("proxy", ["s3", "az", "gs"], indirect=True)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of moto's server."""
    moto = program("moto_server")
    with running(lambda port: [moto, "-H", "127.0.0.1", "-p", str(port)], s3_bucket) as address:
        yield address


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an Azurite with an account of the tests' own."""
    account, folder = f"AZURITE_ACCOUNTS={ACCOUNT}:{ACCOUNT_KEY}", str(tmp_path_factory.mktemp("azurite"))
    # It refuses versions of the protocol that are younger than itself.
    options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", folder, "--blobPort"]
    words = ["env", account, program("azurite-blob"), *options]
    with running(lambda port: [*words, str(port)], azure_container) as address:
        yield address


@pytest.fixture(scope="session")
def s3rver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that lets an object be put over another, whatever the condition."""
    folder = str(tmp_path_factory.mktemp("s3rver"))
    words = [program("s3rver"), "--silent", "--directory", folder, "--address", "127.0.0.1", "--port"]
    with running(lambda port: [*words, str(port)], s3_bucket) as address:
        yield address


@pytest.fixture
def proxy(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """What the environment names as the endpoint of ``s3``, or of the scheme that a test asks for; without a fault
    until a test sets one."""
    scheme = getattr(request, "param", "s3")
    upstream = request.getfixturevalue("azurite" if scheme == "az" else "server")
    kind = GoogleProxy if scheme == "gs" else FaultProxy
    with kind(upstream, scheme) as running_proxy:
        for name, value in environment(running_proxy, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield running_proxy


def environment(proxy: FaultProxy, folder: Path) -> dict[str, str]:
    if proxy.scheme == "az":
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            "AZURE_STORAGE_ENDPOINT": f"{proxy.address}/{ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }
    if proxy.scheme == "gs":
        account = folder / "service-account.json"
        fields = {"gcs_base_url": proxy.address, "disable_oauth": True}
        account.write_text(json.dumps({**fields, "client_email": "", "private_key": "", "private_key_id": ""}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(account), "GOOGLE_ALLOW_HTTP": "true"}
    return {**SECRETS, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": proxy.address, "AWS_ALLOW_HTTP": "true"}


@pytest.fixture
def place(proxy: FaultProxy) -> str:
    """An address under which nothing lies."""
    return f"{proxy.scheme}://{BUCKET}/{secrets.token_hex(6)}"


@pytest.fixture
def direct(proxy: FaultProxy, place: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that is reached without the proxy, which would take most of the time."""
    if proxy.scheme == "az":
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{request.getfixturevalue('azurite')}/{ACCOUNT}")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("server"))
    return place
