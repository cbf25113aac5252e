"""Answers in this process beside what the chat template makes of them, which is what `prepare` would teach."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_templates import CHATML, HARMONY, MARKS, tiny_target, tiny_tokenizer

from collectors.regenerate import in_process
from collectors.regenerate.generate import Answer
from collectors.regenerate.job import regenerate
from collectors.regenerate.options import RegenerateOptions
from hiddenstore.errors import ConfigError, InterruptError
from tests.collectors.tiny import tidies_up


def first_answer(options: RegenerateOptions) -> str:
    return str(json.loads(Path(options.out).read_text().splitlines()[0])["messages"][1]["content"])


def write_questions(path: Path, questions: list[str]) -> tuple[str]:
    rows = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(path),)


@pytest.fixture
def options(tmp_path: Path) -> RegenerateOptions:
    """Without a target."""
    inputs = write_questions(tmp_path / "chats.jsonl", [f"question {number}" for number in range(4)])
    return RegenerateOptions(inputs, tmp_path / "out.jsonl", max_new_tokens=64)


def target_that_says(
    text: str, template: str, folder: Path, monkeypatch: pytest.MonkeyPatch, ended: bool = True
) -> str:
    """A target of this chat template whose every answer is ``text``, special tokens in it and all."""
    return target_that_answers(lambda _prompt: (text, ended), template, folder, monkeypatch)


def target_that_answers(
    answer: Callable[[str], tuple[str, bool]], template: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A target of this chat template; ``answer`` gives the text of an answer to a prompt, and whether it is whole."""
    tokenizer = tiny_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.save_pretrained(tiny_target(folder))
    monkeypatch.setattr(in_process, "load_target", lambda *_: None)

    def answers(_target: object, prompts: list[list[int]], *more: Any) -> list[tuple[int, Answer]]:
        more[-1](0, 0)
        said = [answer(tokenizer.decode(prompt)) for prompt in prompts]
        ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in said]
        return [(row, Answer(ids[row], ended)) for row, (_, ended) in enumerate(said)]

    monkeypatch.setattr(in_process, "generate_batch", answers)
    return str(folder)


def test_an_answer_keeps_the_spaces_before_its_punctuation(
    options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "x = [1 , 2] if a . b else do n't ! Why ?"
    target = target_that_says(said, CHATML, tmp_path / "says", monkeypatch)
    tidies_up(Path(target))
    regenerate(replace(options, target=target))
    assert first_answer(options) == said


IN_CHANNELS = "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Four."
OPENS_A_THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif").replace(
    "{{ m['content'] }}", "{% if m['role'] == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
)
REFUSES_CHANNELS = "{% if '<|channel|>' in messages[-1].content %}{{ raise_exception('no tags here') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "says", "change"),
    [
        (
            HARMONY,
            IN_CHANNELS,
            "'<|channel|>final<|message|><|channel|>an' where the target read and wrote '<|channel|>analysis",
        ),
        (REFUSES_CHANNELS + HARMONY, IN_CHANNELS, "no tags here"),
        (
            OPENS_A_THOUGHT,
            "hm</think>yo",
            "'</think>hm</think>yo<|im_end|>' where the target read and wrote 'hm</think>yo'",
        ),
    ],
)
def test_a_run_ends_before_its_first_answer_is_kept_where_the_template_writes_answers_as_other_text(
    template: str, says: str, change: str, options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_that_says(says, template, tmp_path / "says", monkeypatch)
    with pytest.raises(ConfigError) as caught:
        regenerate(replace(options, target=target))
    assert caught.value.kind == "template-unstable"
    assert change in caught.value.message
    assert "reasoning parser" in str(caught.value.hint)
    assert not Path(f"{options.out}.answers").exists()


@pytest.mark.parametrize(
    ("template", "says", "ended"),
    [
        (CHATML, IN_CHANNELS, True),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}"), "  yo\n", True),
        (OPENS_A_THOUGHT, "hm, I was cut", False),
    ],
)
def test_a_run_goes_on_where_the_template_writes_answers_as_they_are_or_they_were_cut(
    template: str, says: str, ended: bool, options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_that_says(says, template, tmp_path / "says", monkeypatch, ended)
    assert regenerate(replace(options, target=target)).answers == 4
    assert first_answer(options) == says


@pytest.mark.parametrize("long", [in_process.LOOKED_AT - 1, in_process.LOOKED_AT + 1])
def test_answers_that_were_cut_say_nothing_of_the_template_however_many_come_first(
    long: int, options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: str) -> tuple[str, bool]:
        return ("<|channel|>analysis<|message|>So, let us", False) if "long" in prompt else (IN_CHANNELS, True)

    target = target_that_answers(answer, HARMONY, tmp_path / "says", monkeypatch)
    inputs = write_questions(tmp_path / "q.jsonl", [*["long " * 9] * long, *["short"] * in_process.LOOKED_AT])
    options = replace(options, target=target, inputs=inputs)
    for batch_size in (1, 64):
        with pytest.raises(ConfigError, match="writes other text"):
            regenerate(replace(options, out=tmp_path / f"{batch_size}.jsonl", batch_size=batch_size))


def test_a_stopped_run_goes_on_although_the_template_writes_what_is_left_as_other_text(
    options: RegenerateOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(prompt: str) -> tuple[str, bool]:
        return ("hm</think>yo" if "odd" in prompt else "yo", True)

    template = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] }}")
    target = target_that_answers(answer, template, tmp_path / "says", monkeypatch)
    odd = in_process.LOOKED_AT
    inputs = write_questions(tmp_path / "q.jsonl", [*["a longer question"] * 2, *["odd"] * odd])
    options = replace(options, target=target, inputs=inputs, batch_size=1, out=tmp_path / "whole.jsonl")
    assert regenerate(options).answers == odd + 2
    stopped = replace(options, out=tmp_path / "stopped.jsonl")
    kept = Path(f"{stopped.out}.answers/answers-1-of-1.jsonl")
    with pytest.raises(InterruptError):
        regenerate(stopped, lambda: kept.is_file() and kept.read_bytes().count(b"\n") >= 2)
    assert regenerate(stopped).resumed == 2
    assert Path(stopped.out).read_bytes() == Path(options.out).read_bytes()


@pytest.mark.parametrize(("conversations", "is_refused"), [(1, False), (2, False), (3, True)])
def test_a_few_answers_that_the_template_writes_as_other_text_may_be_exceptions_and_are_warned_of(
    conversations: int,
    is_refused: bool,
    options: RegenerateOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(in_process, "output", lambda: SimpleNamespace(warn=warned.append))
    target = target_that_says(IN_CHANNELS, HARMONY, tmp_path / "says", monkeypatch)
    inputs = write_questions(tmp_path / "q.jsonl", ["why?"] * conversations)
    with pytest.raises(ConfigError) if is_refused else nullcontext():
        assert regenerate(replace(options, target=target, inputs=inputs)).answers == conversations
    assert len(warned) == (not is_refused)
    assert all("conversation 1: '<|channel|>final" in line for line in warned)
