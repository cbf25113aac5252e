"""Crash points, lost replies, races, kills and damage over any backend: what a filesystem must pass to hold a store.

Each function takes a ``Backend`` and gives a ``Tally``; nothing is raised for what goes wrong. Power loss, which only
a disk that one writes oneself can show, is not among them.

>>> from hiddenstore.fs.local import LocalFilesystem
>>> tally = crash_points(lambda name: LocalFilesystem(folder / name), Plan(container="webdataset"), step=40)
>>> tally.failures
[]
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal, cast

from hiddenstore.errors import HiddenstoreError, Kind, StorageError
from hiddenstore.fs.seam import Filesystem, WritableFile
from hiddenstore.testing.workload import Backend, Plan, Sweep, Workload

Moment = Literal["before", "half", "after"]


class SimulatedCrash(BaseException):
    """The process is dead: no handler may tidy up, and every later operation raises this again."""


WORDS = ("lost", "doubled", "wrong", "silent", "traceback", "other")
"""What a failure is: samples lost, doubled or wrong, damage that nothing noticed, an error not ours, the rest."""


@dataclass
class Tally:
    """What a part of the suite came to: ``points`` tried, ``failures`` one line for each that went wrong, which begins
    with one of ``WORDS``."""

    points: int = 0
    failures: list[str] = field(default_factory=list)

    def check(self, where: str, look: Callable[[], object]) -> None:
        """One more point; what ``look`` raises is its failure. An AssertionError may begin with one of ``WORDS``."""
        self.points += 1
        try:
            look()
        except Exception as error:  # noqa: BLE001 - a failure of any kind is the answer
            word = str(error).partition(":")[0] if isinstance(error, AssertionError) else "traceback"
            word = "other" if word not in WORDS or isinstance(error, HiddenstoreError) else word
            self.failures.append(f"{word}: {where}: {type(error).__name__}: {error}"[:500])


class MortalFilesystem:
    """A filesystem whose process dies at call number ``at`` of those that change anything, counted from 0.

    ``half`` lets a write put down half of its bytes. ``loses`` the reply of a put-if-absent instead of dying.
    """

    def __init__(self, inner: Filesystem, at: int = -1, moment: Moment = "before", loses: int = -1) -> None:
        self.root = inner.root
        self.calls: list[str] = []
        self.puts = 0
        self._inner, self._at, self._moment, self._loses, self._dead = inner, at, moment, loses, False

    def __getattr__(self, name: str) -> Any:
        """Reads, and whatever else the seam has."""
        if self._dead:
            raise SimulatedCrash
        return getattr(self._inner, name)

    def create(self, path: str) -> WritableFile:
        return cast(WritableFile, _MortalFile(self, self.call(f"create {path}", lambda: self._inner.create(path))))

    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = self.call(f"put {path}", lambda: self._inner.put_if_absent(path, data))
        number, self.puts = self.puts, self.puts + 1
        if number == self._loses:
            raise StorageError(f"{self.root}/{path}: no reply", kind=Kind.REPLY_LOST)
        return won

    def sync_folder(self, path: str) -> None:
        self.call(f"sync {path}", lambda: self._inner.sync_folder(path))

    def remove_tree(self, path: str) -> None:
        self.call(f"remove {path}", lambda: self._inner.remove_tree(path))

    def call(self, name: str, act: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        """One call that changes something."""
        if self._dead:
            raise SimulatedCrash
        strikes = len(self.calls) == self._at
        self.calls.append(name)
        if strikes and self._moment != "after":
            if self._moment == "half":
                half()
            self._die(name)
        done = act()
        if strikes:
            self._die(name)
        return done

    def _die(self, name: str) -> None:
        self._dead = True
        raise SimulatedCrash(f"{self._moment} {name}")


class _MortalFile:
    """What is appended waits here for one write, which may then break in its middle."""

    def __init__(self, fs: MortalFilesystem, file: WritableFile) -> None:
        self._fs, self._file, self._waiting = fs, file, bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._put_waiting()
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        self._fs.call("write", lambda: self._file.write(data), lambda: self._file.write(half))

    def append(self, data: bytes | memoryview) -> None:
        self._waiting += data

    def close(self) -> None:
        self._put_waiting()
        self._fs.call("close", self._file.close)

    def _put_waiting(self) -> None:
        whole, self._waiting = bytes(self._waiting), bytearray()
        if whole:
            half = whole[: len(whole) // 2]
            self._fs.call("write", lambda: self._file.append(whole), lambda: self._file.write(half))

    def abort(self) -> None:
        self._fs.call("abort", self._file.abort)


def crash_points(backend: Backend, plan: Plan = Plan(), step: int = 1) -> Tally:  # noqa: B008 - a frozen value
    """The work of a collector dies before, in the middle of and after every ``step``-th call that changes anything;
    what is left is checked, and the same work finishes the job."""
    tally, expected = Tally(), plan.expected(backend("crash-whole"))
    counting = MortalFilesystem(backend("crash-counted"))
    Workload(cast(Filesystem, counting), plan).run()
    moments: tuple[Moment, ...] = ("before", "half", "after")
    for at, name in list(enumerate(counting.calls))[::step]:
        for moment in moments if name == "write" else moments[::2]:
            place = f"crash-{at}-{moment}"
            mortal = MortalFilesystem(backend(place), at, moment)
            work = Workload(cast(Filesystem, mortal), plan)
            with suppress(SimulatedCrash):
                work.run()
            tally.check(f"{moment} call {at}: {name}", partial(work.check, backend(place), expected))
    return tally


def lost_replies(backend: Backend, plan: Plan = Plan()) -> Tally:  # noqa: B008 - a frozen value
    """Every put-if-absent succeeds once without saying so; the work goes on, or the same work finishes the job."""
    tally, expected = Tally(), plan.expected(backend("reply-whole"))
    counting = MortalFilesystem(backend("reply-counted"))
    Workload(cast(Filesystem, counting), plan).run()
    for at in range(counting.puts):
        place = f"reply-{at}"
        work = Workload(cast(Filesystem, MortalFilesystem(backend(place), loses=at)), plan)
        with suppress(StorageError):
            work.run()
        tally.check(f"no reply to put {at}", partial(work.check, backend(place), expected))
    return tally


def races(backend: Backend, times: int = 20, writers: int = 4) -> Tally:
    """Writers that publish the same name at once, each with its own bytes: one wins, and its bytes are what is read."""
    tally = Tally()
    with ThreadPoolExecutor(writers) as pool:
        for number in range(times):
            name = f"commits/race-{number}.json"
            contents = [bytes([writer]) * 4096 for writer in range(writers)]
            won = list(pool.map(backend("race").put_if_absent, [name] * writers, contents))

            def check(won: list[bool] = won, name: str = name, contents: list[bytes] = contents) -> None:
                assert sum(won) == 1, f"wrong: {sum(won)} writers were told that they published {name}"
                assert backend("race").read(name) == contents[won.index(True)], f"wrong: {name} is not the winner's"

            tally.check(name, check)
    return tally


def kills(backend: Backend, plan: Plan = Plan(), times: int = 10, seed: int = 0) -> Tally:  # noqa: B008 - a frozen value
    """SIGKILLs of real processes that do the work, at random moments, up to three in a row in one place.

    ``points`` counts kills that came before the work was done.
    """
    tally, expected, dice = Tally(), plan.expected(backend("kill-whole")), random.Random(seed)
    span_s = run_and_kill(_work, (backend, "kill-span", plan), None)
    for number in count():
        place = f"kill-{number}"
        for _ in range(dice.randint(1, 3)):
            run_and_kill(_work, (backend, place, plan), dice.uniform(0, span_s), tally)
        tally.points -= 1
        tally.check(place, partial(Workload(backend(place), plan).check, backend(place), expected))
        if tally.points >= times or number > 20 * times:
            return tally
    return tally


def run_and_kill(
    work: Callable[..., object], words: tuple[Any, ...], delay_s: float | None, tally: Tally | None = None
) -> float:
    """Do ``work(*words)`` in a process of its own, SIGKILL it ``delay_s`` after it began (None: never); the seconds it
    ran. ``tally`` counts a kill that came before the end, and as a failure an end of its own that was not well."""
    context = multiprocessing.get_context("forkserver")
    # What takes seconds to import is imported once, not in every process that is killed.
    context.set_forkserver_preload([__name__, work.__module__, "hiddenstore.cli"])
    here, there = context.Pipe()
    process = context.Process(target=_begin, args=(there, work, words), daemon=True)
    process.start()
    here.recv_bytes()
    began = time.monotonic()
    process.join(delay_s)
    if process.is_alive():
        os.kill(cast(int, process.pid), signal.SIGKILL)
        process.join()
    if tally is not None:
        tally.points += process.exitcode == -signal.SIGKILL
        if process.exitcode not in (0, -signal.SIGKILL):
            tally.failures.append(f"traceback: {work.__name__} ended with {process.exitcode}")
    return time.monotonic() - began


def _begin(pipe: Any, work: Callable[..., object], words: tuple[Any, ...]) -> None:
    pipe.send_bytes(b"begun")
    work(*words)


def _work(backend: Backend, place: str, plan: Plan) -> None:
    Workload(backend(place), plan).run()


def damage(backend: Backend, codec: str = "q8", container: str = "zarr", step: int = 1) -> Tally:
    """A small store with every ``step``-th byte flipped, and every file cut, lengthened, emptied, removed, swapped and
    replaced by what stood there in another store: exact data, or an error that names what is wrong."""
    tally, sweep = Tally(), Sweep(backend, codec, step, container)
    for part in (sweep.flips, sweep.cuts, sweep.swaps, sweep.replays):
        for name, changes in part():
            tally.check(name, partial(sweep.check, changes))
    return tally
