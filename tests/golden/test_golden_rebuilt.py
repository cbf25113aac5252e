"""Stores of rebuilt states written once: what they hold reads to the bit, what comes back agrees to the tolerance."""

import json

import numpy as np
import pytest

from hiddenstore.targets.rebuild import TOLERANCE
from tests.golden.reading import EXPECTED_REBUILT, REBUILT, command, files_of, info_of, rebuilt_facts, verify_of

FACTS = json.loads(EXPECTED_REBUILT.read_text())


def test_the_files_are_those_that_were_checked_in() -> None:
    assert {store.name for store in REBUILT.iterdir()} == set(FACTS)
    for name, facts in FACTS.items():
        assert files_of(REBUILT / name) == facts["files"], name


@pytest.mark.parametrize("name", FACTS)
def test_stored_states_have_their_bits_and_rebuilt_ones_their_values(name: str) -> None:
    facts, now = FACTS[name]["samples"], rebuilt_facts(REBUILT / name)["samples"]
    assert now.keys() == facts.keys()
    for sample, expected in facts.items():
        assert now[sample]["stored"] == expected["stored"]
        assert now[sample]["rebuilt"].keys() == expected["rebuilt"].keys() != set()
        for field, values in expected["rebuilt"].items():
            distance = np.linalg.norm(np.subtract(now[sample]["rebuilt"][field], values))
            assert distance <= TOLERANCE * np.linalg.norm(values), field


@pytest.mark.parametrize("name", FACTS)
def test_info_and_verify_say_the_same(name: str) -> None:
    known = FACTS[name]["info"]
    assert {member: value for member, value in info_of(REBUILT / name).items() if member in known} == known
    assert verify_of(REBUILT / name) == FACTS[name]["verify"]
    assert FACTS[name]["verify"]["ok"]
    measures = command("verify", REBUILT / name, "--meaning")["measures"]
    assert measures["rebuilt_error_final"] <= TOLERANCE
