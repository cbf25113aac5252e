"""repair leaves out only what cannot be read and changes nothing else; what it replaced goes by gc."""

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.commit import DAMAGED, lost_samples, publish_commit
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, FormatError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, sha256_hex
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


def write_sealed(path: Path, content: dict[str, object]) -> None:
    body = canonical(content)
    path.write_bytes(body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode())


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


def test_advice_of_an_earlier_release_in_which_a_number_is_null_is_set_aside(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    spoil(store, record.samples[0].id)
    (Path(store.path) / "advice").mkdir()
    row = {
        "recipe": "raw",
        "bytes_per_token": 1.0,
        "kl": None,
        "overlap": None,
        "top1_flips": None,
        "channel_error": None,
        "channel_errors": {"layer_1": None},
        "raw_rows": 0.0,
        "clipped": 0.0,
        "within": True,
        "chosen": True,
    }
    advice = {"format": 1, "tokens": 1, "final_rows": 0, "max_kl": 0.1, "max_channel_error": 0.1, "paired": []}
    write_sealed(Path(store.path) / "advice" / "1.json", {**advice, "chosen": "raw", "rows": [row]})
    assert not verify(store.path, "bytes").ok
    assert list(repair_all(store.path).aside) == ["advice/1.json"]
    assert verify(store.path, "bytes").ok


def test_advice_of_a_later_format_stops_a_repair(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    (Path(store.path) / "advice").mkdir()
    write_sealed(Path(store.path) / "advice" / "1.json", {"format": 9})
    before = tree(store)
    with pytest.raises(FormatError) as error:
        repair_all(store.path)
    assert error.value.kind == "format-future"
    assert tree(store) == before


def test_documents_in_the_place_of_another_kind_are_made_again_or_set_aside(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    expected = contents(store)
    store.save_snapshot("v1")
    snapshot, record = (Path(store.path) / path for path in ("snapshots/v1.json", f"commits/{store.catalog.names[0]}"))
    written = {snapshot: record.read_bytes(), record: snapshot.read_bytes()}
    for path, data in written.items():
        path.write_bytes(data)
    (Path(store.path) / "calibration").mkdir()
    (Path(store.path) / "calibration/slice.json").write_bytes(written[record])
    plan = repair(store.path, dry_run=False)
    assert (plan.dropped, len(plan.units)) == (0, 1)
    assert sorted(plan.aside) == ["calibration/slice.json", "snapshots/v1.json"]
    assert verify(store.path, "bytes").findings == []
    assert contents(Store.open(store.path)) == expected


def test_a_file_of_another_name_in_snapshots_is_no_finding(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("v1")
    for name in ("v1.json.bak", ".DS_Store"):
        (Path(store.path) / "snapshots" / name).write_bytes(b"x")
    assert verify(store.path, "bytes").findings == []


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_snapshot_of_a_record_that_repair_made_again_is_set_aside_with_it(is_lost: bool, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("v1")
    record = store.commits()[0]
    if is_lost:
        spoil(store, record.samples[0].id)
    damage(Path(store.path) / layout.commit_path(record.unit))
    assert repair(store.path).aside == {
        "snapshots/v1.json": f"it names record {record.unit}.json, which is gone, damaged or another one"
    }
    repair_all(store.path)
    report = verify(store.path, "bytes")
    assert report.findings == []
    assert (Path(store.path) / "quarantine/snapshots/v1.json").exists()
    assert repair(store.path).aside == {}


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


def test_a_link_to_a_disk_that_is_not_mounted_is_no_damage_a1(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    victim = next(Path(store.path) / record.segment / f.path for f in record.files if f.path.startswith("layer_1/c/"))
    victim.rename(tmp_path / "elsewhere")
    victim.symlink_to(tmp_path / "elsewhere")
    assert repair(store.path).units == []
    (tmp_path / "elsewhere").rename(tmp_path / "unmounted")
    for look in (repair, verify):
        with pytest.raises(StorageError) as error:
            look(store.path)
        assert error.value.kind == "absence-unknown"


def replace_segment(store: Store, attempt: str = "0badf00d") -> None:
    """The next revision of the first unit, in a segment of its own."""
    record = store.commits()[0]
    segment = layout.segment_path(record.unit, attempt, 1)
    shutil.copytree(Path(store.path) / record.segment, Path(store.path) / segment)
    assert publish_commit(store.fs, record.model_copy(update={"segment": segment}), 1)


def collected(location: str) -> int:
    return len(Store.open(location))


@pytest.mark.parametrize("folder", ["segments", "commits", "snapshots", "target"])
def test_a_folder_of_a_store_on_a_disk_that_is_not_mounted_is_no_damage_and_no_garbage(
    tmp_path: Path, folder: str
) -> None:
    store = make_store(tmp_path, samples=6)
    store.save_snapshot("paper")
    replace_segment(store)
    expected, place = contents(Store.open(store.path, "paper")), Path(store.path) / folder
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert verify(store.path).findings == []
    place.unlink()
    place.symlink_to(tmp_path / "unmounted")
    looks = [repair, verify]
    looks += [gc] if folder != "target" else []
    looks += [collected] if folder == "commits" else []
    for look in looks:
        with pytest.raises(StorageError) as error:
            look(store.path)
        assert error.value.kind == "absence-unknown"
    with suppress(StorageError):
        gc(store.path, dry_run=False, older_than_s=0)
    place.unlink()
    (tmp_path / "elsewhere").rename(place)
    assert contents(Store.open(store.path, "paper")) == expected


def test_a_record_of_another_version_stops_a_repair(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    path = Path(store.path) / layout.commit_path(record.unit)
    write_sealed(path, record.model_dump(mode="json") | {"of_the_future": 1})
    before = tree(store)
    with pytest.raises(FormatError):
        repair_all(store.path)
    assert tree(store) == before


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


def test_a_second_quarantine_of_one_name_keeps_both_files_a17(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    head = Path(store.path) / "target" / "head.safetensors"
    kept = head.read_bytes()
    for number in range(3):
        head.write_bytes(kept[:-1] + bytes([kept[-1] ^ (number + 1)]))
        repair(store.path, dry_run=False)
        assert not head.exists()
    head.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    repair(store.path, dry_run=False)
    folder = Path(store.path) / "quarantine" / "target"
    assert {path.name: path.read_bytes()[-1] ^ kept[-1] for path in folder.iterdir()} == {
        "head.safetensors": 1,
        "head.safetensors.2": 2,
        "head.safetensors.3": 3,
    }


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
