"""repair leaves out only what cannot be read and changes nothing else; what it replaced goes by gc."""

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.commit import DAMAGED, lost_samples
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError
from hiddenstore.files import layout
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.index.publish import publish_index
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, memory_input, random_records
from hiddenstore.testing.workload import contents, problems
from hiddenstore.verify import verify
from hiddenstore.writer import pending_units, restore_input, write_unit
from schemas.manifest import Container, Reject
from tests.accepting import repair_all
from tests.faults import FaultFilesystem
from tests.tiny_world import age


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

    assert repair_all(store.path).dropped == len(lost)
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
            assert repair_all(self.root).done
        return super().put_if_absent(path, data)


def test_of_two_repairs_at_once_one_wins_and_the_other_says_so(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    lost = repair(store.path).dropped
    with pytest.raises(ConflictError, match=f"unit {record.unit} was repaired by somebody else") as caught:
        repair(RepairedMeanwhile(store.path), dry_run=False, accept_loss=lost)
    assert (caught.value.kind, caught.value.hint) == ("repair-raced", "run it again")
    assert repair(store.path, dry_run=False).units == []
    assert verify(store.path, "bytes").findings == []


def files_of(store: Store) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(store.path).rglob("*") if path.is_file()}


def test_a_repair_drops_more_than_one_percent_only_when_told_how_many(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    spoil(store, store.commits()[0].samples[0].id)
    before = files_of(store)
    with pytest.raises(ConfigError) as caught:
        repair(store.path, dry_run=False)
    assert (caught.value.kind, files_of(store)) == ("loss-not-accepted", before)
    lost = repair(store.path).dropped
    assert caught.value.hint == shlex.join(["hiddenstore", "repair", store.path, "-y", "--accept-loss", str(lost)])
    for other in (lost - 1, lost + 1):
        with pytest.raises(ConfigError, match=f"would drop {lost} of .*--accept-loss says {other}") as caught:
            repair(store.path, dry_run=False, accept_loss=other)
        assert (caught.value.kind, files_of(store)) == ("loss-not-accepted", before)
    assert repair(store.path, dry_run=False, accept_loss=lost).dropped == lost


def test_a_unit_without_a_readable_sample_is_left_with_rejects_only(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    shutil.rmtree(Path(store.path) / record.segment)
    repair_all(store.path)
    repaired = Store.open(store.path)
    assert repaired.commits()[0].samples == ()
    assert len(repaired.commits()[0].rejects) == len(record.samples)
    assert verify(store.path, "bytes").ok


def test_what_repair_replaced_is_garbage_unless_a_snapshot_names_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    store.save_snapshot("train")
    repair_all(store.path)
    assert {note.kind for note in verify(store.path).notes} == {"superseded", "pending"}
    assert gc(store.path, older_than_s=0).remove == []
    (Path(store.path) / layout.snapshot_path("train")).unlink()
    assert {note.kind for note in verify(store.path).notes} == {"superseded", "pending"}
    gc(store.path, dry_run=False, older_than_s=0)
    assert not (Path(store.path) / record.segment).exists()
    report = verify(store.path, "bytes")
    assert (report.findings, [note.kind for note in report.notes]) == ([], ["pending"])


def test_what_repair_replaced_a_moment_ago_stays_however_old_it_is(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    opened = Store.open(store.path)
    spoil(store, record.samples[0].id)
    repair_all(store.path)
    age(Path(store.path) / record.segment, 30 * 86400)
    sweep = gc(store.path, dry_run=False)
    assert (sweep.remove, [item.path for item in sweep.wait]) == ([], [record.segment])
    assert sweep.wait[0].age_s < 3600
    # Who opened the store before may name it still.
    opened.save_snapshot("before")
    assert Store.open(store.path, "before").sample(record.samples[-1].id).id == record.samples[-1].id
    opened.remove_snapshot("before")
    age(Path(store.path) / layout.commit_path(record.unit, 1), 30 * 86400)
    assert [item.path for item in gc(store.path).remove] == [record.segment]


def test_a_record_of_whose_samples_nothing_is_known_is_set_aside_so_that_its_unit_can_be_collected_again(
    tmp_path: Path,
) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.write_bytes(path.read_bytes()[:-3])
    kept = {digest: (Path(store.path) / layout.input_path(digest)) for digest in store.inputs()}
    data = {at: at.read_bytes() for at in kept.values()}
    for at in data:
        at.unlink()
    with pytest.raises(CorruptionError):
        Store.open(store.path)
    before, plan = files_of(store), repair(store.path)
    assert [(unit.forget, set(unit.dropped)) for unit in plan.units] == [(True, {e.id for e in record.samples})]
    with pytest.raises(ConfigError, match=f"{len(record.samples)} of 6 samples, of units whose record") as caught:
        repair(store.path, dry_run=False)
    assert (caught.value.kind, files_of(store)) == ("loss-not-accepted", before)
    repair_all(store.path)
    for at, content in data.items():
        at.write_bytes(content)
    Store.open(store.path)
    assert (Path(store.path) / "quarantine" / "commits" / path.name).exists()
    assert [finding.kind for finding in verify(store.path).findings] == ["incomplete"]


@pytest.mark.parametrize("is_indexed", [True, False])
def test_a_record_of_which_nothing_is_left_counts_by_its_index_else_as_one(is_indexed: bool, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = max(store.commits(), key=lambda r: len(r.samples))
    if is_indexed:
        publish_index(store.fs, store.catalog.names)
    (Path(store.path) / layout.commit_path(record.unit)).write_bytes(b"")
    shutil.rmtree(Path(store.path) / layout.INPUTS_DIR)
    plan = repair(store.path)
    assert (plan.dropped, plan.must_be_accepted) == (len(record.samples) if is_indexed else 1, True)
    repair_all(store.path)
    assert len(Store.open(store.path)) == 6 - len(record.samples)


def test_records_wait_for_their_damaged_input_and_are_made_again_once_it_is_back(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    expected = contents(store)
    (digest,) = store.inputs()
    for name in store.catalog.names[:2]:
        flip(Path(store.path) / layout.COMMITS_DIR / name, 120)
    damage(Path(store.path) / layout.input_path(digest))
    done = repair(store.path, dry_run=False)
    assert (done.units, list(done.aside)) == ([], [layout.input_path(digest)])
    assert done.waiting == [record.unit for record in store.commits()[:2]]
    assert repair(store.path).must_be_accepted
    restore_input(store.path, memory_input())
    assert (repair(store.path, dry_run=False).dropped, contents(Store.open(store.path))) == (0, expected)


def damage(path: Path) -> bytes:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return data


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("place", [5, 1000, -90, -30])
def test_a_record_that_cannot_be_read_is_made_again_from_a_segment_that_proves_itself_a3(
    container: Container, place: int, tmp_path: Path
) -> None:
    store = make_store(tmp_path, container=container)
    expected = contents(store)
    record = store.commits()[0]
    flip(Path(store.path) / layout.commit_path(record.unit), place)
    (plan,) = repair(store.path).units
    assert (plan.kept, plan.dropped, plan.source) == (len(record.samples), {}, record.segment)
    repair(store.path, dry_run=False)
    again = Store.open(store.path)
    assert contents(again) == expected
    assert problems(again, finished=True) == []
    assert verify(store.path, "bytes").findings == []
    assert again.commits()[0].engine == record.engine
    assert again.commits()[0].stats.keys() == record.stats.keys()


def test_a_damaged_revision_is_never_skipped_in_favour_of_an_older_one_a3(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=14)
    record = max(store.commits(), key=lambda r: len(r.samples))
    spoil(store, record.samples[-1].id)
    lost = verify(store.path, "bytes").affected
    repair_all(store.path)
    gc(store.path, dry_run=False, older_than_s=0)
    repaired = Store.open(store.path)
    expected = contents(repaired)
    assert set(expected) == set(store.sample_ids) - set(lost)
    flip(Path(store.path) / layout.commit_path(record.unit, 1), 500)
    assert gc(store.path, older_than_s=0, abandoned=True).remove == []
    (plan,) = repair(store.path).units
    assert plan.record == layout.commit_path(record.unit, 1).split("/")[1]
    repair_all(store.path)
    again = Store.open(store.path)
    assert contents(again) == expected
    assert layout.parse_commit(again.commit_files[0].name) is not None
    assert problems(again) == []
    assert lost_samples(next(r for r in again.commits() if r.unit == record.unit)) == set(lost)
    assert verify(store.path, "bytes").findings == []


def test_a_record_whose_segment_is_gone_leaves_samples_to_be_captured_again_a3(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    ids = {sample.id for sample in record.samples}
    shutil.rmtree(Path(store.path) / record.segment)
    flip(Path(store.path) / layout.commit_path(record.unit), 400)
    repair_all(store.path)
    again = Store.open(store.path)
    assert set(again.sample_ids) == set(store.sample_ids) - ids
    assert lost_samples(again.commits()[0]) == ids
    assert problems(again) == []


def spoil_member(store: Store, sample: str) -> None:
    """Flip a byte in the states of one sample of a tar."""
    record, _ = store.locate(sample)
    path = Path(store.path) / record.segment / "samples.tar"
    flip(path, path.read_bytes().index(f"{sample}.layer_3".encode()) + 512 + 128)


@pytest.mark.parametrize(
    ("codec", "container"),
    [("bf16", "zarr"), ("q8", "zarr"), *((codec, "webdataset") for codec in ("bf16", "q8", "q4", "lossless", "tiny"))],
)
def test_the_same_collect_brings_back_what_a_repair_dropped_bit_for_bit_a2(
    codec: str, container: Container, tmp_path: Path
) -> None:
    store = make_store(tmp_path, samples=14, codec=codec, container=container)
    expected = contents(store)
    record = max(store.commits(), key=lambda r: len(r.samples))
    (spoil if container == "zarr" else spoil_member)(store, record.samples[1].id)
    lost = verify(store.path, "bytes").affected
    # Chunks of a Zarr segment are longer than these units; members of a tar are of one sample.
    assert lost == [sample.id for sample in record.samples] if container == "zarr" else [record.samples[1].id]
    repair_all(store.path)
    repaired = Store.open(store.path)
    (pending,) = pending_units(repaired, record.input).values()
    assert (pending.name, pending.revision) == (record.unit, 2)
    samples = [sample for sample in make_samples(14) if pending.lacks(sample.id)]
    assert {sample.id for sample in samples} == set(lost)
    engine = ENGINE.model_copy(update={"version": "2"})
    written = recapture_unit(repaired, pending, random_records(samples, store.capture), (), engine)
    assert written is not None
    stays = container == "webdataset"
    assert (written.engine == ENGINE) == stays
    assert [(part.engine, list(part.samples)) for part in written.recaptured] == ([(engine, lost)] if stays else [])
    again = Store.open(store.path)
    assert contents(again) == expected
    assert [s.id for s in written.samples] == [s.id for s in record.samples]
    assert verify(store.path, "bytes").findings == problems(again, finished=True) == []
    assert pending_units(again, record.input) == {}


def test_rejects_of_a_capture_are_never_pending_a2(tmp_path: Path) -> None:
    store = make_store(tmp_path / "1", samples=4)
    (digest,) = store.inputs()
    fresh = make_store(FaultFilesystem(), samples=1)
    sample = make_samples(1)[0]
    reject = Reject(id=sample.id, tokens=sample.tokens, reason="zeros", detail="sick")
    write_unit(fresh, "u-000000", digest, (), [reject], ENGINE)
    assert lost_samples(Store.open(fresh.fs).commits()[-1]) == frozenset()
    assert pending_units(store, digest) == {}


def test_the_same_copy_brings_back_what_a_repair_of_the_copy_dropped_a2(tmp_path: Path) -> None:
    source = make_store(tmp_path, samples=14)
    place = tmp_path / "copy"
    run_copy(open_copy([source], place))
    copied = Store.open(place)
    expected = contents(copied)
    record = max(copied.commits(), key=lambda r: len(r.samples))
    spoil(copied, record.samples[0].id)
    repair_all(place)
    assert len(Store.open(place)) < 14
    report = run_copy(open_copy([source], place))
    assert report.units == 1
    again = Store.open(place)
    assert contents(again) == expected
    assert problems(again, finished=True) == []


def test_gc_sweeps_nothing_of_a_unit_that_a_snapshot_names_by_a_record_that_is_gone_a4(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("train")
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    repair_all(store.path)
    path = Path(store.path) / layout.commit_path(record.unit)
    path.write_bytes(path.read_bytes()[:-3])
    assert gc(store.path, older_than_s=0, abandoned=True).remove == []
    path.unlink()
    assert gc(store.path, older_than_s=0, abandoned=True).remove == []


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_an_empty_record_of_a_unit_with_rejects_is_made_again_a3(container: Container, tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=14, container=container)
    record = max(store.commits(), key=lambda r: len(r.samples))
    members = [sample for sample in make_samples(14) if sample.id in {entry.id for entry in record.samples}]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.unlink()
    gc(store.path, dry_run=False, older_than_s=0, abandoned=True)
    reject = Reject(id=members[1].id, tokens=members[1].tokens, reason="zeros", detail="sick")
    stored = random_records([members[0], *members[2:]], store.capture)
    assert write_unit(store, record.unit, record.input, stored, [reject], ENGINE)
    expected = contents(Store.open(store.path))
    path.write_bytes(b"")
    repair_all(store.path)
    again = Store.open(store.path)
    assert contents(again) == expected
    assert problems(again) == []
    # Nothing says any more why it was refused, so the same collect decides again.
    assert lost_samples(next(r for r in again.commits() if r.unit == record.unit)) == {members[1].id}
