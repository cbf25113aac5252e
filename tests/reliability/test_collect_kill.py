"""SIGKILL at random moments: the resumed store equals the uninterrupted one, byte for byte."""

import random
import shutil
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.store import Store
from hiddenstore.testing.suite import Tally
from hiddenstore.verify.structure import unnamed_segments
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target
from tests.forked import Forked, command
from tests.reliability.collect_worker import finish, in_small_units, start_collect
from tests.reliability.figures import Figures

SAMPLES = 200


class Place:
    """DATA, target and the uninterrupted store that every resumed one must equal."""

    def __init__(self, folder: Path) -> None:
        self.data = data_for_tiny(folder / "data", samples=SAMPLES)
        self.target = save_target(folder / "target")
        self.straight = folder / "straight"
        finish(self.start(self.straight))
        self.expected = segment_bytes(self.straight)
        self.units = _commits(self.straight)

    def start(self, store: Path, rank: int = 0, world_size: int = 1, begun: Path | None = None) -> Forked:
        return start_collect(self.data, store, self.target, rank, world_size, begun)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("kill"))


def _commits(store: Path) -> int:
    return len(list((store / "commits").glob("*.json")))


def _wait_for_progress(worker: Forked, store: Path, commits: int) -> None:
    """Until the store holds this many commits or the worker ends: counted, since no clock fits two machines."""
    while worker.poll() is None and _commits(store) < commits:
        time.sleep(0.0005)


def _kill_and_resume(place: Place, store: Path, dice: random.Random, kills: int) -> int:
    """Kill up to ``kills`` runs on one store, then finish it under a random world size; the kills that hit work."""
    hits = 0
    for _ in range(kills):
        world_size = dice.choice((1, 1, 2, 3))
        worker = place.start(store, dice.randrange(world_size), world_size)
        _wait_for_progress(worker, store, _commits(store) + dice.randrange(place.units // kills))
        time.sleep(dice.uniform(0, 0.02))
        worker.send_signal(signal.SIGKILL)
        hits += worker.wait(120) == -signal.SIGKILL
    world_size = dice.choice((1, 2))
    finish(*(place.start(store, rank, world_size) for rank in range(world_size)))
    return hits


def _check_equal(place: Place, store: Path) -> None:
    assert segment_bytes(store) == place.expected
    found, straight = Store.open(store), Store.open(place.straight)
    assert found.sample_ids == straight.sample_ids
    assert len(found) == SAMPLES - sum(len(record.rejects) for record in found.commits())
    for mine, theirs in zip(found.commits(), straight.commits(), strict=True):
        assert mine.model_dump(exclude={"segment"}) == theirs.model_dump(exclude={"segment"})


def test_a_collect_killed_five_times_resumes_to_the_uninterrupted_store(
    place: Place, tmp_path: Path, figures: Figures
) -> None:
    hits = _kill_and_resume(place, tmp_path / "store", random.Random(5), kills=5)
    assert hits > 0
    figures.add("SIGKILLs of a command", "collect, other world sizes", Tally(points=hits))
    _check_equal(place, tmp_path / "store")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_collect_killed_25_times_over_several_stores_resumes_each(
    place: Place, tmp_path: Path, figures: Figures
) -> None:
    hits = 0
    dice = random.Random(25)
    for attempt in range(5):
        store = tmp_path / f"store-{attempt}"
        hits += _kill_and_resume(place, store, dice, kills=5)
        _check_equal(place, store)
        shutil.rmtree(store)
    assert hits >= 15
    figures.add("SIGKILLs of a command", "collect, other world sizes", Tally(points=hits))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_of_the_workers_preempted_again_and_again_lose_at_most_their_open_units(
    place: Place, tmp_path: Path, figures: Figures
) -> None:
    store, dice, rounds, tally = tmp_path / "store", random.Random(50), 4, Tally()
    lives = {rank: [tmp_path / f"begun-{rank}-0"] for rank in range(4)}
    workers = {rank: place.start(store, rank, 4, lives[rank][-1]) for rank in range(4)}
    lost = Counter[str]()
    for _ in range(rounds):
        for worker in workers.values():
            _wait_for_progress(worker, store, _commits(store) + 3)
        committed = _committed(store)
        for rank in dice.sample(sorted(workers), 2):
            workers[rank].send_signal(signal.SIGKILL)
            workers[rank].wait(60)
            is_open = set(_lines(lives[rank][-1])) - _committed(store)
            lost.update(is_open)
            tally.check(f"worker {rank}", partial(_require_few, is_open))
            lives[rank].append(tmp_path / f"begun-{rank}-{len(lives[rank])}")
            workers[rank] = place.start(store, rank, 4, lives[rank][-1])
        assert committed <= _committed(store)
    finish(*workers.values())
    _check_equal(place, store)
    # What was captured again is what was open, a capture for each time, and nothing that was committed.
    captured = Counter(unit for files in lives.values() for file in files for unit in _lines(file))
    assert captured - Counter(_committed(store)) == lost
    named = {commit.name: commit.record.segment for commit in Store.open(store).commit_files}
    assert len(unnamed_segments(LocalFilesystem(store), named)) <= 2 * rounds
    figures.add("SIGKILLs of half of four workers", "collect: at most two open units each", tally)
    assert tally.failures == []


def _committed(store: Path) -> set[str]:
    return {path.stem for path in (store / "commits").glob("*.json")}


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _require_few(is_open: set[str]) -> None:
    """A worker captures one unit while it writes the one before."""
    assert len(is_open) <= 2, f"lost: {len(is_open)} units of one worker"


def test_sigterm_drops_the_open_unit_and_exits_75(place: Place, tmp_path: Path) -> None:
    words = ("collect", str(place.data), "-o", str(tmp_path / "store"), "--target", str(place.target), "-q")
    worker = Forked(in_small_units, command, *words)
    while worker.poll() is None and _commits(tmp_path / "store") < 2:
        time.sleep(0.005)
    worker.send_signal(signal.SIGTERM)
    _out, errors = worker.communicate(60)
    assert worker.returncode == 75, errors
    done = len(Store.open(tmp_path / "store"))
    assert 0 < done < SAMPLES
    finish(Forked(in_small_units, command, *words))
    _check_equal(place, tmp_path / "store")
