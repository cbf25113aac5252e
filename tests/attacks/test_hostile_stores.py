"""Stores made to hurt whoever opens them: absurd sizes, paths that leave, links, names with control characters."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hiddenstore.care.gc import gc
from hiddenstore.cli import main
from hiddenstore.errors import CorruptionError, FormatError, HiddenstoreError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, seal, sha256_hex
from hiddenstore.inputs import PreparedInput
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_data, make_store
from schemas.manifest import CommitRecord, StoreManifest
from tests.faults import FaultFilesystem

PEAK_BYTES = 32 << 20
REFUSED = (CorruptionError, FormatError)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(params=["bf16", "q8", "lossless"])
def store(request: pytest.FixtureRequest) -> Store:
    store = make_store(FaultFilesystem(), samples=2, codec=request.param)
    store[store.sample_ids[0]]
    return store


def replace(store: Store, path: str, data: bytes) -> None:
    store.fs.disk.overwrite(f"{store.path}/{path}", data)  # type: ignore[attr-defined]


def sealed(content: dict[str, Any]) -> bytes:
    body = canonical(content)
    return body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode()


def rewrite_commit(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """A record with a digest that fits, as somebody hostile would publish it."""
    record = store.commits()[0]
    content = record.model_dump(mode="json")
    change(content)
    replace(store, layout.commit_path(record.unit), sealed(content))


def read_everything(store: Store) -> None:
    again = Store.open(store.fs)
    for name in again.sample_ids:
        again[name]


def states_file(content: dict[str, Any]) -> dict[str, Any]:
    file: dict[str, Any] = next(file for file in content["files"] if file["path"] == "layer_1/c/0/0")
    return file


def huge_file(content: dict[str, Any]) -> None:
    states_file(content)["size"] = 1 << 46


def absurd_file(content: dict[str, Any]) -> None:
    states_file(content)["size"] = 10**30


def huge_sample(content: dict[str, Any]) -> None:
    content["samples"][-1]["tokens"] = 1 << 40


def huge_final(content: dict[str, Any]) -> None:
    content["samples"][-1]["final_rows"] = 1 << 40


def absurd_sample(content: dict[str, Any]) -> None:
    content["samples"][-1]["tokens"] = 10**40


def longer_sample(content: dict[str, Any]) -> None:
    content["samples"][-1]["tokens"] += 1


def negative_start(content: dict[str, Any]) -> None:
    content["samples"][0]["start"] = -5


def overlapping(content: dict[str, Any]) -> None:
    content["samples"][1]["start"] = 0


def leaving_file(content: dict[str, Any]) -> None:
    content["files"][0]["path"] = "../../../../etc/passwd"


def absolute_segment(content: dict[str, Any]) -> None:
    content["segment"] = "/etc"


def leaving_segment(content: dict[str, Any]) -> None:
    content["segment"] = "segments/../../outside"


def terminal_escape(content: dict[str, Any]) -> None:
    content["samples"][0]["id"] = "\x1b[2J" + "a" * 28


def path_like_sample(content: dict[str, Any]) -> None:
    content["samples"][0]["id"] = "../../etc/cron.d/evil"


@pytest.mark.parametrize(
    "change",
    [
        huge_file,
        absurd_file,
        huge_sample,
        huge_final,
        absurd_sample,
        longer_sample,
        negative_start,
        overlapping,
        leaving_file,
        absolute_segment,
        leaving_segment,
        terminal_escape,
        path_like_sample,
    ],
)
def test_a_hostile_record_is_refused_in_little_memory(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    rewrite_commit(store, change)
    with little_memory(), pytest.raises(REFUSED) as error:
        read_everything(store)
    assert "\x1b" not in error.value.message


@pytest.mark.parametrize("shape", [[1 << 40, 32], [1 << 62, 1 << 62], [64, 1 << 40], [-1, 32], [], [64, 32, 1 << 40]])
def test_an_array_that_claims_an_absurd_shape_does_not_allocate(store: Store, shape: list[int]) -> None:
    """Metadata and record agree with each other and lie about the data."""
    record = store.commits()[0]
    path = f"{record.segment}/layer_1/zarr.json"
    content = json.loads(store.fs.read(path))
    content["shape"] = shape
    data = canonical(content)
    replace(store, path, data)

    def change(commit: dict[str, Any]) -> None:
        for file in commit["files"]:
            if file["path"] == "layer_1/zarr.json":
                file |= {"size": len(data), "sha256": sha256_hex(data)}

    rewrite_commit(store, change)
    with little_memory(), pytest.raises(REFUSED):
        read_everything(store)


def test_target_files_outside_the_target_folder_are_not_read(store: Store, tmp_path: Path) -> None:
    manifest = store.manifest.model_dump(mode="json")
    manifest["target_files"][0]["path"] = "../commits/" + store.commit_files[0].name
    replace(store, layout.STORE_JSON, sealed(manifest))
    with pytest.raises(HiddenstoreError) as error:
        Store.open(store.fs)
    assert error.value.kind == "store-invalid"


def test_a_target_file_of_absurd_size_is_not_read(store: Store) -> None:
    manifest = store.manifest.model_dump(mode="json")
    manifest["target_files"][0]["size"] = 10**15
    replace(store, layout.STORE_JSON, sealed(manifest))
    with little_memory(), pytest.raises(CorruptionError):
        Store.open(store.fs).target_file(manifest["target_files"][0]["path"])


def test_prepared_data_with_parts_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = make_data(tmp_path / "data")
    info = PreparedInput.open(folder).info
    for path in ("../other.parquet", "/etc/passwd", "a/../../x"):
        moved = info.files[0].model_copy(update={"path": path})
        (folder / "data.json").write_bytes(seal(info.model_copy(update={"files": (moved,)})))
        with pytest.raises(CorruptionError) as error:
            PreparedInput.open(folder)
        assert error.value.kind == "file-corrupt"


def test_a_link_in_place_of_a_segment_file_reads_exact_bytes_or_fails(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2, codec="bf16")
    record = store.commits()[0]
    victim = tmp_path / "store" / record.segment / "layer_1" / "c" / "0" / "0"
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(victim.stat().st_size))
    victim.unlink()
    victim.symlink_to(secret)
    with pytest.raises(CorruptionError):
        read_everything(store)


@pytest.mark.parametrize("folder", ["segments", "index"])
def test_gc_removes_nothing_where_a_linked_folder_leads_to_somebody_elses_files(tmp_path: Path, folder: str) -> None:
    """Among them is one whose name is that of garbage."""
    store = make_store(tmp_path, samples=2)
    unit = store.commits()[0].unit
    theirs = tmp_path / "projects" / {"segments": f"{unit}-20240101", "index": ".tmp-20240101"}[folder]
    shutil.rmtree(Path(store.path, folder), ignore_errors=True)
    Path(store.path, folder).symlink_to("../projects")
    theirs.mkdir(parents=True)
    (theirs / "thesis.txt").write_text("years of work")
    sweep = gc(store.path, dry_run=False, older_than_s=0)
    assert [item.path for item in sweep.elsewhere] == [f"{folder}/{theirs.name}"]
    assert sweep.remove == []
    assert (theirs / "thesis.txt").read_text() == "years of work"
    said = CliRunner().invoke(main, ["gc", str(store.path), "--older-than", "0", "-y"])
    assert said.exit_code == 0
    assert f"leads out of the store, to {theirs.parent}" in said.output


def test_gc_sweeps_a_store_that_is_itself_behind_a_link(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=2)
    Path(store.path, "commits", ".tmp-1").write_bytes(b"")
    (tmp_path / "link").symlink_to("store")
    assert len(gc(tmp_path / "link", dry_run=False, older_than_s=0).remove) == 1
    assert not Path(store.path, "commits", ".tmp-1").exists()


def test_a_named_pipe_in_place_of_a_document_does_not_hang(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=1, codec="bf16")
    path = tmp_path / "store" / layout.commit_path(store.commits()[0].unit)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(StorageError, match="not known to be gone"):
        Store.open(tmp_path / "store")


def test_a_document_in_the_place_of_another_kind_is_refused(store: Store) -> None:
    replace(store, layout.STORE_JSON, store.fs.read(layout.commit_path(store.commits()[0].unit)))
    with pytest.raises(CorruptionError, match="it is no StoreManifest"):
        Store.open(store.fs)
    assert StoreManifest.model_fields.keys() != CommitRecord.model_fields.keys()
