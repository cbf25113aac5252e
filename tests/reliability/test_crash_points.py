"""Every crash point of create → register → write → seal → commit → snapshot, in every way a disk may come back.

One run of the workload passes every moment a crash could fall on: before each operation on the disk, half-way through
each write, and after the last. At each of them the disk is taken as six survivors: data since the last fsync kept,
dropped or torn, times names since the last folder fsync kept or dropped. Each distinct survivor is opened, checked,
resumed by the same workload and compared with the run that never crashed.
"""

import hashlib
from collections import deque
from functools import cache, partial
from typing import Any

import pytest

from hiddenstore import writer
from hiddenstore.errors import HiddenstoreError, StorageError
from hiddenstore.files import layout
from hiddenstore.fs import local
from hiddenstore.testing.suite import SimulatedCrash, Tally
from hiddenstore.testing.workload import Plan, Workload, garbage
from tests.faults import SURVIVALS, Fault, FaultDisk, FaultFilesystem
from tests.reliability.figures import Figures


@cache
def expected(plan: Plan) -> Any:
    """Fingerprint and contents of the run that never crashed."""
    return plan.expected(FaultFilesystem())


def check_survivor(fs: FaultFilesystem, work: Workload) -> None:
    work.check(fs, expected(work.plan))


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
        pytest.param(Plan("bf16", False), id="bf16-registered-last", marks=pytest.mark.slow),
        pytest.param(Plan("bf16", True, "webdataset"), id="bf16-webdataset"),
        pytest.param(Plan("q8", True, "webdataset"), id="q8-webdataset", marks=pytest.mark.slow),
        pytest.param(Plan("q8", True), id="q8", marks=pytest.mark.slow),
        pytest.param(Plan("lossless", True), id="lossless", marks=pytest.mark.slow),
        pytest.param(Plan("q4", True), id="q4", marks=pytest.mark.slow),
        pytest.param(Plan("tiny", True), id="topk", marks=pytest.mark.slow),
    ],
)
def test_every_crash_point_leaves_a_sound_store_that_the_same_command_finishes(plan: Plan, figures: Figures) -> None:
    distinct, points = survivors(plan)
    assert points > (200 if plan.container == "zarr" else 80)
    tally = Tally()
    for fs, work in distinct:
        tally.check("", partial(check_survivor, fs, work))
    figures.add("crash points × 6 power losses", f"{plan.container}, {plan.codec}: {points} points", tally)
    assert tally.failures == []


@pytest.mark.parametrize("container", ["zarr", "webdataset"])
def test_every_crash_point_between_the_blocks_of_a_file_leaves_a_sound_store(
    container: str, figures: Figures, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan("bf16", True, container)
    expected(plan)
    monkeypatch.setattr(local, "_BLOCK_BYTES", 512)
    monkeypatch.setattr(local, "_SPARE", deque())
    distinct, points = survivors(plan)
    tally = Tally()
    for fs, work in distinct:
        tally.check("", partial(check_survivor, fs, work))
    figures.add("crash points × 6 power losses", f"{container}, bf16, blocks of 512 bytes: {points} points", tally)
    assert tally.failures == []


@pytest.mark.parametrize("forgotten", ["sync_file", "sync_folder", "commit"])
def test_the_enumeration_notices_what_is_not_made_durable(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan()
    expected(plan)
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
