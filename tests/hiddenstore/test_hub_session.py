"""Requests of the hub's client end: whatever a server does, through our calls and the library's own downloads."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import get_session, snapshot_download

from hiddenstore.errors import ConfigError, NotFoundError, StorageError
from hiddenstore.servers import hub_session
from hiddenstore.servers.hub_session import bound_hub_requests
from hiddenstore.share.hub import HubRemote
from hiddenstore.testing.builders import make_store
from tests.hiddenstore.hub_double import HubDouble, Repo, in_place_of_the_hub
from trainer.export.published import import_drafter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")

BODY = bytes(range(256)) * 4
FILES = {"config.json": b"{}", "model.safetensors": BODY}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _seconds: None))
    monkeypatch.setattr(hub_session, "START_S", 0.3)
    with in_place_of_the_hub(monkeypatch) as double:
        double.repos["me/drafter"] = Repo(True, [{name: (data, False) for name, data in FILES.items()}])
        yield double


def drip(hub: HubDouble, words: str, start_s: float = 0.0) -> list[float]:
    """A byte of an answer in 50 ms, of a thousand: each wait is short, and the whole takes minutes."""
    begun: list[float] = []

    def slowly(_method: str, path: str) -> float | None:
        if words not in path:
            return None
        begun.append(time.monotonic())
        return 0.05

    hub.drip = slowly
    return begun


def test_a_pull_from_a_hub_that_drips_ends_with_an_error_of_its_own(hub: HubDouble) -> None:
    remote = HubRemote("me/drafter", "model")
    assert remote.read_range("model.safetensors", 3, 500) == BODY[3:503]
    tries = drip(hub, "/resolve/")
    with pytest.raises(StorageError, match=r"no whole answer within \d+ s") as caught:
        remote.read_range("model.safetensors", 0, len(BODY))
    assert (caught.value.kind, len(tries)) == ("server-timeout", 6)
    assert time.monotonic() - tries[0] < 6 * 5


def test_a_list_of_files_that_drips_ends_too(hub: HubDouble) -> None:
    drip(hub, "/tree/")
    with pytest.raises(StorageError) as caught:
        HubRemote("me/drafter", "model").size("config.json")
    assert caught.value.kind == "server-timeout"


def test_a_drafter_that_the_library_downloads_ends_too(hub: HubDouble, tmp_path: Path) -> None:
    drip(hub, "model.safetensors")
    with pytest.raises(StorageError) as caught:
        import_drafter("me/drafter", tmp_path / "run", tmp_path / "store")
    assert caught.value.kind == "server-timeout"


@pytest.mark.parametrize(
    ("others", "read"),
    [
        ([], "medusa_lm_head.pt"),
        (["training_args.bin", "optimizer.pt"], "medusa_lm_head.pt"),
        (["model.safetensors"], "model.safetensors"),
    ],
)
def test_torch_files_of_a_drafter_are_fetched_where_it_has_no_other_weights(
    hub: HubDouble, tmp_path: Path, others: list[str], read: str
) -> None:
    files = dict.fromkeys([*others, "medusa_lm_head.pt"], BODY) | {"config.json": b"{}"}
    hub.repos["me/drafter"] = Repo(True, [{name: (data, False) for name, data in files.items()}])
    store = make_store(tmp_path, samples=2).path
    with pytest.raises(ConfigError, match=read):
        import_drafter("me/drafter", tmp_path / "run", store)
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert fetched == {"config.json", read, *(name for name in others if name.endswith(".bin"))}


@pytest.mark.parametrize(
    ("name", "said"), [("README.md", r"holds no config\.json"), ("config.json", r"holds no \.safetensors, .*\.pt")]
)
def test_a_hub_repository_without_a_drafter_is_said_to_have_none(
    hub: HubDouble, tmp_path: Path, name: str, said: str
) -> None:
    hub.repos["me/drafter"] = Repo(True, [{name: (b"{}", False)}])
    with pytest.raises(NotFoundError, match=said):
        import_drafter("me/drafter", tmp_path / "run", make_store(tmp_path, samples=2).path)


def test_bytes_that_come_at_the_least_rate_put_the_end_off(hub: HubDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_session, "LEAST_RATE", 4)
    bound_hub_requests()
    client = get_session()
    bound_hub_requests()
    assert get_session() is client, "bound once"
    monkeypatch.setitem(FILES, "model.safetensors", BODY[:40])
    hub.repos["me/drafter"] = Repo(True, [{name: (data, False) for name, data in FILES.items()}])
    begun = drip(hub, "model.safetensors")
    folder = Path(snapshot_download("me/drafter"))
    assert (folder / "model.safetensors").read_bytes() == BODY[:40]
    assert time.monotonic() - begun[0] > 2 * hub_session.START_S


@pytest.mark.parametrize(("error", "kind"), [("ConnectError", "server-unreachable"), ("ReadTimeout", "server-timeout")])
def test_a_client_that_stands_on_httpx_fails_as_one_of_httpx2(
    error: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = type("HTTPError", (Exception,), {})
    late = type("TimeoutException", (root,), {})
    library = SimpleNamespace(
        HTTPError=root,
        TimeoutException=late,
        ConnectError=type("ConnectError", (root,), {}),
        ReadTimeout=type("ReadTimeout", (late,), {}),
    )
    monkeypatch.setitem(sys.modules, "httpx", library)

    def refuse(*_words: object, **_more: object) -> None:
        raise getattr(library, error)("refused")

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuse)
    with pytest.raises(StorageError) as caught:
        HubRemote("me/drafter", "model").size("config.json")
    assert caught.value.kind == kind
