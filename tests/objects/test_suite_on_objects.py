"""``hiddenstore.testing.suite`` and the crash points of care on real servers of object storage."""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest

from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.testing.suite import (
    MortalFilesystem,
    SimulatedCrash,
    Tally,
    crash_points,
    damage,
    kills,
    lost_replies,
    races,
)
from hiddenstore.testing.workload import Plan
from schemas.manifest import Container
from tests.reliability.figures import Figures
from tests.reliability.test_care_crash_points import (
    Damaged,
    care,
    check_survivor,
    damaged_record,
    damaged_sample,
    readable,
)

# A process that is dead closes no file.
pytestmark = [pytest.mark.objects, pytest.mark.filterwarnings("ignore:[Uu]nclosed file:ResourceWarning")]

WHOLE = [pytest.mark.slow, pytest.mark.timeout(3600)]
WEBDATASET, ZARR = "webdataset", "zarr"


@dataclass(frozen=True)
class Bucket:
    """A backend of the suite below an address; ``environment`` is what a process of its own finds there."""

    address: str
    environment: Mapping[str, str]

    def __call__(self, name: str) -> Filesystem:
        os.environ.update(self.environment)
        return ObjectFilesystem(f"{self.address}/{name}")

    @property
    def scheme(self) -> str:
        return f"{self.address.partition(':')[0]}://"


@pytest.fixture
def bucket(direct: str) -> Bucket:
    return Bucket(direct, {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_"))})


@dataclass(frozen=True)
class Share:
    """How much of the suite is run: every ``step``-th crash point, every ``stride``-th byte, so many kills."""

    step: int
    kills: int
    stride: int


SAMPLE, ALL = Share(17, 1, 1 << 13), Share(1, 40, 499)
PARTS: dict[str, Callable[[Bucket, Container, Share], Tally]] = {
    "crash points at the seam": lambda bucket, container, share: crash_points(
        bucket, Plan(container=container), share.step
    ),
    "lost replies": lambda bucket, container, _: lost_replies(bucket, Plan(container=container)),
    "races of writers": lambda bucket, _container, share: races(bucket, times=5 * share.kills),
    "SIGKILLs of a writer": lambda bucket, container, share: kills(bucket, Plan(container=container), share.kills),
    "damage": lambda bucket, container, share: damage(bucket, "q8", container, share.stride),
}


def check(name: str, container: Container, bucket: Bucket, share: Share, figures: Figures) -> None:
    tally = PARTS[name](bucket, container, share)
    figures.add(name, f"{bucket.scheme}, {container}", tally)
    assert tally.points
    assert tally.failures == []


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("proxy", ["s3", "az"], indirect=True)
def test_object_storage_passes_the_suite(name: str, bucket: Bucket, figures: Figures) -> None:
    check(name, WEBDATASET, bucket, SAMPLE, figures)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("container", [WEBDATASET, ZARR])
@pytest.mark.parametrize("proxy", [pytest.param(scheme, marks=WHOLE) for scheme in ("s3", "az")], indirect=True)
def test_object_storage_passes_all_of_the_suite(
    name: str, container: Container, bucket: Bucket, figures: Figures
) -> None:
    check(name, container, bucket, ALL, figures)


def uploaded(damaged: Damaged, fs: Filesystem) -> Filesystem:
    for path, data in damaged.fs.disk.files().items():
        file = fs.create(path.removeprefix(f"{damaged.fs.root}/"))
        file.write(data)
        file.close()
    return fs


def crash_in_care(damaged: Damaged, bucket: Bucket, step: int) -> Tally:
    """Repair, recapture and gc die before or after every ``step``-th call that changes anything."""
    before, tally = readable(damaged.fs), Tally()
    assert before.items() < damaged.expected.items()
    counting = MortalFilesystem(uploaded(damaged, bucket("counted")))
    care(counting)
    for at, name in list(enumerate(counting.calls))[::step]:
        for moment in ("before", "after"):
            fs = uploaded(damaged, bucket(f"{at}-{moment}"))
            with suppress(SimulatedCrash):
                care(MortalFilesystem(fs, at, moment))
            survivor = bucket(f"{at}-{moment}")
            tally.check(f"{moment} call {at}: {name}", partial(check_survivor, survivor, before, damaged.expected))
    return tally


def check_care(
    make: Callable[[Container], Damaged], container: Container, bucket: Bucket, step: int, figures: Figures
) -> None:
    tally = crash_in_care(make(container), bucket, step)
    figures.add("crash points of repair, recapture, gc", f"{bucket.scheme}, {container}", tally)
    assert tally.points
    assert tally.failures == []


@pytest.mark.parametrize("make", [damaged_sample, damaged_record])
@pytest.mark.parametrize("proxy", ["s3", "az"], indirect=True)
def test_a_crash_in_care_on_objects_loses_nothing(
    make: Callable[[Container], Damaged], bucket: Bucket, figures: Figures
) -> None:
    check_care(make, WEBDATASET, bucket, 11, figures)


@pytest.mark.parametrize("make", [damaged_sample, damaged_record])
@pytest.mark.parametrize("container", [WEBDATASET, ZARR])
@pytest.mark.parametrize("proxy", [pytest.param(scheme, marks=WHOLE) for scheme in ("s3", "az")], indirect=True)
def test_no_crash_in_care_on_objects_loses_anything(
    make: Callable[[Container], Damaged], container: Container, bucket: Bucket, figures: Figures
) -> None:
    check_care(make, container, bucket, 1, figures)
