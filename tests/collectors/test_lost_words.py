"""Words of answers that chat templates leave out: beside a tool call, as Llama 3.1's, and thoughts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_templates import CHATML, CHATML_TAGGED, LLAMA3, chat, tiny_target, tiny_tokenizer, write_rows

from collectors.tokenize.template import ChatTemplate, Tokenised
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation

LLAMA31 = LLAMA3.replace(
    "{{ m['content'] | trim }}",
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
    "{{ '{\"name\": \"' + c.name + '\", ' }}{{ '\"parameters\": ' }}{{ c.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m['content'] | trim }}{% endif %}",
)
"""Llama 3.1's, of a custom tool call: its words are not rendered."""
BOTH = LLAMA31.replace("{% if m.tool_calls %}", "{% if m.tool_calls %}{{ m['content'] | trim }}")


def called(content: str) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "adder", "arguments": {"a": 5}}}
    return [{"role": "user", "content": "five?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


def are_words_lost(template: str, messages: list[dict[str, Any]]) -> bool:
    (sample,) = ChatTemplate(tiny_tokenizer(template)).tokenise([Conversation("f:1", messages)])
    assert isinstance(sample, Tokenised), sample
    return sample.are_words_lost


@pytest.mark.parametrize(("template", "is_lost"), [(LLAMA31, True), (BOTH, False)])
def test_words_beside_a_tool_call_that_the_template_drops_are_noticed(template: str, is_lost: bool) -> None:
    assert are_words_lost(template, called("Let me add.")) == is_lost
    assert not are_words_lost(template, called(" \n"))
    # The question holds the same words.
    assert are_words_lost(template, called("five?")) == is_lost
    results = [{"role": "tool", "content": "5"}, {"role": "assistant", "content": "five"}]
    assert are_words_lost(template, [*called("Let me add."), *results]) == is_lost


HIDES = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] | trim }}")


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED, LLAMA3, HIDES])
@pytest.mark.parametrize("answer", ["Yes.", " Yes,\n\n  no. ", "<think>\nwell\n</think>\n\nYes.", "so\n</think>\nYes."])
def test_thoughts_and_white_space_are_no_words_that_are_lost(template: str, answer: str) -> None:
    assert not are_words_lost(template, chat("Why?", answer))


def run(*arguments: str | Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *map(str, arguments), "--val", "0"])
    assert ended.value.code == 0


def test_prepare_counts_and_says_words_that_were_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_target(tmp_path / "target", LLAMA31)
    rows = [{"messages": called("Let me add.")}, {"messages": called("")}, {"messages": chat("a", "b")}]
    for name, some, words_lost in (("whole", rows, 1), ("plain", rows[1:], None)):
        run(write_rows(tmp_path / f"{name}.jsonl", some), "-o", tmp_path / name, "--target", target)
        warned = " ".join(capsys.readouterr().err.split())
        assert ("1 sample lost words of an answer" in warned) == (words_lost is not None)
        assert json.loads((tmp_path / name / "data.json").read_bytes()).get("words_lost") == words_lost
