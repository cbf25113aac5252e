"""gc removes only what nothing needs, and nothing that a writer may still commit."""

import shutil
from pathlib import Path

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.commit import publish_commit
from hiddenstore.errors import StorageError
from hiddenstore.files import layout
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.verify import verify
from hiddenstore.writer import publish_segment
from tests.tiny_world import age, tree


def make_orphan(store: Store) -> Path:
    record = store.commits()[0]
    orphan = Path(store.path) / "segments" / f"{record.unit}-0badf00d"
    shutil.copytree(Path(store.path) / record.segment, orphan)
    return orphan


def test_gc_removes_old_orphans_and_temporary_files_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = tree(Path(store.path))
    orphan, temporary = make_orphan(store), Path(store.path) / "commits" / ".tmp-0011223344556677"
    temporary.write_text("half")
    for path in (orphan, temporary):
        age(path, 2 * 86400)
    plan = gc(store.path)
    assert {item.path for item in plan.remove} == {f"segments/{orphan.name}", "commits/.tmp-0011223344556677"}
    assert plan.size_bytes > 0
    assert orphan.exists()
    assert gc(store.path, dry_run=False).done
    assert tree(Path(store.path)) == before


def test_gc_leaves_what_a_running_writer_may_be_about_to_commit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    orphan = make_orphan(store)
    plan = gc(store.path, dry_run=False)
    assert plan.remove == []
    assert [item.path for item in plan.wait] == [f"segments/{orphan.name}"]
    assert orphan.exists()


def test_gc_never_touches_the_segment_of_a_record_it_cannot_read(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.write_bytes(path.read_bytes()[:-3])
    assert gc(store.path, dry_run=False, older_than_s=0).remove == []
    assert (Path(store.path) / record.segment).exists()


def test_gc_keeps_what_a_stopped_writer_may_still_commit_a4(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=10)
    record = store.commits()[1]
    path = Path(store.path) / layout.commit_path(record.unit)
    data = path.read_bytes()
    path.unlink()
    age(Path(store.path) / record.segment, 30 * 86400)
    sweep = gc(store.path, dry_run=False)
    assert [item.path for item in sweep.unfinished] == [record.segment]
    assert sweep.remove == []
    path.write_bytes(data)
    assert verify(store.path, "bytes").findings == []
    assert len(Store.open(store.path)) == 10


def test_gc_keeps_the_attempt_at_a_revision_that_nobody_has_committed_a4(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    attempt = layout.segment_path(record.unit, "0badf00d", 1)
    lost = layout.segment_path(record.unit, "0badf00d")
    for path in (attempt, lost):
        shutil.copytree(Path(store.path) / record.segment, Path(store.path) / path)
    sweep = gc(store.path, older_than_s=0)
    assert [item.path for item in sweep.remove] == [lost]
    assert [item.path for item in sweep.unfinished] == [attempt]
    assert publish_commit(store.fs, record.model_copy(update={"segment": attempt}), 1)
    assert {item.path: item.reason for item in gc(store.path, older_than_s=0).remove} == {
        lost: "orphan",
        record.segment: "superseded",
    }


def test_a_writer_whose_segment_was_given_up_does_not_commit_it_a4(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.unlink()
    gc(store.path, dry_run=False, older_than_s=0, abandoned=True)
    assert not (Path(store.path) / record.segment).exists()
    with pytest.raises(StorageError) as error:
        publish_segment(store.fs, record)
    assert error.value.kind == "segment-swept"
    assert not path.exists()
