"""docs/targets.md: its table is what the tests' tables make of it, and it leaves no family out."""

import pytest
import transformers

from hiddenstore.targets.families import FAMILIES
from tests.collectors.tiny import CONFIGS
from tests.collectors.tiny_families import TEXT, WITH_VISION
from tests.targets_page import BEGIN, END, OF_ENGINES, PAGE, PUBLISHED, table


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="it lacks some of the families")
def test_the_table_of_targets_is_the_tests_own() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table(), "python -m tests.targets_page"
    assert [kind for kind in FAMILIES if f"`{kind}`" not in page] == []
    assert {*PUBLISHED} <= {*CONFIGS, *TEXT, *WITH_VISION}


@pytest.mark.parametrize("engine", OF_ENGINES)
def test_the_tests_of_engines_that_the_page_names_are_there(engine: str) -> None:
    file, _, function = OF_ENGINES[engine].partition("::")
    assert f"\ndef {function}(" in (PAGE.parents[1] / file).read_text(encoding="utf-8")
