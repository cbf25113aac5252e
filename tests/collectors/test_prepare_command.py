"""``hiddenstore prepare`` as a person or a script meets it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import chat, tiny_target, write_rows

from hiddenstore.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_target(tmp_path_factory.mktemp("target"))


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["prepare", *map(str, arguments)])
    return int(str(caught.value.code))


def rows(count: int) -> list[Any]:
    return [{"messages": chat(f"Is {i} even?", "yes" if i % 2 == 0 else "no")} for i in range(count)]


def test_the_summary_names_what_was_read_refused_and_what_comes_next(
    tmp_path: Path, target: str, capsys: Capture
) -> None:
    source = write_rows(tmp_path / "a.jsonl", [*rows(6), b"{oops", rows(1)[0]])
    out = tmp_path / "data"
    assert run(source, "-o", out, "--target", target, "--val", "50%") == 0
    shown = capsys.readouterr()
    for text in ("rows read", "8", "generation tags", "limit 256", "1 dropped", "invalid-json", "a.jsonl:7"):
        assert text in shown.out
    assert f"next: hiddenstore collect {out} -o {out}-store --target {target}" in shown.err
    assert "rejects.jsonl" in shown.err


@pytest.mark.parametrize(("elapsed", "shown"), [(0.5, "3  (6 rows/s)"), (7.0, "3")])
def test_a_rate_of_less_than_a_row_a_second_is_not_shown_as_none(
    tmp_path: Path, target: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, elapsed: float, shown: str
) -> None:
    from collectors.cli import prepare as command

    real = command._show_data
    monkeypatch.setattr(command, "_show_data", lambda answer: real({**answer, "elapsed_s": elapsed}))
    assert run(write_rows(tmp_path / "a.jsonl", rows(3)), "-o", tmp_path / "data", "--target", target) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "rows read" in line]
    assert line.partition("rows read")[2].strip() == shown


def test_json_is_one_document_with_every_count(tmp_path: Path, target: str, capsys: Capture) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(5))
    assert run(source, "-o", tmp_path / "data", "--target", target, "--json", "--loss-on", "last-turn") == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert document["schema"] == "hiddenstore.prepare/1"
    assert (document["rows_read"], document["samples"], document["loss_on"]) == (5, 5, "last-turn")
    stored = json.loads((tmp_path / "data" / "data.json").read_text())
    assert {key: value for key, value in stored.items() if key != "sha256"}.items() <= document.items()


def test_an_empty_validation_split_is_said(tmp_path: Path, target: str, capsys: Capture) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(2))
    assert run(source, "-o", tmp_path / "data", "--target", target, "--val", "0.0001%") == 0
    assert "none of the 2 samples fell into the validation split" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "share"), [("1%", 0.01), ("0.25", 0.25), ("0", 0.0), (".5", 0.5), ("12.5 %", 0.125), ("100%", 1.0)]
)
def test_val_takes_percent_or_fraction(tmp_path: Path, target: str, capsys: Capture, text: str, share: float) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(2))
    assert run(source, "-o", tmp_path / "data", "--target", target, "--val", text, "--json") == 0
    assert json.loads(capsys.readouterr().out)["validation_share"] == share


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["none.jsonl"], 2, "path-missing"),
        (["a.jsonl", "--val", "101%"], 2, "share"),
        (["a.jsonl", "--val", "some"], 2, "share"),
        (["a.jsonl", "--max-tokens", "1"], 2, "max-tokens"),
        (["a.jsonl", "--max-tokens", "9999"], 2, "--max-tokens 256"),
        (["a.jsonl", "--overlong", "keep"], 2, "overlong"),
        (["a.jsonl", "--template", "none.jinja"], 2, "path-missing"),
        ([], 2, "INPUT"),
    ],
)
def test_a_wrong_option_is_a_usage_error_and_nothing_is_written(
    tmp_path: Path,
    target: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", rows(2))
    assert run(*arguments, "-o", "data", "--target", target) == code
    assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_existing_output_is_a_conflict(tmp_path: Path, target: str, capsys: Capture) -> None:
    source = write_rows(tmp_path / "a.jsonl", rows(2))
    assert run(source, "-o", tmp_path / "data", "--target", target, "-q") == 0
    assert run(source, "-o", tmp_path / "data", "--target", target) == 6
    assert "[output-exists]" in capsys.readouterr().err


def test_a12_rows_whose_tool_calls_the_template_does_not_write_are_counted_and_warned_of(
    tmp_path: Path, target: str, capsys: Capture
) -> None:
    call = {"type": "function", "function": {"name": "adder", "arguments": "{}"}}
    lost = {"messages": [*chat("five?"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    source = write_rows(tmp_path / "a.jsonl", [*rows(3), lost, lost])
    assert run(source, "-o", tmp_path / "data", "--target", target) == 0
    shown = capsys.readouterr()
    assert "tool-calls-lost" in shown.out
    assert "2 rows called tools and were left out" in shown.err
    stored = json.loads((tmp_path / "data" / "data.json").read_text())
    assert [(reject["reason"], reject["rows"]) for reject in stored["rejects"]] == [("tool-calls-lost", 2)]
    assert stored["samples"] == 3
