"""Crash points of repair → recapture → gc: what still reads is never lost, and the same commands finish the job.

As in ``test_crash_points``: one run passes every moment a crash could fall on, and at each of them the disk is taken as
six survivors.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest

from hiddenstore.care.gc import gc
from hiddenstore.care.stored_unit import recapture_unit
from hiddenstore.errors import CorruptionError
from hiddenstore.files import layout
from hiddenstore.fs.seam import Filesystem
from hiddenstore.store import Store
from hiddenstore.testing.builders import ENGINE, make_samples, make_store, random_records
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import contents, problems, sample_digest
from hiddenstore.verify import verify
from hiddenstore.writer import pending_units
from schemas.manifest import Container
from tests.accepting import repair_all
from tests.faults import SURVIVALS, FaultFilesystem
from tests.reliability.figures import Figures

SAMPLES = 6


@dataclass(frozen=True)
class Damaged:
    """A store with damage, and what it held before."""

    fs: FaultFilesystem
    expected: dict[str, str]


def flip(fs: FaultFilesystem, path: str, place: int) -> None:
    data = bytearray(fs.read(path))
    data[place] ^= 1
    fs.disk.overwrite(f"{fs.root}/{path}", bytes(data))


def damaged_sample(container: Container) -> Damaged:
    fs = FaultFilesystem()
    store = make_store(fs, samples=SAMPLES, layers=(1,), width=8, codec="q8", container=container)
    record, expected = max(store.commits(), key=lambda r: len(r.samples)), contents(store)
    if container == "webdataset":
        path = f"{record.segment}/samples.tar"
        flip(fs, path, fs.read(path).index(f"{record.samples[0].id}.layer_1".encode()) + 512 + 128)
    else:
        flip(fs, f"{record.segment}/layer_1/c/0/0", 3)
    return Damaged(fs, expected)


def damaged_record(container: Container) -> Damaged:
    fs = FaultFilesystem()
    store = make_store(fs, samples=SAMPLES, layers=(1,), width=8, codec="q8", container=container)
    expected = contents(store)
    flip(fs, layout.commit_path(store.commits()[0].unit), 700)
    return Damaged(fs, expected)


def care(fs: Filesystem) -> Store:
    """What a person types: repair, the same collect, gc."""
    repair_all(fs)
    store = Store.open(fs)
    (digest,) = store.inputs()
    for pending in pending_units(store, digest).values():
        samples = [
            sample for sample in make_samples(SAMPLES) if sample.id in pending.order and pending.lacks(sample.id)
        ]
        assert recapture_unit(store, pending, random_records(samples, store.capture), (), ENGINE)
    gc(fs, dry_run=False, older_than_s=0)
    return Store.open(fs)


def readable(fs: Filesystem) -> dict[str, str]:
    """What reads in spite of damage."""
    store, digests = Store.open(fs, strict=False), {}
    for name in store.sample_ids:
        with suppress(CorruptionError):
            digests[name] = sample_digest(store, name)
    return digests


def check_survivor(fs: Filesystem, before: dict[str, str], expected: dict[str, str]) -> None:
    """What read before a crash still reads, and the same commands finish."""
    assert before.items() <= readable(fs).items(), "lost: what read before the crash"
    store = care(fs)
    assert contents(store) == expected, "lost: other samples than before the damage"
    assert problems(store, finished=True) == []
    assert verify(fs, "bytes").findings == []


def survivors(fs: FaultFilesystem, step: int) -> list[FaultFilesystem]:
    """Distinct disks after a crash at every ``step``-th moment."""
    distinct: dict[bytes, FaultFilesystem] = {}
    moments = 0

    def observe() -> None:
        nonlocal moments
        moments += 1
        if moments % step == 0:
            for data, names in SURVIVALS:
                after = fs.after_crash(data, names)
                distinct.setdefault(hashlib.sha256(after.disk.state()).digest(), after)

    fs.disk.observer = observe
    care(fs)
    observe()
    fs.disk.observer = None
    return list(distinct.values())


def check(make: Callable[[Container], Damaged], container: Container, step: int, figures: Figures) -> None:
    damaged = make(container)
    before = readable(damaged.fs)
    assert before.items() <= damaged.expected.items()
    found = survivors(damaged.fs, step)
    assert len(found) > 5
    for fs in found:
        check_survivor(fs, before, damaged.expected)
    figures.add("crash points of repair, recapture, gc × 6 power losses", container, Tally(points=len(found)))


@pytest.mark.parametrize("make", [damaged_sample, damaged_record])
def test_a_crash_in_care_loses_nothing_and_the_same_commands_finish(
    make: Callable[[Container], Damaged], figures: Figures
) -> None:
    check(make, "webdataset", 3, figures)


@pytest.mark.slow
@pytest.mark.parametrize("container", ["zarr", "webdataset"])
@pytest.mark.parametrize("make", [damaged_sample, damaged_record])
def test_every_crash_point_of_care_loses_nothing_and_the_same_commands_finish(
    make: Callable[[Container], Damaged], container: Container, figures: Figures
) -> None:
    check(make, container, 1, figures)
