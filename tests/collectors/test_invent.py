"""Questions that the target asks itself: different, ended, the same after a kill, and answered like any others."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from collectors.demo import TARGET_DIR
from collectors.regenerate import invent as module
from collectors.regenerate.generate import Answer
from collectors.regenerate.invent import invent, questions_file
from collectors.regenerate.options import RegenerateOptions
from hiddenstore.cli import main
from hiddenstore.errors import CaptureError, ConfigError, ConflictError, CorruptionError, InterruptError
from tests.collectors.tiny import save_target, tidies_up


@pytest.fixture
def options(tmp_path: Path) -> RegenerateOptions:
    return RegenerateOptions((), tmp_path / "answers.jsonl", str(TARGET_DIR), batch_size=12, seed=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[RegenerateOptions, Counter[str]]:
    """An uninterrupted run of 20 questions, and what it dropped by reason."""
    out = tmp_path_factory.mktemp("straight") / "answers.jsonl"
    options = RegenerateOptions((), out, str(TARGET_DIR), batch_size=12, seed=1)
    return options, invent(options, 20)


def questions(options: RegenerateOptions) -> list[str]:
    rows = map(json.loads, questions_file(options.out).read_text().splitlines())
    return [row["messages"][-1]["content"] for row in rows]


def test_the_target_asks_what_it_was_tuned_on(straight: tuple[RegenerateOptions, Counter[str]]) -> None:
    options, dropped = straight
    asked = questions(options)
    assert len(asked) == len({text.casefold() for text in asked}) == 20
    # The bundled target was taught questions about the standard library, whose names stand in backticks.
    assert sum("`" in text for text in asked) > 10
    assert not any("<|" in text for text in asked)
    assert set(dropped) <= {"cut", "looping", "short", "duplicate"}


def test_a_stopped_run_goes_on_to_the_same_questions(
    straight: tuple[RegenerateOptions, Counter[str]], tmp_path: Path
) -> None:
    options, _ = straight
    stopped, calls = replace(options, out=tmp_path / "stopped.jsonl"), count()
    with pytest.raises(InterruptError):
        invent(stopped, 20, lambda: next(calls) == 0)
    assert 0 < len(questions(stopped)) < 20
    invent(stopped, 20)
    assert questions(stopped) == questions(options)


def test_a_question_may_hold_what_ends_a_line_of_text_and_none_of_json(
    straight: tuple[RegenerateOptions, Counter[str]], tmp_path: Path
) -> None:
    other = replace(straight[0], out=tmp_path / "answers.jsonl")
    for name in (".questions.jsonl", ".questions.settings.json"):
        shutil.copy(f"{straight[0].out}{name}", f"{other.out}{name}")
    file = questions_file(other.out)
    _, *rest = file.read_text().splitlines()
    first = {"batch": 0, "messages": [{"role": "user", "content": "one\u2028two\u0085three"}]}
    file.write_text("\n".join([json.dumps(first, ensure_ascii=False), *rest]) + "\n")
    assert invent(other, 20) == Counter()


@pytest.mark.parametrize("damage", [b'{"batch": 0, "mess', b"[1]", b'{"batch": 0, "messages": []}', b"\x00"])
def test_a_damaged_file_of_questions_is_named_with_its_line(options: RegenerateOptions, damage: bytes) -> None:
    invent(options, 2)
    file = questions_file(options.out)
    first, *_ = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + damage + b"\n")
    with pytest.raises(CorruptionError, match=r"\.questions\.jsonl is damaged: line 2 is no question") as caught:
        invent(options, 4)
    assert caught.value.kind == "file-corrupt"


def test_a_system_message_opens_every_question(options: RegenerateOptions) -> None:
    invent(replace(options, system="be brief"), 3)
    row = json.loads(questions_file(options.out).read_text().splitlines()[0])
    assert row["messages"][0] == {"role": "system", "content": "be brief"}


def test_a_question_keeps_the_spaces_before_its_punctuation(
    options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(TARGET_DIR, tmp_path / "target"))
    tidies_up(folder)
    said = "Who said x = [1 , 2] . Why ?"
    ids = AutoTokenizer.from_pretrained(folder)(said, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(module, "generate_batch", lambda *_: [(0, Answer(ids, True))])
    invent(replace(options, target=str(folder)), 1)
    assert questions(options) == [said]


def test_a_target_that_asks_nothing_is_an_error_with_the_reasons(
    options: RegenerateOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LONGEST_QUESTION", 2)
    with pytest.raises(CaptureError, match=r"asks too few questions: 0 of 24, \d+ cut") as caught:
        invent(options, 20)
    assert caught.value.kind == "nothing-answered"


def test_a_target_without_a_template_is_refused(options: RegenerateOptions, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target")
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        invent(replace(options, target=str(folder)), 3)
    assert caught.value.kind == "template-missing"


def test_the_command_asks_and_answers(tmp_path: Path) -> None:
    out, more = ["-o", str(tmp_path / "a.jsonl")], ["--max-new-tokens", "24", "--set", "batch_size=8", "--json"]
    target = ["--target", str(TARGET_DIR)]
    result = CliRunner().invoke(main, ["regenerate", "self:6", *out, *target, *more])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert 0 < len(rows) <= 6
    assert {message["role"] for row in rows for message in row["messages"]} == {"user", "assistant"}
    for inputs in (
        ["self:0", *target],
        ["self:many", *target],
        ["self:6", "more.jsonl", *target],
        ["self:6", "--server", "http://localhost:1"],
    ):
        assert CliRunner().invoke(main, ["regenerate", *inputs, *out]).exit_code == 2


def test_questions_that_were_asked_otherwise_are_not_taken_for_these(options: RegenerateOptions) -> None:
    invent(options, 3)
    for change in ({"seed": 2}, {"system": "be brief"}, {"batch_size": 6}):
        with pytest.raises(ConflictError, match=f"asked otherwise: {next(iter(change))}") as caught:
            invent(replace(options, **change), 3)  # type: ignore[arg-type]
        assert caught.value.kind == "answers-differ"


def test_fewer_questions_than_there_are_answer_the_first_ones(tmp_path: Path) -> None:
    words = ["--max-new-tokens", "8", "--temperature", "0", "--set", "batch_size=8", "-q"]
    words += ["--target", str(TARGET_DIR), "-o", str(tmp_path / "a.jsonl")]
    assert CliRunner().invoke(main, ["regenerate", "self:5", *words]).exit_code == 0
    (tmp_path / "a.jsonl").unlink()
    assert CliRunner().invoke(main, ["regenerate", "self:2", *words]).exit_code == 0
    asked = [
        json.loads(line)["messages"][0] for line in (tmp_path / "a.jsonl.questions.jsonl").read_text().splitlines()
    ]
    answered = [json.loads(line)["messages"][0] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert answered
    assert [message for message in asked[:2] if message in answered] == answered


def test_a_wrong_option_is_refused_before_anything_is_asked(options: RegenerateOptions, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        invent(replace(options, batch_size=0), 3)
    invent(replace(options, out=tmp_path / "new" / "folder" / "a.jsonl"), 1)
    assert questions_file(tmp_path / "new" / "folder" / "a.jsonl").is_file()


def test_a_template_that_refuses_the_first_turn_is_named(options: RegenerateOptions, tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('no system role here') }}")
    with pytest.raises(ConfigError, match="refuses a first turn: no system role here"):
        invent(replace(options, template=str(tmp_path / "strict.jinja")), 3)
