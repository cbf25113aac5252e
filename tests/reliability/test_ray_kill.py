"""Ray actors killed at random, and a job that is asked to stop: the store ends equal to one process's."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.job import CollectOptions
from collectors.launch import launch
from hiddenstore.rank import Drain
from hiddenstore.store import Store
from tests.collectors import ray_world

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAMPLES = 120
KILLS = 5


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_world.cluster() as address:
        yield address


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CollectOptions:
    return ray_world.collect_straight(tmp_path_factory.mktemp("ray"), SAMPLES)


@pytest.fixture
def options(straight: CollectOptions, tmp_path: Path) -> CollectOptions:
    return replace(straight, store=tmp_path / "store")


@pytest.mark.usefixtures("cluster")
def test_five_random_kills_of_three_actors_lose_and_double_nothing(
    options: CollectOptions, straight: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = len(Store.open(straight.store).commits())
    kills = set(random.Random(KILLS).sample(range(4, units - 4), KILLS))
    document = ray_world.collect_with_kills(options, kills, monkeypatch)
    ray_world.check_equal(options, straight)
    ray_world.check_document(document, options.store, losses=KILLS)


def test_sigterm_exits_75_and_the_same_command_does_the_rest(
    cluster: str, options: CollectOptions, straight: CollectOptions
) -> None:
    program = (
        "import ray, sys; from tests.collectors.ray_world import small_units; connect = ray.init\n"
        "ray.init = lambda **more: connect(runtime_env={'worker_process_setup_hook': small_units}, **more)\n"
        "from hiddenstore.cli import main; sys.argv[0] = 'hiddenstore'; main()"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", program, *ray_world.words(options), "--launcher", "ray:1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    commits = Path(options.store) / "commits"
    while worker.poll() is None and not (commits.is_dir() and len(list(commits.glob("*.json"))) > 1):
        time.sleep(0.002)
    worker.send_signal(signal.SIGTERM)
    out, errors = worker.communicate(timeout=120)
    assert (worker.returncode, out) == (75, ""), errors
    assert 0 < len(Store.open(options.store)) < SAMPLES
    report = launch("ray:1", options, Drain(), lambda _text: None)
    assert report.resumed_units >= 2
    assert report.pending_units == 0
    ray_world.check_equal(options, straight)
