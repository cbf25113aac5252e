"""verify finds what is missing, left over, cut short or changed, and names the file and the samples."""

import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from hiddenstore.care.gc import gc
from hiddenstore.commit import publish_commit
from hiddenstore.errors import ConfigError, NotFoundError
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.inputs import REGISTERED, encode_registered, table_digest
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_store, random_records
from hiddenstore.verify import Report, verify
from hiddenstore.verify.structure import unnamed_segments
from hiddenstore.writer import write_unit


def kinds(report: Report) -> list[str]:
    return sorted(finding.kind for finding in report.findings)


def big_file(store: Store, unit: int = 1) -> tuple[Path, list[str]]:
    """The largest file of a unit (the codes of a layer) and the unit's samples."""
    record = store.commits()[unit]
    file = max((f for f in record.files if f.path.startswith("layer_")), key=lambda f: f.size)
    return Path(store.path) / record.segment / file.path, [sample.id for sample in record.samples]


@pytest.mark.parametrize("codec", ["bf16", "lossless", "q8"])
def test_a_healthy_store_has_no_finding_at_the_first_two_depths(tmp_path: Path, codec: str) -> None:
    store = make_store(tmp_path, samples=10, codec=codec)
    for depth in ("structure", "bytes"):
        report = verify(store.path, depth)  # type: ignore[arg-type]
        assert report.findings == report.notes == []
        assert (report.units, report.samples) == (len(store.commits()), 10)
    assert report.bytes_checked > sum(record.bytes_stored for record in store.commits())


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_bytes_that_are_not_there_are_not_counted_as_checked(tmp_path: Path, container: str) -> None:
    store = make_store(tmp_path, samples=10, container=container)
    whole = verify(store.path, "bytes").bytes_checked
    first, second = (Path(store.path, record.segment) for record in store.commits()[:2])
    gone, cut = (
        max((f for f in unit.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size) for unit in (first, second)
    )
    left = whole - gone.stat().st_size - cut.stat().st_size
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-1])
    assert verify(store.path, "bytes").bytes_checked == left


def test_structure_is_checked_without_torch(tmp_path: Path) -> None:
    """Loading it takes longer than a small store."""
    store = make_store(tmp_path, samples=10)
    program = (
        "import sys\n"
        "from hiddenstore.verify import verify\n"
        "assert not verify(sys.argv[1]).findings\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, store.path], timeout=120, check=True)


@pytest.mark.parametrize("other", ["0" * 31 + "F", "0" * 31 + " ", "é" * 32, "é" * 16, "a" * 31 + "\0", "b" * 64, ""])
def test_samples_that_an_input_names_otherwise_are_missing(tmp_path: Path, other: str) -> None:
    """Whatever text stands for the id of the first sample of a unit."""
    store = make_store(tmp_path, samples=4)
    unit, ids = store.commits()[0].unit, [sample.id for sample in store.commits()[0].samples]
    rows = pa.table([[other, *ids[1:]], [unit] * len(ids), [8] * len(ids), ["train"] * len(ids)], schema=REGISTERED)
    store.fs.put_if_absent(layout.input_path(table_digest(rows)), encode_registered(rows))
    found = [finding for finding in verify(store.path).findings if finding.kind.startswith("samples")]
    assert [(finding.kind, finding.samples) for finding in found] == [
        ("samples-missing", (other,)),
        ("samples-unexpected", (ids[0],)),
    ]


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        verify(tmp_path)
    with pytest.raises(ConfigError):
        verify(make_store(tmp_path).path, "deep")  # type: ignore[arg-type]


def test_a_missing_file_names_the_samples_of_its_unit(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path, samples = big_file(store)
    path.unlink()
    report = verify(store.path)
    assert kinds(report) == ["file-missing"]
    assert list(report.findings[0].samples) == samples
    assert path.as_posix().endswith(report.findings[0].path)


def test_a_truncated_file_is_named_with_both_sizes(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path, samples = big_file(store)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    report = verify(store.path)
    assert kinds(report) == ["file-size"]
    assert f"expected {len(data):,} bytes, found {len(data) - 1:,}" in report.findings[0].detail
    assert report.affected == samples


def test_a_flipped_byte_is_seen_by_the_second_depth_only_and_names_the_samples_it_costs(tmp_path: Path) -> None:
    store = make_store(tmp_path, codec="bf16")
    path, samples = big_file(store)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    assert verify(store.path).ok
    report = verify(store.path, "bytes")
    assert kinds(report) == ["file-corrupt"]
    assert report.affected
    assert set(report.affected) <= set(samples)
    assert "samples cannot be read" in report.findings[0].detail


def test_every_file_of_a_store_is_covered_by_the_second_depth(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=3)
    for path in sorted(p for p in Path(store.path).rglob("*") if p.is_file()):
        data = path.read_bytes()
        place = len(data) // 2
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        assert not verify(store.path, "bytes").ok, path
        path.write_bytes(data)
    assert verify(store.path, "bytes").ok


def test_a_damaged_commit_record_is_named_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record, other = store.commits()[0], store.commits()[1]
    path = Path(store.path) / layout.commit_path(record.unit)
    path.write_bytes(path.read_bytes().replace(b'"tokens":', b'"tokenz":', 1))
    (Path(store.path) / other.segment / other.files[0].path).unlink()
    report = verify(store.path)
    assert {"document-corrupt", "file-missing"} <= set(kinds(report))
    assert any(path.name in f.path for f in report.findings)
    assert not [note for note in report.notes if note.kind == "orphan"]


def test_a_damaged_store_json_is_a_finding_and_the_commits_are_still_checked(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    path, samples = big_file(store)
    path.unlink()
    manifest = Path(store.path) / layout.STORE_JSON
    manifest.write_bytes(manifest.read_bytes()[:-20])
    report = verify(store.path, "bytes")
    assert kinds(report) == ["document-corrupt", "file-missing"]
    assert set(samples) <= set(report.affected)


def test_a_segment_without_a_commit_is_an_orphan_and_no_fault(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    orphan = Path(store.path) / "segments" / f"{store.commits()[0].unit}-0badf00d"
    orphan.mkdir()
    (orphan / "zarr.json").write_text("{}")
    (Path(store.path) / "commits" / ".tmp-0123456789abcdef").write_text("half")
    report = verify(store.path)
    assert report.ok
    assert sorted((note.kind, note.path) for note in report.notes) == [
        ("orphan", "commits/.tmp-0123456789abcdef"),
        ("orphan", f"segments/{orphan.name}"),
    ]


def test_units_of_an_input_without_a_commit_are_incomplete(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=10)
    lost = store.commits()[1]
    (Path(store.path) / layout.commit_path(lost.unit)).unlink()
    report = verify(store.path)
    assert kinds(report) == ["incomplete"]
    assert list(report.findings[0].samples) == [sample.id for sample in lost.samples]
    assert lost.unit in report.findings[0].detail


def test_samples_neither_stored_nor_rejected_are_missing(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=10)
    record = next(record for record in store.commits() if len(record.samples) > 1)
    short = record.model_copy(update={"samples": record.samples[:-1]})
    (Path(store.path) / layout.commit_path(record.unit)).write_bytes(seal(short))
    report = verify(store.path)
    assert kinds(report) == ["samples-missing"]
    assert report.affected == [record.samples[-1].id]


def test_a_sample_held_twice_is_found_within_an_input_and_noted_across_inputs(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    record = store.commits()[0]
    samples = [store.sample(sample.id) for sample in record.samples]
    records = random_records(samples, store.capture)
    write_unit(store, "other-000000", "f" * 64, records, [], ENGINE)
    report = verify(store.path)
    assert report.ok
    assert {note.kind for note in report.notes} == {"duplicate", "input-missing"}
    write_unit(store, "again-000000", record.input, records, [], ENGINE)
    assert "duplicate" in kinds(verify(store.path))


def test_a_snapshot_of_a_record_that_changed_is_found(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("train")
    record = store.commits()[0]
    changed = record.model_copy(update={"engine": ENGINE.model_copy(update={"version": "2"})})
    (Path(store.path) / layout.commit_path(record.unit)).write_bytes(seal(changed))
    report = verify(store.path)
    assert kinds(report) == ["snapshot-mismatch"]


def test_a_snapshot_that_names_a_record_which_is_gone_is_an_error(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store.save_snapshot("train")
    record = store.commits()[0]
    (Path(store.path) / layout.commit_path(record.unit)).unlink()
    report = verify(store.path)
    assert kinds(report) == ["commit-missing", "incomplete"]
    (gone,) = [finding for finding in report.findings if finding.kind == "commit-missing"]
    assert gone.path == layout.commit_path(record.unit)


@pytest.mark.parametrize("is_a_unit", [False, True])
def test_a_segment_of_a_lost_attempt_at_a_revision_is_an_orphan_unless_a_unit_has_its_name(
    tmp_path: Path, is_a_unit: bool
) -> None:
    store = make_store(tmp_path, samples=10)
    record, other = store.commits()[:2]
    won, lost = (layout.segment_path(record.unit, attempt, 1) for attempt in ("0badf00d", "deadbeef"))
    for path in (won, lost):
        shutil.copytree(Path(store.path, record.segment), Path(store.path, path))
    assert publish_commit(store.fs, record.model_copy(update={"segment": won}), 1)
    if is_a_unit:
        ((digest, registered),) = store.inputs().items()
        units = [f"{record.unit}-r1" if unit == other.unit else unit for unit in registered.table["unit"].to_pylist()]
        table = registered.table.set_column(1, "unit", pa.array(units))
        Path(store.path, layout.input_path(digest)).write_bytes(encode_registered(table))
    fate = "unfinished" if is_a_unit else "orphan"
    named = {f"{record.unit}.r1.json": won}
    assert unnamed_segments(store.fs, named) == {record.segment: "superseded", lost: fate}
    assert [item.path for item in gc(store.path, older_than_s=0).unfinished] == ([lost] if is_a_unit else [])


def test_a_segment_of_a_lost_attempt_stays_unfinished_while_an_input_cannot_be_read(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=10)
    record = store.commits()[0]
    won, lost = (layout.segment_path(record.unit, attempt, 1) for attempt in ("0badf00d", "deadbeef"))
    for path in (won, lost):
        shutil.copytree(Path(store.path, record.segment), Path(store.path, path))
    assert publish_commit(store.fs, record.model_copy(update={"segment": won}), 1)
    (digest,) = store.inputs()
    Path(store.path, layout.input_path(digest)).write_bytes(b"PAR1")
    assert unnamed_segments(store.fs, {})[lost] == "unfinished"
