"""Shared by every test: quiet libraries, one thread, no network."""

import contextlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

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
    from tests.tiny_world import World


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> "World":
    """Tiny targets, DATA, stores and a run, made once through the command line; read only."""
    from tests.tiny_world import make_world

    return make_world(tmp_path_factory.mktemp("world"))
