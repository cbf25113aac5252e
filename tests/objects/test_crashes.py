"""Crashes before and after every put, and kills of real processes, on object storage."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hiddenstore.errors import NotFoundError
from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.fs.seam import is_temporary
from hiddenstore.inputs import PreparedInput
from hiddenstore.store import Store
from hiddenstore.testing.suite import Tally
from hiddenstore.testing.workload import fingerprint, garbage, problems
from tests.collectors.prepared import data_for_tiny
from tests.collectors.tiny import save_target
from tests.faults import SimulatedCrash
from tests.forked import Forked, command
from tests.objects.proxy import Fault, FaultProxy, Request
from tests.reliability.collect_worker import finish, start_collect
from tests.reliability.figures import Figures
from tests.reliability.test_crash_points import Plan, Workload, check_survivor
from tests.tiny_world import chat, run, write_rows

pytestmark = pytest.mark.objects

PLAN = Plan(container="webdataset")
T = TypeVar("T")
SIDES: tuple[Fault, Fault] = ("refused", "lost")


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


def test_a_crash_before_or_after_each_put_is_resumed_to_the_same_store(direct: str) -> None:
    count = puts(direct)
    assert count > 12
    for at in range(count):
        crash_and_resume(direct, at, is_after=bool(at % 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proxy", ["s3", "az"], indirect=True)
def test_a_crash_on_either_side_of_every_put_is_resumed_to_the_same_store(direct: str, figures: Figures) -> None:
    tally = Tally()
    for at, is_after in product(range(puts(direct)), (False, True)):
        tally.check(f"put {at}, after: {is_after}", partial(crash_and_resume, direct, at, is_after))
    figures.add("crashes before and after each put", direct.partition(":")[0] + "://", tally)
    assert tally.failures == []


class Killing:
    """Collects of small units onto object storage in processes of their own."""

    def __init__(self, place: str, folder: Path) -> None:
        self.data, self.target = data_for_tiny(folder / "data", samples=80), save_target(folder / "target")
        finish(start_collect(self.data, f"{place}/straight", self.target))
        self.expected = fingerprint(ObjectFilesystem(f"{place}/straight"))

    def kill_and_resume(self, store: str, dice: random.Random, kills: int) -> int:
        """The kills that hit work; the store finished afterwards equals the straight one."""
        hits, fs = 0, ObjectFilesystem(store)
        for _ in range(kills):
            world_size = dice.choice((1, 2))
            worker = start_collect(self.data, store, self.target, dice.randrange(world_size), world_size)
            wanted = len(fs.list("commits")) + dice.randrange(4)
            while worker.poll() is None and len(fs.list("commits")) < wanted:
                time.sleep(0.002)
            time.sleep(dice.uniform(0, 0.05))
            worker.send_signal(signal.SIGKILL)
            hits += worker.wait(120) == -signal.SIGKILL
        finish(start_collect(self.data, store, self.target))
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


def data_files(place: str) -> dict[str, bytes]:
    fs = ObjectFilesystem(place)
    return {name: fs.read(name) for name in fs.list("") if not is_temporary(name)}


def test_a_prepare_killed_at_any_put_leaves_no_data_and_the_same_command_goes_on(
    place: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    chats = write_rows(tmp_path / "chats.jsonl", [*(chat(i) for i in range(12)), {"messages": []}])
    words = ("prepare", chats, "--target", str(save_target(tmp_path / "target")), "--val", "20%", "-q", "-o")
    proxy.set_plan(None)
    assert run(*words, f"{place}/whole") == 0
    keys = [request.key for request in proxy.requests if request.method == "PUT"]
    expected, last = data_files(f"{place}/whole"), len(keys) - 1
    assert keys[last].endswith("/data.json")
    # Of the put that makes DATA of what lies there, both sides; of those before, one.
    for at, fault in [*((at, SIDES[at % 2]) for at in range(last)), *((last, side) for side in SIDES)]:
        out = f"{place}/{at}-{fault}"
        kill_at_put(proxy, at, fault, Forked(command, *words, out))
        is_whole = (at, fault) == (last, "lost")
        if not is_whole:
            with pytest.raises(NotFoundError):
                PreparedInput.open(out)
        assert run(*words, out) == (6 if is_whole else 0)
        assert data_files(out) == expected


def kill_at_put(proxy: FaultProxy, at: int, fault: Fault, process: Forked) -> None:
    """SIGKILL a process when its put number ``at`` comes: ``refused`` before it is done, ``lost`` after."""
    puts: list[str] = []

    def plan(request: Request) -> Fault | None:
        puts.extend([request.key] if request.method == "PUT" else [])
        if request.method != "PUT" or len(puts) != at + 1:
            return None
        process.send_signal(signal.SIGKILL)
        return fault

    proxy.set_plan(plan)
    assert process.wait(60) == -signal.SIGKILL
    proxy.set_plan(None)
    folder, _, name = puts[at].lstrip("/").rpartition("/")
    while fault == "lost" and ObjectFilesystem(f"s3://{folder}").size(name) is None:
        time.sleep(0.01)
