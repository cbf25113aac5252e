"""Ray actors killed at random, a node killed, a job asked to stop: the store ends equal to one process's."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.capture.job import CollectOptions, collect
from collectors.launch import launch
from hiddenstore.process import Drain
from hiddenstore.store import Store
from tests.collectors import ray_world

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SAMPLES = 120
KILLS = 3


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def cluster(faults: Path) -> Iterator[str]:
    with ray_world.cluster(faults) as address:
        yield address


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CollectOptions:
    return ray_world.collect_straight(tmp_path_factory.mktemp("ray"), SAMPLES)


@pytest.fixture
def options(straight: CollectOptions, tmp_path: Path) -> CollectOptions:
    return replace(straight, store=tmp_path / "store")


@pytest.mark.usefixtures("cluster")
def test_random_kills_of_three_actors_lose_and_double_nothing(
    options: CollectOptions, straight: CollectOptions, faults: Path
) -> None:
    units = ray_world.units_of(straight)
    ray_world.plant(faults, "kills once", *random.Random(KILLS).sample(units[4:-4], KILLS))
    document = ray_world.collect_by_three(options)
    ray_world.check_equal(options, straight)
    ray_world.check_document(document, options.store, losses=KILLS)


def test_sigterm_exits_75_and_one_process_does_the_rest_without_ray(
    cluster: str, options: CollectOptions, straight: CollectOptions, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import pathlib, ray, sys; from tests.collectors.ray_world import worker_environment; connect = ray.init\n"
        f"environment = worker_environment(pathlib.Path({str(faults)!r}))\n"
        "ray.init = lambda **more: connect(runtime_env=environment, **more)\n"
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
    monkeypatch.setattr("hiddenstore.inputs.UNIT_TOKENS", ray_world.UNIT_TOKENS)
    report = collect(options, note=lambda _text: None)
    assert report.resumed_units >= 2
    assert report.pending_units == 0
    ray_world.check_equal(options, straight)


def test_a_node_that_is_killed_loses_and_doubles_nothing(
    options: CollectOptions, straight: CollectOptions, faults: Path
) -> None:
    """Both nodes are full, so that there is no room for another worker in place of the one that is lost."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
    doomed = cluster.add_node(**node)
    commits = Path(options.store) / "commits"

    def kill_node() -> None:
        while not (commits.is_dir() and len(list(commits.glob("*.json"))) > 10):
            time.sleep(0.002)
        cluster.remove_node(doomed, allow_graceful=False)

    killer = threading.Thread(target=kill_node)
    try:
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=ray_world.worker_environment(faults))
        killer.start()
        report = launch("ray:2", options, Drain(), lambda _text: None)
        killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    ray_world.check_equal(options, straight)
    assert (report.workers, report.workers_lost, report.pending_units) == (2, 1, 0)
    assert report.units == len(Store.open(options.store).commits())
    assert report.samples == SAMPLES
