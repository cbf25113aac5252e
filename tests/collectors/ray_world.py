"""A local Ray cluster of three cores, a tiny input with many units, and a crew that loses its actors."""

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from collectors.job import CollectOptions, collect
from collectors.launch.ray import RayCrew
from hiddenstore import inputs
from hiddenstore.cli import main
from hiddenstore.store import Store
from tests.collectors.prepared import data_for_tiny, segment_bytes
from tests.collectors.tiny import save_target

UNIT_TOKENS = 80


def small_units() -> None:
    """What Ray's worker processes run first."""
    inputs.UNIT_TOKENS = UNIT_TOKENS


@contextmanager
def cluster() -> Iterator[str]:
    """This process connected to a cluster of its own; the cluster's address."""
    import ray

    context = ray.init(
        address="local",
        num_cpus=3,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": small_units, "env_vars": {"OMP_NUM_THREADS": "1"}},
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


def collect_with_kills(
    options: CollectOptions, kills: set[int], monkeypatch: pytest.MonkeyPatch, seed: int = 5
) -> dict[str, Any]:
    """``collect --launcher ray:3 --json`` while the actors that get the n-th units are killed, for n in ``kills``."""
    monkeypatch.setattr("collectors.launch.ray.RayCrew", _killing(kills, random.Random(seed)))
    done = CliRunner().invoke(main, [*words(options), "--launcher", "ray:3", "--json"])
    assert done.exit_code == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def check_equal(options: CollectOptions, straight: CollectOptions) -> None:
    """Nothing is lost, doubled or damaged: the store equals the one that one process wrote, byte for byte."""
    assert segment_bytes(options.store) == segment_bytes(straight.store)
    assert Store.open(options.store).sample_ids == Store.open(straight.store).sample_ids
    checked = CliRunner().invoke(main, ["verify", str(options.store), "--full", "--json"])
    assert checked.exit_code == 0, checked.output


def check_document(document: dict[str, Any], store: str | Path, losses: int) -> None:
    """The report counts every unit once and shows each worker's utilisation."""
    workers = document["workers"]
    assert (len(workers), document["workers_lost"]) == (3, losses)
    assert sum(worker["losses"] for worker in workers) == losses
    assert document["units"] == sum(worker["units"] for worker in workers) == len(Store.open(store).commits())
    assert document["samples"] == len(Store.open(store))
    assert document["units_pending"] == 0
    assert sum(worker["forward_s"] for worker in workers) == pytest.approx(document["forward_s"], abs=0.01)
    assert any(worker["forward_share"] > 0 for worker in workers)


def _killing(kills: set[int], dice: random.Random) -> type[RayCrew]:
    """Kills a moment after the unit was handed out: before, in or after its forward, and its commit."""

    class KillingCrew(RayCrew):
        handed_out = 0

        def call(self, index: int, method: str, *arguments: Any) -> None:
            super().call(index, method, *arguments)
            if method == "capture":
                self.handed_out += 1
                if self.handed_out in kills:
                    time.sleep(dice.uniform(0, 0.03))
                    self.kill(index)

    return KillingCrew
