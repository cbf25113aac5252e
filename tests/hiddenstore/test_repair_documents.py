"""repair and the files beside the units: set aside when damaged, left alone when unmounted or of another release."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.commit import publish_commit
from hiddenstore.errors import CorruptionError, FormatError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.documents import canonical, sha256_hex
from hiddenstore.store import Store
from hiddenstore.testing.builders import make_store
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from tests.accepting import repair_all
from tests.hiddenstore.test_maintain import damage, spoil, tree
from tests.tiny_world import run

FINDINGS = 3


def write_sealed(path: Path, content: dict[str, object]) -> None:
    body = canonical(content)
    path.write_bytes(body[:-1] + b',"sha256":"%s"}\n' % sha256_hex(body).encode())


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


def test_advice_of_an_earlier_release_in_which_a_number_is_null_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert run("verify", store.path, "--full") == FINDINGS
    assert f"next: hiddenstore repair {store.path}\n" in capsys.readouterr().err
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


@pytest.mark.parametrize("change", [{"of_the_future": 1}, {"format": 9}])
def test_a_record_of_another_release_stops_a_repair_and_verify_names_what_reads_it(
    tmp_path: Path, change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path)
    first, second = store.commits()[:2]
    write_sealed(Path(store.path) / layout.commit_path(first.unit), first.model_dump(mode="json") | change)
    damage(Path(store.path) / layout.commit_path(second.unit))
    before = tree(store)
    with pytest.raises(FormatError) as error:
        repair_all(store.path)
    assert error.value.hint == "pip install --upgrade hiddenstore"
    assert tree(store) == before
    assert run("verify", store.path) == FINDINGS
    assert "next: pip install --upgrade hiddenstore\n" in capsys.readouterr().err


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
