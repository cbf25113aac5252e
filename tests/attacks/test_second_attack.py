"""The second attack: what a hostile or unlucky user, another program or another machine does to stores, DATA, runs and
dumps. Each row says what was done and what must come of it: a named error, or everything held. ``--results`` writes the
table."""

import json
from pathlib import Path

import pytest

from hiddenstore import inputs
from tests.attacks.second import data, dumps, exports, machine, runs, stores
from tests.attacks.second.lab import UNIT_TOKENS, Attempt, Lab, with_units
from tests.reliability.figures import of_this_commit
from tests.tiny_world import World

ROOMS = {room.__name__.rpartition(".")[2]: room.ATTEMPTS for room in (data, dumps, exports, machine, runs, stores)}

BROKE = {
    "data: DATA sealed again: a mask of twos",
    "data: DATA sealed again: a mask too short",
    "data: DATA sealed again: a row twice, digest and all",
    "data: DATA sealed again: a token of -1",
    "data: DATA sealed again: no mask column",
    "data: DATA sealed again: no tokens",
    "data: DATA sealed again: one token changed",
    "data: DATA sealed again: tokens with null",
    "data: DATA sealed again: turns backwards",
    "data: conversations: a name that is no text",
    "data: conversations: a named pipe",
    "data: prompts of decode: a lone surrogate",
    "dumps: a dump lies: a mask of nothing",
    "dumps: a dump of raw shards: more samples than there are",
    "dumps: a dump of raw shards: tokens said to be int64",
    "exports: a target after capture, collect: config.json of NaN",
    "exports: a target after capture, export: config.json is a list",
    "exports: a target after capture, export: one block fine-tuned",
    "exports: a target after capture, serve: one block fine-tuned",
    "exports: a target after capture, serve: two words of the vocabulary swapped",
    "exports: an export, import: 10^9 layers",
    "exports: an export, import: config.json is a list",
    "exports: an export, import: layers as text",
    "exports: an export, serve: hiddenstore.json drafts 'x; rm'",
    "exports: an export, serve: weights missing",
    "machine: options: export W/run --engine vllm --yarn nan 2048 -o e",
    "machine: options: ls W/store --where tokens>NaN",
    "machine: the machine: stderr full",
    "machine: the machine: stdout closed",
    "runs: a run: a checkpoint renamed step-5, eval",
    "runs: a run: a tensor missing, eval",
    "runs: a run: a tensor of integers, eval",
    "runs: a run: metrics.jsonl of half a line, finished, resume",
    "runs: a run: metrics.jsonl of infinity, more",
    "runs: a run: no snapshot.json, resume",
    "runs: a run: weights with NaN, eval",
    "stores: a tar's index lies: fields null",
    "stores: sealed again: format 2",
    "stores: sealed again: format as text",
    "stores: sealed again: supervised tokens one more",
}
"""Attempts that ended in a traceback, a hang or silence when first made; the tests of every day repeat them."""

CASES = {f"{room}: {attempt.what}": attempt for room, attempts in ROOMS.items() for attempt in attempts}


def test_no_two_attempts_have_one_name_and_those_that_broke_are_there() -> None:
    assert len(CASES) == sum(map(len, ROOMS.values()))
    assert sorted(BROKE - CASES.keys()) == []


@pytest.mark.parametrize(
    ("name", "attempt"),
    [
        pytest.param(name, attempt, id=name, marks=() if name in BROKE else pytest.mark.slow)
        for name, attempt in CASES.items()
    ],
)
def test_an_attempt_is_refused_by_name_or_held(
    name: str,
    attempt: Attempt,
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    lab = Lab(with_units(world), tmp_path, capsys)
    monkeypatch.setattr(inputs, "UNIT_TOKENS", UNIT_TOKENS)
    word, said = "error", ""
    try:
        ended = attempt.do(lab)
        word, said = ended.word, ended.err
    except AssertionError as error:
        word = str(error).partition(":")[0].splitlines()[0]
        raise
    finally:
        folder = request.config.getoption("--results")
        if folder is not None:
            note(Path(folder), name, word)
    assert word in attempt.expected.split("|"), said


def note(folder: Path, name: str, word: str) -> None:
    """Add one row to the results of this commit and write their table again."""
    path, document = of_this_commit(folder, "attack")
    rows = document.setdefault("rows", {})
    rows[name] = word
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    verdicts = {name: verdict(word) for name, word in rows.items()}
    kinds = ("held", "refused", "lost", "silent", "traceback", "hang", "error")
    counts = ", ".join(f"{kind} {list(verdicts.values()).count(kind)}" for kind in kinds)
    lines = [
        f"# The second attack, {document['date']}",
        "",
        f"Commit {document['commit']}; {len(rows)} attempts: {counts}. Each is a row of `tests/attacks/second/`; "
        "`make reliability PART=tests/attacks/test_second_attack.py` makes them again and writes this file. Held: "
        "everything is as it was or as it should be. Refused: an error of a named kind, or a finding of `verify`. "
        "Mended: it ended in a traceback, a hang or silence when it was first made.",
        "",
        "| attempt | outcome | verdict | |",
        "|---|---|---|---|",
        *(
            f"| {cell(name)} | {word} | {verdicts[name]} | {'mended' if name in BROKE else ''} |"
            for name, word in sorted(rows.items())
        ),
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def verdict(word: str) -> str:
    """``held``, ``refused``, or what must never be."""
    if word in ("lost", "silent", "hang", "traceback", "error"):
        return word
    return {"held": "held", "internal": "traceback", "lost or wrong": "lost", "not counted": "silent"}.get(
        word, "refused"
    )


def cell(text: str) -> str:
    return text[:160].replace("|", "\\|").replace("\n", " ")
