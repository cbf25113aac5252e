"""Collect with real Ray actors; what takes longer is in tests/reliability/test_ray_kill.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.capture.job import CollectOptions, CollectReport, collect
from collectors.launch import launch
from hiddenstore.errors import CaptureError, ConfigError
from hiddenstore.process import Drain
from tests.collectors import ray_world

pytest.importorskip("ray")
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cluster, and where its workers look for faults."""
    folder = tmp_path_factory.mktemp("faults")
    with ray_world.cluster(folder):
        yield folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CollectOptions:
    return ray_world.collect_straight(tmp_path_factory.mktemp("ray"), samples=60)


@pytest.fixture
def options(straight: CollectOptions, tmp_path: Path) -> CollectOptions:
    return replace(straight, store=tmp_path / "store")


def collect_with_ray(launcher: str, options: CollectOptions) -> CollectReport:
    return launch(launcher, options, Drain(), lambda _text: None)


def test_three_actors_of_which_one_is_killed_write_the_store_of_one_process(
    options: CollectOptions, straight: CollectOptions, faults: Path
) -> None:
    ray_world.plant(faults, "kills once", ray_world.units_of(straight)[7])
    document = ray_world.collect_by_three(options)
    ray_world.check_equal(options, straight)
    ray_world.check_document(document, options.store, losses=1)


def test_a_unit_that_ends_every_worker_is_named_and_all_others_are_done(
    options: CollectOptions, straight: CollectOptions, faults: Path
) -> None:
    units = ray_world.units_of(straight)
    ray_world.plant(faults, "fails", units[2])
    message = f"lost 3 times, the last with {units[2]} in hand: .*CUDA error"
    with pytest.raises(CaptureError, match=message) as caught:
        collect_with_ray("ray:1", options)
    (faults / units[2]).unlink()
    assert caught.value.kind == "workers-lost"
    assert ray_world.units_of(options) == [unit for unit in units if unit != units[2]]


def test_rejects_of_all_workers_count_against_one_budget(
    options: CollectOptions, straight: CollectOptions, faults: Path
) -> None:
    units = ray_world.units_of(straight)
    ray_world.plant(faults, "spoils", *units)
    with pytest.raises(CaptureError, match=r"2 samples rejected \(2 zero-rows\), more than the 1 allowed") as caught:
        collect_with_ray("ray:2", options)
    assert caught.value.kind == "too-many-rejects"
    for unit in units:
        (faults / unit).unlink()


@pytest.mark.usefixtures("faults")
def test_a_layer_that_does_not_exist_is_refused_as_without_ray(options: CollectOptions) -> None:
    wrong = replace(options, layers="1,77")
    with pytest.raises(ConfigError) as alone:
        collect(wrong, note=lambda _text: None)
    with pytest.raises(ConfigError) as launched:
        collect_with_ray("ray:1", wrong)
    assert launched.value.__dict__ == alone.value.__dict__
    assert not Path(options.store).exists()


def test_a_store_that_workers_have_for_themselves_is_refused(
    options: CollectOptions, faults: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectors.launch.ray.VISIBLE_WITHIN_S", 1)
    monkeypatch.chdir(tmp_path)
    # Every process has its own folder of this name, as machines without a shared disk have.
    (tmp_path / "own").symlink_to("/proc/self/cwd")
    with pytest.raises(ConfigError, match=r"a worker wrote store\.json into its own .*/own/store") as caught:
        collect_with_ray("ray:1", replace(options, store=tmp_path / "own" / "store"))
    assert caught.value.kind == "store-not-shared"
    assert (faults / "store" / "store.json").exists()
    assert not (tmp_path / "store").exists()


def test_without_ray_the_error_says_how_to_install_it(options: CollectOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "collectors.launch.ray")
    with pytest.raises(ConfigError) as caught:
        launch("ray", options, Drain(), lambda _text: None)
    assert (caught.value.kind, caught.value.hint) == ("not-installed", "pip install 'hiddenstore[ray]'")


def test_the_array_script_of_the_docs_gives_each_element_its_own_rank() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text()
    script = page.split("```bash\n")[1].split("```")[0]
    assert len(script.splitlines()) == 12
    probe = f"{sys.executable} -c 'from hiddenstore.process import from_environment as f; print(f())'"
    shell = script.replace("srun hiddenstore collect data -o store --target Qwen/Qwen3-8B", probe)
    assert probe in shell
    # As SLURM sets them in the batch step of element 5 of 64.
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "64", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    done = subprocess.run(
        ["bash", "-c", shell], env=os.environ | slurm, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "rank 5 of 64\n"
