"""Writing: creation, races between attempts, and what a failure leaves."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hiddenstore
from hiddenstore import writer
from hiddenstore.errors import ConfigError, ConflictError, Kind, StorageError
from hiddenstore.files import layout
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.records import Record
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    VOCAB,
    capture_spec,
    make_store,
    memory_input,
    random_records,
    target_files,
)
from hiddenstore.testing.workload import contents, fingerprint, garbage, problems
from hiddenstore.writer import create_store, register_input, write_unit
from schemas.manifest import CommitRecord, Reject
from tests.faults import Fault, FaultFilesystem

CAPTURE = capture_spec(width=8)
PREPARED = memory_input(6)
UNITS = list(PREPARED.units())


def empty_store(fs: FaultFilesystem | None = None) -> Store:
    return create_store(fs or FaultFilesystem(), CAPTURE, HEAD, "safe", target_files(width=8))


def write(store: Store, index: int = 0) -> CommitRecord | None:
    records = random_records(UNITS[index].samples, CAPTURE)
    return write_unit(store, UNITS[index].name, PREPARED.info.digest, records, (), ENGINE)


def test_a_store_is_created_once_and_opened_after() -> None:
    store = empty_store()
    write(store)
    again = empty_store(store.fs)  # type: ignore[arg-type]
    assert len(again.commits()) == 1
    assert again.target_file(layout.HEAD_NAME) == target_files(width=8)[layout.HEAD_NAME]


def test_another_capture_is_refused_with_every_difference() -> None:
    store = empty_store()
    target = CAPTURE.target.model_copy(update={"weights_sha256": "9" * 64, "name": "elsewhere", "dtype": "float32"})
    other = CAPTURE.model_copy(update={"aux_layers": (1, 4), "final": "all", "target": target})
    with pytest.raises(ConflictError) as error:
        create_store(store.fs, other, HEAD, "safe", target_files(width=8))
    assert error.value.kind == "store-mismatch"
    assert error.value.hint
    lines = error.value.message.splitlines()[1:]
    assert lines == [
        "  capture.target.weights_sha256: 44444444… stored, 99999999… asked",
        "  capture.aux_layers: [1, 3] stored, [1, 4] asked",
        "  capture.final: supervised stored, all asked",
    ]


def test_no_store_takes_the_name_of_a_snapshot_of_another(tmp_path: Path) -> None:
    store = create_store(tmp_path / "store", CAPTURE, HEAD, "safe", target_files(width=8))
    write(store)
    store.save_snapshot("v1")
    for name in ("v1", "later"):
        with pytest.raises(ConfigError, match=f"snapshot {name} of the store .*, which it would hide") as caught:
            create_store(f"{store.path}@{name}", CAPTURE, HEAD, "safe", target_files(width=8))
        assert (caught.value.kind, caught.value.hint) == ("usage", f"another place, such as {store.path}-{name}")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert len(hiddenstore.open(f"{store.path}@v1")) == len(store.sample_ids)
    beside_none = create_store(tmp_path / "qwen@main", CAPTURE, HEAD, "safe", target_files(width=8))
    assert hiddenstore.open(beside_none.path).manifest == beside_none.manifest


def test_the_name_of_a_target_is_for_people_only() -> None:
    store = empty_store()
    target = CAPTURE.target.model_copy(update={"name": "other/name", "revision": "main", "dtype": "float32"})
    same = CAPTURE.model_copy(update={"target": target})
    assert create_store(store.fs, same, HEAD, "safe", {}).manifest == store.manifest


def test_target_files_of_an_unfinished_store_are_never_overwritten() -> None:
    fs = FaultFilesystem()
    fs.put_if_absent("target/config.json", b"older")
    with pytest.raises(ConflictError) as error:
        empty_store(fs)
    assert error.value.kind == "target-files-differ"
    assert (error.value.hint or "").startswith("rm -r ")
    assert fs.read("target/config.json") == b"older"
    assert fs.size(layout.STORE_JSON) is None


def test_of_two_racing_creators_both_get_the_same_store(tmp_path: Path) -> None:
    stores: list[Store] = []

    def create() -> None:
        stores.append(create_store(tmp_path / "store", CAPTURE, HEAD, "safe", target_files(width=8)))

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({store.manifest.model_dump_json() for store in stores}) == 1
    assert len(stores) == 4
    assert problems(stores[0]) == []


def test_of_two_attempts_at_one_unit_the_second_sweeps_only_its_own_segment() -> None:
    store = empty_store()
    won = write(store)
    before = store.fs.disk.files()  # type: ignore[attr-defined]
    assert won is not None
    assert write(store) is None
    assert store.fs.disk.files() == before  # type: ignore[attr-defined]


def test_of_many_racing_writers_exactly_one_wins_and_no_garbage_stays(tmp_path: Path) -> None:
    results: list[CommitRecord | None] = []
    stores = [create_store(tmp_path / "store", CAPTURE, HEAD, "safe", target_files(width=8)) for _ in range(4)]
    barrier = threading.Barrier(4)

    def race(store: Store) -> None:
        barrier.wait()
        results.append(write(store))

    threads = [threading.Thread(target=race, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [record for record in results if record is not None]
    store = Store.open(tmp_path / "store")
    assert len(winners) == 1
    assert store.commits() == winners
    assert problems(store) == []
    assert garbage(store.fs) == []


def test_every_interleaving_of_two_writers_keeps_one_whole_unit() -> None:
    """The second attempt runs whole between any two operations of the first."""
    alone = empty_store()
    start = len(alone.fs.disk.operations)  # type: ignore[attr-defined]
    write(alone)
    expected = contents(Store.open(alone.fs))
    total = len(alone.fs.disk.operations)  # type: ignore[attr-defined]
    for at in range(start, total, 3):
        fs = FaultFilesystem()
        store = empty_store(fs)
        results: list[CommitRecord | None] = []

        def intrude(fs: FaultFilesystem = fs, store: Store = store, at: int = at, results: list = results) -> None:
            if len(fs.disk.operations) >= at and not results:
                fs.disk.observer = None
                results.append(write(store))

        fs.disk.observer = intrude
        results.append(write(store))
        assert len([record for record in results if record is not None]) == 1
        assert contents(Store.open(fs)) == expected
        assert garbage(fs) == []


def test_an_attempt_whose_reply_was_lost_keeps_its_segment() -> None:
    fs = FaultFilesystem()
    store = empty_store(fs)
    fs.disk.fault = Fault(at=fs.puts, kind="reply-lost")
    record = write(store)
    assert record is not None
    assert Store.open(fs).commits() == [record]
    assert problems(Store.open(fs)) == []


def test_an_attempt_that_lost_and_lost_its_reply_sweeps_its_own_segment() -> None:
    fs = FaultFilesystem()
    store = empty_store(fs)
    won = write(store)
    fs.disk.fault = Fault(at=fs.puts, kind="reply-lost")
    assert write(store) is None
    assert Store.open(fs).commits() == [won]
    assert garbage(fs) == []


def test_a_reply_lost_before_anything_was_stored_is_an_error_that_sweeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = empty_store()

    def timeout(self: LocalFilesystem, path: str, data: bytes) -> bool:
        raise StorageError("timeout", kind=Kind.REPLY_LOST)

    monkeypatch.setattr(FaultFilesystem, "put_if_absent", timeout)
    with pytest.raises(StorageError):
        write(store)
    # The request may still arrive: only gc, after its grace period, may remove the segment.
    assert len(garbage(store.fs)) == 1


def test_a_failure_while_writing_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = empty_store()
    before = store.fs.disk.files()  # type: ignore[attr-defined]

    def interrupt(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(FaultFilesystem, "sync_folder", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(store)
    left = {path: data for path, data in store.fs.disk.files().items() if not path.endswith("/")}  # type: ignore[attr-defined]
    assert left == before


def test_a_unit_of_rejects_only_has_a_record_without_files() -> None:
    store = empty_store()
    rejects = [
        Reject(id=sample.id, tokens=sample.tokens, reason="non-finite", detail="layer_1") for sample in UNITS[0].samples
    ]
    record = write_unit(store, UNITS[0].name, PREPARED.info.digest, [], rejects, ENGINE)
    register_input(store, PREPARED)
    again = Store.open(store.fs)
    assert record is not None
    assert (record.files, record.samples) == ((), ())
    assert problems(again) == []
    assert len(again) == 0


def test_a_unit_written_twice_has_the_same_bytes_apart_from_its_attempt() -> None:
    one, other = empty_store(), empty_store()
    first, second = write(one), write(other)
    assert first is not None
    assert second is not None
    assert first.segment != second.segment
    assert fingerprint(one.fs) == fingerprint(other.fs)


def test_a_unit_of_records_that_a_generator_gives_holds_all_of_them() -> None:
    store, listed = empty_store(), empty_store()
    records = random_records(UNITS[0].samples, CAPTURE)
    given = (record for record in records)
    record = write_unit(store, UNITS[0].name, PREPARED.info.digest, given, (), ENGINE)
    assert record is not None
    assert [entry.id for entry in record.samples] == [sample.id for sample in UNITS[0].samples]
    write(listed)
    assert fingerprint(store.fs) == fingerprint(listed.fs)


def of_sample(**changes: object) -> Callable[[Record], Record]:
    return lambda record: replace(record, sample=replace(record.sample, **changes))  # type: ignore[arg-type]


FORBIDDEN: dict[str, Callable[[Record], Record]] = {
    r"input_ids is not what the format allows: token 64 is outside": of_sample(input_ids=np.full(36, VOCAB)),
    r"token 4294967301 is outside": of_sample(input_ids=np.full(36, 2**32 + 5)),
    r"input_ids is float32, expected whole numbers": of_sample(input_ids=np.zeros(36, np.float32)),
    r"input_ids has shape \[36, 1\], expected \[36\]": of_sample(input_ids=np.zeros((36, 1), np.int32)),
    r"loss_mask is not what the format allows: it is not of zeros and ones": of_sample(loss_mask=np.full(36, 255)),
    r"mask.*: it is not of zeros and ones": of_sample(loss_mask=np.full(36, -1)),
    r"loss_mask is float64, expected whole numbers": of_sample(loss_mask=np.full(36, 0.5)),
    r"turn \[1, 0, 37\] \(role, start, end\) is none of 36 tokens": of_sample(spans=np.array([[1, 0, 37]])),
    r"turn \[9, 0, 4\]": of_sample(spans=np.array([[9, 0, 4]])),
    r"its split is 'val', expected one of train, validation": of_sample(split="val"),
    r"its split is 'test'": of_sample(split="test"),
    r"sample a/b: its id is not": of_sample(id="a/b"),
    r"final_rows is \[21, 22\] … \(2\), expected final_row_positions\(.*\) = \[21, 22, 23": lambda record: replace(
        record, final_rows=record.final_rows[:2], final=record.final[:2]
    ),
    r"it has no token": lambda record: replace(
        of_sample(input_ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, np.uint8))(record), aux=record.aux[:, :0]
    ),
}


@pytest.mark.parametrize("message", FORBIDDEN)
def test_what_readers_would_refuse_is_refused_before_anything_is_written(message: str) -> None:
    store = empty_store()
    before = store.fs.disk.files()  # type: ignore[attr-defined]
    first, *others = random_records(UNITS[0].samples, CAPTURE)
    assert first.sample.tokens == 36
    with pytest.raises(ConfigError, match=message) as caught:
        write_unit(store, UNITS[0].name, PREPARED.info.digest, [FORBIDDEN[message](first), *others], (), ENGINE)
    assert caught.value.kind == "record-invalid"
    assert store.fs.disk.files() == before  # type: ignore[attr-defined]


def test_a_unit_with_a_sample_twice_or_of_no_input_is_refused_before_anything_is_written() -> None:
    store = empty_store()
    before = store.fs.disk.files()  # type: ignore[attr-defined]
    records = random_records(UNITS[0].samples, CAPTURE)
    with pytest.raises(ConfigError, match=f"sample {records[0].sample.id} is in unit twice twice"):
        write_unit(store, "twice", PREPARED.info.digest, [*records, records[0]], (), ENGINE)
    with pytest.raises(ConfigError, match=r"'mine.parquet' cannot be a input digest") as caught:
        write_unit(store, "mine", "mine", records, (), ENGINE)
    assert caught.value.kind == "name-invalid"
    assert store.fs.disk.files() == before  # type: ignore[attr-defined]


def test_whole_numbers_of_any_type_are_stored_as_those_of_the_format() -> None:
    store, usual = empty_store(), empty_store()
    records = random_records(UNITS[0].samples, CAPTURE)
    wide = [
        of_sample(input_ids=r.sample.input_ids.astype(np.int64), loss_mask=r.sample.loss_mask != 0)(r) for r in records
    ]
    write_unit(store, UNITS[0].name, PREPARED.info.digest, wide, (), ENGINE)
    write(usual)
    assert fingerprint(store.fs) == fingerprint(usual.fs)


def test_the_order_of_publishing_is_segment_then_record() -> None:
    store = empty_store()
    write(store)
    names = store.fs.disk.operations  # type: ignore[attr-defined]
    link = max(index for index, name in enumerate(names) if name.startswith("link") and layout.COMMITS_DIR in name)
    writes = [index for index, name in enumerate(names) if layout.SEGMENTS_DIR in name]
    assert max(writes) < link


def test_states_of_all_codecs_round_trip_through_a_store(tmp_path: Path) -> None:
    for codec in ("bf16", "lossless"):
        store = make_store(tmp_path / codec, codec=codec)
        for expected in random_records([store.sample(name) for name in store.sample_ids], store.capture):
            found = store[expected.sample.id]
            assert torch.equal(found.aux.view(torch.uint16), expected.aux.view(torch.uint16))
            assert torch.equal(found.final.view(torch.uint16), expected.final.view(torch.uint16))


def test_a_failed_sweep_leaves_the_segment_to_gc(monkeypatch: pytest.MonkeyPatch) -> None:
    store = empty_store()
    write(store)

    def refuse(self: LocalFilesystem, path: str) -> None:
        raise StorageError("busy", kind=Kind.IO_ERROR)

    monkeypatch.setattr(FaultFilesystem, "remove_tree", refuse)
    assert write(store) is None
    assert len(garbage(store.fs)) == 1
    assert writer.sweep(store.fs, garbage(store.fs)[0]) is None
