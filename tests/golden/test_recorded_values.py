"""Bytes written and numbers trained today are those that were recorded: to the last bit on the machine that recorded
them, to a tolerance elsewhere."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.golden.reading import RECORDED
from tests.golden.values import SECTIONS, differences, machine

KNOWN: dict[str, Any] = json.loads(RECORDED.read_text())
ENTRIES = sorted(set(KNOWN) - {"machine"})


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        return {
            f"{section}/{entry}": value
            for section, measure in SECTIONS.items()
            for entry, value in measure(tmp_path_factory.mktemp(section)).items()
        }


def test_what_is_measured_is_what_was_recorded(measured: dict[str, Any]) -> None:
    assert sorted(measured) == ENTRIES


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_value_is_the_recorded_one(entry: str, measured: dict[str, Any]) -> None:
    found = json.loads(json.dumps(measured[entry]))
    assert list(differences(KNOWN[entry], found, exact=machine() == KNOWN["machine"]))[:5] == []
