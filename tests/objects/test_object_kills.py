"""SIGKILLs of every command that writes, at random moments, on object storage."""

import os
from pathlib import Path

import pytest

from tests.reliability.command_kills import COMMANDS, Base, kill_often
from tests.reliability.figures import Figures

pytestmark = [pytest.mark.objects, pytest.mark.slow, pytest.mark.timeout(3600)]

KILLS = {"s3": 60, "az": 20}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("proxy", KILLS, indirect=True)
def test_kills_of_a_command_cost_nothing_but_time(name: str, direct: str, tmp_path: Path, figures: Figures) -> None:
    scheme = direct.partition(":")[0]
    base = Base(tmp_path, direct, "webdataset", dict(os.environ)).make()
    tally = kill_often(base, name, KILLS[scheme])
    figures.add(f"SIGKILLs of a command, {scheme}://", name, tally)
    assert tally.failures == []
