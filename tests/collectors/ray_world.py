"""A local Ray cluster of three cores, a tiny input with many units, and workers that a unit ends or spoils."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from collectors.capture.job import CollectJob, CollectOptions, collect
from collectors.engines import Captured, CaptureRequest
from hiddenstore import inputs
from hiddenstore.cli import main
from hiddenstore.inputs import Unit
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target

UNIT_TOKENS = 80
FAULTS = "HIDDENSTORE_TEST_FAULTS"


def in_worker() -> None:
    """What Ray's worker processes run first: small units, and those with a fault meet it (see ``plant``)."""
    inputs.UNIT_TOKENS = UNIT_TOKENS
    # Another folder than that of the process that hands out the units, as on another machine.
    os.chdir(os.environ[FAULTS])
    capture = CollectJob.capture

    def capture_with_faults(self: CollectJob, unit: Unit) -> Any:
        planted = Path(os.environ[FAULTS]) / unit.name
        fault = planted.read_text() if planted.exists() else ""
        if fault == "kills once":
            planted.unlink()
            # Before, in or after its forward, and its commit.
            threading.Timer(random.Random(unit.name).uniform(0, 0.03), _kill_this_process).start()
        elif fault == "kills":
            _kill_this_process()
        elif fault == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        elif fault == "spoils":
            _spoil(self, planted.parent)
        return capture(self, unit)

    CollectJob.capture = capture_with_faults  # type: ignore[method-assign]


def plant(folder: Path, fault: str, *units: str) -> None:
    """From now on each of the units ``kills`` its worker, ``kills once`` or ``fails``; two workers ``spoils`` each."""
    for unit in units:
        (folder / unit).write_text(fault)


def worker_environment(faults: Path) -> dict[str, Any]:
    return {"worker_process_setup_hook": in_worker, "env_vars": {"OMP_NUM_THREADS": "1", FAULTS: str(faults)}}


@contextmanager
def cluster(faults: Path) -> Iterator[str]:
    """This process connected to a cluster of its own; the cluster's address."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env=worker_environment(faults),
    )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def collect_straight(folder: Path, samples: int) -> CollectOptions:
    """DATA, target, and a store that one process collected."""
    data = data_for_tiny(folder / "data", samples=samples)
    options = CollectOptions(data, folder / "straight", str(save_target(folder / "target")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hiddenstore.inputs.UNIT_TOKENS", UNIT_TOKENS)
        collect(options, note=lambda _text: None)
    return options


def words(options: CollectOptions) -> list[str]:
    """The options as ``hiddenstore`` takes them."""
    return ["collect", str(options.data), "-o", str(options.store), "--target", options.target]


def collect_by_three(options: CollectOptions) -> dict[str, Any]:
    """What ``collect --launcher ray:3 --json`` answers."""
    done = CliRunner().invoke(main, [*words(options), "--launcher", "ray:3", "--json"])
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def units_of(options: CollectOptions) -> list[str]:
    return [record.unit for record in Store.open(options.store).commits()]


def check_equal(options: CollectOptions, straight: CollectOptions) -> None:
    """Nothing is lost, doubled or damaged: the store equals the one that one process wrote, byte for byte."""
    assert segment_bytes(options.store) == segment_bytes(straight.store)
    assert Store.open(options.store).sample_ids == Store.open(straight.store).sample_ids
    checked = CliRunner().invoke(main, ["verify", str(options.store), "--full", "--json"])
    assert checked.exit_code == 0, checked.output


def check_document(document: dict[str, Any], store: str | Path, losses: int) -> None:
    """The report counts every unit once, whoever committed it, and every lost worker."""
    assert (document["workers"], document["workers_lost"]) == (3, losses)
    assert document["units"] == len(Store.open(store).commits())
    assert document["samples"] == len(Store.open(store))
    assert document["units_pending"] == 0
    assert 0 < document["forward_s"] < 3 * document["seconds"]


def _kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _spoil(job: CollectJob, folder: Path) -> None:
    """One reject of this worker, and no more before another worker has its own."""
    spoilt = folder / f"spoilt-by-{os.getpid()}"
    if spoilt.exists():
        while len(list(folder.glob("spoilt-by-*"))) < 2:
            time.sleep(0.02)
        return
    spoilt.touch()
    capture = job.engine.capture

    def capture_with_zeros(requests: Sequence[CaptureRequest], *watched: Any) -> Captured:
        job.engine.capture = capture  # type: ignore[method-assign]
        captured = capture(requests, *watched)
        captured.aux[0, 1] = 0
        return captured

    job.engine.capture = capture_with_zeros  # type: ignore[method-assign]
