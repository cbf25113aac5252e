"""push and pull against the hub's API over HTTP, and over the storage seam: what arrives, what is refused, resuming."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hiddenstore.care.copy import run_copy, with_layers
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, NotFoundError, StorageError
from hiddenstore.files.layout import STORE_JSON
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.inspect.samples import parse_where
from hiddenstore.share import hub as hub_module
from hiddenstore.share import pull as pull_module
from hiddenstore.share.hub import HubRemote, open_remote
from hiddenstore.share.pull import pull
from hiddenstore.share.push import open_staging, push_store
from hiddenstore.share.remote import CARD, SUMS, StorageRemote
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.hiddenstore.hub_double import TOKEN, HubDouble, in_place_of_the_hub
from tests.tiny_world import World, error_of, run, tree

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:(httpx2|huggingface_hub).*")

PLACE = "hf://datasets/me/states"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubDouble]:
    monkeypatch.setattr(hub_module, "retry_wait_s", lambda number: 0.0)
    with in_place_of_the_hub(monkeypatch) as double:
        yield double


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "store").mkdir()
    return make_store(tmp_path / "store", samples=12, container="webdataset")


def silent(_label: str, _total: int) -> object:
    return lambda _count: None


def push(store: Store, remote: object, card: str = "---\n---\n# A card\n") -> object:
    return push_store(store, remote, card, False, silent)  # type: ignore[arg-type]


def test_a16_the_document_that_makes_a_store_of_a_pull_comes_after_all_else_is_durable(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, StorageRemote(LocalFilesystem(tmp_path / "place")))
    out, synced = tmp_path / "out", set[str]()
    honest = PosixDisk.sync_folder

    def sync_folder(disk: PosixDisk, path: str) -> None:
        if not (out / STORE_JSON).exists():
            synced.add(path)
        honest(disk, path)

    monkeypatch.setattr(PosixDisk, "sync_folder", sync_folder)
    pull(StorageRemote(LocalFilesystem(tmp_path / "place")), out, silent)
    assert {str(path) for path in out.rglob("*") if path.is_dir()} < synced


def test_records_are_pulled_after_the_segments_that_they_name_and_before_their_index(
    store: Store, tmp_path: Path
) -> None:
    read: list[str] = []

    class Watched(StorageRemote):
        def read_range(self, path: str, offset: int, length: int) -> bytes:
            read.append(path.partition("/")[0])
            return super().read_range(path, offset, length)

    remote = Watched(LocalFilesystem(tmp_path / "place"))
    push(store, remote)
    pull(remote, tmp_path / "out", silent)
    last = {folder: at for at, folder in enumerate(read)}
    assert last["segments"] < read.index("commits")
    assert last["commits"] < read.index("store.json")
    turns = [pull_module._turn(path) for path in ("commits/u-000000.json", "index/8.parquet", "store.json")]
    assert turns == [1, 2, 3]


def test_a_push_killed_before_it_replaced_a_card_is_finished_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = LocalFilesystem(tmp_path / "place")
    push(store, StorageRemote(place), "---\n---\n# Card A\n")
    with monkeypatch.context() as patch:
        patch.setattr(StorageRemote, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            push(store, StorageRemote(place), "---\n---\n# Card B\n")
    push(store, StorageRemote(place), "---\n---\n# Card B\n")
    pull(StorageRemote(place), tmp_path / "out", silent)
    assert (tmp_path / "out" / CARD).read_text().endswith("# Card B\n")


def test_a_store_comes_back_from_the_hub_as_it_was_pushed(
    hub: HubDouble, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("push", world / "store", PLACE, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    repo = hub.repos["me/states"]
    assert repo.private
    assert said["files"] == said["files_sent"] == len(repo.files) - 1
    assert run("pull", PLACE, str(tmp_path / "here")) == 0
    here = Store.open(tmp_path / "here")
    assert here.manifest.container == "webdataset"
    assert contents(here) == contents(Store.open(world / "store"))
    assert verify(here.path, "bytes").ok
    listed = dict(reversed(line.split("  ")) for line in repo.files[SUMS].decode().splitlines())
    assert listed == {
        p: hashlib.sha256(d).hexdigest() for p, d in repo.files.items() if p not in (SUMS, ".gitattributes")
    }
    assert subprocess.run(["sha256sum", "-c", "--quiet", SUMS], cwd=here.path, check=False).returncode == 0


def test_the_card_says_what_a_reader_needs_and_shows_no_sample(hub: HubDouble, world: World, tmp_path: Path) -> None:
    results = {"schema": "hiddenstore.eval/1", "run": "/secret/place/run", "store": "/secret/place/store", "step": 2}
    results |= {"accepted_length": 1.5, "draft_len": 3, "tree_width": 1, "split": "validation"}
    (tmp_path / "eval.json").write_text(json.dumps({**results, "ngram_accepted_length": 1.25}))
    assert run("push", world / "store", PLACE, "--results", str(tmp_path / "eval.json"), "-q") == 0
    card = hub.repos["me/states"].files[CARD].decode()
    _, front, text = card.split("---\n", 2)
    facts = yaml.safe_load(front)
    assert facts["viewer"] is False
    assert {"hiddenstore", "webdataset"} <= set(facts["tags"])
    assert facts["size_categories"] == ["n<1K"]
    source = Store.open(world / "store")
    for words in (
        "[0, 1, 2]",
        source.capture.final_norm,
        "safe (aux: q8, final: q8)",
        f"{len(source):,} (",
        "**1.500**",
    ):
        assert words in text, words
    assert "token ids are the text" in text
    assert "hiddenstore eval run store --split validation --draft-len 3\n" in text
    assert "n-gram table from the same text has 1.250" in text
    assert "/secret" not in card
    assert "W h a t" not in card
    assert str(world.root) not in card
    assert run("push", world / "store", "hf://datasets/me/shown", "--sample", "1", "-q") == 0
    shown = hub.repos["me/shown"].files[CARD].decode()
    assert "W h a t   i s" in shown
    assert "viewer" not in shown


def test_a_part_holds_the_layers_and_samples_that_were_chosen_and_no_token_of_another(
    hub: HubDouble, world: World, tmp_path: Path
) -> None:
    assert run("push", world / "store", PLACE, "--layers", "0,2", "--split", "validation", "-q") == 0
    assert run("pull", PLACE, str(tmp_path / "here"), "-q") == 0
    here, whole = Store.open(tmp_path / "here"), Store.open(world / "store")
    assert here.capture.aux_layers == (0, 2)
    assert {entry.id for _, entry in here.entries} == {e.id for _, e in whole.entries if e.split == "validation"}
    for sample_id in here.sample_ids:
        assert here[sample_id].aux.shape[0] == 2
        expected = whole.read(sample_id, (0, 2)).aux.float()
        # Units are cut anew, so q8 rounds a second time.
        assert (here[sample_id].aux.float() - expected).norm() < 0.02 * expected.norm()
    left_out = set(whole.sample_ids) - set(here.sample_ids)
    everything = b"".join(hub.repos["me/states"].files.values()).decode("latin-1")
    assert not [sample_id for sample_id in left_out if sample_id in everything]
    assert not any(path.startswith("calibration/slice") for path in hub.repos["me/states"].files)


def test_layers_left_out_of_whole_units_leave_the_codes_of_the_others_as_they_are(
    hub: HubDouble, world: World, tmp_path: Path
) -> None:
    assert run("copy", world / "store", str(tmp_path / "part"), "--layers", "2", "-q") == 0
    part, whole = Store.open(tmp_path / "part"), Store.open(world / "store")
    for sample_id in part.sample_ids:
        assert part[sample_id].aux.equal(whole.read(sample_id, (2,)).aux)
        assert part[sample_id].final.equal(whole[sample_id].final)
    assert verify(part.path, "bytes").ok
    assert run("copy", world / "store", str(tmp_path / "part"), "-q") == 6
    with pytest.raises(ConfigError, match="holds no layer 7"):
        with_layers(whole, (2, 7))


def test_staging_that_holds_other_samples_is_refused(
    hub: HubDouble, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    staging = str(tmp_path / "staging")
    assert run("push", world / "store", PLACE, "--split", "train", "--staging", staging, "-q") == 0
    assert Path(staging).is_dir()
    assert run("push", world / "store", PLACE, "--split", "validation", "--staging", staging, "-q") == 6
    message, fix = error_of(capsys.readouterr().err)
    assert "samples not among those to push" in message
    assert fix == "--staging ANOTHER"


def test_a_staging_of_samples_chosen_by_their_unit_goes_on(store: Store, tmp_path: Path) -> None:
    record, place = store.commits()[0], tmp_path / "staging"
    for _ in range(2):
        run_copy(open_staging(store, place, parse_where([f"unit={record.unit}"]), None, False))
    assert {*Store.open(place).sample_ids} == {entry.id for entry in record.samples}


def test_a_server_that_fails_is_asked_again(hub: HubDouble, store: Store, tmp_path: Path) -> None:
    failed: dict[str, int] = {}

    def fault(method: str, path: str) -> int | None:
        kind = next((k for k in ("/lfs/", "/commit/", "/resolve/") if k in path), "")
        failed[kind] = failed.get(kind, 0) + 1
        return 503 if kind and failed[kind] == 1 else None

    hub.fault = fault
    push(store, open_remote(PLACE))
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert min(failed.values()) >= 2
    assert contents(Store.open(tmp_path / "here")) == contents(store)
    assert set(hub.uploads.values()) == {1}


def test_a_push_that_was_refused_half_way_goes_on_and_sends_nothing_twice(
    hub: HubDouble, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "COMMIT_FILES", 2)
    commits = []

    def fault(method: str, path: str) -> int | None:
        commits.extend([path] if "/commit/" in path else [])
        return 403 if "/commit/" in path and len(commits) == 3 else None

    hub.fault = fault
    with pytest.raises(StorageError, match="the hub answered 403") as caught:
        push(store, open_remote(PLACE))
    assert caught.value.kind == "permission-denied"
    assert SUMS not in hub.repos["me/states"].files
    with pytest.raises(NotFoundError, match="the push has not come to its end") as unfinished:
        pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert unfinished.value.kind == "push-unfinished"
    assert not (tmp_path / "here").exists()
    push(store, open_remote(PLACE))
    assert set(hub.uploads.values()) == {1}
    report = push(store, open_remote(PLACE))
    assert report.files_sent == 0  # type: ignore[attr-defined]
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(store)


def test_a_store_that_has_grown_sends_what_is_new_and_a_pull_brings_it(hub: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    place, storage = tmp_path / "store", StorageRemote(LocalFilesystem(tmp_path / "bucket"))
    for remotes in (lambda: open_remote(PLACE), lambda: storage):
        first = make_store(place, samples=6, container="webdataset")
        push(first, remotes())
        here = tmp_path / f"here-{remotes().keeps_history}"
        pull(remotes(), here, silent)  # type: ignore[arg-type]
    grown = make_store(place, samples=6, seed=7, container="webdataset")
    for remotes in (lambda: open_remote(PLACE), lambda: storage):
        report = push(grown, remotes(), "---\n---\n# Another card\n")
        assert 0 < report.files_sent < report.files  # type: ignore[attr-defined]
        here = tmp_path / f"here-{remotes().keeps_history}"
        came = pull(remotes(), here, silent)  # type: ignore[arg-type]
        assert came.bytes_read < came.bytes
        assert contents(Store.open(here)) == contents(grown)
        assert verify(here, "bytes").ok
    assert contents(Store.open(tmp_path / "bucket")) == contents(grown)


def test_a_place_that_holds_another_store_is_left_alone(hub: HubDouble, store: Store, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = make_store(tmp_path / "other", samples=4, layers=(0, 2), container="webdataset")
    for remote in (open_remote(PLACE), StorageRemote(LocalFilesystem(tmp_path / "bucket"))):
        push(store, remote)
        with pytest.raises(ConflictError, match="holds another") as caught:
            push(other, remote)
        assert caught.value.kind == "output-exists"
    assert Store.open(tmp_path / "bucket").capture == store.capture


def test_a_card_that_no_push_put_there_is_left_alone(store: Store, tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    (bucket / CARD).write_text("mine")
    with pytest.raises(ConflictError, match="that no push put there") as caught:
        push(store, StorageRemote(LocalFilesystem(bucket)))
    assert caught.value.kind == "output-exists"
    assert [(path.name, path.read_text()) for path in bucket.iterdir()] == [(CARD, "mine")]


def test_damage_is_not_pushed(hub: HubDouble, store: Store) -> None:
    file = next(Path(store.path).glob("segments/*/samples.tar"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=r"samples.tar is damaged: expected tree .*; nothing was pushed"):
        push(store, open_remote(PLACE))
    assert hub.repos == {}


def test_a_store_that_lacks_a_file_is_not_pushed_and_the_file_is_named(hub: HubDouble, store: Store) -> None:
    next(Path(store.path).glob("segments/*/samples.tar")).unlink()
    with pytest.raises(CorruptionError, match=r"samples.tar is not there; nothing was pushed") as caught:
        push(store, open_remote(PLACE))
    assert caught.value.kind == "file-missing"
    assert hub.repos == {}


def test_a_pull_that_was_cut_goes_on_at_the_byte_where_it_stopped(
    hub: HubDouble, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, open_remote(PLACE))
    monkeypatch.setattr(pull_module, "PIECE_BYTES", 1000)
    asked = []

    def fault(method: str, path: str) -> int | None:
        asked.extend([path] if path.endswith("samples.tar") else [])
        return 403 if len(asked) == 6 else None

    hub.fault = fault
    with pytest.raises(StorageError, match="403"):
        pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert not (tmp_path / "here/store.json").exists()
    total = sum(map(len, hub.repos["me/states"].files.values()))
    before = hub.sent_bytes
    assert list((tmp_path / "here").rglob(".tmp-pull-*"))
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    # SHA256SUMS is read once a pull, and nothing that came is asked for again.
    assert hub.sent_bytes == total + len(hub.repos["me/states"].files[SUMS]) - len(b"*.tar filter=lfs\n")
    assert before < hub.sent_bytes
    assert contents(Store.open(tmp_path / "here")) == contents(store)
    assert not list((tmp_path / "here").rglob(".tmp-*"))


def test_bytes_that_are_not_those_that_were_pushed_are_refused_and_a_damaged_copy_is_mended(
    hub: HubDouble, store: Store, tmp_path: Path
) -> None:
    push(store, open_remote(PLACE))
    repo = hub.repos["me/states"]
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    name = next(path for path in repo.files if path.endswith("samples.tar"))
    (tmp_path / "here" / name).write_bytes(bytes(len(repo.files[name])))
    assert pull(open_remote(PLACE), tmp_path / "here", silent).replaced == (name,)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(store)
    data, in_lfs = repo.history[-1][name]
    repo.history[-1][name] = (data[:-1] + b"!", in_lfs)
    with pytest.raises(CorruptionError, match=f"{name} is not what was pushed") as caught:
        pull(open_remote(PLACE), tmp_path / "there", silent)  # type: ignore[arg-type]
    assert caught.value.kind == "file-corrupt"
    assert not (tmp_path / "there/store.json").exists()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("0" * 64 + "  ../../etc/passwd", "path-unsafe"),
        ("0" * 64 + "  /etc/passwd", "path-unsafe"),
        ("no sums", "document-corrupt"),
    ],
)
def test_sums_that_lead_out_of_the_folder_or_are_none_write_nothing(
    hub: HubDouble, store: Store, tmp_path: Path, line: str, kind: str
) -> None:
    push(store, open_remote(PLACE))
    hub.repos["me/states"].history[-1][SUMS] = (line.encode(), False)
    with pytest.raises((ConfigError, CorruptionError)) as caught:
        pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert caught.value.kind == kind
    assert not (tmp_path / "here").exists()


def test_the_hubs_limits_are_seen_before_the_first_byte(
    hub: HubDouble, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most, says in (
        ("MOST_FILES", 5, "files"),
        ("MOST_IN_FOLDER", 2, "entries in"),
        ("MOST_BYTES", 99, "bytes in"),
    ):
        with monkeypatch.context() as small:
            small.setattr(hub_module, name, most)
            with pytest.raises(ConfigError, match=f"takes at most {most}.* {says}") as caught:
                push(store, open_remote(PLACE))
        assert caught.value.kind == "hub-limit"
    assert hub.requests == []


def test_a_public_repository_is_not_filled_unless_that_was_said(hub: HubDouble, store: Store) -> None:
    push_store(store, open_remote(PLACE), "---\n---\n", True, silent)  # type: ignore[arg-type]
    assert not hub.repos["me/states"].private
    with pytest.raises(ConfigError, match="can be read by everybody"):
        push(store, open_remote(PLACE), "---\n---\n# More\n")


def test_a_private_repository_does_not_stay_private_unsaid(hub: HubDouble, store: Store) -> None:
    push(store, open_remote(PLACE))
    with pytest.raises(ConfigError, match="is private, and --public is of a new repository"):
        push_store(store, open_remote(PLACE), "---\n---\n# More\n", True, silent)  # type: ignore[arg-type]
    assert hub.repos["me/states"].private


def test_neither_the_token_nor_a_signed_address_is_ever_shown(
    hub: HubDouble, store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = ""
    for place in ("/lfs/", "/api/datasets/me/states/commit/"):
        hub.fault = lambda method, path, place=place: 403 if path.startswith(place) else None  # type: ignore[misc]
        assert run("push", store.path, PLACE, "-v") == 5
        said += "".join(capfd.readouterr())
    assert "told to fail, whoever asks: Bearer …" in said
    assert TOKEN not in said
    assert "canary" not in said
    hub.fault = lambda method, path: None
    assert run("push", store.path, PLACE, "-q") == 0
    assert run("pull", PLACE, str(tmp_path / "here"), "-q") == 0
    written = b"".join(data or b"" for data in tree(tmp_path).values()) + b"".join(
        hub.repos["me/states"].files.values()
    )
    assert TOKEN.encode() not in written


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (("push", "store", "hf://me/states"), "a store is pushed to a dataset repository", 2),
        (("push", "store", "hf://datasets/me/states@main"), "to its main branch", 2),
        (("push", "exported", "hf://datasets/me/drafter"), "a drafter is pushed to a model repository", 2),
        (("push", "store", "hf://states"), "is no repository", 2),
        (("push", "store", "hf://datasets/me/.."), "is no repository", 2),
        (("push", "store", "ftp://host/states"), "cannot be opened", 2),
        (("push", "run", "hf://datasets/me/states"), "is a training run; stores and exported drafters are pushed", 2),
        (("push", "nothing", "hf://datasets/me/states"), "nothing is neither a store nor a drafter", 2),
        (("push", "exported", "hf://me/drafter", "--split", "train"), "are of stores", 2),
        (
            ("push", "store", "hf://datasets/me/states", "--results", "chats.jsonl"),
            "is not what eval or decode prints",
            2,
        ),
        (("pull", "hf://datasets/me/nothing", "data"), "Repository not found", 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_shared_is_said_before_anything_is_sent(
    hub: HubDouble, world: World, words: tuple[str, ...], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*world.named(words)) == code
    assert says in error_of(capsys.readouterr().err)[0] or says in capsys.readouterr().err
    assert hub.repos == {}


def test_a_folder_of_something_else_is_not_pulled_into(hub: HubDouble, store: Store, tmp_path: Path) -> None:
    push(store, open_remote(PLACE))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("words")
    with pytest.raises(ConflictError, match="no pull made it"):
        pull(open_remote(PLACE), tmp_path / "mine", silent)  # type: ignore[arg-type]
    assert list(tree(tmp_path / "mine")) == ["thesis.txt"]
    (tmp_path / "other").mkdir()
    other = "hf://datasets/me/other"
    push(make_store(tmp_path / "other", samples=4, layers=(0, 2), container="webdataset"), open_remote(other))
    (tmp_path / "here").mkdir()
    # What a pull leaves that is killed before its first file is there.
    (tmp_path / "here/.SHA256SUMS.writing-00000000").touch()
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    before = tree(tmp_path / "here")
    with pytest.raises(ConflictError, match="another store was pulled to"):
        pull(open_remote(other), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert tree(tmp_path / "here") == before


def test_two_pulls_into_one_folder_do_not_meet(hub: HubDouble, store: Store, tmp_path: Path) -> None:
    push(store, open_remote(PLACE))
    errors: list[ConflictError] = []

    def second(_label: str, _total: int) -> object:
        with pytest.raises(ConflictError, match="another pull writes") as caught:
            pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
        errors.append(caught.value)
        return lambda _count: None

    pull(open_remote(PLACE), tmp_path / "here", second)  # type: ignore[arg-type]
    assert len(errors) == 1
    assert contents(Store.open(tmp_path / "here")) == contents(store)


def test_a_file_that_goes_while_it_is_pushed_is_named(hub: HubDouble, store: Store) -> None:
    file = next(Path(store.path).glob("segments/*/samples.tar"))

    def begin(label: str, _total: int) -> object:
        file.unlink() if label == "push" else None
        return lambda _count: None

    with pytest.raises(StorageError, match=f"{file}: No such file"):
        push_store(store, open_remote(PLACE), "---\n---\n", False, begin)  # type: ignore[arg-type]
    assert SUMS not in hub.repos["me/states"].files


def test_a_store_that_grows_while_it_is_pushed_arrives_as_it_was_when_the_push_began(
    hub: HubDouble, store: Store, tmp_path: Path
) -> None:
    expected = contents(store)

    def grow(seed: int) -> Store:
        return make_store(Path(store.path), samples=6, seed=seed, container="webdataset")

    def begin(label: str, _total: int) -> object:
        grow(8 if label == "read" else 9)
        return lambda _count: None

    grow(7)
    push_store(store, open_remote(PLACE), "---\n---\n", False, begin)  # type: ignore[arg-type]
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == expected
    assert verify(tmp_path / "here", "bytes").ok
    grown = Store.open(store.path)
    push(grown, open_remote(PLACE))
    pull(open_remote(PLACE), tmp_path / "here", silent)  # type: ignore[arg-type]
    assert contents(Store.open(tmp_path / "here")) == contents(grown)


def test_a_store_in_another_container_is_pushed_again_and_as_it_grows(hub: HubDouble, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    path = make_store(tmp_path / "store", samples=6).path
    assert run("push", path, PLACE, "-q") == 0
    sent = dict(hub.repos["me/states"].files)
    assert run("push", path, PLACE, "-q") == 0
    assert hub.repos["me/states"].files == sent
    grown = make_store(tmp_path / "store", samples=6, seed=7)
    assert run("push", path, PLACE, "-q") == 0
    assert run("pull", PLACE, str(tmp_path / "here"), "-q") == 0
    assert contents(Store.open(tmp_path / "here")) == contents(grown)


def test_a_copied_store_that_has_grown_is_pushed_from_what_was_pulled_of_it(
    hub: HubDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    path, pushed = make_store(tmp_path / "store", samples=6).path, str(tmp_path / "pushed")
    assert run("push", path, PLACE, "-q") == 0
    grown = make_store(tmp_path / "store", samples=6, seed=7)
    (copied,) = Path(path).parent.glob("*.push-*")
    shutil.rmtree(copied)
    assert run("push", path, PLACE, "-q") == 6
    assert "--staging PUSHED" in (error_of(capsys.readouterr().err)[1] or "")
    assert run("pull", PLACE, pushed, "-q") == 0
    assert run("push", path, PLACE, "--staging", pushed, "-q") == 0
    assert run("pull", PLACE, str(tmp_path / "here"), "-q") == 0
    assert contents(Store.open(tmp_path / "here")) == contents(grown)


def test_without_the_network_the_variable_that_forbids_it_is_named(
    hub: HubDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="HF_HUB_OFFLINE is set") as caught:
        HubRemote("me/states", "dataset").size(SUMS)
    assert caught.value.kind == "server-unreachable"


@pytest.mark.slow
def test_a_push_and_a_pull_that_are_killed_are_finished_by_the_same_command(
    hub: HubDouble, world: World, tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def killed(after: str, *words: str) -> None:
        """Kill the command while its first request of a kind waits for an answer."""
        arrived, over = threading.Event(), threading.Event()

        def fault(method: str, path: str) -> None:
            if path.startswith(after):
                arrived.set()
                over.wait()

        hub.fault = fault
        with subprocess.Popen([sys.executable, "-m", "hiddenstore", *words], env=environment, cwd=tmp_path) as process:
            assert arrived.wait(120)
            process.kill()
        hub.fault = lambda method, path: None
        over.set()

    store, here = world / "store", str(tmp_path / "here")
    for after, *words in (("/lfs/", "push", store, PLACE), ("/datasets/me/states/resolve/", "pull", PLACE, here)):
        for _ in range(2):
            killed(after, *words, "-q")
        assert run(*words, "-q") == 0
    assert contents(Store.open(here)) == contents(Store.open(store))
    assert re.search("^[0-9a-f]{64}  store.json$", (tmp_path / "here" / SUMS).read_text(), re.MULTILINE)
