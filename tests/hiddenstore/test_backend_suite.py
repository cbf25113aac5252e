"""``hiddenstore.testing``: a local disk passes its suite, and a backend that lies does not."""

from functools import partial
from pathlib import Path

import pytest

from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem
from hiddenstore.testing.suite import crash_points, damage, kills, lost_replies, races
from hiddenstore.testing.workload import Plan
from hiddenstore.verify import Report
from tests.faults import FaultFilesystem, memory_backend
from tests.reliability.figures import Figures

PLAN = Plan(container="webdataset")


def local(folder: Path, name: str) -> Filesystem:
    return LocalFilesystem(folder / name)


@pytest.mark.parametrize(
    ("thin", "times"), [(41, 1), pytest.param(1, 100, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_a_local_disk_passes_the_suite(thin: int, times: int, tmp_path: Path, figures: Figures) -> None:
    backend = partial(local, tmp_path)
    parts = {
        "crash points at the seam": crash_points(backend, PLAN, step=thin),
        "races of writers": races(backend, times=3 * times),
        "lost replies": lost_replies(backend, PLAN),
        "SIGKILLs of a writer": kills(backend, PLAN, times=times),
        "damage": damage(backend, "q8", "webdataset", step=211 * thin),
    }
    for name, tally in parts.items():
        figures.add(name, "a local disk, webdataset", tally)
        assert tally.points, name
        assert tally.failures == [], name


@pytest.mark.parametrize(("container", "step"), [("zarr", 4), ("webdataset", 1)])
def test_crash_points_at_the_seam_are_survived(container: str, step: int) -> None:
    tally = crash_points(memory_backend(), Plan(container=container), step)
    assert tally.points > 20
    assert tally.failures == []


def failures(tallies: list) -> str:
    return "\n".join(failure for tally in tallies for failure in tally.failures)


def test_a_backend_that_replaces_what_is_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FaultFilesystem.put_if_absent

    def replaces(fs: FaultFilesystem, path: str, data: bytes) -> bool:
        fs.remove_tree(path)
        return honest(fs, path, data)

    monkeypatch.setattr(FaultFilesystem, "put_if_absent", replaces)
    assert "wrong: " in failures([races(memory_backend(), times=1)])


def test_a_backend_that_forgets_a_document_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = FaultFilesystem.put_if_absent
    monkeypatch.setattr(
        FaultFilesystem, "put_if_absent", lambda fs, path, data: "r-" in path or honest(fs, path, data[: len(data) - 1])
    )
    with pytest.raises(Exception, match="damaged"):
        crash_points(memory_backend(), PLAN, step=5)


def test_damage_that_nothing_notices_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenstore.testing.workload.verify", lambda *_, **__: Report("bytes"))
    assert "silent: " in failures([damage(memory_backend(), "bf16", "webdataset", step=211)])
