"""Where answers begin: behind a header that some templates write, and prompt for, behind a question alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_template import HEADER_TAGGED, REASONS, sample, supervised_runs, tokenise, turns
from tiny_templates import CHATML, chat, tiny_target, tiny_tokenizer, write_rows

from collectors.tokenize.prepare import PrepareOptions, prepare
from collectors.tokenize.template import ChatTemplate
from hiddenstore.conversation import Conversation, Problem
from hiddenstore.errors import ConfigError
from hiddenstore.inputs import PreparedInput
from schemas.prepared import LossOn

PREAMBLE = "<s>{% if messages %}<|im_start|>system\nThe assistant is kind.<|im_end|>\n{% endif %}"
ASKS_BEHIND_QUESTIONS = PREAMBLE + CHATML.replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1]['role'] == 'user' %}"
)
"""As GigaChat 3 and Apriel 1.5."""
ENDS_BETWEEN = ASKS_BEHIND_QUESTIONS.replace(
    "<|im_end|>\n{% endfor %}",
    "{% if not (loop.last and m['role'] == 'assistant') %}<|im_end|>\n{% endif %}{% endfor %}",
)
"""As Hy3, which ends an answer once something follows it."""
NO_HEADER = PREAMBLE + (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{{ m['content'] }}[/INST]"
    "{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
"""As Devstral."""
HEADER_ENDS_QUESTIONS = NO_HEADER.replace("[/INST]", "<|im_start|>{% if not loop.last %}</think>{% endif %}").replace(
    "{% if add_generation_prompt %}", "{% if add_generation_prompt and messages[-1]['role'] == 'user' %}</think>"
)
"""As DeepSeek V3.1."""
HELLO, BACK = ({"role": "assistant", "content": text} for text in ("Hello!", "You are back."))


@pytest.mark.parametrize("text", [ASKS_BEHIND_QUESTIONS, ENDS_BETWEEN])
def test_an_answer_that_opens_begins_behind_the_header_that_a_question_is_followed_by(text: str) -> None:
    template = ChatTemplate(tiny_tokenizer(text))
    found = sample(template, [HELLO, *chat("a", "b", "c")])
    assert supervised_runs(template, found)[0].removesuffix("<|im_end|>") == "Hello!"
    assert turns(template, found)[0][1].removesuffix("<|im_end|>") == "Hello!"


@pytest.mark.parametrize("text", [ASKS_BEHIND_QUESTIONS, ENDS_BETWEEN])
def test_a_header_that_no_prompt_has_is_no_part_of_an_answer_behind_an_answer_or_a_system_message(text: str) -> None:
    template = ChatTemplate(tiny_tokenizer(text))
    found = sample(template, [{"role": "system", "content": "be brief"}, HELLO, BACK, *chat("a", "b", "c")])
    runs = [run.removesuffix("<|im_end|>") for run in supervised_runs(template, found)]
    assert runs == ["Hello!", "You are back.", "b"]


@pytest.mark.parametrize(
    ("text", "header"), [(NO_HEADER, "a header"), (HEADER_ENDS_QUESTIONS, "the header '</think>'")]
)
def test_an_answer_that_opens_without_a_header_is_refused_and_not_learned_with_what_stands_before_it(
    text: str, header: str
) -> None:
    def of(loss_on: LossOn, messages: list[dict[str, Any]]) -> list[str] | Problem:
        template = ChatTemplate(tiny_tokenizer(text), loss_on)
        found = tokenise(template, messages)
        return found if isinstance(found, Problem) else supervised_runs(template, found)

    refused = of("assistant", [HELLO, *chat("a", "b")])
    assert isinstance(refused, Problem)
    assert refused.reason == "not-prefix-stable"
    assert refused.detail == f"where message 1 begins is not revealed: {header} of prompts does not stand before it"
    assert of("last-turn", [HELLO, *chat("a", "b")]) == ["b</s>"]
    assert of("assistant", [*chat("a", "b"), HELLO]) == ["b</s>Hello!</s>"]


def test_the_header_is_asked_for_once_for_each_setting_and_set_of_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    template, rendered = ChatTemplate(tiny_tokenizer(NO_HEADER)), list[str]()
    render = ChatTemplate.render

    def count(self: ChatTemplate, conversation: Conversation, *more: Any, **named: Any) -> Any:
        rendered.append(conversation.messages[0]["content"])
        return render(self, conversation, *more, **named)

    monkeypatch.setattr(ChatTemplate, "render", count)
    plain = Conversation("f:1", chat("a", "b"))
    others = replace(plain, tools=[{"name": "add"}]), replace(plain, template_kwargs={"enable_thinking": False})
    template.tokenise([plain] * 3)
    assert len(rendered) - rendered.count("a") == 2
    template.tokenise([*others, plain] * 3)
    assert len(rendered) - rendered.count("a") == 6


THINKS_IN_TAGS = HEADER_TAGGED.replace(
    "{{ m['content'] }}<|im_end|>\n{% endgeneration",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n{% endif %}</think>\n"
    "{{ m['content'] }}<|im_end|>\n{% endgeneration",
).replace("assistant\n{% endif %}", "assistant\n</think>{% endif %}")
"""As Laguna XS: it prompts for an answer without thoughts."""


@pytest.mark.parametrize("think_loss", [True, False])
def test_a_header_inside_generation_tags_is_cut_where_the_prompt_goes_on_otherwise_than_the_answer(
    think_loss: bool,
) -> None:
    template = ChatTemplate(tiny_tokenizer(THINKS_IN_TAGS), think_loss=think_loss)
    plain, thought = chat("a", "b"), chat("a", "b")
    thought[1]["reasoning_content"] = "hm"
    runs = [supervised_runs(template, sample(template, messages)) for messages in (plain, thought)]
    expected = ["\nb<|im_end|>"], ["<think>\nhm\n</think>\nb<|im_end|>" if think_loss else "\nb<|im_end|>"]
    assert runs == list(expected)


ASKED = "{% if enable_thinking is not defined or enable_thinking %}"
OPENS_A_THOUGHT = REASONS.replace("assistant\n{% endif %}", "assistant\n{% if true %}<think>\n{% endif %}{% endif %}")
"""As MiniMax-M2: no answer without thoughts stands behind its prompt."""


@pytest.mark.parametrize(
    ("text", "beside", "written"),
    [
        (OPENS_A_THOUGHT, {"reasoning_content": "hm"}, "hm\n</think>\n\nb<|im_end|>"),
        (OPENS_A_THOUGHT.replace("{% if true %}", ASKED), {"enable_thinking": False}, "b<|im_end|>"),
    ],
)
def test_a_template_whose_prompt_opens_a_thought_works_for_rows_that_have_one_or_ask_for_none(
    tmp_path: Path, text: str, beside: dict[str, Any], written: str
) -> None:
    target = tiny_target(tmp_path / "target", text)
    asked, said = chat("a", "b")
    rows = [{"messages": [asked, said | beside], **beside}, {"messages": [asked, said]}]
    info = prepare([write_rows(tmp_path / "a.jsonl", rows)], tmp_path / "data", target, PrepareOptions(workers=1))
    assert [(reject.reason, reject.rows) for reject in info.rejects] == [("not-prefix-stable", 1)]
    (found,) = PreparedInput.open(tmp_path / "data").samples()
    assert tiny_tokenizer().decode(found.input_ids[found.loss_mask == 1]) == written


def test_where_no_row_suits_a_prompt_that_opens_a_thought_the_error_says_what_does(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", OPENS_A_THOUGHT)
    source = write_rows(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(ConfigError, match="not-prefix-stable: 1 row") as caught:
        prepare([source], tmp_path / "data", target, PrepareOptions(workers=1))
    assert "--template FILE" in str(caught.value.hint)
