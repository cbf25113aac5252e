"""Index files: a store opened through them is the store its commit records describe, whatever happened to either."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.commit import publish_commit, read_commit
from hiddenstore.errors import CorruptionError
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.fs.seam import Filesystem
from hiddenstore.index import catalog, publish
from hiddenstore.index.catalog import read_catalog
from hiddenstore.index.file import IndexFile, index_numbers, live_indexes
from hiddenstore.index.publish import IndexWriter, publish_index
from hiddenstore.index.table import SampleTable
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.testing.workload import contents
from hiddenstore.verify import structure, verify
from hiddenstore.writer import pending_units, write_unit
from schemas.manifest import CommitRecord, FileEntry, SampleEntry
from tests.accepting import repair_all
from tests.faults import SURVIVALS, FaultFilesystem

SAMPLES = 12


@pytest.fixture(autouse=True)
def an_index_is_always_worth_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalog, publish):
        monkeypatch.setattr(module, "WORTH_AN_INDEX", 0)


def indexed_store(fs: FaultFilesystem | None = None) -> Store:
    """A store in memory; two index files cover its records."""
    store = make_store(fs or FaultFilesystem(), samples=SAMPLES, container="webdataset")
    names = store.catalog.names
    publish_index(store.fs, names[: len(names) // 2])
    publish_index(store.fs, names[len(names) // 2 :])
    return Store.open(store.fs)


def facts(fs: Filesystem, use_index: bool = True) -> tuple[object, ...]:
    """Everything that a catalog knows, as plain values."""
    seen = read_catalog(fs, use_index)
    table = seen.table.take(seen.commit_order())
    columns = {name: column.tolist() for name, column in table.columns.items()}
    numbers = {name: column.tolist() for name, column in seen.facts.items()}
    return seen.names, seen.digests, numbers, list(table.ids), columns, seen.repeats


def assert_index_is_believed_rightly(fs: Filesystem) -> None:
    assert facts(fs) == facts(fs, use_index=False)


def drop(store: Store, path: str) -> None:
    store.fs.disk.overwrite(f"{store.path}/{path}", None)  # type: ignore[attr-defined]


def test_an_iteration_gives_the_samples_before_a_record_that_has_gone() -> None:
    store = indexed_store()
    before = sum(len(record.samples) for record in store.commits()[:2])
    opened, given = Store.open(store.fs), []
    drop(store, layout.commit_path(store.commits()[2].unit))
    with pytest.raises(CorruptionError) as error:
        given.extend(record.sample.id for record in opened)
    assert error.value.kind == "commit-missing"
    assert given == list(store.sample_ids)[:before]
    assert before > 0


def small_record(number: int, revision: int = 0, samples: int = 2, attempt: str = "0123abcd") -> CommitRecord:
    unit = f"u-{number:06d}"
    entries = tuple(
        SampleEntry(
            id=hashlib.blake2b(f"{number}-{place}".encode(), digest_size=16).hexdigest(), split="train",
            start=5 * place, tokens=5, supervised=3, final_start=4 * place, final_rows=4,
        )
        for place in range(samples)
    )  # fmt: skip
    return CommitRecord(
        unit=unit, input="ab" * 32, segment=layout.segment_path(unit, attempt, revision), engine=ENGINE,
        files=(FileEntry(path="samples.tar", size=9, sha256="0" * 64),), samples=entries,
    )  # fmt: skip


def test_a19_a_store_opened_through_its_index_reads_no_record_and_holds_the_same() -> None:
    store = indexed_store()
    expected = contents(Store.open(store.fs, strict=False))
    store.fs.disk.reads.clear()  # type: ignore[attr-defined]
    opened = Store.open(store.fs)
    counts = (len(opened), opened.duplicates, opened.totals["units"])
    assert not any("/commits/" in read and read.endswith(".json") for read in store.fs.disk.reads)  # type: ignore[attr-defined]
    assert counts == (SAMPLES, 0, len(store.commits()))
    assert contents(opened) == expected
    assert opened.snapshot() == Store.open(store.fs, strict=False).snapshot()
    assert_index_is_believed_rightly(store.fs)
    assert verify(store.fs).findings == []


def test_a_few_samples_are_found_by_row_group_and_prefix_and_many_by_columns() -> None:
    store = indexed_store()
    for name in store.sample_ids:
        fresh = Store.open(store.fs)
        assert fresh.locate(name)[0].samples[fresh.locate(name)[1]].id == name
        assert fresh.id_starting(name[:12]) == name
        assert fresh.index_of(name) == list(store.sample_ids).index(name)
    fresh = Store.open(store.fs)
    assert "0" * 32 not in fresh
    assert "no-id" not in fresh
    assert all(fresh.locate(name) for name in store.sample_ids for _ in range(3))


def test_a_newer_revision_counts_where_the_index_knows_the_older_one() -> None:
    store = indexed_store()
    record = store.commits()[0]
    kept = record.model_copy(update={"samples": record.samples[:1], "segment": f"{record.segment[:-9]}-r1-00000000"})
    assert publish_commit(store.fs, kept, 1)
    assert_index_is_believed_rightly(store.fs)
    assert Store.open(store.fs).commits()[0].samples == record.samples[:1]


def test_records_of_few_samples_in_many_files_are_kept_no_longer_than_their_files_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "KEPT_ENTRIES", 100)
    store = make_store(FaultFilesystem(), samples=SAMPLES, container="zarr")
    for name in store.sample_ids:
        store.locate(name)
    kept = [commit.record for commit in store.catalog._kept.values()]
    assert 0 < sum(len(record.samples) for record in kept) < SAMPLES
    assert sum(len(record.files) + len(record.samples) for record in kept) <= 100


def test_a_vanished_record_is_an_error_gives_no_samples_and_is_captured_again_under_another_name() -> None:
    store = indexed_store()
    record, before = store.commits()[1], contents(store)
    lost = {entry.id for entry in record.samples}
    drop(store, layout.commit_path(record.unit))
    assert_index_is_believed_rightly(store.fs)
    assert set(Store.open(store.fs).sample_ids) == before.keys() - lost
    (finding,) = [finding for finding in verify(store.fs).findings if finding.kind == "commit-missing"]
    assert (set(finding.samples), "incomplete" in verify(store.fs).kinds) == (lost, True)
    opened = Store.open(store.fs)
    (pending,) = pending_units(opened, record.input).values()
    assert (pending.name, pending.revision, pending.replaces) == (record.unit, 1, None)
    samples = [sample for sample in make_samples(SAMPLES) if sample.id in lost]
    records = random_records(samples, store.capture)
    assert write_unit(opened, record.unit, record.input, records, (), ENGINE, pending.revision)
    gc(store.fs, dry_run=False, older_than_s=0)
    assert contents(Store.open(store.fs)) == before
    assert verify(store.fs, "bytes").findings == []


def test_another_record_under_a_name_an_index_knows_is_named_and_repair_takes_the_index_away() -> None:
    store = indexed_store()
    record = store.commits()[0]
    path = layout.commit_path(record.unit)
    other = record.model_copy(update={"samples": record.samples[:1]})
    store.fs.disk.overwrite(f"{store.path}/{path}", seal(other))  # type: ignore[attr-defined]
    with pytest.raises(CorruptionError) as error:
        contents(Store.open(store.fs))
    assert error.value.kind == "index-stale"
    assert "index-stale" in verify(store.fs).kinds
    assert list(repair_all(store.fs).aside) == ["index/1.parquet"]
    assert "index-stale" not in verify(store.fs).kinds
    assert_index_is_believed_rightly(store.fs)


def test_two_digests_of_one_record_are_settled_by_the_record() -> None:
    store = indexed_store()
    record = store.commits()[0]
    other = record.model_copy(update={"samples": record.samples[:1]})
    store.fs.disk.overwrite(f"{store.path}/{layout.commit_path(record.unit)}", seal(other))  # type: ignore[attr-defined]
    publish_index(store.fs, [f"{record.unit}.json"])
    assert_index_is_believed_rightly(store.fs)
    publish._merge(store.fs, index_numbers(store.fs))
    assert f"{record.unit}.json" not in live_indexes(store.fs)[0].header.records
    assert_index_is_believed_rightly(store.fs)


def test_a_damaged_index_costs_time_only_is_named_and_repaired() -> None:
    store = indexed_store()
    expected, path = facts(store.fs), f"{store.path}/index/1.parquet"
    whole = store.fs.disk.files()[path]  # type: ignore[attr-defined]
    named = 0
    for place in range(0, len(whole), 61):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        store.fs.disk.overwrite(path, bytes(damaged))  # type: ignore[attr-defined]
        assert facts(store.fs) == expected
        few = Store.open(store.fs)
        assert few.locate(few.catalog[0].record.samples[0].id)[1] == 0
        named += bool({"index-corrupt", "index-stale"} & verify(store.fs).kinds.keys())
    assert named > len(whole) / 61 / 2
    store.fs.disk.overwrite(path, whole[:-20])  # type: ignore[attr-defined]
    assert list(repair(store.fs, dry_run=False).aside) == ["index/1.parquet"]
    assert verify(store.fs).findings == []
    assert facts(store.fs) == expected


def test_many_small_index_files_become_one_and_a_reader_of_the_old_ones_goes_on() -> None:
    fs = FaultFilesystem()
    records = [small_record(number) for number in range(publish.MERGED)]
    for record in records:
        publish_commit(fs, record)
    fs.put_if_absent("store.json", b"{}")
    for record in records[:-1]:
        publish_index(fs, [f"{record.unit}.json"])
    reader = read_catalog(fs)
    assert len(index_numbers(fs)) == publish.MERGED - 1
    publish_index(fs, [f"{records[-1].unit}.json"])
    (merged,) = live_indexes(fs)
    assert len(merged.header.records) == len(records)
    assert_index_is_believed_rightly(fs)
    wanted = records[3].samples[1].id
    assert reader.locate(wanted) == (3, 1)
    assert len(reader.table) == 2 * len(records)


def test_samples_that_two_index_files_hold_are_read_from_the_first_unit() -> None:
    fs = FaultFilesystem()
    fs.put_if_absent("store.json", b"{}")
    for number in (5, 2):
        copy = small_record(1)
        unit = f"u-{number:06d}"
        publish_commit(fs, copy.model_copy(update={"unit": unit, "segment": f"segments/{unit}-0123abcd"}))
        publish_index(fs, [f"{unit}.json"])
    assert_index_is_believed_rightly(fs)
    seen = read_catalog(fs)
    assert (seen.locate(small_record(1).samples[1].id), seen.repeats, seen.place_of(1, 1)) == ((0, 1), 2, 2)


def test_ids_that_are_no_hex_digits_are_held_as_text() -> None:
    fs = FaultFilesystem()
    fs.put_if_absent("store.json", b"{}")
    record = small_record(1)
    entries = [
        entry.model_copy(update={"id": name}) for entry, name in zip(record.samples, ("b_2", "A-1"), strict=True)
    ]
    publish_commit(fs, record.model_copy(update={"samples": tuple(entries)}))
    publish_index(fs, ["u-000001.json"])
    publish_commit(fs, small_record(2))
    assert_index_is_believed_rightly(fs)
    assert read_catalog(fs).locate("A-1") == (0, 1)
    assert read_catalog(fs).locate(small_record(2).samples[0].id) == (1, 0)
    assert read_catalog(fs).locate("A") is None


def test_a_writer_covers_what_it_wrote_and_what_it_inherited_but_not_in_a_small_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fs = FaultFilesystem()
    for number in range(3):
        publish_commit(fs, small_record(number))
    writer = IndexWriter(fs, read_catalog(fs))
    publish_commit(fs, small_record(3))
    writer.add("u-000003")
    monkeypatch.setattr(publish, "WORTH_AN_INDEX", 4)
    writer.close()
    assert index_numbers(fs) == []
    monkeypatch.setattr(publish, "WORTH_AN_INDEX", 3)
    writer.close()
    assert read_catalog(fs).uncovered == ()
    assert len(read_catalog(fs)) == 4


def test_a_disk_that_refuses_the_index_fails_no_writer() -> None:
    fs = FaultFilesystem()
    publish_commit(fs, small_record(0))
    writer = IndexWriter(fs, read_catalog(fs))
    fs.disk.capacity = 0
    writer.close()
    assert index_numbers(fs) == []


def test_an_input_that_an_index_or_a_snapshot_names_is_missed() -> None:
    store = indexed_store()
    (digest,) = store.inputs()
    drop(store, layout.input_path(digest))
    assert "input-missing" in verify(store.fs).kinds
    for number in index_numbers(store.fs):
        drop(store, layout.index_path(number))
    assert verify(store.fs).ok
    store.save_snapshot("train")
    assert "input-missing" in verify(store.fs).kinds


def test_what_a_merge_left_behind_is_garbage_that_nobody_reads() -> None:
    store = indexed_store()
    old = {number: store.fs.read(layout.index_path(number)) for number in index_numbers(store.fs)}
    assert publish._merge(store.fs, list(old))
    for number, data in old.items():
        store.fs.put_if_absent(layout.index_path(number), data)
    assert [file.number for file in live_indexes(store.fs)] == [3]
    assert_index_is_believed_rightly(store.fs)
    assert {note.path for note in verify(store.fs).notes} == {"index/1.parquet", "index/2.parquet"}
    gc(store.fs, dry_run=False, older_than_s=0)
    assert index_numbers(store.fs) == [3]


def test_adding_an_index_file_reads_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    store = indexed_store()
    before = index_numbers(store.fs)
    monkeypatch.setattr(IndexFile, "open", None)
    assert publish_index(store.fs, store.catalog.names[:1]) == before[-1] + 1


def test_samples_are_read_from_an_index_without_pandas(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", samples=SAMPLES, container="webdataset")
    publish_index(store.fs, store.catalog.names)
    script = (
        "import sys; from hiddenstore.fs.local import LocalFilesystem; from hiddenstore.index.file import IndexFile; "
        "table = IndexFile.open(LocalFilesystem(sys.argv[1]), 1).read(); print(len(table), 'pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(store.path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(SAMPLES), "False"]


def test_resuming_reads_an_index_file_that_the_store_was_opened_with_no_second_time() -> None:
    store = indexed_store()
    record = store.commits()[1]
    drop(store, layout.commit_path(record.unit))
    opened = Store.open(store.fs)
    first, second = index_numbers(store.fs)
    publish_index(store.fs, store.catalog.names[:1])
    store.fs.disk.reads.clear()  # type: ignore[attr-defined]
    assert pending_units(opened, record.input)[record.unit].revision == 1
    read = {name for name in store.fs.disk.reads if "/index/" in name}  # type: ignore[attr-defined]
    assert any(name.endswith(layout.index_path(second + 1)) for name in read)
    assert not any(name.endswith((layout.index_path(first), layout.index_path(second))) for name in read)


def test_the_next_merge_removes_what_one_left_behind_and_covers_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    store = indexed_store()
    monkeypatch.setattr(publish, "MERGED", 2)
    old = {number: store.fs.read(layout.index_path(number)) for number in index_numbers(store.fs)}
    assert publish._merge(store.fs, list(old))
    for number, data in old.items():
        store.fs.put_if_absent(layout.index_path(number), data)
    publish.publish_index(store.fs, [])
    assert index_numbers(store.fs) == [3]
    assert_index_is_believed_rightly(store.fs)


def care_of(store: Store) -> None:
    """Repair, what it dropped captured again, covered by the index, merged, swept."""
    fs = store.fs
    repair_all(fs)
    opened = Store.open(fs)
    writer = IndexWriter(fs, opened.catalog)
    for digest in opened.inputs():
        for pending in pending_units(opened, digest).values():
            lost = [item for item in make_samples(SAMPLES) if item.id in pending.order and pending.lacks(item.id)]
            assert recapture_unit(opened, pending, random_records(lost, opened.capture), (), ENGINE)
            writer.add(pending.name, pending.revision)
    writer.close()
    publish._merge(fs, index_numbers(fs))
    gc(fs, dry_run=False, older_than_s=0)


def spoiled_sample(store: Store) -> None:
    record = max(store.commits(), key=lambda record: len(record.samples))
    path = f"{store.path}/{record.segment}/samples.tar"
    data = bytearray(store.fs.disk.files()[path])  # type: ignore[attr-defined]
    data[len(data) // 2] ^= 1
    store.fs.disk.overwrite(path, bytes(data))  # type: ignore[attr-defined]


def spoiled_record(store: Store) -> None:
    path = f"{store.path}/{layout.commit_path(store.commits()[0].unit)}"
    data = store.fs.disk.files()[path]  # type: ignore[attr-defined]
    store.fs.disk.overwrite(path, data[:200] + b"#" + data[201:])  # type: ignore[attr-defined]


def survivors(store: Store) -> Iterator[FaultFilesystem]:
    """Distinct disks after a crash at any moment of ``care_of``."""
    fs, distinct = store.fs, {}
    assert isinstance(fs, FaultFilesystem)

    def observe() -> None:
        for survival in SURVIVALS:
            after = fs.after_crash(*survival)
            distinct.setdefault(hashlib.sha256(after.disk.state()).digest(), after)

    fs.disk.observer = observe
    care_of(store)
    fs.disk.observer = None
    yield from distinct.values()


@pytest.mark.parametrize("spoil", [spoiled_sample, spoiled_record])
def test_no_crash_of_care_makes_an_index_say_other_than_the_records(spoil: Callable[[Store], None]) -> None:
    store = indexed_store()
    spoil(store)
    seen = 0
    for fs in survivors(store):
        seen += 1
        true, indexed = read_catalog(fs, use_index=False), read_catalog(fs)
        if not true.damaged:
            assert_index_is_believed_rightly(fs)
        assert set(indexed.table.ids) >= set(true.table.ids)
        assert {finding.kind for finding in verify(fs).findings} & {"index-stale", "index-corrupt"} == set()
    assert seen > 20
    assert verify(store.fs, "bytes").findings == []
    assert_index_is_believed_rightly(store.fs)


def test_a_crash_while_index_files_are_merged_leaves_one_truth() -> None:
    store = indexed_store()
    expected, fs, distinct = facts(store.fs), store.fs, {}
    assert isinstance(fs, FaultFilesystem)

    def observe() -> None:
        for survival in SURVIVALS:
            after = fs.after_crash(*survival)
            distinct.setdefault(hashlib.sha256(after.disk.state()).digest(), after)

    fs.disk.observer = observe
    assert publish._merge(fs, index_numbers(fs))
    fs.disk.observer = None
    assert len(distinct) > 5
    for after in distinct.values():
        assert facts(after) == expected
        gc(after, dry_run=False, older_than_s=0)
        assert facts(after) == expected
        assert verify(after).findings == []


def test_columns_of_many_tables_come_out_sorted_and_equal_to_one_table() -> None:
    from hiddenstore.index.table import joined, table_of

    records = [(number, small_record(number, samples=7)) for number in range(40)]
    whole = joined([table_of(records)])
    parts = joined([joined([table_of(records[start : start + 9])]) for start in range(0, 40, 9)])
    assert list(whole.ids) == sorted(entry.id for _, record in records for entry in record.samples)
    assert whole.ids == parts.ids
    assert all(np.array_equal(whole.columns[name], parts.columns[name]) for name in whole.columns)


def test_a_record_that_vanishes_while_a_store_is_open_is_named() -> None:
    store = indexed_store()
    drop(store, layout.commit_path(store.commits()[2].unit))
    opened = Store.open(store.fs)
    name = opened.catalog.names[0]
    drop(store, f"{layout.COMMITS_DIR}/{name}")
    with pytest.raises(CorruptionError) as error:
        opened.commits()[0]
    assert error.value.kind == "commit-missing"
    assert read_commit(store.fs, opened.catalog.names[1])


@pytest.mark.parametrize("covered", [True, False])
def test_an_interrupt_while_the_columns_are_made_costs_no_sample(
    covered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = indexed_store() if covered else make_store(FaultFilesystem(), samples=SAMPLES, container="webdataset")
    opened, repeats = Store.open(store.fs), SampleTable.repeats

    def interrupted(_table: SampleTable) -> np.ndarray:
        monkeypatch.setattr(SampleTable, "repeats", repeats)
        raise KeyboardInterrupt

    monkeypatch.setattr(SampleTable, "repeats", interrupted)
    with pytest.raises(KeyboardInterrupt):
        len(opened.catalog.table)
    assert len(opened.catalog.table) == SAMPLES
    assert [opened.locate(name)[0] for name in opened.sample_ids]


def test_an_index_of_records_that_were_written_while_verify_looked_is_no_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = make_store(FaultFilesystem(), samples=SAMPLES, container="webdataset")
    disk, last = store.fs.disk, f"{store.path}/{layout.COMMITS_DIR}/{store.catalog.names[-1]}"
    kept = disk.files()[last]
    disk.overwrite(last, None)
    publish_index(store.fs, store.catalog.names[:-1])

    class LateLook(structure._IndexLook):
        def __init__(self, fs: Filesystem, found: catalog.Catalog) -> None:
            super().__init__(fs, found)
            disk.overwrite(last, kept)
            publish_index(fs, store.catalog.names[-1:])

    monkeypatch.setattr(structure, "_IndexLook", LateLook)
    report = verify(store.fs)
    assert [finding for finding in report.findings if finding.kind == "commit-missing"] == []
    monkeypatch.undo()
    assert verify(store.fs).findings == []


@pytest.mark.parametrize("is_open", [False, True])
def test_an_index_that_was_merged_while_verify_looked_is_no_finding_and_the_merged_one_is_checked(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    store = make_store(FaultFilesystem(), samples=80, container="webdataset")
    names = store.catalog.names
    for name in names[: publish.MERGED - 1]:
        publish_index(store.fs, [name])
    seen: list[int] = []

    def open_late(fs: Filesystem, number: int) -> IndexFile:
        first = not seen
        seen.append(number)
        if first and not is_open:
            publish_index(fs, names[publish.MERGED - 1 :])
        file = IndexFile.open(fs, number)
        if first and is_open:
            publish_index(fs, names[publish.MERGED - 1 :])
        return file

    monkeypatch.setattr(structure, "IndexFile", SimpleNamespace(open=open_late))
    assert verify(store.fs).findings == []
    assert index_numbers(store.fs) == [max(seen)]
