"""Two stores of one capture: neither takes the other's place, there or here, and one that grows is still the same."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.cli import main
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, StorageError
from hiddenstore.files.lock import WRITER, FolderLock
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.inspect.samples import parse_where
from hiddenstore.share import hub
from hiddenstore.share.hub import open_remote
from hiddenstore.share.pull import pull
from hiddenstore.share.push import open_staging, push_store
from hiddenstore.share.remote import SUMS, Remote, StorageRemote
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store, memory_input
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from hiddenstore.writer import register_input
from tests.accepting import repair_all
from tests.hiddenstore.hub_double import in_place_of_the_hub
from tests.tiny_world import run, tree

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")


@pytest.fixture(params=["hub", "bucket"])
def remote(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    if request.param == "bucket":
        yield StorageRemote(LocalFilesystem(tmp_path / "place"))
        return
    with in_place_of_the_hub(monkeypatch):
        yield open_remote("hf://datasets/me/states")


def made(folder: Path, samples: int, seed: int = 0) -> Store:
    folder.mkdir()
    return make_store(folder, samples=samples, seed=seed, container="webdataset")


def damage_middle(store: Store) -> None:
    """One bit of the unit with most samples."""
    record = max(store.commits(), key=lambda record: len(record.samples))
    tar = Path(store.path, record.segment, "samples.tar")
    data = bytearray(tar.read_bytes())
    data[len(data) // 2] ^= 1
    tar.write_bytes(bytes(data))


def silent(_label: str, _total: int) -> object:
    return lambda _count: None


def push(store: Store, remote: Remote) -> None:
    push_store(store, remote, "---\n---\n# A card\n", False, silent)  # type: ignore[arg-type]


def restore(remote: Remote, pulled: Path, lossy: str) -> None:
    """As the refusal of a push says."""
    pull(remote, pulled, silent)  # type: ignore[arg-type]
    run_copy(open_copy([Store.open(pulled)], lossy))


def test_what_was_damaged_in_a_bucket_is_pushed_again_once_it_is_removed_as_the_pull_says(tmp_path: Path) -> None:
    store, place = made(tmp_path / "one", 5), tmp_path / "place"
    bucket = StorageRemote(LocalFilesystem(place))
    push(store, bucket)
    damaged = next((place / "inputs").iterdir())
    damaged.write_bytes(bytes(damaged.stat().st_size))
    with pytest.raises(CorruptionError, match="is not what was pushed") as caught:
        pull(bucket, tmp_path / "here", silent)  # type: ignore[arg-type]
    assert f"remove inputs/{damaged.name} there" in str(caught.value.hint)
    damaged.unlink()
    push(store, bucket)
    pull(bucket, tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(store)


def test_a_store_is_not_pushed_into_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "store")
    before = tree(tmp_path)
    for place in ("in", ".", "../store"):
        with pytest.raises(SystemExit, match="6"):
            main(["push", store.path, f"{store.path}/{place}"])
        assert "cannot be pushed into itself" in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_neither_a_push_nor_a_pull_hides_a_snapshot_behind_a_folder_of_its_name(
    remote: Remote, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = made(tmp_path / "one", 5)
    store.save_snapshot("v1")
    push(store, remote)
    with pytest.raises(ConfigError, match="snapshot v1 of the store") as caught:
        pull(remote, Path(f"{store.path}@v1"), silent)  # type: ignore[arg-type]
    assert caught.value.kind == "usage"
    with pytest.raises(SystemExit, match="2"):
        main(["push", store.path, f"{store.path}@v1"])
    assert f"fix: another place, such as {store.path}-v1" in " ".join(capsys.readouterr().err.split())
    assert not Path(f"{store.path}@v1").exists()
    pull(remote, tmp_path / "qwen@main", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "qwen@main")) == contents(store)


def test_a_store_of_the_same_capture_and_other_text_takes_nobody_s_place(remote: Remote, tmp_path: Path) -> None:
    one, other = made(tmp_path / "one", 12), made(tmp_path / "other", 5)
    assert one.manifest == other.manifest
    push(one, remote)
    with pytest.raises(ConflictError, match="holds another store: 9 units of it, such as") as caught:
        push(other, remote)
    assert caught.value.kind == "output-exists"
    pull(remote, tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(one)
    elsewhere = StorageRemote(LocalFilesystem(tmp_path / "elsewhere"))
    push(other, elsewhere)
    before = tree(tmp_path / "here")
    with pytest.raises(ConflictError, match="another store was pulled to"):
        pull(elsewhere, tmp_path / "here", silent)  # type: ignore[arg-type]
    assert tree(tmp_path / "here") == before


def test_a_list_of_sums_that_is_damaged_here_comes_again_and_opens_the_folder_to_no_other_store(
    remote: Remote, tmp_path: Path
) -> None:
    one, other, here = made(tmp_path / "one", 12), made(tmp_path / "other", 5), tmp_path / "here"
    push(one, remote)
    pull(remote, here, silent)  # type: ignore[arg-type]
    whole = tree(here)
    (here / SUMS).write_bytes((here / SUMS).read_bytes().replace(b"  ", b" ", 1))
    elsewhere = StorageRemote(LocalFilesystem(tmp_path / "elsewhere"))
    push(other, elsewhere)
    with pytest.raises(ConflictError, match="another store was pulled to"):
        pull(elsewhere, here, silent)  # type: ignore[arg-type]
    assert pull(remote, here, silent).bytes_read == 0  # type: ignore[arg-type]
    assert tree(here) == whole


def test_a_store_that_was_repaired_and_has_grown_is_the_same_one(remote: Remote, tmp_path: Path) -> None:
    store = made(tmp_path / "one", 12)
    push(store, remote)
    pull(remote, tmp_path / "here", silent)  # type: ignore[arg-type]
    damage_middle(store)
    assert repair_all(store.path).dropped
    restore(remote, tmp_path / "pushed", store.path)
    make_store(Path(store.path).parent, samples=5, container="webdataset")
    grown = Store.open(store.path)
    assert {record.unit for record in grown.commits()} > {record.unit for record in store.commits()}
    push(grown, remote)
    pull(remote, tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(grown)


def test_a_push_does_not_take_samples_from_a_place_that_a_repair_here_dropped(remote: Remote, tmp_path: Path) -> None:
    store, here = made(tmp_path / "one", 12), tmp_path / "here"
    whole = contents(store)
    push(store, remote)
    pull(remote, here, silent)  # type: ignore[arg-type]
    damage_middle(store)
    assert repair_all(store.path).dropped
    with pytest.raises(ConflictError, match=r"holds samples of 1 unit, .* that a repair of .* dropped") as caught:
        push(Store.open(store.path), remote)
    assert caught.value.kind == "output-exists"
    assert f"pull {remote.address} PUSHED && hiddenstore copy PUSHED {store.path};" in str(caught.value.hint)
    restore(remote, tmp_path / "pushed", store.path)
    push(Store.open(store.path), remote)
    assert pull(remote, here, silent).lossy == ()  # type: ignore[arg-type]
    assert contents(Store.open(here)) == whole


def test_a_pull_does_not_take_samples_from_a_folder_that_a_repair_there_dropped(tmp_path: Path) -> None:
    store, here = made(tmp_path / "one", 12), tmp_path / "here"
    place, anew = (StorageRemote(LocalFilesystem(tmp_path / name)) for name in ("place", "anew"))
    push(store, place)
    pull(place, here, silent)  # type: ignore[arg-type]
    damage_middle(store)
    assert repair_all(store.path).dropped
    push(Store.open(store.path), anew)
    before = tree(here)
    with pytest.raises(ConflictError, match=r"holds samples of 1 unit, such as .*; nothing was brought") as caught:
        pull(anew, here, silent)  # type: ignore[arg-type]
    assert caught.value.hint == f"hiddenstore pull {anew.address} PUSHED && hiddenstore copy {here} PUSHED"
    assert tree(here) == before


def test_a_pull_into_a_copy_that_was_repaired_says_which_samples_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, here = made(tmp_path / "one", 12), str(tmp_path / "here")
    place = StorageRemote(LocalFilesystem(tmp_path / "place"))
    push(store, place)
    monkeypatch.setattr(hub, "open_remote", lambda _address: place)
    assert run("pull", "s3://bucket/states", here) == 0
    damage_middle(Store.open(here))
    assert repair_all(here).dropped
    capsys.readouterr()
    assert run("pull", "s3://bucket/states", here) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"a repair of {here} dropped samples of 1 unit that {place.address} holds" in said
    restore(place, tmp_path / "pushed", here)
    assert run("pull", "s3://bucket/states", here) == 0
    assert "dropped" not in capsys.readouterr().err
    assert contents(Store.open(here)) == contents(store)


def test_a_bucket_takes_files_again_that_its_last_push_left_out(tmp_path: Path) -> None:
    store, earlier = made(tmp_path / "one", 12), tmp_path / "earlier"
    place = StorageRemote(LocalFilesystem(tmp_path / "place"))
    push(store, place)
    pull(place, earlier, silent)  # type: ignore[arg-type]
    damage_middle(store)
    assert repair_all(store.path).dropped
    restore(place, tmp_path / "pushed", store.path)
    push(Store.open(store.path), place)
    push(Store.open(earlier), place)
    pull(place, tmp_path / "fresh", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "fresh")) == contents(Store.open(earlier))


def test_a_store_made_anew_is_not_pushed_with_the_samples_of_the_one_it_replaced(tmp_path: Path) -> None:
    old, new, staging = made(tmp_path / "old", 5, seed=9), made(tmp_path / "new", 12), tmp_path / "staging"
    run_copy(open_staging(old, staging, None, None, False))
    before = tree(staging)
    with pytest.raises(ConflictError, match="holds 5 samples not among those to push") as caught:
        open_staging(new, staging, None, None, False)
    assert (caught.value.kind, caught.value.hint) == ("output-exists", "--staging ANOTHER")
    assert tree(staging) == before


def test_a_staging_folder_that_is_to_hold_samples_of_another_choice_is_refused(tmp_path: Path) -> None:
    store, staging = made(tmp_path / "one", 12), tmp_path / "staging"
    open_staging(store, staging, parse_where([], "train"), None, False)
    assert not len(Store.open(staging))
    with pytest.raises(ConflictError, match="holds 10 samples not among those to push"):
        open_staging(store, staging, parse_where([], "validation"), None, False)


def test_a_snapshot_is_pushed_without_the_ids_of_what_was_added_later(tmp_path: Path) -> None:
    store = make_store(tmp_path / "one", samples=5)
    store.save_snapshot("v1")
    register_input(store, memory_input(4, seed=1))
    assert len(store.inputs()) == 2
    main(["push", f"{store.path}@v1", f"{tmp_path}/place"], standalone_mode=False)
    pushed = Store.open(tmp_path / "place")
    assert (pushed.sample_ids, len(pushed.inputs())) == (store.sample_ids, 1)
    assert verify(pushed.path, "bytes").ok


def test_two_pushes_do_not_copy_into_one_staging_folder_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, staging = make_store(tmp_path / "store", samples=6), tmp_path / "staging"
    words = ["push", store.path, f"{tmp_path}/place", "--where", "tokens>0", "--staging", str(staging)]
    staging.mkdir()
    with FolderLock(staging) as lock:
        lock.take()
        with pytest.raises(SystemExit, match="6"):
            main(words)
    assert "one process at a time writes a staging folder" in capsys.readouterr().err
    assert not (tmp_path / "place").exists()
    main(words, standalone_mode=False)
    assert sorted(Store.open(tmp_path / "place").sample_ids) == sorted(store.sample_ids)
    assert not (staging / WRITER).exists()


def test_a_push_of_nothing_leaves_no_staging_folder(tmp_path: Path) -> None:
    store, staging = make_store(tmp_path / "store"), tmp_path / "staging"
    with pytest.raises(SystemExit, match="2"):
        main(["push", store.path, f"{tmp_path}/place", "--where", "tokens>999999", "--staging", str(staging)])
    assert not staging.exists()


def test_a_staging_folder_may_hold_what_a_repair_of_its_source_dropped(tmp_path: Path) -> None:
    store, staging = made(tmp_path / "one", 12), tmp_path / "staging"
    run_copy(open_staging(store, staging, None, None, False))
    whole = contents(store)
    damage_middle(store)
    assert repair_all(store.path).dropped
    run_copy(open_staging(Store.open(store.path), staging, None, None, False))
    assert contents(Store.open(staging)) == whole


def test_a_list_of_files_that_comes_cut_at_the_end_of_a_line_is_no_smaller_push(tmp_path: Path) -> None:
    class Cut(StorageRemote):
        def read_range(self, path: str, offset: int, length: int) -> bytes:
            data = super().read_range(path, offset, length)
            return data[: data[:-1].rindex(b"\n") + 1] if path == SUMS else data

    store, place = made(tmp_path / "a", 4), LocalFilesystem(tmp_path / "place")
    push(store, StorageRemote(place))
    with pytest.raises(StorageError, match="bytes came of") as caught:
        pull(Cut(place), tmp_path / "out", silent)  # type: ignore[arg-type]
    assert caught.value.kind == "io-error"
    assert not (tmp_path / "out").exists()
