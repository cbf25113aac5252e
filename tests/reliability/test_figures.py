"""Result files: what one commit tried is one table, however many days it took."""

import json
from pathlib import Path

import pytest

from hiddenstore.testing.suite import Tally
from tests.attacks.test_second_attack import note
from tests.reliability.figures import Figures

EARLIER = "2026-01-01"


def reliability(folder: Path, part: str) -> None:
    Figures(folder).add(part, "a store", Tally(points=3))


def attack(folder: Path, attempt: str) -> None:
    note(folder, attempt, "held")


@pytest.mark.parametrize("write", [reliability, attack])
def test_parts_that_end_on_another_day_add_to_the_file_of_their_commit(write, tmp_path: Path) -> None:
    stem = write.__name__
    write(tmp_path, "first")
    (today,) = tmp_path.glob(f"{stem}-*.json")
    # As if midnight had passed since.
    begun = today.rename(tmp_path / f"{stem}-{EARLIER}.json")
    today.with_suffix(".md").unlink()
    write(tmp_path, "second")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{stem}-{EARLIER}.json", f"{stem}-{EARLIER}.md"]
    assert {"first", "second"} <= set(begun.with_suffix(".md").read_text().replace("|", " ").split())


@pytest.mark.parametrize("write", [reliability, attack])
def test_the_file_of_another_commit_is_neither_added_to_nor_changed(write, tmp_path: Path) -> None:
    before = tmp_path / f"{write.__name__}-{EARLIER}.json"
    before.write_text(json.dumps({"date": EARLIER, "commit": "0000000", "rows": []}))
    kept = before.read_bytes()
    write(tmp_path, "first")
    assert before.read_bytes() == kept
    assert len(list(tmp_path.glob("*.json"))) == 2
