"""Token ids, loss masks and turn spans from chat templates, with and without generation tags."""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_templates import (
    BROKEN,
    CHATML,
    CHATML_TAGGED,
    EMPTY_TAGS,
    EMPTY_THOUGHT_LAST,
    FOLDS_SYSTEM,
    LLAMA3,
    NO_PROMPT,
    NO_SYSTEM,
    STRIPS_THOUGHTS,
    USERS_ONLY,
    chat,
    tiny_target,
    tiny_tokenizer,
)
from transformers import ByT5Tokenizer

from collectors.tokenize.prepare import check_template, refuse_if_unstable
from collectors.tokenize.template import ChatTemplate, Tokenised, read_template
from hiddenstore.conversation import Conversation, Problem, Row, parse_row
from hiddenstore.errors import ConfigError, FormatError, NotFoundError
from hiddenstore.targets import rendering
from hiddenstore.targets.folder import open_target
from schemas.manifest import ROLES
from schemas.prepared import LossOn

TWO_TURNS = chat("What is two and two?", "It is four.", "How many apples?", "There are 12 🙂")
TEMPLATES = {"chatml": CHATML, "chatml-tagged": CHATML_TAGGED, "llama3": LLAMA3}


def tokenise(template: ChatTemplate, messages: list[dict[str, Any]]) -> Tokenised | Problem:
    (result,) = template.tokenise([Conversation("f:1", messages)])
    return result


def sample(template: ChatTemplate, messages: list[dict[str, Any]]) -> Tokenised:
    result = tokenise(template, messages)
    assert isinstance(result, Tokenised), result
    return result


def supervised_runs(template: ChatTemplate, found: Tokenised) -> list[str]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], found.loss_mask, [0]])))
    return [template.tokenizer.decode(found.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def turns(template: ChatTemplate, found: Tokenised) -> list[tuple[str, str]]:
    return [(ROLES[role], template.tokenizer.decode(found.input_ids[a:b].tolist())) for role, a, b in found.spans]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("loss_on", ["assistant", "last-turn", "all"])
def test_ids_are_those_of_apply_chat_template(name: str, loss_on: LossOn) -> None:
    template = ChatTemplate(tiny_tokenizer(TEMPLATES[name]), loss_on)
    for messages in (TWO_TURNS, chat("a", "b"), chat("a", "b", "c", system="be brief")):
        expected = template.tokenizer.apply_chat_template(messages, return_dict=False)
        assert sample(template, messages).input_ids.tolist() == expected


def test_bos_is_written_once() -> None:
    template = ChatTemplate(tiny_tokenizer(LLAMA3))
    ids = sample(template, TWO_TURNS).input_ids
    assert (ids == template.tokenizer.bos_token_id).sum() == 1
    assert ids[0] == template.tokenizer.bos_token_id


def test_tagged_mask_is_that_of_transformers() -> None:
    template = ChatTemplate(tiny_tokenizer(CHATML_TAGGED))
    for messages in (TWO_TURNS, chat("漢字", "naïve café"), chat("x", " y ", "z", "\n")):
        expected = template.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert sample(template, messages).loss_mask.tolist() == expected["assistant_masks"]


def test_a_character_of_several_tokens_at_the_end_of_a_range_is_supervised_whole() -> None:
    tagged = CHATML_TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    template = ChatTemplate(tiny_tokenizer(tagged))
    assert supervised_runs(template, sample(template, chat("hi", "hello 🙂"))) == ["hello 🙂"]


@pytest.mark.parametrize(("untagged", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
def test_prefix_comparison_supervises_answers_up_to_their_end_token(untagged: str, end: str) -> None:
    template = ChatTemplate(tiny_tokenizer(untagged))
    assert template.mask_from == "prefixes"
    assert supervised_runs(template, sample(template, TWO_TURNS)) == [f"It is four.{end}", f"There are 12 🙂{end}"]


def test_prefixes_and_tags_agree_on_mask_and_spans() -> None:
    tagged, untagged = ChatTemplate(tiny_tokenizer(CHATML_TAGGED)), ChatTemplate(tiny_tokenizer(CHATML))
    for messages in (TWO_TURNS, chat("a", "b", system="s"), chat("a", "b", "c")):
        one, other = sample(tagged, messages), sample(untagged, messages)
        assert one.loss_mask.tolist() == other.loss_mask.tolist()
        assert one.spans.tolist() == other.spans.tolist()


@pytest.mark.parametrize("template_text", [CHATML, CHATML_TAGGED, LLAMA3])
def test_last_turn_supervises_the_last_answer_only(template_text: str) -> None:
    template = ChatTemplate(tiny_tokenizer(template_text), "last-turn")
    (run,) = supervised_runs(template, sample(template, TWO_TURNS))
    assert run.startswith("There are 12 🙂")


def test_loss_on_all_supervises_every_token_and_keeps_the_turns() -> None:
    template = ChatTemplate(tiny_tokenizer(CHATML), "all")
    found = sample(template, TWO_TURNS)
    assert found.loss_mask.all()
    assert [ROLES[role] for role in found.spans[:, 0]] == ["user", "assistant", "user", "assistant"]


def test_turn_spans_hold_each_message_and_answers_without_their_header() -> None:
    template = ChatTemplate(tiny_tokenizer(CHATML))
    messages = [*chat("hi", "hello", system="be brief"), {"role": "tool", "content": "42"}, *chat("so?", "yes")]
    assert turns(template, sample(template, messages)) == [
        ("system", "<|im_start|>system\nbe brief<|im_end|>\n"),
        ("user", "<|im_start|>user\nhi<|im_end|>\n"),
        ("assistant", "hello<|im_end|>"),
        ("tool", "<|im_start|>tool\n42<|im_end|>\n"),
        ("user", "<|im_start|>user\nso?<|im_end|>\n"),
        ("assistant", "yes<|im_end|>"),
    ]


def test_messages_whose_boundary_is_hidden_share_a_turn() -> None:
    template = ChatTemplate(tiny_tokenizer(FOLDS_SYSTEM))
    check_template(template)
    assert turns(template, sample(template, chat("hi", "hello", system="be brief"))) == [
        ("user", "<s><|im_start|>user\nbe brief\nhi<|im_end|>\n"),
        ("assistant", "hello<|im_end|>"),
    ]


def test_a_refusal_of_the_template_is_the_reason_and_the_next_row_is_fine() -> None:
    tagged = NO_SYSTEM.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
    tokenizer = tiny_tokenizer(tagged)
    rows = [Conversation("f:1", chat("hi", "yo", system="no")), Conversation("f:2", chat("hi", "yo"))]
    refused, fine = ChatTemplate(tokenizer).tokenise(rows)
    assert isinstance(refused, Problem)
    assert (refused.location, refused.reason) == ("f:1", "template-refused")
    assert refused.detail == "System role not supported"
    assert isinstance(fine, Tokenised)


def test_a_template_that_rewrites_thoughts_is_refused_when_a_row_has_one() -> None:
    template = ChatTemplate(tiny_tokenizer(STRIPS_THOUGHTS))
    check_template(template)
    assert isinstance(tokenise(template, TWO_TURNS), Tokenised)
    thinking = chat("a", "<think>\nwell\n</think>\n\nb", "c", "d")
    problem = tokenise(template, thinking)
    assert isinstance(problem, Problem)
    assert problem.reason == "not-prefix-stable"
    with pytest.raises(ConfigError, match="rewrites earlier turns") as caught:
        refuse_if_unstable(template, problem)
    assert caught.value.kind == "template-unstable"
    assert caught.value.hint is not None
    assert "--template FILE" in caught.value.hint
    assert "--loss-on all" in caught.value.hint


def test_a_template_that_marks_only_the_last_turn_works_for_single_and_last_turns() -> None:
    template = ChatTemplate(tiny_tokenizer(EMPTY_THOUGHT_LAST))
    check_template(template)
    runs = supervised_runs(template, sample(template, chat("a", "b")))
    assert runs == ["<think>\n\n</think>\n\nb<|im_end|>"]
    assert isinstance(tokenise(template, TWO_TURNS), Problem)
    last = ChatTemplate(tiny_tokenizer(EMPTY_THOUGHT_LAST), "last-turn")
    assert supervised_runs(last, sample(last, TWO_TURNS)) == ["<think>\n\n</think>\n\nThere are 12 🙂<|im_end|>"]
    everything = ChatTemplate(tiny_tokenizer(EMPTY_THOUGHT_LAST), "all")
    assert sample(everything, TWO_TURNS).loss_mask.all()


def test_a_row_that_is_unstable_under_a_stable_template_is_the_rows_problem() -> None:
    template = ChatTemplate(tiny_tokenizer(CHATML))
    refuse_if_unstable(template, Problem("f:1", "not-prefix-stable", "odd"))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (USERS_ONLY, "template-invalid"),
        (EMPTY_TAGS, "mask-empty"),
        (NO_PROMPT, "template-unstable"),
        (BROKEN, "template-invalid"),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_any_data(text: str, kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_template(ChatTemplate(tiny_tokenizer(text)))
    assert caught.value.kind == kind


def test_a_generation_prompt_that_no_answer_begins_with_is_refused_at_once() -> None:
    opens_a_thought = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    with pytest.raises(ConfigError, match="once it is answered") as caught:
        check_template(ChatTemplate(tiny_tokenizer(opens_a_thought)))
    assert caught.value.kind == "template-unstable"
    assert caught.value.hint is not None
    assert "last-turn" not in caught.value.hint
    check_template(ChatTemplate(tiny_tokenizer(opens_a_thought), "all"))


def test_a_tokenizer_without_template_needs_one_given() -> None:
    with pytest.raises(ConfigError) as caught:
        ChatTemplate(tiny_tokenizer(None))
    assert caught.value.kind == "template-missing"
    assert caught.value.hint == "give one: --template FILE"
    template = ChatTemplate(tiny_tokenizer(None), template=CHATML)
    assert supervised_runs(template, sample(template, chat("a", "b"))) == ["b<|im_end|>"]


def test_an_answer_that_renders_to_nothing_is_not_a_sample() -> None:
    silent = CHATML_TAGGED.replace("{% generation %}", "{% if m['content'] != 'mute' %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% endif %}"
    )
    result = tokenise(ChatTemplate(tiny_tokenizer(silent)), chat("a", "mute"))
    assert isinstance(result, Problem)
    assert result.reason == "nothing-supervised"


def test_a_tokenizer_without_offsets_gives_the_same_kind_of_mask() -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML_TAGGED.replace("<|im_end|>", "{{ eos_token }}")
    template = ChatTemplate(tokenizer)
    found = sample(template, TWO_TURNS)
    assert found.input_ids.tolist() == tokenizer.apply_chat_template(TWO_TURNS, return_dict=False)
    assert supervised_runs(template, found) == ["It is four.</s>", "There are 12 🙂</s>"]
    assert [ROLES[role] for role in found.spans[:, 0]] == ["user", "assistant", "user", "assistant"]


def test_tools_reach_the_template() -> None:
    text = "{% if tools %}{{ tools[0]['name'] }}{% endif %}" + CHATML_TAGGED
    template = ChatTemplate(tiny_tokenizer(text))
    tool = {"name": "adder"}
    (found,) = template.tokenise([Conversation("f:1", chat("a", "b"), [tool])])
    assert isinstance(found, Tokenised)
    assert turns(template, found)[0] == ("user", "adder<|im_start|>user\na<|im_end|>\n")


def test_digests_follow_the_tokenizer_and_the_template_in_use(tmp_path: Path) -> None:
    folder = open_target(str(tiny_target(tmp_path / "t", CHATML)))
    tokenizer = tiny_tokenizer(CHATML)
    digests = ChatTemplate(tokenizer).digests
    assert digests == (folder.tokenizer_sha256, folder.chat_template_sha256)
    other = ChatTemplate(tokenizer, template=LLAMA3).digests
    assert other == (digests[0], ChatTemplate(tiny_tokenizer(LLAMA3)).digests[1])
    assert other[1] != digests[1]


def test_template_files_are_read_whole_or_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(CHATML)
    assert read_template(tmp_path / "t.jinja") == CHATML
    (tmp_path / "empty.jinja").write_text(" \n")
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(NotFoundError):
        read_template(tmp_path / "none.jinja")
    for name in ("empty.jinja", "binary.jinja"):
        with pytest.raises(ConfigError, match=name):
            read_template(tmp_path / name)


def test_a_target_folder_without_config_or_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_target(tmp_path / "no-config")
    (tmp_path / "no-config" / "config.json").unlink()
    (tmp_path / "no-tokenizer").mkdir()
    settings_ = {"model_type": "llama", "vocab_size": 400}
    (tmp_path / "no-tokenizer" / "config.json").write_text(json.dumps(settings_))
    for name in ("no-config", "no-tokenizer"):
        with pytest.raises(ConfigError, match=name):
            open_target(str(tmp_path / name))


WORDS = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda t: t.strip()
)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=2, max_size=6), st.none() | WORDS, st.sampled_from(sorted(TEMPLATES)))
def test_masks_and_spans_hold_for_any_text(contents: list[str], system: str | None, name: str) -> None:
    template = _cached(name)
    messages = chat(*contents, system=system)
    found = sample(template, messages)
    assert found.input_ids.tolist() == template.tokenizer.apply_chat_template(messages, return_dict=False)
    assert found.loss_mask.shape == found.input_ids.shape
    answers = np.zeros_like(found.loss_mask)
    last = 0
    for role, start, end in found.spans.tolist():
        assert last <= start < end <= len(found.input_ids)
        last = end
        answers[start:end] |= role == ROLES.index("assistant")
    assert answers.tolist() == found.loss_mask.tolist()
    written = [text.strip() if name == "llama3" else text for text in contents[1::2]]
    end_token = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    assert supervised_runs(template, found) == [f"{text}{end_token}" for text in written]


_TEMPLATE_CACHE: dict[str, ChatTemplate] = {}


def _cached(name: str) -> ChatTemplate:
    if name not in _TEMPLATE_CACHE:
        _TEMPLATE_CACHE[name] = ChatTemplate(tiny_tokenizer(TEMPLATES[name]))
    return _TEMPLATE_CACHE[name]


THOUGHTS = [
    ("<think>\nwell\n</think>\n\nYes.", "\n\nYes.<|im_end|>"),
    ("<think></think>Yes.", "Yes.<|im_end|>"),
    ("a<think>b</think>c<think>d</think>e", "ace<|im_end|>"),
    ("[THINK]hm[/THINK]Yes.", "Yes.<|im_end|>"),
    ("No thought at all.", "No thought at all.<|im_end|>"),
    ("<think>cut off while", None),
]


@pytest.mark.parametrize("template", [CHATML, CHATML_TAGGED])
@pytest.mark.parametrize(("answer", "left"), THOUGHTS)
def test_thoughts_are_left_out_of_the_mask(template: str, answer: str, left: str | None) -> None:
    def tokens(think_loss: bool) -> Any:
        chat_template = ChatTemplate(tiny_tokenizer(template), think_loss=think_loss)
        return chat_template, chat_template.tokenise([Conversation("f:1", chat("Why <think>?</think>", answer))])[0]

    whole, without = tokens(True), tokens(False)
    if left is None:
        assert getattr(without[1], "reason", "") == "nothing-supervised"
        return
    decode = whole[0].tokenizer.decode
    # A plain restatement: every supervised token whose text lies outside <think>…</think> of the answer.
    text = re.sub(r"(?s)<think>.*?</think>|\[THINK\].*?\[/THINK\]", "", answer) + "<|im_end|>"
    assert decode(without[1].input_ids[without[1].loss_mask == 1]) == text == left
    assert (without[1].loss_mask <= whole[1].loss_mask).all()
    assert (without[1].input_ids == whole[1].input_ids).all()


def test_a_thought_that_the_prompt_opened_ends_at_its_closing_tag() -> None:
    opened = CHATML_TAGGED.replace("{% generation %}", "<think>\n{% generation %}")
    template = ChatTemplate(tiny_tokenizer(opened), think_loss=False)
    sample = template.tokenise([Conversation("f:1", chat("Why?", "because\n</think>\n\nYes."))])[0]
    assert isinstance(sample, Tokenised)
    assert template.tokenizer.decode(sample.input_ids[sample.loss_mask == 1]) == "\n\nYes.<|im_end|>"


REASONS = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}",
)


@pytest.mark.parametrize(("template", "is_lost"), [(REASONS, False), (CHATML, True)])
def test_reasoning_that_the_template_leaves_out_is_noticed(template: str, is_lost: bool) -> None:
    messages = chat("Why?", "Yes.")
    messages[1]["reasoning_content"] = "because of that"
    sample = ChatTemplate(tiny_tokenizer(template)).tokenise([Conversation("f:1", messages)])[0]
    assert isinstance(sample, Tokenised)
    assert sample.is_reasoning_lost == is_lost


def test_tool_calls_tools_and_reasoning_reach_the_template() -> None:
    template = (
        "{% if tools %}tools: {{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m['content'] }}"
        "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ c.function.arguments.a }}</call>{% endfor %}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    row = {
        "messages": [
            {"role": "user", "content": "five?"},
            {"role": "assistant", "content": "", "reasoning_content": "I must add", "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
            {"role": "assistant", "content": "five"},
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    parsed = parse_row(Row("f:1", row, 1))
    assert isinstance(parsed, Conversation)
    for think_loss, first in ((True, "<think>I must add</think><call>"), (False, "<call>")):
        chosen = ChatTemplate(tiny_tokenizer(template), think_loss=think_loss)
        sample = chosen.tokenise([parsed])[0]
        assert isinstance(sample, Tokenised)
        assert "tools: add" in chosen.tokenizer.decode(sample.input_ids)
        supervised = chosen.tokenizer.decode(sample.input_ids[sample.loss_mask == 1])
        assert supervised == f"{first}add:5</call><|im_end|>five<|im_end|>"
        assert sample.spans[:, 0].tolist() == [1, 2, 3, 2]


@pytest.mark.parametrize("arguments", ['{"a": "ü"}', {"a": "ü"}])
def test_arguments_reach_a_template_that_joins_them_to_text_as_json(arguments: object) -> None:
    template = CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + ':' + c.function.arguments + '</call>' }}{% endfor %}",
    )
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*chat("five?"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    parsed = parse_row(Row("f:1", {"messages": messages}, 1))
    assert isinstance(parsed, Conversation)
    assert '<call>add:{"a": "ü"}</call>' in ChatTemplate(tiny_tokenizer(template)).render(parsed)[0]


@pytest.mark.parametrize("text", [CHATML, CHATML_TAGGED, LLAMA3])
@pytest.mark.parametrize("loss_on", ["assistant", "last-turn", "all"])
def test_a11_the_end_of_an_answer_that_the_limit_cut_is_neither_rendered_nor_supervised(
    text: str, loss_on: LossOn
) -> None:
    template = ChatTemplate(tiny_tokenizer(text), loss_on)
    messages: list[dict[str, Any]] = chat("What is two and two?", "It is", "How many apples?", "There are 12 e")
    ended = sample(template, messages)
    row = {"messages": [message | {"finish_reason": "length"} for message in messages]}
    parsed = parse_row(Row("f:1", row, 1))
    assert isinstance(parsed, Conversation)
    assert parsed.messages == messages
    (cut,) = template.tokenise([parsed])
    assert isinstance(cut, Tokenised)
    written = template.tokenizer.decode(cut.input_ids)
    assert written.endswith("There are 12 e")
    assert template.tokenizer.decode(ended.input_ids).startswith(written)
    supervised = supervised_runs(template, cut)
    assert supervised[-1].endswith("There are 12 e")
    if loss_on == "assistant":
        assert supervised == ["It is", "There are 12 e"]
        assert [words for role, words in turns(template, cut) if role == "assistant"] == ["It is", "There are 12 e"]
    if loss_on == "all":
        first_end = template.tokenizer.decode(cut.input_ids[cut.loss_mask == 0])
        assert first_end.strip() in ("<|im_end|>", "<|eot_id|>")


def test_a11_an_answer_that_ended_by_itself_keeps_its_end() -> None:
    template = ChatTemplate(tiny_tokenizer(CHATML))
    row = {"messages": [message | {"finish_reason": "stop"} for message in TWO_TURNS]}
    parsed = parse_row(Row("f:1", row, 1))
    assert isinstance(parsed, Conversation)
    (result,) = template.tokenise([parsed])
    assert isinstance(result, Tokenised)
    assert result.input_ids.tolist() == sample(template, TWO_TURNS).input_ids.tolist()
    assert result.loss_mask.tolist() == sample(template, TWO_TURNS).loss_mask.tolist()


def called(name: str, content: str = "") -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": {"a": 5}}}
    return [{"role": "user", "content": "five?"}, {"role": "assistant", "content": content, "tool_calls": [call]}]


CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"


@pytest.mark.parametrize("text", [CHATML, CHATML_TAGGED])
@pytest.mark.parametrize("loss_on", ["assistant", "last-turn", "all"])
@pytest.mark.parametrize("content", ["", "Let me see.", "The adder helps."])
def test_a12_tool_calls_that_the_template_does_not_write_reject_their_conversation(
    text: str, loss_on: LossOn, content: str
) -> None:
    messages = called("adder", content)
    lost = tokenise(ChatTemplate(tiny_tokenizer(text), loss_on), messages)
    assert isinstance(lost, Problem)
    assert lost.reason == "tool-calls-lost"
    assert "adder" in lost.detail
    writes = text.replace("{{ m['content'] }}", "{{ m['content'] }}" + CALLS)
    assert isinstance(tokenise(ChatTemplate(tiny_tokenizer(writes), loss_on), messages), Tokenised)


def test_a12_a_second_call_of_the_same_function_is_lost_where_the_template_writes_the_first_alone() -> None:
    messages = called("adder")
    messages[1]["tool_calls"] *= 2
    writes = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}" + CALLS)
    assert isinstance(tokenise(ChatTemplate(tiny_tokenizer(writes)), messages), Tokenised)
    lost = tokenise(
        ChatTemplate(tiny_tokenizer(writes.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"))), messages
    )
    assert isinstance(lost, Problem)
    assert (lost.reason, lost.detail) == ("tool-calls-lost", "the template writes no call of adder")


def test_a12_a_call_that_only_the_list_of_tools_names_is_lost() -> None:
    text = "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}\n{% endif %}" + CHATML
    conversation = Conversation("f:1", called("adder"), [{"type": "function", "function": {"name": "adder"}}])
    (lost,) = ChatTemplate(tiny_tokenizer(text)).tokenise([conversation])
    assert isinstance(lost, Problem)
    assert lost.reason == "tool-calls-lost"


def test_a12_an_answer_of_which_the_template_writes_nothing_is_rejected() -> None:
    hides = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] | trim }}")
    for answer in ("<think>four</think>", "<think>four</think>\n"):
        lost = tokenise(ChatTemplate(tiny_tokenizer(hides)), chat("two and two?", answer))
        assert isinstance(lost, Problem)
        assert lost.reason == "empty-answer"
    assert isinstance(tokenise(ChatTemplate(tiny_tokenizer(hides)), chat("a", "<think>b</think>c")), Tokenised)


LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% if a > b + 99999 %}x{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("guard", ["{% if true %}", "{% if messages | length > 2 %}"])
def test_a18_a_template_that_never_ends_is_a_named_error(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)
    template = ChatTemplate(tiny_tokenizer(CHATML + guard + LOOP + "{% endif %}"))
    calls = {"{% if true %}": lambda: check_template(template)}
    with pytest.raises(FormatError, match="has not rendered") as caught:
        calls.get(guard, lambda: template.tokenise([Conversation("f:7", TWO_TURNS)]))()
    assert caught.value.kind == "template-endless"
    assert "--template FILE" in str(caught.value.hint)


def test_a18_the_time_that_rendering_may_take_is_that_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "RENDER_S", 0.2)
    template = ChatTemplate(tiny_tokenizer(CHATML))
    deadline = time.process_time() + 0.5
    while time.process_time() < deadline:
        assert isinstance(tokenise(template, TWO_TURNS), Tokenised)


TWO_ENDS = CHATML + "{% if not add_generation_prompt %}</s>{% endif %}"
HEADER_TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}<|im_start|>assistant\n{{ m['content'] }}"
    "<|im_end|>\n{% endgeneration %}{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_an_end_of_the_whole_text_behind_the_end_of_a_turn_is_the_template_s() -> None:
    template = ChatTemplate(tiny_tokenizer(TWO_ENDS))
    assert supervised_runs(template, sample(template, chat("two?", "2"))) == ["2<|im_end|>"]


def test_a_header_and_white_space_inside_generation_tags_are_not_what_the_target_writes() -> None:
    template = ChatTemplate(tiny_tokenizer(HEADER_TAGGED))
    assert template.is_tagged
    assert supervised_runs(template, sample(template, chat("a", "b", "c", "d"))) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize("text", [CHATML, CHATML_TAGGED])
@pytest.mark.parametrize("before", ["", "{% if messages %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"])
def test_an_answer_that_opens_a_conversation_is_supervised_without_what_stands_before_it(
    text: str, before: str
) -> None:
    template = ChatTemplate(tiny_tokenizer(before + text))
    first = {"role": "assistant", "content": "Hello!"}
    found = sample(template, [first, *chat("a", "b")])
    assert supervised_runs(template, found) == ["Hello!<|im_end|>", "b<|im_end|>"]
    assert ("assistant", "Hello!<|im_end|>") in turns(template, found)


THINKS = CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(("text", "answer"), [(CHATML, "<think>\nOkay, so the user"), (THINKS, "Okay, so the user")])
def test_an_answer_that_was_cut_inside_its_thoughts_is_left_out_and_counted(text: str, answer: str) -> None:
    template = ChatTemplate(tiny_tokenizer(text))
    messages = chat("two and two?", answer)
    (lost,) = template.tokenise([Conversation("f:1", messages, cut=frozenset({1}))])
    assert isinstance(lost, Problem)
    assert lost.reason == "cut-in-thought"
    closed = chat("two and two?", f"{answer}</think>It is f")
    (kept,) = template.tokenise([Conversation("f:1", closed, cut=frozenset({1}))])
    assert getattr(kept, "reason", "") != "cut-in-thought"


def test_a_cut_answer_whose_thoughts_stand_in_a_member_of_their_own_is_kept() -> None:
    asked, said = chat("two and two?", "It is f")
    answer = said | {"reasoning_content": "Two, two."}
    (kept,) = ChatTemplate(tiny_tokenizer(THINKS)).tokenise([Conversation("f:1", [asked, answer], cut=frozenset({1}))])
    assert getattr(kept, "reason", "") != "cut-in-thought"


def test_thoughts_between_tags_that_the_template_leaves_out_of_the_last_answer_are_said() -> None:
    hides = CHATML.replace("{{ m['content'] }}", "{{ m['content'].split('</think>')[-1] | trim }}")
    found = sample(ChatTemplate(tiny_tokenizer(hides)), chat("two and two?", "<think>two, two</think>Four."))
    assert found.is_reasoning_lost
    whole = sample(ChatTemplate(tiny_tokenizer(CHATML)), chat("two and two?", "<think>two, two</think>Four."))
    assert not whole.is_reasoning_lost
