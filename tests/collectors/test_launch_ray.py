"""Collect with real Ray actors; what takes longer is in tests/reliability/test_ray_kill.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from collectors.job import CollectOptions, collect
from collectors.launch import launch
from hiddenstore.errors import ConfigError
from hiddenstore.rank import Drain
from tests.collectors import ray_world

pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with ray_world.cluster() as address:
        yield address


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> CollectOptions:
    return ray_world.collect_straight(tmp_path_factory.mktemp("ray"), samples=60)


@pytest.fixture
def options(straight: CollectOptions, tmp_path: Path) -> CollectOptions:
    return replace(straight, store=tmp_path / "store")


@pytest.mark.usefixtures("cluster")
def test_three_actors_of_which_one_is_killed_write_the_store_of_one_process(
    options: CollectOptions, straight: CollectOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = ray_world.collect_with_kills(options, {7}, monkeypatch)
    ray_world.check_equal(options, straight)
    ray_world.check_document(document, options.store, losses=1)


@pytest.mark.usefixtures("cluster")
def test_a_layer_that_does_not_exist_is_refused_as_without_ray(options: CollectOptions) -> None:
    wrong = replace(options, layers="1,77")
    with pytest.raises(ConfigError) as alone:
        collect(wrong, note=lambda _text: None)
    with pytest.raises(ConfigError) as launched:
        launch("ray:1", wrong, Drain(), lambda _text: None)
    assert launched.value.__dict__ == alone.value.__dict__
    assert not Path(options.store).exists()


def test_without_ray_the_error_says_how_to_install_it(options: CollectOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError) as caught:
        launch("ray", options, Drain(), lambda _text: None)
    assert (caught.value.kind, caught.value.hint) == ("ray-missing", "pip install 'hiddenstore[ray]'")


def test_the_array_script_of_the_docs_gives_each_element_its_own_rank() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scale-out.md").read_text()
    script = page.split("```bash\n")[1].split("```")[0]
    assert len(script.splitlines()) == 12
    probe = f"{sys.executable} -c 'from hiddenstore.rank import from_environment as f; print(f())'"
    shell = script.replace("srun hiddenstore collect data -o store --target Qwen/Qwen3-8B", probe)
    assert probe in shell
    # As SLURM sets them in the batch step of element 5 of 64.
    slurm = {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "64", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    done = subprocess.run(
        ["bash", "-c", shell], env=os.environ | slurm, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "rank 5 of 64\n"
