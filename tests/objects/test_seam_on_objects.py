"""The seam's promises on a real S3 server."""

import json
import os
import pickle
import threading
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import obstore
import pytest

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, StorageError
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.objects import PART_BYTES, ObjectFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents, garbage, problems
from hiddenstore.verify import verify
from tests.objects.conftest import SECRETS, every_scheme
from tests.objects.proxy import FaultProxy
from tests.objects.servers import ACCOUNT_KEY
from tests.tiny_world import LAYERS, TRAIN, chat, run, save_target, tree, write_rows
from tests.trainer.runs import WORDS

# webdataset leaves the tars that it read for the collection of garbage to close.
pytestmark = [pytest.mark.objects, pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")]


SHOWN_BY_NOBODY = (*SECRETS.values(), ACCOUNT_KEY)


def write(fs: ObjectFilesystem, path: str, data: bytes) -> None:
    file = fs.create(path)
    file.write(data)
    file.close()


@every_scheme
def test_a_name_is_published_once_and_whole(place: str) -> None:
    fs = ObjectFilesystem(place)
    assert fs.put_if_absent("commits/a.json", b"one")
    assert not fs.put_if_absent("commits/a.json", b"two")
    assert fs.put_if_absent("commits/a.json", b"one"), "its own bytes are a reply that was lost"
    assert fs.read("commits/a.json") == b"one"
    assert fs.list("") == ["commits"]
    assert fs.list("commits") == ["a.json"]
    assert fs.list("nowhere") == []


def test_what_takes_the_place_of_a_removed_object_is_what_is_read(place: str) -> None:
    fs = ObjectFilesystem(place)
    for data in (b"one", b"two"):
        assert fs.put_if_absent("index/1.parquet", data)
        assert fs.read_range("index/1.parquet", 0, 3) == data
        fs.remove_tree("index/1.parquet")
        with pytest.raises(NotFoundError):
            fs.read_range("index/1.parquet", 0, 3)


@every_scheme
def test_a_new_file_never_replaces_another(place: str) -> None:
    fs = ObjectFilesystem(place)
    write(fs, "a", b"one")
    with pytest.raises(ConflictError) as taken:
        write(fs, "a", b"two")
    assert taken.value.kind == "file-exists"
    aborted = fs.create("b")
    aborted.write(b"half")
    aborted.abort()
    assert (fs.read("a"), fs.size("b")) == (b"one", None)


@every_scheme
def test_a_folder_goes_whole_though_others_remove_it_too(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, names = ObjectFilesystem(place), [f"segments/u/{number:02}" for number in range(30)]
    for name in (*names, "segments/u2/0", "snapshots/a.json"):
        fs.put_if_absent(name, b"x")
    fs.remove_tree("snapshots/a.json")
    fs.remove_tree("segments/u")
    assert (fs.list("segments"), fs.size("segments/u/00"), fs.size("snapshots/a.json")) == (["u2"], None, None)
    for name in names:
        fs.put_if_absent(name, b"x")
    listed = fs._below("segments/u")
    fs.remove_tree(names[0])
    # What was listed before somebody else removed the first.
    monkeypatch.setattr(fs, "_below", lambda path: listed)
    fs.remove_tree("segments/u")
    assert fs.list("segments") == ["u2"]


@every_scheme
def test_large_files_go_and_come_in_parts(place: str, proxy: FaultProxy) -> None:
    fs, data = ObjectFilesystem(place), os.urandom(2 * PART_BYTES + 17)
    write(fs, "large", data)
    assert sum(request.method == "PUT" for request in proxy.requests) >= 3, "one put of everything"
    fs, proxy.requests = ObjectFilesystem(place), []
    assert fs.read("large") == data
    assert len([request for request in proxy.requests if request.method == "GET"]) == 4
    assert fs.read_range("large", PART_BYTES - 3, PART_BYTES + 5) == data[PART_BYTES - 3 : 2 * PART_BYTES + 2]
    write(fs, "large", data)
    with pytest.raises(ConflictError):
        write(fs, "large", data[:-1] + bytes([data[-1] ^ 1]))
    with fs.local_copy("large") as copy:
        assert copy.read_bytes() == data


def test_a_large_document_is_one_conditional_put_and_a_larger_one_goes_in_parts(
    place: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, data = ObjectFilesystem(place), os.urandom(PART_BYTES + 9)
    fs.require_atomic_put()
    for name, largest in (("one", 2 * PART_BYTES), ("parts", PART_BYTES)):
        monkeypatch.setattr("hiddenstore.fs.objects._LARGEST_PUT", largest)
        proxy.set_plan(None)
        assert fs.put_if_absent(name, data)
        assert sum(request.method == "PUT" for request in proxy.requests) == (1 if name == "one" else 2)
        assert fs.put_if_absent(name, data)
        assert not fs.put_if_absent(name, data[::-1])
        assert fs.read(name) == data


@every_scheme
def test_reads_beyond_the_end_are_short_and_absent_names_are_missing(place: str) -> None:
    fs = ObjectFilesystem(place)
    write(fs, "a", b"12345")
    for offset in (3, 5, 9):
        with pytest.raises(CorruptionError) as short:
            fs.read_range("a", offset, 4)
        assert short.value.kind == "file-short"
    with pytest.raises(NotFoundError):
        fs.read("b")
    with pytest.raises(ConfigError) as outside:
        fs.read("../a")
    assert outside.value.kind == "path-unsafe"


@every_scheme
def test_a_tree_is_measured_copied_and_removed_whole(place: str, tmp_path: Path) -> None:
    fs = pickle.loads(pickle.dumps(ObjectFilesystem(place)))
    for name in ("t/a", "t/b/c", "tt"):
        write(fs, name, name.encode())
    size, age_s = fs.usage("t")
    assert (size, 0 <= age_s < 3600) == (8, True)
    with fs.local_copy("t") as copy:
        assert tree(copy) == {"a": b"t/a", "b": None, "b/c": b"t/b/c"}
    assert not copy.exists()
    with fs.local_copy("t", without="a") as copy:
        assert list(tree(copy)) == ["b", "b/c"]
    fs.remove_tree("t")
    fs.remove_tree("t")
    assert fs.list("") == ["tt"]
    assert fs.usage("t") == (0, 0.0)


@every_scheme
def test_a_store_on_objects_is_whole_and_software_that_opens_files_is_told(place: str) -> None:
    store = make_store(ObjectFilesystem(place), container="webdataset")
    assert problems(store, finished=True) == []
    assert garbage(store.fs) == []
    assert verify(place, "bytes", also_stock=True).findings == []
    with pytest.raises(ConfigError) as remote:
        store.webdataset()
    assert remote.value.kind == "store-remote"
    arrays = make_store(ObjectFilesystem(f"{place}-z"), container="zarr")
    assert verify(arrays.fs, "bytes", also_stock=True).findings == []
    assert contents(arrays) == contents(store)


@every_scheme
def test_every_command_works_on_addresses(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    target = save_target(tmp_path / "target")
    write_rows(tmp_path / "chats.jsonl", [chat(i) for i in range(40)])
    data, store = f"{place}/data", f"{place}/store"

    printed: list[str] = []

    def ok(*words: str) -> dict[str, object]:
        capsys.readouterr()
        assert run(*words, "--json") == 0, capsys.readouterr().err
        printed.extend(capsys.readouterr())
        answer: dict[str, object] = json.loads(printed[-2])
        return answer

    prepare = ("prepare", "chats.jsonl", "-o", data, "--target", str(target), "--val", "20%")
    ok(*prepare)
    assert run(*prepare) == 6
    collect = ("collect", data, "-o", store, "--target", str(target), "--layers", LAYERS, "--final", "all")
    assert ok("plan", data, "--target", str(target), "-o", store)["container"] == "webdataset"
    assert ok("doctor", place)["ok"]
    ok(*collect)
    assert Store.open(store).manifest.container == "webdataset"
    assert ok(*collect)["units"] == 0
    for command in ("info", "ls", "stats", "advise", "verify", "repair", "gc"):
        ok(command, store)
    ok("show", store, Store.open(store).sample_ids[0])
    ok("verify", store, "--full", "--stock")
    ok("copy", store, "local", "--container", "zarr")
    ok("copy", "local", f"{place}/copy")
    assert Store.open(f"{place}/copy").manifest.container == "webdataset"
    assert contents(Store.open(f"{place}/copy")) == contents(Store.open(store)) == contents(Store.open("local"))
    assert run("copy", store, f"{store}/") == 6
    ok("train", store, "-o", "run", "--cache", "cache", "--mirror", f"{place}/mirror", *TRAIN)
    ok("eval", "run", store)
    ok("decode", "run", "--target", str(target), "--prompts", store, "-n", "2", "--max-new-tokens", "8")
    ok("export-data", store, "--to", "speculators", "-o", "dump")
    imported = ("import", "dump", "--from", "speculators", "-o", f"{place}/imported", "--target", str(target))
    ok(*imported)
    assert ok(*imported)["units"] == 0
    passes = open_filesystem(f"{place}/imported/.import")
    # What a kill in the middle of an upload leaves: a pass without its document.
    passes.remove_tree(f"{passes.list('')[0]}/data.json")
    assert ok(*imported)["units"] == 0
    assert len(Store.open(f"{place}/imported")) == 40
    written = {**files_of(place), **tree(tmp_path)}
    assert {"mirror/checkpoints/step-2/state.json", "run/config.yaml"} <= written.keys()
    assert shown_in([*written.values(), *(text.encode() for text in printed)]) == []


def test_what_was_is_told_frozen_compared_and_read_again_at_addresses(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stored = make_store(ObjectFilesystem(f"{place}/store"), samples=12, layers=(1, 3, 4), container="webdataset")
    path, units = stored.path, len(stored.commits())
    # Where the system would look if an address were taken for a path.
    decoy = Path(path) / "commits" / f"{stored.commits()[0].unit}.json"
    decoy.parent.mkdir(parents=True)
    decoy.touch()
    os.utime(decoy, (0, 0))

    def ok(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        assert run(*words, "--json") == 0, capsys.readouterr().err
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    ok("snapshot", path, "v1")
    events = ok("log", path, "--units")["events"]
    assert sorted(event["action"] for event in events) == ["froze", *["wrote"] * units]
    began = datetime.now(UTC) - timedelta(hours=1)
    assert all(datetime.fromisoformat(event["first"]) > began for event in events)
    assert [snapshot["name"] for snapshot in ok("snapshot", path)["snapshots"]] == ["v1"]
    assert ok("info", f"{path}@v1")["samples"] == ok("info", path)["samples"] == 12
    ok("diff", f"{path}@v1", path)
    ok("report", path, "-o", "report.html")
    assert ok("vocab", path, "--size", "40", "-o", "vocab.safetensors")["size"] == 40
    ok("train", f"{path}@v1", "-o", "frozen", *WORDS, "train.max_steps=2")
    an_epoch_a_step = ("data.batch_tokens=4096", "train.max_steps=3")
    ok("train", path, "-o", "follow", *WORDS, *an_epoch_a_step, "train.follow=true")
    assert any(".epoch-" in snapshot["name"] for snapshot in ok("snapshot", path)["snapshots"])


def test_parts_of_an_object_are_read_several_at_a_time(
    place: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, data = ObjectFilesystem(place), os.urandom(2 * PART_BYTES + 17)
    write(fs, "large", data)
    honest, waiting, lock, meet = proxy.forward, [0], threading.Lock(), threading.Event()

    def forward(method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        if method == "GET" and any(name.lower() == "range" for name in headers):
            with lock:
                waiting[0] += 1
            if waiting[0] > 1:
                meet.set()
            # The first part is answered once another was asked for.
            meet.wait(30)
        return honest(method, path, headers, body)

    monkeypatch.setattr(proxy, "forward", forward)
    assert ObjectFilesystem(place).read("large") == data
    assert meet.is_set()


def test_a_request_is_repeated_at_random_and_growing_intervals(
    place: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("hiddenstore.fs.objects.time.sleep", waits.append)
    monkeypatch.setattr("hiddenstore.fs.objects.DEADLINE_S", 3.0)
    proxy.set_plan(lambda _request: "503")
    for _ in range(2):
        waits.append(-1.0)
        with pytest.raises(StorageError):
            ObjectFilesystem(place).list("")
    tries = [[*group] for is_wait, group in groupby(waits, lambda wait: wait >= 0) if is_wait]
    assert len(tries) == 2
    assert tries[0][0] != tries[1][0], "two clients that were refused at once come back at once"
    for each in tries:
        assert all(wait <= 0.1 * 2**number for number, wait in enumerate(each))


@every_scheme
def test_no_credential_is_shown_whatever_the_server_says(
    place: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(ObjectFilesystem(f"{place}/store"), container="webdataset")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    monkeypatch.setattr("hiddenstore.fs.objects.DEADLINE_S", 1.0)
    for fault in ("403", "503"):
        proxy.set_plan(lambda _request, fault=fault: fault)
        assert run("info", f"{place}/store") == 5
        printed = capsys.readouterr()
        assert f"the server answered {fault}" in printed.err
        assert not any(secret in printed.err + printed.out for secret in (*SHOWN_BY_NOBODY, "AWS4-HMAC", "SharedKey"))
    proxy.set_plan(None)
    assert shown_in([*files_of(place).values(), *tree(tmp_path).values()]) == []


def files_of(place: str) -> dict[str, bytes | None]:
    """Everything below an address, by path."""
    above, _, name = place.rpartition("/")
    with open_filesystem(above).local_copy(name) as copy:
        return tree(copy)


def shown_in(contents: list[bytes | None]) -> list[str]:
    """The credentials that stand in any of them."""
    return [secret for secret in SHOWN_BY_NOBODY if any(secret.encode() in data for data in contents if data)]


def test_a_server_without_conditional_put_is_read_and_refused_for_writing(place: str, proxy: FaultProxy) -> None:
    stored = contents(make_store(ObjectFilesystem(place), container="webdataset"))
    for fault in ("unconditional", "501"):
        proxy.set_plan(lambda request, fault=fault: fault if request.method == "PUT" else None)
        assert contents(Store.open(place)) == stored
        before = ObjectFilesystem(place).list("commits")
        with pytest.raises(StorageError) as refused:
            make_store(ObjectFilesystem(f"{place}-new"), container="webdataset")
        assert refused.value.kind == "no-atomic-put"
        assert open_filesystem(f"{place}-new").list("") == []
        assert ObjectFilesystem(place).list("commits") == before


def test_a_real_server_that_forgets_conditions_is_read_and_refused_for_writing(
    place: str,
    s3rver: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored = make_store(tmp_path, container="webdataset")
    for name in SECRETS:
        monkeypatch.setenv(name, "S3RVER")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3rver)
    fs = ObjectFilesystem(place)
    for path, data in tree(tmp_path / "store").items():
        if data is not None:
            obstore.put(fs._bucket, path, data)
    assert contents(Store.open(place)) == contents(stored)
    assert verify(place, "bytes", also_stock=True).findings == []
    target, data = str(save_target(tmp_path / "target")), str(tmp_path / "chats-data")
    chats = write_rows(tmp_path / "chats.jsonl", [chat(i) for i in range(4)])
    assert run("prepare", chats, "-o", data, "--target", target) == 0
    capsys.readouterr()
    assert run("collect", data, "-o", f"{place}-new", "--target", target, "--layers", LAYERS) == 5
    assert "no conditional put" in capsys.readouterr().err
    assert open_filesystem(f"{place}-new").list("") == []


@every_scheme
def test_a_refusal_that_no_retry_mends_comes_at_once(place: str, proxy: FaultProxy) -> None:
    proxy.set_plan(lambda _request: "403")
    with pytest.raises(StorageError) as refused:
        ObjectFilesystem(place).list("")
    assert refused.value.kind == "permission-denied"
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("address", ["az://container/store", "s3://stores/none"])
def test_without_credentials_it_is_said_where_they_come_from(
    address: str, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SECRETS, *(name for name in os.environ if name.startswith("AZURE_"))):
        monkeypatch.delenv(name, raising=False)
    # A machine without a role: what hands out credentials answers that there are none.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", proxy.address)
    proxy.set_plan(lambda _request: "403")
    with pytest.raises(StorageError) as refused:
        ObjectFilesystem(address).list("")
    assert refused.value.kind == "permission-denied"
    assert "docs/object-storage.md" in (refused.value.hint or "")
