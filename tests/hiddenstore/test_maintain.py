"""gc removes only what nothing needs; repair leaves out only what cannot be read and changes nothing else."""

import os
import shutil
import time
from pathlib import Path

import pytest
import torch

from hiddenstore import layout
from hiddenstore.care.repair import DAMAGED, gc, repair
from hiddenstore.errors import ConflictError, CorruptionError
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.verify import verify


def tree(store: Store) -> dict[str, bytes]:
    root = Path(store.path)
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def spoil(store: Store, sample: str) -> None:
    """Flip a byte in the codes of one sample."""
    record, index = store.locate(sample)
    entry = record.samples[index]
    path = next(Path(store.path) / record.segment / f.path for f in record.files if f.path.startswith("layer_3/c/"))
    data = bytearray(path.read_bytes())
    data[(entry.start + entry.tokens // 2) * store.capture.target.hidden_size] ^= 1
    path.write_bytes(data)


def age(path: Path, seconds: float) -> None:
    for member in [path, *path.rglob("*")]:
        os.utime(member, (time.time() - seconds,) * 2)


def make_orphan(store: Store) -> Path:
    record = store.commits()[0]
    orphan = Path(store.path) / "segments" / f"{record.unit}-0badf00d"
    shutil.copytree(Path(store.path) / record.segment, orphan)
    return orphan


def test_gc_removes_old_orphans_and_temporary_files_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = tree(store)
    orphan, temporary = make_orphan(store), Path(store.path) / "commits" / ".tmp-0011223344556677"
    temporary.write_text("half")
    for path in (orphan, temporary):
        age(path, 2 * 86400)
    plan = gc(store.path)
    assert {item.path for item in plan.remove} == {f"segments/{orphan.name}", "commits/.tmp-0011223344556677"}
    assert plan.size_bytes > 0
    assert orphan.exists()
    assert gc(store.path, dry_run=False).done
    assert tree(store) == before


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


def test_a_healthy_store_needs_no_repair(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    before = tree(store)
    assert repair(store.path, dry_run=False).units == []
    assert tree(store) == before


@pytest.mark.parametrize("codec", ["bf16", "q8"])
def test_repair_drops_the_damaged_samples_and_keeps_the_others_bit_for_bit(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, samples=14, codec=codec)
    healthy = {name: store[name] for name in store.sample_ids}
    record = max(store.commits(), key=lambda r: r.tokens)
    spoil(store, record.samples[-1].id)
    lost = verify(store.path, "bytes").affected
    assert record.samples[-1].id in lost
    before = tree(store)
    plan = repair(store.path)
    assert [unit.unit for unit in plan.units] == [record.unit]
    assert set(plan.units[0].dropped) == set(lost)
    assert tree(store) == before

    assert repair(store.path, dry_run=False).dropped == len(lost)
    repaired = Store.open(store.path)
    assert verify(store.path, "bytes").findings == []
    assert set(repaired.sample_ids) == set(healthy) - set(lost)
    for name in repaired.sample_ids:
        assert torch.equal(repaired[name].aux.view(torch.uint16), healthy[name].aux.view(torch.uint16))
        assert torch.equal(repaired[name].final.view(torch.uint16), healthy[name].final.view(torch.uint16))
        assert repaired[name].sample.spans.tolist() == healthy[name].sample.spans.tolist()
    rejects = next(r for r in repaired.commits() if r.unit == record.unit).rejects
    assert {(r.id, r.reason) for r in rejects} == {(name, DAMAGED) for name in lost}
    assert all((Path(store.path) / name).read_bytes() == data for name, data in before.items())


class RepairedMeanwhile(LocalFilesystem):
    """A store that somebody else repairs before the first file is published through it."""

    is_repaired = False

    def put_if_absent(self, path: str, data: bytes) -> bool:
        if not self.is_repaired:
            self.is_repaired = True
            assert repair(self.root, dry_run=False).done
        return super().put_if_absent(path, data)


def test_of_two_repairs_at_once_one_wins_and_the_other_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    with pytest.raises(ConflictError, match=f"unit {record.unit} was repaired by somebody else") as caught:
        repair(RepairedMeanwhile(store.path), dry_run=False)
    assert (caught.value.kind, caught.value.hint) == ("repair-raced", "run it again")
    assert repair(store.path, dry_run=False).units == []
    assert verify(store.path, "bytes").findings == []


def test_a_unit_without_a_readable_sample_is_left_with_rejects_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    shutil.rmtree(Path(store.path) / record.segment)
    repair(store.path, dry_run=False)
    repaired = Store.open(store.path)
    assert repaired.commits()[0].samples == ()
    assert len(repaired.commits()[0].rejects) == len(record.samples)
    assert verify(store.path, "bytes").ok


def test_what_repair_replaced_is_garbage_unless_a_snapshot_names_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    store.save_snapshot("train")
    repair(store.path, dry_run=False)
    assert {note.kind for note in verify(store.path).notes} == {"superseded"}
    assert gc(store.path, older_than_s=0).remove == []
    (Path(store.path) / layout.snapshot_path("train")).unlink()
    gc(store.path, dry_run=False, older_than_s=0)
    assert not (Path(store.path) / record.segment).exists()
    assert verify(store.path, "bytes").findings == verify(store.path).notes == []


def test_a_record_that_cannot_be_read_is_set_aside_so_that_its_unit_can_be_collected_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CorruptionError):
        Store.open(store.path)
    assert [unit.forget for unit in repair(store.path, dry_run=False).units] == [True]
    Store.open(store.path)
    assert (Path(store.path) / "quarantine" / "commits" / path.name).exists()
    assert [finding.kind for finding in verify(store.path).findings] == ["incomplete"]


def damage(path: Path) -> bytes:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


def test_damaged_files_beside_the_units_are_set_aside_and_the_same_collect_writes_them_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (digest,) = store.inputs()
    paths = ["target/head.safetensors", "target/config.json", layout.input_path(digest)]
    kept = {path: damage(Path(store.path) / path) for path in paths}
    plan = repair(store.path)
    assert (sorted(plan.aside), plan.units) == (sorted(paths), [])
    assert all((Path(store.path) / path).exists() for path in paths)
    repair(store.path, dry_run=False)
    assert not any((Path(store.path) / path).exists() for path in paths)
    assert all((Path(store.path) / "quarantine" / path).exists() for path in paths)
    shutil.rmtree(tmp_path / "data")
    again = make_store(tmp_path)
    assert {path: (Path(store.path) / path).read_bytes() for path in paths} == kept
    report = verify(again.path, "bytes")
    assert (report.findings, report.notes) == ([], [])


def test_a_damaged_snapshot_or_advice_is_set_aside_and_the_store_verifies(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("v1")
    damage(Path(store.path) / "snapshots" / "v1.json")
    (Path(store.path) / "advice").mkdir()
    (Path(store.path) / "advice" / "1.json").write_text("{}")
    (Path(store.path) / "calibration").mkdir()
    (Path(store.path) / "calibration" / "slice.json").write_text("{}")
    assert not verify(store.path, "bytes").ok
    plan = repair(store.path, dry_run=False)
    assert sorted(plan.aside) == ["advice/1.json", "calibration/slice.json", "snapshots/v1.json"]
    assert verify(store.path, "bytes").ok


def test_a_damaged_store_json_says_how_it_is_written_again(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path = Path(store.path) / "store.json"
    kept = damage(path)
    with pytest.raises(CorruptionError) as caught:
        repair(store.path)
    assert caught.value.hint is not None
    command = caught.value.hint.partition(";")[0].split()
    assert command == ["mv", str(path), str(path.with_name(".damaged-store.json"))]
    path.rename(command[2])
    shutil.rmtree(tmp_path / "data")
    make_store(tmp_path)
    assert path.read_bytes() == kept
