"""Shared by every test: quiet libraries, one thread, no network."""

import contextlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

# The environments of peers and engines hold no hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import settings

    # A deadline is a clock, and the machine may be busy.
    settings.register_profile("no-clock", deadline=None)
    settings.load_profile("no-clock")

if TYPE_CHECKING:
    from tests.reliability.figures import Figures
    from tests.tiny_world import World

LONGEST = {
    "test_damage_sweep", "test_model", "test_crash_points", "test_collect_kill", "test_group", "test_run_lock",
    "test_other_house", "test_parallel", "test_resume", "test_invent", "test_regenerate", "test_run_pipeline",
    "test_capture_kill", "test_engine_drafters", "test_engine_eagle3", "test_engine_families", "test_engine_mtp",
    "test_engine_parallel", "test_from_clone_to_server", "test_three_engines",
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", metavar="FOLDER", help="also write what engines accepted, or what was tried, there")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker of `make test` or `make test-engines` is left with one at the end."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> "Figures":
    """What tests of reliability count; with ``--results`` it is added to the result file of the day."""
    from tests.reliability.figures import Figures

    folder = request.config.getoption("--results")
    marks = request.config.option.markexpr.replace("slow or not slow", "")
    run = "sample" if "not slow" in marks else "all"
    return Figures(None if folder is None else Path(folder), run)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """Tiny targets, DATA, stores and a run, made once through the command line; read only."""
    from tests.tiny_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))
