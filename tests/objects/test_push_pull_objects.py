"""push and pull over a real S3 server, through a proxy that fails."""

from pathlib import Path

import pytest

from hiddenstore.share.hub import open_remote
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents
from tests.objects.proxy import FaultProxy
from tests.tiny_world import World, run, tree

pytestmark = pytest.mark.objects


def test_a_store_is_pushed_to_a_bucket_read_there_and_pulled(place: str, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = make_store(tmp_path / "store", samples=8)
    assert run("push", store.path, place, "-q") == 0
    assert contents(Store.open(place)) == contents(store)
    assert run("pull", place, str(tmp_path / "here"), "-q") == 0
    assert contents(Store.open(tmp_path / "here")) == contents(store)
    assert not [path for path in tree(tmp_path) if ".tmp-" in path]


def test_what_a_bucket_holds_is_not_sent_again(place: str, proxy: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = make_store(tmp_path / "store", samples=12, container="webdataset")
    assert run("push", store.path, place, "-q") == 0
    remote = open_remote(place)
    assert remote.size("SHA256SUMS")
    assert remote.size("SHA256SUMS.pushing") is None
    proxy.set_plan(None)
    assert run("push", store.path, place, "-q") == 0
    assert not [r for r in proxy.requests if r.method == "PUT" and "/segments/" in r.key]


def test_a_drafter_in_a_bucket_is_not_replaced(place: str, tmp_path: Path, world: World) -> None:
    source = world / "exported"
    assert run("push", source, place, "-q") == 0
    assert run("push", source, place, "-q") == 0
    (tmp_path / "other").mkdir()
    for name, data in tree(Path(source)).items():
        (tmp_path / "other" / name).write_bytes((data or b"") + b" " * name.endswith(".json"))
    assert run("push", str(tmp_path / "other"), place, "-q") == 6
