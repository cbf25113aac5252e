"""Every crash point of create → register → write → seal → commit → snapshot, in every way a disk may come back.

One run of the workload passes every moment a crash could fall on: before each operation on the disk, half-way through
each write, and after the last. At each of them the disk is taken as six survivors: data since the last fsync kept,
dropped or torn, times names since the last folder fsync kept or dropped. Each distinct survivor is opened, checked,
resumed by the same workload and compared with the run that never crashed.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest

from hiddenstore import layout, writer
from hiddenstore.codecs.recipes import recipe_name
from hiddenstore.errors import HiddenstoreError, StorageError
from hiddenstore.segments.base import EncodedUnit
from hiddenstore.segments.encode import encode_records
from hiddenstore.store import Store
from hiddenstore.testing.builders import (
    ENGINE,
    HEAD,
    capture_spec,
    memory_input,
    random_records,
    target_files,
)
from hiddenstore.writer import create_store, register_input, write_encoded_unit
from schemas.capture import CaptureSpec
from schemas.manifest import Container
from tests.faults import SURVIVALS, Fault, FaultDisk, FaultFilesystem, SimulatedCrash
from tests.invariants import contents, fingerprint, garbage, problems

SAMPLES = 3
PREPARED = memory_input(SAMPLES)
TARGET_FILES = target_files(width=8)


@dataclass(frozen=True)
class Plan:
    """What to write: units encoded beforehand, and whether the input is registered before or after them."""

    codec: str = "bf16"
    register_first: bool = True
    container: Container = "zarr"

    @cached_property
    def capture(self) -> CaptureSpec:
        return capture_spec(layers=(1,), width=8, codec=self.codec)

    @cached_property
    def units(self) -> dict[str, EncodedUnit]:
        return {
            unit.name: encode_records(unit.name, random_records(unit.samples, self.capture), self.capture)
            for unit in PREPARED.units()
        }

    @cached_property
    def expected(self) -> tuple[dict[str, object], dict[str, str]]:
        """Fingerprint and contents of the run that never crashed."""
        store = Workload(FaultFilesystem(), self).run()
        assert problems(store, finished=True) == []
        assert len(self.units) >= 2
        assert len(store) == SAMPLES
        return fingerprint(store.fs), contents(store)


@dataclass
class Workload:
    """What a collector does, and what it was told had succeeded."""

    fs: FaultFilesystem
    plan: Plan
    done: list[str] = field(default_factory=list)
    registered: bool = False

    def run(self) -> Store:
        plan = self.plan
        store = create_store(
            self.fs, plan.capture, HEAD, recipe_name(plan.capture.codecs), TARGET_FILES, plan.container
        )
        if self.plan.register_first:
            self.register(store)
        held = {record.unit for record in store.commits()}
        for unit, encoded in self.plan.units.items():
            if unit not in held:
                assert write_encoded_unit(store, unit, PREPARED.info.digest, encoded, (), ENGINE)
                self.done.append(unit)
        self.register(store)
        store = Store.open(self.fs)
        store.save_snapshot("end")
        return store

    def register(self, store: Store) -> None:
        register_input(store, PREPARED)
        self.registered = True

    def promised(self) -> "Workload":
        return replace(self, done=list(self.done))


def check_survivor(fs: FaultFilesystem, work: Workload) -> None:
    """What a crash left is sound, holds all that was promised, and the same command finishes the job."""
    stored, read = work.plan.expected
    if fs.size(layout.STORE_JSON) is not None:
        store = Store.open(fs)
        assert problems(store) == []
        assert contents(store).items() <= read.items()
        assert {record.unit for record in store.commits()} >= set(work.done)
        assert bool(store.inputs()) >= work.registered
    else:
        assert work.done == []
    resumed = Workload(fs, work.plan)
    store = resumed.run()
    assert not set(resumed.done) & set(work.done)
    assert problems(store, finished=True) == []
    assert fingerprint(fs) == stored
    assert contents(store) == read


def check_all(distinct: list[tuple[FaultFilesystem, Workload]]) -> None:
    for fs, work in distinct:
        check_survivor(fs, work)


def survivors(plan: Plan) -> tuple[list[tuple[FaultFilesystem, Workload]], int]:
    """Distinct survivors, each with what had been promised by then, and the number of crash points."""
    fs = FaultFilesystem()
    work = Workload(fs, plan)
    found: dict[bytes, tuple[FaultFilesystem, Workload]] = {}
    points = 0

    def observe() -> None:
        nonlocal points
        points += 1
        for data, names in SURVIVALS:
            after = fs.after_crash(data, names)
            key = hashlib.sha256(after.disk.state() + repr((work.done, work.registered)).encode()).digest()
            found.setdefault(key, (after, work.promised()))

    fs.disk.observer = observe
    work.run()
    observe()
    return list(found.values()), points


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan("bf16", True), id="bf16"),
        pytest.param(Plan("bf16", False), id="bf16-registered-last"),
        pytest.param(Plan("bf16", True, "webdataset"), id="bf16-webdataset"),
        pytest.param(Plan("q8", True, "webdataset"), id="q8-webdataset", marks=pytest.mark.slow),
        pytest.param(Plan("q8", True), id="q8", marks=pytest.mark.slow),
        pytest.param(Plan("lossless", True), id="lossless", marks=pytest.mark.slow),
        pytest.param(Plan("q4", True), id="q4", marks=pytest.mark.slow),
        pytest.param(Plan("tiny", True), id="topk", marks=pytest.mark.slow),
    ],
)
def test_every_crash_point_leaves_a_sound_store_that_the_same_command_finishes(plan: Plan) -> None:
    distinct, points = survivors(plan)
    assert points > (200 if plan.container == "zarr" else 80)
    check_all(distinct)
    print(f"{points} crash points, {points * len(SURVIVALS)} survivors, {len(distinct)} distinct")  # noqa: T201


@pytest.mark.parametrize("forgotten", ["sync_file", "sync_folder", "commit"])
def test_the_enumeration_notices_what_is_not_made_durable(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan()
    assert plan.expected
    if forgotten == "commit":
        monkeypatch.setattr(writer, "publish_commit", lambda *_: True)
    else:
        monkeypatch.setattr(FaultDisk, forgotten, lambda self, target: None)
    distinct, _ = survivors(plan)
    with pytest.raises((AssertionError, HiddenstoreError)):
        check_all(distinct)


def operations(plan: Plan) -> list[str]:
    fs = FaultFilesystem()
    Workload(fs, plan).run()
    return fs.disk.operations


def test_a_crash_raised_in_the_middle_of_any_operation_runs_no_clean_up() -> None:
    plan = Plan()
    for at in range(0, len(operations(plan)), 5):
        fs = FaultFilesystem(Fault(at, "crash", ("before", "half", "after")[at % 3]))  # type: ignore[arg-type]
        work = Workload(fs, plan)
        with pytest.raises(SimulatedCrash):
            work.run()
        check_survivor(fs.after_crash("kept", "kept"), work)


def test_an_error_of_the_disk_at_any_operation_stops_cleanly_and_the_job_resumes() -> None:
    plan = Plan()
    for at, name in enumerate(operations(plan)):
        grows = name.split()[0] in ("make_folder", "create", "write", "link")
        fs = FaultFilesystem(Fault(at, "enospc" if grows else "eio", "half"))
        work = Workload(fs, plan)
        if name.startswith("unlink"):
            work.run()
        else:
            with pytest.raises(StorageError) as error:
                work.run()
            assert (error.value.kind, error.value.exit_code) == ("disk-full" if grows else "io-error", 5)
        check_survivor(fs.copy() if grows else fs.after_crash("dropped", "dropped"), work)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_full_disk_leaves_nothing_trusted_and_room_lets_the_job_finish(share: float) -> None:
    plan = Plan()
    whole = FaultFilesystem()
    Workload(whole, plan).run()
    fs = FaultFilesystem(capacity=int(whole.disk.used() * share))
    work = Workload(fs, plan)
    with pytest.raises(StorageError, match=r"needs [\d,]+ more bytes, [\d,]+ bytes free") as error:
        work.run()
    assert error.value.kind == "disk-full"
    if fs.size(layout.STORE_JSON) is not None:
        assert garbage(fs) == []
    fs.disk.capacity = None
    check_survivor(fs, work)
