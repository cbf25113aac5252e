"""What a run that goes on, or a file that is taken from it, must have in common with the answers that are there."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectors.regenerate.answers import AnswersFolder
from collectors.regenerate.invent import invent
from collectors.regenerate.job import regenerate, take_answered
from collectors.regenerate.options import RegenerateOptions, answer_settings, target_digests
from hiddenstore.errors import CaptureError, ConfigError, ConflictError, CorruptionError, InterruptError
from tests.collectors.tiny import save_target


@pytest.fixture
def options(tmp_path: Path) -> RegenerateOptions:
    rows = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(4)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    target = save_target(tmp_path / "target")
    out = tmp_path / "out.jsonl"
    return RegenerateOptions((str(tmp_path / "chats.jsonl"),), out, str(target), max_new_tokens=8, batch_size=1)


def stop(options: RegenerateOptions) -> None:
    answers = Path(f"{options.out}.answers/answers-1-of-1.jsonl")
    with pytest.raises(InterruptError):
        regenerate(options, lambda: answers.is_file() and answers.read_bytes().count(b"\n") >= 2)


def test_another_checkpoint_in_the_same_folder_does_not_go_on_with_the_answers(options: RegenerateOptions) -> None:
    stop(options)
    save_target(Path(str(options.target)), seed=1)
    with pytest.raises(ConflictError, match="checkpoint_sha256") as caught:
        regenerate(options)
    assert caught.value.kind == "answers-differ"
    with pytest.raises(ConflictError, match="checkpoint_sha256"):
        take_answered(options, Path(options.out).with_name("so-far.jsonl"))
    save_target(Path(str(options.target)))
    assert regenerate(options).written > 0


@pytest.mark.parametrize("damage", [b'{"answers_by": "tar', b"[]", b""])
def test_damaged_settings_are_an_error_of_their_own(options: RegenerateOptions, damage: bytes) -> None:
    stop(options)
    Path(f"{options.out}.answers/settings.json").write_bytes(damage)
    taken = Path(options.out).with_name("so-far.jsonl")
    for goes_on in (lambda: regenerate(options), lambda: take_answered(options, taken)):
        with pytest.raises(CorruptionError, match=r"settings\.json is damaged: it holds no settings") as caught:
            goes_on()
        assert caught.value.kind == "file-corrupt"


def test_questions_of_another_checkpoint_are_not_gone_on_with(options: RegenerateOptions) -> None:
    invent(options, 2)
    save_target(Path(str(options.target)), seed=1)
    with pytest.raises(ConflictError, match="checkpoint_sha256"):
        invent(options, 4)


@pytest.mark.parametrize("change", [{"temperature": 0.3}, {"system": "be brief"}, {"seed": 9}, {"max_new_tokens": 9}])
def test_what_is_taken_was_made_under_the_settings_that_are_given(
    options: RegenerateOptions, tmp_path: Path, change: dict[str, Any]
) -> None:
    stop(options)
    with pytest.raises(ConflictError, match="were made otherwise") as caught:
        take_answered(replace(options, **change), tmp_path / "so-far.jsonl")
    assert caught.value.kind == "answers-differ"
    assert next(iter(change)) in str(caught.value)
    assert not (tmp_path / "so-far.jsonl").exists()
    assert take_answered(options, tmp_path / "so-far.jsonl").written > 0


def test_what_a_server_answered_can_be_taken_without_its_model_s_name(options: RegenerateOptions) -> None:
    served = replace(options, target=None, server="http://127.0.0.1:9", serves=options.target, temperature=0.0)
    folder = AnswersFolder(Path(options.out), 1, served.limit)
    folder.claim(answer_settings(served, "tiny", target_digests(served)))
    folder.require(answer_settings(served, None, target_digests(served)))
    folder.require(answer_settings(replace(served, max_new_tokens=9), "tiny", target_digests(served)))
    with pytest.raises(ConflictError, match="model 'tiny'"):
        folder.require(answer_settings(served, "other", target_digests(served)))
    save_target(Path(str(options.target)), seed=1)
    with pytest.raises(ConflictError, match="checkpoint_sha256"):
        folder.require(answer_settings(served, None, target_digests(served)))


def test_a_run_that_was_begun_before_checkpoints_were_compared_goes_on(options: RegenerateOptions) -> None:
    stop(options)
    path = Path(f"{options.out}.answers/settings.json")
    settings = json.loads(path.read_bytes())
    path.write_text(json.dumps({name: value for name, value in settings.items() if not name.endswith("_sha256")}))
    assert regenerate(options).resumed >= 2


def rows_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


def test_switches_of_all_answers_reach_the_chat_template_in_this_process_and_the_rows(
    options: RegenerateOptions, tmp_path: Path
) -> None:
    template = tmp_path / "switch.jinja"
    template.write_text("{% if enable_thinking is defined %}{{ 1 / 0 }}{% endif %}a")
    refused = replace(options, template=str(template), extra=OFF)
    with pytest.raises(CaptureError, match="4 refused"):
        regenerate(refused)
    regenerate(replace(options, out=tmp_path / "off.jsonl", extra=OFF))
    rows = rows_of(tmp_path / "off.jsonl")
    assert rows
    assert all(row["chat_template_kwargs"] == {"enable_thinking": False} for row in rows)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"top_k": 20}, "extra.top_k is a member of requests"),
        ({"chat_template_kwargs": "off"}, "extra.chat_template_kwargs: "),
        ({"chat_template_kwargs": {"messages": []}}, "extra.chat_template_kwargs: .*messages"),
    ],
)
def test_members_that_no_answer_in_this_process_would_follow_are_refused(
    options: RegenerateOptions, extra: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        regenerate(replace(options, extra=extra))
    assert caught.value.kind == "option-invalid"


def test_earlier_thoughts_stand_in_the_prompt_under_the_name_that_the_template_reads(
    options: RegenerateOptions, tmp_path: Path
) -> None:
    thought = {"role": "assistant", "content": "two", "reasoning_content": "because"}
    turns = [{"role": "user", "content": "one"}, thought, {"role": "user", "content": "three"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [*turns, {"role": "assistant", "content": "four"}]}))
    template = tmp_path / "thoughts.jinja"
    template.write_text("{% for m in messages if m.role == 'assistant' %}{{ m.reasoning + m.content }}{% endfor %}")
    report = regenerate(replace(options, turns="last", template=str(template)))
    assert (report.written, report.dropped) == (1, {})


@pytest.mark.parametrize(
    "words", [{"truncation": True, "max_length": 4}, {"padding": "max_length", "max_length": 90}, {"tokenize": False}]
)
def test_switches_of_a_row_reach_the_template_alone_and_never_the_tokenizer(
    options: RegenerateOptions, tmp_path: Path, words: dict[str, Any]
) -> None:
    plain = replace(options, temperature=0.0)
    regenerate(plain)
    chats = tmp_path / "switched.jsonl"
    rows = [{**row, "chat_template_kwargs": words} for row in rows_of(options.inputs[0])]
    chats.write_text("\n".join(map(json.dumps, rows)))
    switched = replace(plain, inputs=(str(chats),), out=tmp_path / "switched-out.jsonl")
    assert regenerate(switched).written > 0
    assert rows_of(switched.out) == [{**row, "chat_template_kwargs": words} for row in rows_of(plain.out)]
