"""Who wrote what and when, names for what a store held, and looking at, comparing and copying what they name."""

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.cli import main
from hiddenstore.files import layout
from hiddenstore.files.documents import seal
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    make_samples,
    make_store,
    memory_input,
    random_records,
    target_files,
)
from hiddenstore.testing.workload import contents
from hiddenstore.verify import verify
from hiddenstore.writer import create_store, pending_units, register_input, write_unit
from tests.accepting import repair_all

SAMPLES = 12
DAY_S = 86400


def run(*words: str) -> Result:
    result = CliRunner().invoke(main, words, prog_name="hiddenstore")
    assert result.exit_code in (0, 3), result.stderr
    return result


def run_json(*words: str) -> dict:
    document = json.loads(run(*words, "--json").stdout)
    assert document["schema"] == f"hiddenstore.{words[0]}/1"
    return document


def written(path: Path, day: int) -> None:
    """Let a file be written on a day since 1970-01-02."""
    os.utime(path, (day * DAY_S, day * DAY_S))


def damage_and_repair(store: Store) -> str:
    """Lose one sample; the name of its unit."""
    record = max(store.commits(), key=lambda r: len(r.samples))
    path = Path(store.path, record.segment, "layer_1/c/0/0")
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(bytes(data))
    assert repair_all(store.path).dropped
    return record.unit


def recapture(location: str) -> None:
    store = Store.open(location)
    (digest,) = store.inputs()
    for pending in pending_units(store, digest).values():
        lost = [sample for sample in make_samples(SAMPLES) if sample.id in pending.order and pending.lacks(sample.id)]
        assert recapture_unit(store, pending, random_records(lost, store.capture), (), ENGINE)


@pytest.fixture
def lived(past: Path, tmp_path: Path) -> Store:
    return Store.open(shutil.copytree(past, tmp_path / "store"))


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of which half was written on day 1 by one engine, half on day 2 by another, repaired on day 3, recaptured
    on day 4; ``before`` was frozen on day 2 and ``lossy`` on day 3."""
    capture, prepared = capture_spec(), memory_input(SAMPLES)
    location = tmp_path_factory.mktemp("past") / "store"
    store = create_store(location, capture, HEAD, "safe", target_files())
    register_input(store, prepared)
    units = list(prepared.units())
    for number, unit in enumerate(units):
        day = 1 + number * 2 // len(units)
        engine = ENGINE.model_copy(update={"version": str(day)})
        write_unit(store, unit.name, prepared.info.digest, random_records(unit.samples, capture), (), engine)
        written(location / "commits" / f"{unit.name}.json", day)
    Store.open(location).save_snapshot("before")
    written(location / "snapshots/before.json", 2)
    unit = damage_and_repair(Store.open(location))
    written(location / "commits" / f"{unit}.r1.json", 3)
    Store.open(location).save_snapshot("lossy")
    written(location / "snapshots/lossy.json", 3)
    recapture(str(location))
    written(location / "commits" / f"{unit}.r2.json", 4)
    return location


def test_log_says_what_was_done_when_and_by_which_engine(lived: Store) -> None:
    events = run_json("log", lived.path)["events"]
    days = [(event["action"], event["last"][:10]) for event in events]
    assert days[0] == ("recaptured", "1970-01-05")
    assert set(days[1:3]) == {("repaired", "1970-01-04"), ("froze", "1970-01-04")}
    assert set(days[3:5]) == {("froze", "1970-01-03"), ("wrote", "1970-01-03")}
    assert days[5:] == [("wrote", "1970-01-02")]
    wrote = [event for event in events if event["action"] == "wrote"]
    assert [event["version"] for event in wrote] == ["2", "1"]
    assert sum(event["samples"] for event in wrote) == SAMPLES
    assert sum(event["units"] for event in wrote) == len(lived.commits())
    assert sum(event["superseded"] for event in events) == 2
    each = run_json("log", lived.path, "--units")["events"]
    assert len(each) == len(lived.commits()) + 4
    assert sum(event["size_bytes"] for event in each) == sum(event["size_bytes"] for event in events)


def test_log_names_the_machine_where_the_file_system_keeps_it_and_says_where_it_does_not(tmp_path: Path) -> None:
    here, store = os.uname().nodename, make_store(tmp_path, samples=SAMPLES)
    record = Path(store.path, layout.commit_path(store.commits()[0].unit))
    try:
        os.setxattr(record, "user.hiddenstore.host", b"elsewhere")
    except OSError:
        pytest.skip("the file system of the tests has no extended attributes")
    (event,) = run_json("log", store.path)["events"]
    assert event["hosts"] == sorted([here, "elsewhere"])
    assert "2 machines" in run("log", store.path).stdout
    before = contents(Store.open(store.path))
    for path in Path(store.path).rglob("*.json"):
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    (event,) = run_json("log", store.path)["events"]
    assert event["hosts"] == []
    assert contents(Store.open(store.path)) == before
    assert verify(store.path, "bytes").ok


def test_log_of_a_snapshot_names_what_it_froze(lived: Store) -> None:
    events = run_json("log", f"{lived.path}@before", "-n", "0")["events"]
    assert [event["action"] for event in events] == ["wrote", "wrote"]
    assert sum(event["samples"] for event in events) == SAMPLES


def test_log_fits_a_terminal_of_80_columns(lived: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("log", lived.path).stdout.splitlines()
    assert len(lines) == 7
    assert max(map(len, lines)) <= 80


def test_log_names_a_record_that_cannot_be_read(lived: Store) -> None:
    path = next(Path(lived.path, "commits").glob("*.r1.json"))
    path.write_bytes(path.read_bytes()[:-5])
    result = run("log", lived.path)
    assert path.name in result.stderr
    assert "repaired" not in result.stdout


def test_a_snapshot_is_made_listed_and_removed_by_name(lived: Store) -> None:
    run("snapshot", lived.path, "after")
    listed = run_json("snapshot", lived.path)["snapshots"]
    assert {item["name"]: item["samples"] for item in listed} == {
        "before": SAMPLES,
        "lossy": len(Store.open(lived.path, "lossy")),
        "after": SAMPLES,
    }
    run("snapshot", lived.path, "after", "--remove")
    assert "after" not in run("snapshot", lived.path, "-q").stdout.split()
    missing = CliRunner().invoke(main, ["snapshot", lived.path, "after", "--remove"])
    assert (missing.exit_code, "snapshot-missing" in missing.stderr) == (2, True)
    taken = CliRunner().invoke(main, ["snapshot", lived.path, "lossy"])
    assert (taken.exit_code, "output-exists" in taken.stderr) == (6, True)


def test_a_snapshot_counts_what_info_counts_where_samples_are_stored_twice(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    again = make_samples(3)
    write_unit(store, "again", next(iter(store.inputs())), random_records(again, store.capture), (), ENGINE)
    info = run_json("info", store.path)
    assert info["duplicates"] == len(again)
    (listed,) = run_json("snapshot", store.path, "v1")["snapshots"]
    assert (listed["samples"], listed["tokens"]) == (info["samples"], info["tokens"])
    frozen = Store.open(store.path, "v1")
    # Lists that are frozen already may count a sample that is stored twice twice.
    counted = frozen.snapshot("v1").model_copy(update={"samples": frozen.totals["samples"]})
    Path(store.path, layout.snapshot_path("v1")).write_bytes(seal(counted))
    assert Store.open(store.path).save_snapshot("v1").commits == counted.commits


def test_diff_compares_any_two_snapshots_of_one_store(lived: Store) -> None:
    lost = SAMPLES - len(Store.open(lived.path, "lossy"))
    document = run_json("diff", f"{lived.path}@lossy", lived.path)
    assert document["coverage"] == {"only_a": 0, "both": SAMPLES - lost, "only_b": lost}
    assert (document["a"], document["b"]) == (f"{lived.path}@lossy", lived.path)
    run("snapshot", lived.path, "after")
    assert run_json("diff", f"{lived.path}@lossy", f"{lived.path}@after")["coverage"]["only_b"] == lost
    assert run_json("diff", f"{lived.path}@after", lived.path)["different"] is False


def test_copy_brings_over_what_a_snapshot_names_and_joins_two(lived: Store, tmp_path: Path) -> None:
    lossy = Store.open(lived.path, "lossy")
    run("copy", f"{lived.path}@lossy", str(tmp_path / "lossy"))
    assert contents(Store.open(tmp_path / "lossy")) == contents(lossy)
    run("copy", f"{lived.path}@lossy", lived.path, str(tmp_path / "lossy"))
    assert contents(Store.open(tmp_path / "lossy")) == contents(lived)
    other = make_store(tmp_path / "other", samples=4, seed=7)
    other.save_snapshot("all")
    run("copy", f"{lived.path}@lossy", f"{other.path}@all", str(tmp_path / "both"))
    assert contents(Store.open(tmp_path / "both")) == contents(lossy) | contents(other)
    assert verify(tmp_path / "both", "bytes").ok


def test_verify_notes_samples_that_a_repair_dropped_until_they_are_captured_again(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=SAMPLES)
    damage_and_repair(store)
    (note,) = [note for note in verify(store.path).notes if note.kind == "pending"]
    assert len(note.samples) == len(store) - len(Store.open(store.path))
    assert "the same collect" in run("verify", store.path).stdout
    recapture(store.path)
    assert [note for note in verify(store.path).notes if note.kind == "pending"] == []


def test_a_file_that_is_no_snapshot_among_them_keeps_nobody_from_the_others(tmp_path: Path) -> None:
    store = make_store(tmp_path, samples=SAMPLES)
    store.save_snapshot("train-v1")
    damage_and_repair(store)
    for name in ("snapshots/train-v1 (1).json", "snapshots/.tmp-0123456789abcdef", "inputs/.tmp-0123456789abcdef"):
        Path(store.path, name).write_bytes(b"{}")
    said = run_json("info", store.path)
    assert (said["snapshots"], said["inputs"]) == (["train-v1"], 1)
    assert [item["name"] for item in run_json("snapshot", store.path)["snapshots"]] == ["train-v1"]
    assert "froze" in {event["action"] for event in run_json("log", store.path)["events"]}
    assert run_json("repair", store.path)["units"] == []
    assert verify(store.path).kinds == {}
