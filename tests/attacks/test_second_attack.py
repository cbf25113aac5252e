"""The second attack: what a hostile or unlucky user, another program or another machine does to stores, DATA, runs and
dumps. Each row says what was done and what must come of it: a named error, or everything held. ``--results`` writes
the table."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hiddenstore import inputs
from tests.attacks.second import data, dumps, exports, machine, runs, stores
from tests.attacks.second.lab import UNIT_TOKENS, Attempt, Lab, Outcome, with_units
from tests.tiny_world import World

ROOMS = {room.__name__.rpartition(".")[2]: room.ATTEMPTS for room in (data, dumps, exports, machine, runs, stores)}


def cases() -> Iterator[object]:
    for room, attempts in ROOMS.items():
        names = [attempt.what for attempt in attempts]
        assert len(set(names)) == len(names), room
        for attempt in attempts:
            marks = [pytest.mark.slow] if attempt.slow else []
            yield pytest.param(room, attempt, id=f"{room}: {attempt.what}", marks=marks)


@pytest.mark.parametrize(("room", "attempt"), list(cases()))
def test_an_attempt_is_refused_by_name_or_held(
    room: str,
    attempt: Attempt,
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    lab = Lab(with_units(world), tmp_path, capsys)
    monkeypatch.setattr(inputs, "UNIT_TOKENS", UNIT_TOKENS)
    ended, word = None, "?"
    try:
        ended = attempt.do(lab)
        word = ended.word
    except AssertionError as error:
        word = str(error).splitlines()[0]
        raise
    finally:
        _note(request, room, attempt, ended, word)
    assert word in attempt.expected.split("|"), ended


def _note(request: pytest.FixtureRequest, room: str, attempt: Attempt, ended: Outcome | None, word: str) -> None:
    folder = request.config.getoption("--results")
    if folder is None:
        return
    path = Path(folder) / f"attack-{datetime.now(UTC):%Y-%m-%d}.json"
    rows = json.loads(path.read_text()) if path.is_file() else {}
    err = ended.err.strip() if ended else ""
    rows[f"{room}: {attempt.what}"] = {
        "outcome": word,
        "expected": attempt.expected,
        "err": err[-700:],
        "code": ended.code if ended else None,
    }
    path.write_text(json.dumps(rows, indent=1, sort_keys=True))
