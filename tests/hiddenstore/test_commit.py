"""Commit records: who wins, which revision counts, and what is believed."""

import pytest

from hiddenstore.commit import (
    committed_units,
    latest_names,
    publish_commit,
    read_commit,
)
from hiddenstore.errors import ConfigError, CorruptionError, StorageError
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.index.catalog import make_snapshot, read_catalog, read_frozen
from hiddenstore.testing.builders import ENGINE
from schemas.manifest import CommitRecord, FileEntry, LayerStats, SampleEntry
from tests.faults import Fault, FaultFilesystem

DIGEST = "ab" * 32


def record(unit: str = "u-000001", attempt: str = "0123abcd", **changes: object) -> CommitRecord:
    sample = SampleEntry(id="s1", split="train", start=0, tokens=5, supervised=2, final_start=0, final_rows=3)
    values = {
        "unit": unit,
        "input": DIGEST,
        "segment": f"segments/{unit}-{attempt}",
        "engine": ENGINE,
        "files": (FileEntry(path="zarr.json", size=3, sha256="0" * 64),),
        "samples": (sample,),
    }
    return CommitRecord(**{**values, **changes})


def test_the_first_attempt_wins_and_the_second_learns_it_lost() -> None:
    fs = FaultFilesystem()
    assert publish_commit(fs, record(attempt="00000001"))
    assert not publish_commit(fs, record(attempt="00000002"))
    assert read_commit(fs, "u-000001.json").record.segment.endswith("00000001")


def test_a_lost_reply_is_settled_by_reading_back() -> None:
    mine, other = record(attempt="00000001"), record(attempt="00000002")
    fs = FaultFilesystem(Fault(at=0, kind="reply-lost"))
    assert publish_commit(fs, mine)
    fs = FaultFilesystem()
    publish_commit(fs, other)
    fs.disk.fault = Fault(at=1, kind="reply-lost")
    assert not publish_commit(fs, mine)
    assert fs.read("commits/u-000001.json") == seal(other)


def test_a_repeated_request_that_meets_its_own_record_has_won() -> None:
    fs = FaultFilesystem()
    assert publish_commit(fs, record())
    assert publish_commit(fs, record())


def test_an_io_error_is_not_taken_for_a_lost_reply() -> None:
    fs = FaultFilesystem(Fault(at=4, kind="eio"))
    with pytest.raises(StorageError) as error:
        publish_commit(fs, record())
    assert error.value.kind == "io-error"


def test_the_highest_revision_counts() -> None:
    fs = FaultFilesystem()
    for revision, attempt in ((0, "00000000"), (2, "00000002"), (10, "0000000a"), (1, "00000001")):
        publish_commit(fs, record(attempt=attempt), revision)
    publish_commit(fs, record("u-000000"))
    assert latest_names(fs) == ["u-000000.json", "u-000001.r10.json"]
    assert [commit.record.segment for commit in read_catalog(fs)] == [
        "segments/u-000000-0123abcd",
        "segments/u-000001-0000000a",
    ]
    assert committed_units(fs) == {"u-000000", "u-000001"}


def test_what_is_no_record_is_ignored() -> None:
    fs = FaultFilesystem()
    publish_commit(fs, record())
    for name in (".tmp-00ff", "notes.txt", "u-000002.json.partial", "u-000001.r0.json", "-x.json", ".json"):
        fs.put_if_absent(f"commits/{name}", b"garbage")
    catalog = read_catalog(fs)
    assert len(catalog) == 1
    assert catalog.damaged == ()


def test_a_damaged_record_is_reported_and_the_others_are_read() -> None:
    fs = FaultFilesystem()
    for number in range(20):
        publish_commit(fs, record(f"u-{number:06d}"))
    data = fs.read("commits/u-000007.json")
    fs.disk.overwrite(f"{fs.root}/commits/u-000007.json", data[:-9] + b"X" + data[-8:])
    catalog = read_catalog(fs)
    assert len(catalog) == 19
    assert [error.kind for error in catalog.damaged] == ["document-corrupt"]
    assert "u-000007.json" in catalog.damaged[0].message


def test_two_records_in_each_others_place_are_damage() -> None:
    fs = FaultFilesystem()
    fs.put_if_absent("commits/u-000001.json", seal(record("u-000002")))
    with pytest.raises(CorruptionError, match="holds the record of unit 'u-000002'") as error:
        read_commit(fs, "u-000001.json")
    assert (error.value.kind, error.value.samples) == ("commit-invalid", ("s1",))


@pytest.mark.parametrize(
    "changes",
    [
        {"segment": "segments/other-0123abcd"},
        {"segment": "../u-000001-0123abcd"},
        {"segment": "/etc/passwd"},
        {"files": (FileEntry(path="../../etc/passwd", size=1, sha256=""),)},
        {"files": (FileEntry(path="/etc/passwd", size=1, sha256=""),)},
        {"files": (FileEntry(path="a", size=1, sha256=""), FileEntry(path="a", size=1, sha256=""))},
        {"files": (FileEntry(path="a", size=1 << 60, sha256=""),)},
        {"files": ()},
    ],
)
def test_a_record_that_points_elsewhere_or_is_absurd_is_neither_written_nor_read(changes: dict[str, object]) -> None:
    fs = FaultFilesystem()
    bad = record(**changes)
    with pytest.raises(CorruptionError):
        publish_commit(fs, bad)
    fs.put_if_absent("commits/u-000001.json", seal(bad))
    with pytest.raises(CorruptionError) as error:
        read_commit(fs, "u-000001.json")
    assert error.value.kind == "commit-invalid"


def test_a_snapshot_freezes_records_by_digest() -> None:
    fs = FaultFilesystem()
    for number in range(3):
        publish_commit(fs, record(f"u-{number:06d}"))
    snapshot = make_snapshot("s", read_catalog(fs))
    publish_commit(fs, record("u-000009"))
    publish_commit(fs, record("u-000000", "00000009"), revision=1)
    assert [commit.name for commit in read_frozen(fs, snapshot)] == [
        "u-000000.json",
        "u-000001.json",
        "u-000002.json",
    ]
    # All three hold the one sample.
    assert (snapshot.samples, snapshot.tokens) == (1, 5)
    fs.disk.overwrite(f"{fs.root}/{layout.STORE_JSON}", b"{}")
    path = f"{fs.root}/commits/u-000001.json"
    fs.disk.overwrite(path, seal(record("u-000001", "99999999")))
    with pytest.raises(CorruptionError) as other:
        read_frozen(fs, snapshot)
    fs.disk.overwrite(path, None)
    with pytest.raises(CorruptionError) as gone:
        read_frozen(fs, snapshot)
    assert (other.value.kind, gone.value.kind) == ("snapshot-mismatch", "commit-missing")


@pytest.mark.parametrize("name", ["", ".", "a/b", "../x", "a" * 200, "x\n", "-x", "a b"])
def test_names_that_are_no_names_are_refused(name: str) -> None:
    for make in (layout.commit_path, layout.input_path, layout.snapshot_path):
        with pytest.raises(ConfigError, match=r"cannot be .*: expected .*\[") as error:
            make(name)
        assert error.value.kind == "name-invalid"


def test_names_parse_back_to_what_they_were_made_from() -> None:
    unit = layout.unit_name(DIGEST, 42)
    assert unit == "abababababab-000042"
    assert layout.parse_commit(layout.commit_path(unit).split("/")[1]) == (unit, 0)
    assert layout.parse_commit(layout.commit_path(unit, 3).split("/")[1]) == (unit, 3)
    records = [(unit, 0, f"{unit}.json"), (unit, 3, f"{unit}.r3.json")]
    others = ["x.json\ny.json", "x.r0.json", "x.json.tmp", ".json", f"{unit}.json\n", " x.json", "x.JSON", "x.r.json"]
    assert list(layout.parse_commits([*others[:4], *(name for *_, name in records), *others[4:]])) == records
    assert [layout.parse_commit(name) for name in others] == [None] * len(others)
    assert layout.segment_claims(layout.segment_path(unit, layout.new_attempt()).split("/")[1]) == ((unit, 0),)
    revised = layout.segment_path(unit, layout.new_attempt(), 3).split("/")[1]
    assert layout.segment_claims(revised) == ((unit, 3), (f"{unit}-r3", 0))
    assert layout.parse_input(layout.input_path(DIGEST).split("/")[1]) == DIGEST


class CountedReads(FaultFilesystem):
    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def read(self, path: str) -> bytes:
        self.paths.append(path)
        return super().read(path)


def test_two_thousand_commit_records_are_read_once_each() -> None:
    fs = CountedReads()
    stats = {f"layer_{k}": LayerStats(rows=9, rms_mean=1, rms_median=1, rms_max=1, abs_max=1) for k in range(4)}
    samples = tuple(
        SampleEntry(
            id=f"{number:032x}", split="train", start=700 * number, tokens=700, supervised=400,
            final_start=402 * number, final_rows=402,
        )
        for number in range(40)
    )  # fmt: skip
    files = tuple(FileEntry(path=f"layer_{n}/c/0/0", size=10**8, sha256="0" * 64) for n in range(28))
    large = record(samples=samples, files=files, stats=stats)
    for number in range(2000):
        unit = layout.unit_name(DIGEST, number)
        data = seal(large.model_copy(update={"unit": unit, "segment": layout.segment_path(unit, "0123abcd")}))
        fs.disk.overwrite(f"{fs.root}/commits/{unit}.json", data)
    catalog = read_catalog(fs)
    assert len(catalog) == 2000
    assert sorted(fs.paths) == [f"commits/{name}" for name in catalog.names]
