"""SIGKILLs of every command that writes, at random moments, on a local disk."""

import pytest

from tests.reliability.command_kills import COMMANDS, Base, kill_often
from tests.reliability.figures import Figures

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = 120


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = tmp_path_factory.mktemp("kills")
    return Base(folder, str(folder), "zarr").make()


@pytest.mark.parametrize("name", COMMANDS)
def test_kills_of_a_command_cost_nothing_but_time(name: str, base: Base, figures: Figures) -> None:
    tally = kill_often(base, name, KILLS)
    figures.add("SIGKILLs of a command, a local disk", name, tally)
    assert tally.failures == []
