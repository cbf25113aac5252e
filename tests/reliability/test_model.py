"""Whatever writers, crashes, repairs, sweeps and copies do to a store, in whatever order: it holds what a dict holds.

Hypothesis draws the order. The model is a dict of the samples that were committed and not lost to damage; after every
step the store must read exactly as it, every snapshot as when it was made, and nothing may lie there unexplained.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hiddenstore.care.copy import open_copy, run_copy
from hiddenstore.care.gc import gc
from hiddenstore.care.repair import repair
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.commit import committed_units
from hiddenstore.errors import CorruptionError, Kind, StorageError
from hiddenstore.files import layout
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.segments.segment import write_encoded
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, HEAD, capture_spec, memory_input, random_records, target_files
from hiddenstore.testing.suite import SimulatedCrash, Tally
from hiddenstore.testing.workload import contents, problems, sample_digest
from hiddenstore.verify import structure, verify
from hiddenstore.writer import create_store, pending_units, publish_segment, register_input, write_encoded_unit
from schemas.manifest import CommitRecord
from tests.accepting import repair_all
from tests.faults import SURVIVALS, Fault, FaultFilesystem, ReadFault
from tests.reliability.figures import Figures
from tests.reliability.test_read_faults import ERRORS

SAMPLES = 6
INPUT = memory_input(SAMPLES)
CAPTURE = capture_spec(layers=(1,), width=8, codec="q8")
UNITS = [unit.name for unit in INPUT.units()]
steps = 0


@cache
def encoded() -> dict[str, EncodedUnit]:
    return {u.name: encode_records(u.name, random_records(u.samples, CAPTURE), CAPTURE) for u in INPUT.units()}


@cache
def whole() -> dict[str, dict[str, str]]:
    """Digests of all samples, by unit."""
    store = new_store(FaultFilesystem(), "zarr")
    for unit in UNITS:
        write_encoded_unit(store, unit, INPUT.info.digest, encoded()[unit], (), ENGINE)
    digests = contents(Store.open(store.fs))
    return {unit: {entry.id: digests[entry.id] for entry in encoded()[unit].samples} for unit in UNITS}


def new_store(fs: FaultFilesystem, container: str) -> Store:
    store = create_store(fs, CAPTURE, HEAD, "safe", target_files(8), container)
    register_input(store, INPUT)
    return store


class StoreModel(RuleBasedStateMachine):
    """``live``: digests of the samples that the store must hold, by unit of a record; ``spoiled``: damaged segments;
    ``suspended``: records whose segment is durable and whose writer was stopped before it published them."""

    @initialize(container=st.sampled_from(["zarr", "webdataset"]))
    def create(self, container: str) -> None:
        self.container = container
        self.fs, self.copied = FaultFilesystem(), FaultFilesystem(root="/fault/copy")
        new_store(self.fs, container)
        self.live: dict[str, dict[str, str]] = {}
        self.snapshots: dict[str, dict[str, str]] = {}
        self.spoiled: set[str] = set()
        self.suspended: list[CommitRecord] = []
        self.gave_up = False

    @rule(unit=st.sampled_from(UNITS))
    def write(self, unit: str) -> None:
        """A writer, the second one of a unit where there was one."""
        record = self.attempt(unit)
        assert (record is None) == (unit in self.live), "doubled: a unit is committed twice"
        self.live.setdefault(unit, dict(whole()[unit]))

    @rule(unit=st.sampled_from(UNITS))
    def suspend(self, unit: str) -> None:
        """A writer is stopped between its segment and its record."""
        path = layout.segment_path(unit, layout.new_attempt())
        files = write_encoded(self.fs, path, encoded()[unit], CAPTURE, self.container)
        members = {"files": files, "samples": encoded()[unit].samples, "stats": encoded()[unit].stats}
        record = CommitRecord(unit=unit, input=INPUT.info.digest, segment=path, engine=ENGINE, **members)
        self.suspended.append(record)

    @precondition(lambda self: self.suspended)
    @rule(place=st.integers(0, 99))
    def go_on(self, place: int = 0) -> None:
        """A suspended writer goes on, however long it slept."""
        record = self.suspended.pop(place % len(self.suspended))
        if any(self.fs.size(f"{record.segment}/{file.path}") is None for file in record.files):
            assert self.gave_up or record.unit in self.live, "lost: gc swept what could still win"
            with pytest.raises(StorageError) as error:
                publish_segment(self.fs, record)
            assert error.value.kind == Kind.SEGMENT_SWEPT
            return
        won = publish_segment(self.fs, record)
        assert won == (record.unit not in self.live), "doubled: a unit is committed twice"
        self.live.setdefault(record.unit, dict(whole()[record.unit]))

    @rule(unit=st.sampled_from(UNITS), at=st.integers(0, 60), survival=st.sampled_from(SURVIVALS))
    def crash_while_writing(self, unit: str, at: int, survival: Any) -> None:
        """A writer's machine goes down at some operation; with it all that was suspended."""
        self.fs.disk.fault = Fault(len(self.fs.disk.operations) + at, "crash", ("before", "half", "after")[at % 3])
        with suppress(SimulatedCrash):
            self.attempt(unit)
        self.fs = self.fs.after_crash(*survival)
        self.suspended.clear()
        self.look(unit)

    @rule(unit=st.sampled_from(UNITS), at=st.integers(0, 60), kind=st.sampled_from(["enospc", "eio"]))
    def disk_error_while_writing(self, unit: str, at: int, kind: Any) -> None:
        self.fs.disk.fault = Fault(len(self.fs.disk.operations) + at, kind, "half")
        with suppress(StorageError):
            self.attempt(unit)
        self.fs.disk.fault = None
        self.look(unit)

    @rule(survival=st.sampled_from(SURVIVALS))
    def power_loss(self, survival: Any) -> None:
        self.fs = self.fs.after_crash(*survival)
        self.suspended.clear()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def damage_and_repair(self, data: st.DataObject) -> None:
        """One flipped byte; the storage refuses a read while it is repaired, and the repair is done again."""
        store = Store.open(self.fs)
        record = data.draw(st.sampled_from([record for record in store.commits() if record.files] or [None]))
        if record is None:
            return
        file = data.draw(st.sampled_from([file for file in record.files if file.size]))
        path = f"{record.segment}/{file.path}"
        damaged = bytearray(self.fs.read(path))
        damaged[data.draw(st.integers(0, file.size - 1))] ^= 1
        self.fs.disk.overwrite(f"{self.fs.root}/{path}", bytes(damaged))
        self.spoiled.add(record.segment)
        reads = len(self.fs.disk.reads)
        self.fs.disk.read_fault = ReadFault(reads + data.draw(st.integers(0, 80)), data.draw(st.sampled_from(ERRORS)))
        dropped: set[str] = set()
        with suppress(StorageError):
            dropped = self.drop_damaged()
        self.fs.disk.read_fault = None
        dropped |= self.drop_damaged()
        assert dropped <= {entry.id for entry in record.samples}, "lost: more than what was damaged"
        for name in dropped:
            del self.live[record.unit][name]

    def drop_damaged(self) -> set[str]:
        return {name for unit in repair_all(self.fs).units for name in unit.dropped}

    @rule()
    def collect_the_rest(self) -> None:
        """What a person types after all that: everything is there."""
        store = Store.open(self.fs)
        for pending in pending_units(store, INPUT.info.digest).values():
            if pending.replaces is None:
                self.write(pending.name)
                continue
            samples = [s for u in INPUT.units() if u.name == pending.name for s in u.samples if pending.lacks(s.id)]
            assert recapture_unit(store, pending, random_records(samples, CAPTURE), (), ENGINE)
            self.live[pending.name] = dict(whole()[pending.name])
        assert self.live == whole(), "lost: the same command did not finish the job"

    @rule()
    def snapshot(self) -> None:
        name = f"s{len(self.snapshots)}"
        Store.open(self.fs).save_snapshot(name)
        self.snapshots[name] = self.flat()

    @rule(abandoned=st.booleans())
    def sweep(self, abandoned: bool) -> None:
        gc(self.fs, dry_run=False, older_than_s=0, abandoned=abandoned)
        self.gave_up |= abandoned

    @rule()
    def copy(self) -> None:
        """Into a store that has earlier copies: it never loses what it had."""
        before = contents(Store.open(self.copied)) if self.copied.size(layout.STORE_JSON) is not None else {}
        run_copy(open_copy([Store.open(self.fs)], self.copied))
        assert contents(Store.open(self.copied)) == before | self.flat(), "lost: a copy is not what it was made of"

    @rule(at=st.integers(0, 200), error=st.sampled_from(ERRORS), command=st.sampled_from([verify, repair, gc]))
    def refused_read(self, at: int, error: int, command: Callable[[FaultFilesystem], object]) -> None:
        before = self.fs.disk.files()
        self.fs.disk.read_fault = ReadFault(len(self.fs.disk.reads) + at, error)
        with suppress(StorageError):
            command(self.fs)
        self.fs.disk.read_fault = None
        assert self.fs.disk.files() == before, "wrong: a read was refused and something changed"

    @invariant()
    def the_store_is_what_the_model_is(self) -> None:
        global steps
        steps += 1
        store = Store.open(self.fs)
        digests = contents(store)
        assert digests == self.flat(), "lost: or wrong, or doubled"
        assert not store.duplicates, "doubled: a sample is in two units"
        assert [problem for problem in problems(store) if "neither" not in problem] == []
        for name, frozen in self.snapshots.items():
            self.check_snapshot(Store.open(self.fs, name), frozen)

    def check_snapshot(self, store: Store, frozen: dict[str, str]) -> None:
        assert set(store.sample_ids) == set(frozen), "lost: a snapshot holds other samples than when it was made"
        for name in store.sample_ids:
            try:
                assert sample_digest(store, name) == frozen[name], "wrong: a snapshot reads as other data"
            except CorruptionError:
                assert store.locate(name)[0].segment in self.spoiled, "lost: a snapshot cannot be read any more"

    def flat(self) -> dict[str, str]:
        return {name: digest for unit in self.live.values() for name, digest in unit.items()}

    def attempt(self, unit: str) -> CommitRecord | None:
        return write_encoded_unit(Store.open(self.fs), unit, INPUT.info.digest, encoded()[unit], (), ENGINE)

    def look(self, unit: str) -> None:
        """A writer that was cut off may have committed its unit or not."""
        committed = committed_units(self.fs)
        assert set(self.live) <= committed, "lost: a unit that was committed"
        if unit in committed:
            self.live.setdefault(unit, dict(whole()[unit]))


def play(examples: int, length: int) -> None:
    run_state_machine_as_test(
        StoreModel,
        settings=settings(
            max_examples=examples,
            stateful_step_count=length,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def count_steps(figures: Figures, part: str, variant: str, work: Callable[[], None]) -> None:
    before, tally = steps, Tally()
    try:
        work()
    except BaseException:
        tally.failures.append("other: see the log")
        raise
    finally:
        figures.add(part, variant, replace(tally, points=steps - before))


def test_a_store_is_what_its_model_is(figures: Figures) -> None:
    count_steps(figures, "steps of drawn histories", "25 steps each", lambda: play(15, 25))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_store_is_what_its_model_is_at_length(figures: Figures) -> None:
    count_steps(figures, "steps of drawn histories", "50 steps each", lambda: play(600, 50))


EVENTS: dict[str, Callable[[StoreModel], None]] = {
    "goes on": lambda model: model.go_on(),
    "another writes the unit": lambda model: model.write(UNITS[0]),
    "gc": lambda model: model.sweep(False),
    "gc --abandoned": lambda model: model.sweep(True),
    "everything is collected": lambda model: model.collect_the_rest(),
}


@pytest.mark.parametrize(
    ("container", "events"),
    [
        pytest.param("webdataset", [name for name in EVENTS if name != "everything is collected"], id="webdataset"),
        pytest.param("zarr", list(EVENTS), id="zarr-all-events", marks=pytest.mark.slow),
        pytest.param("webdataset", list(EVENTS), id="webdataset-all-events", marks=pytest.mark.slow),
    ],
)
def test_every_schedule_of_two_suspended_writers_ends_with_each_sample_once(
    container: str, events: list[str], figures: Figures
) -> None:
    def work() -> None:
        for order in sorted(set(permutations([*events, "goes on"]))):
            model = StoreModel()
            model.create(container)
            model.suspend(UNITS[0])
            model.suspend(UNITS[0])
            for event in order:
                EVENTS[event](model)
            model.the_store_is_what_the_model_is()

    count_steps(figures, "schedules of two suspended writers", container, work)


def test_the_model_notices_a_gc_that_sweeps_what_can_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = structure.unnamed_segments

    def forgetful(*words: Any) -> dict[str, str]:
        return dict.fromkeys(honest(*words), "orphan")

    monkeypatch.setattr("hiddenstore.care.gc.unnamed_segments", forgetful)
    model = StoreModel()
    model.create("webdataset")
    model.suspend(UNITS[0])
    model.sweep(False)
    with pytest.raises(AssertionError, match="lost: gc swept what could still win"):
        model.go_on()
