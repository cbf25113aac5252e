"""Crashes before and after every put, and kills of real processes, on object storage."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.invariants import fingerprint, garbage, problems
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.faults import SimulatedCrash
from tests.reliability.test_crash_points import Plan, Workload, check_survivor

pytestmark = pytest.mark.objects

ROOT = Path(__file__).parents[2]
PLAN = Plan(container="webdataset")
T = TypeVar("T")


class CrashingFilesystem(ObjectFilesystem):
    """Dies before or after put number ``at`` (counted from 0), and stays dead."""

    def __init__(self, address: str, at: int | None = None, is_after: bool = False) -> None:
        super().__init__(address)
        self._at, self._is_after = at, is_after
        self.puts, self._is_dead = 0, False

    def _ask(self, path: str, action: Callable[[Any, str], T], is_put: bool = False) -> T:
        if self._is_dead:
            raise SimulatedCrash
        strikes = is_put and self.puts == self._at
        self.puts += is_put
        if strikes and not self._is_after:
            self._is_dead = True
            raise SimulatedCrash
        try:
            return super()._ask(path, action, is_put)
        finally:
            if strikes:
                self._is_dead = True
                raise SimulatedCrash


def crash_and_resume(place: str, at: int, is_after: bool) -> None:
    fs = CrashingFilesystem(f"{place}/{at}-{is_after}", at, is_after)
    work = Workload(fs, PLAN)  # type: ignore[arg-type]
    with pytest.raises(SimulatedCrash):
        work.run()
    check_survivor(ObjectFilesystem(fs.root), work)  # type: ignore[arg-type]


def puts(place: str) -> int:
    fs = CrashingFilesystem(f"{place}/straight")
    store = Workload(fs, PLAN).run()  # type: ignore[arg-type]
    assert garbage(store.fs) == []
    return fs.puts


@pytest.fixture
def direct(server: str, place: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An address that is reached without the proxy, which would take most of the time."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    return place


def test_a_crash_before_or_after_each_put_is_resumed_to_the_same_store(direct: str) -> None:
    count = puts(direct)
    assert count > 12
    for at in range(count):
        crash_and_resume(direct, at, is_after=bool(at % 2))


@pytest.mark.slow
def test_a_crash_on_the_other_side_of_each_put_is_resumed_to_the_same_store(direct: str) -> None:
    for at in range(puts(direct)):
        crash_and_resume(direct, at, is_after=not at % 2)


class Killing:
    """Collects of small units onto object storage in processes of their own."""

    def __init__(self, place: str, folder: Path) -> None:
        self.data, self.target = data_for_tiny(folder / "data", samples=80), save_target(folder / "target")
        self.finish(f"{place}/straight")
        self.expected = fingerprint(ObjectFilesystem(f"{place}/straight"))

    def start(self, store: str, rank: int = 0, world_size: int = 1) -> "subprocess.Popen[str]":
        arguments = [str(self.data), store, str(self.target), str(rank), str(world_size)]
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.reliability.collect_worker", *arguments],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        assert worker.stdout.readline()
        return worker

    def finish(self, store: str) -> None:
        _out, errors = (worker := self.start(store)).communicate()
        assert worker.returncode == 0, errors

    def kill_and_resume(self, store: str, dice: random.Random, kills: int) -> int:
        """The kills that hit work; the store finished afterwards equals the straight one."""
        hits, fs = 0, ObjectFilesystem(store)
        for _ in range(kills):
            world_size = dice.choice((1, 2))
            worker = self.start(store, dice.randrange(world_size), world_size)
            wanted = len(fs.list("commits")) + dice.randrange(4)
            while worker.poll() is None and len(fs.list("commits")) < wanted:
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.05))
            worker.send_signal(signal.SIGKILL)
            worker.communicate()
            hits += worker.returncode == -signal.SIGKILL
        self.finish(store)
        assert problems(Store.open(store), finished=True) == []
        assert fingerprint(fs) == self.expected
        return hits


def test_a_collect_killed_twice_resumes_to_the_uninterrupted_store(direct: str, tmp_path: Path) -> None:
    assert Killing(direct, tmp_path).kill_and_resume(f"{direct}/killed", random.Random(5), kills=2) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_collects_killed_25_times_over_several_stores_resume_each(direct: str, tmp_path: Path) -> None:
    killing, dice = Killing(direct, tmp_path), random.Random(25)
    assert sum(killing.kill_and_resume(f"{direct}/killed-{n}", dice, kills=5) for n in range(5)) >= 15
