"""What a row says beside its turns: system messages, history, functions, weights and switches of its chat template;
what its question is about, its thoughts, and columns that contradict each other."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_double import ChatDouble, options, texts
from tiny_templates import CHATML, CHATML_TAGGED, STRIPS_THOUGHTS, chat, tiny_target, tiny_tokenizer, write_rows

from collectors.conversations.mix import open_sources
from collectors.conversations.prompts import Augmentation, Variant, write_prompts
from collectors.regenerate.job import regenerate, rows_into
from collectors.regenerate.options import RegenerateOptions
from collectors.regenerate.rewrite import Reply, Rewrite
from collectors.tokenize.prepare import prepare
from collectors.tokenize.template import ChatTemplate, Tokenised
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation, Problem, Row, parse_row
from hiddenstore.errors import ConfigError
from schemas.prepared import LossOn

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
BRIEF = {"role": "system", "content": "be brief"}
PAIR = {"instruction": "hi", "output": "hello"}


def parsed(row: dict[str, Any]) -> Conversation:
    item = parse_row(Row("f:1", row, 1))
    assert isinstance(item, Conversation), item
    return item


def reason(row: dict[str, Any]) -> str:
    item = parse_row(Row("f:1", row, 1))
    assert isinstance(item, Problem), item
    return item.reason


@pytest.mark.parametrize("name", ["system", "system_prompt"])
@pytest.mark.parametrize("row", [{"messages": HI}, {"conversations": HI}, PAIR])
def test_a_system_message_beside_the_turns_opens_them(name: str, row: dict[str, Any]) -> None:
    assert parsed({**row, name: "be brief"}).messages == [BRIEF, *HI]
    for empty in (None, "", " \n"):
        assert parsed({**row, name: empty}).messages == HI
    assert reason({**row, name: ["be brief"]}) == "system-invalid"


def test_a_system_message_that_a_row_states_twice_is_one_and_two_that_differ_are_refused() -> None:
    assert parsed({"messages": [BRIEF, *HI], "system": "be brief\n", "system_prompt": "be brief"}).messages == [
        BRIEF,
        *HI,
    ]
    assert parsed({"messages": [{"role": "system", "content": ""}, *HI], "system": "be brief"}).messages == [BRIEF, *HI]
    assert reason({"messages": [BRIEF, *HI], "system": "be kind"}) == "system-invalid"
    assert reason({"messages": HI, "system": "be kind", "system_prompt": "be brief"}) == "system-invalid"


@pytest.mark.parametrize("written", [lambda pairs: pairs, json.dumps])
def test_alpaca_s_history_comes_before_the_question(written: Any) -> None:
    row = {**PAIR, "history": written([["a", "b"], ["c", "d"]]), "system": "be brief"}
    assert parsed(row).messages == [BRIEF, *chat("a", "b", "c", "d"), *HI]
    assert parsed({**PAIR, "history": []}).messages == HI
    assert parsed({**PAIR, "history": None}).messages == HI


@pytest.mark.parametrize("history", [[["a"]], ["ab"], [{"role": "user", "content": "a"}], 3, "long ago"])
def test_a_history_of_something_else_is_refused(history: Any) -> None:
    assert reason({**PAIR, "history": history}) == "history-invalid"
    assert reason({"messages": HI, "history": [["a", "b"]]}) == "history-invalid"


def test_functions_are_tools_and_a_function_call_is_a_tool_call() -> None:
    adder = {"name": "adder", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": adder}]
    for functions in ([adder], tools, json.dumps([adder])):
        assert parsed({"messages": HI, "functions": functions}).tools == tools
    assert parsed({"messages": HI, "functions": [adder], "tools": tools}).tools == tools
    assert reason({"messages": HI, "functions": [adder], "tools": [{"name": "other"}]}) == "tools-invalid"
    assert reason({"messages": HI, "functions": ["adder"]}) == "tools-invalid"
    call = {"name": "adder", "arguments": '{"a": 5}'}
    for given in (call, json.dumps(call)):
        answer = {"role": "assistant", "content": "I add.", "function_call": given}
        (message,) = parsed({"messages": [HI[0], answer]}).messages[1:]
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "adder", "arguments": {"a": 5}}}]
    assert (
        reason({"messages": [HI[0], {"role": "assistant", "content": "a", "function_call": "b"}]})
        == "tool-calls-invalid"
    )


def sample_of(template: str, loss_on: LossOn, row: dict[str, Any]) -> tuple[ChatTemplate, Tokenised | Problem]:
    chat_template = ChatTemplate(tiny_tokenizer(template), loss_on)
    return chat_template, chat_template.tokenise([parsed(row)])[0]


def supervised(template: ChatTemplate, sample: Any) -> list[str]:
    assert isinstance(sample, Tokenised), sample
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
    return [template.tokenizer.decode(sample.input_ids[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


def weighed(*weights: Any) -> dict[str, Any]:
    turns: list[dict[str, Any]] = chat(*"abcdef")
    answers = iter(weights)
    return {"messages": [turn | ({"weight": next(answers)} if turn["role"] == "assistant" else {}) for turn in turns]}


@pytest.mark.parametrize("text", [CHATML, CHATML_TAGGED])
def test_an_answer_of_weight_0_is_rendered_and_not_supervised(text: str) -> None:
    template, sample = sample_of(text, "assistant", weighed(1, 0, None))
    assert supervised(template, sample) == ["b<|im_end|>", "f<|im_end|>"]
    assert isinstance(sample, Tokenised)
    _, plain = sample_of(text, "assistant", {"messages": chat(*"abcdef")})
    assert isinstance(plain, Tokenised)
    assert sample.input_ids.tolist() == plain.input_ids.tolist()
    # Turns of the target are what data.loss_on chooses from.
    assert (sample.spans[:, 0] == 2).sum() == 2
    template, sample = sample_of(text, "all", weighed(0, 1, 1))
    assert "".join(supervised(template, sample)).count("b<|im_end|>") == 0
    template, sample = sample_of(text, "last-turn", weighed(0, 0, 1))
    assert supervised(template, sample) == ["f<|im_end|>"]
    _, problem = sample_of(text, "last-turn", weighed(1, 1, 0))
    assert getattr(problem, "reason", "") == "nothing-supervised"


def test_weights_other_than_0_and_1_are_refused_and_those_of_others_say_nothing() -> None:
    for weight in (0.5, -1, "0", float("nan")):
        assert reason(weighed(1, weight, 1)) == "weight-invalid"
    assert parsed({"messages": [{**HI[0], "weight": 0}, HI[1]]}).untaught == frozenset()


def test_an_answer_of_weight_0_that_the_template_rewrites_need_not_be_supervised() -> None:
    row = {"messages": chat("a", "<think>b</think>c", "d", "e")}
    _, problem = sample_of(STRIPS_THOUGHTS, "assistant", row)
    assert getattr(problem, "reason", "") == "not-prefix-stable"
    row["messages"][1]["weight"] = 0  # type: ignore[assignment]
    template, sample = sample_of(STRIPS_THOUGHTS, "assistant", row)
    assert supervised(template, sample) == ["e<|im_end|>"]
    _, problem = sample_of(STRIPS_THOUGHTS, "all", row)
    assert getattr(problem, "reason", "") == "weight-unplaced"


OFF = "enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
SWITCH = CHATML.replace("assistant\n{% endif %}", "assistant\n{% if " + OFF + "{% endif %}").replace(
    "{{ m['content'] }}", "{% if m.role == 'assistant' and " + OFF + "{{ m['content'] }}"
)


@pytest.mark.parametrize(
    "members",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False, "absent": None}},
        {"chat_template_kwargs": '{"enable_thinking": false}', "enable_thinking": False},
    ],
)
def test_switches_of_a_row_reach_its_chat_template(members: dict[str, Any]) -> None:
    template, sample = sample_of(SWITCH, "assistant", {"messages": HI, **members})
    assert supervised(template, sample) == ["hello<|im_end|>"]
    assert isinstance(sample, Tokenised)
    expected = template.tokenizer.apply_chat_template(HI, return_dict=False, enable_thinking=False)
    assert sample.input_ids.tolist() == expected
    _, plain = sample_of(SWITCH, "assistant", {"messages": HI})
    assert isinstance(plain, Tokenised)
    assert plain.input_ids.tolist() != expected


@pytest.mark.parametrize(
    "members",
    [
        {"chat_template_kwargs": {"messages": "none"}},
        {"chat_template_kwargs": {"tools": "none"}},
        {"chat_template_kwargs": {"documents": [{"text": "a"}]}},
        {"chat_template_kwargs": {"switches": [b"a"]}},
        {"chat_template_kwargs": ["enable_thinking"]},
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        {"enable_thinking": "no"},
    ],
)
def test_switches_that_cannot_be_given_are_refused(members: dict[str, Any]) -> None:
    assert reason({"messages": HI, **members}) == "template-kwargs-invalid"


LAST_OFF = SWITCH.replace("m.role == 'assistant' and", "loop.last and m.role == 'assistant' and")
"""Qwen3's of ``enable_thinking``: the empty thought stands before the last answer alone."""


def test_rows_that_their_switches_make_unstable_are_said_with_what_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": chat("a", "b", "c", "d"), "enable_thinking": thinking} for thinking in (True, False)]
    chats, target = write_rows(tmp_path / "c.jsonl", rows), tiny_target(tmp_path / "target", LAST_OFF)
    for loss_on, samples in (("assistant", 1), ("last-turn", 2)):
        out = tmp_path / loss_on
        with pytest.raises(SystemExit):
            main(["prepare", chats, "-o", str(out), "--target", target, "--val", "0", "--loss-on", loss_on])
        shown = " ".join(capsys.readouterr().err.split())
        assert ("1 row was left out: this chat template does not write their answers" in shown) == (samples == 1)
        assert ("--loss-on last-turn asks" in shown) == (samples == 1)
        assert json.loads((out / "data.json").read_bytes())["samples"] == samples


TOOLS_IN_WORDS = "{% if python_tools %}<tools>{{ python_tools | join(', ') }}</tools>{% endif %}" + CHATML


def test_lists_and_objects_reach_the_chat_template_as_smoltalk2_has_them() -> None:
    kwargs = {"custom_instructions": "", "enable_thinking": False, "python_tools": ["def f(): ..."], "xml_tools": []}
    assert parsed({"messages": HI, "chat_template_kwargs": kwargs}).template_kwargs == kwargs
    nested = {"style": {"tone": "dry", "date": None}}
    assert parsed({"messages": HI, "chat_template_kwargs": nested}).template_kwargs == nested
    template, sample = sample_of(TOOLS_IN_WORDS, "assistant", {"messages": HI, "chat_template_kwargs": kwargs})
    assert isinstance(sample, Tokenised), sample
    assert template.tokenizer.decode(sample.input_ids).startswith("<tools>def f(): ...</tools>")


def test_a_table_s_columns_beside_the_turns_are_read(tmp_path: Path) -> None:
    beside = {"system": "be brief", "functions": '[{"name": "f"}]', "chat_template_kwargs": {"a": 1}}
    for row in (
        {"messages": HI, **beside},
        {**PAIR, **beside, "history": [["a", "b"]]},
        {**PAIR, "tools": '[{"name": "g"}]'},
    ):
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        (source,) = open_sources([str(tmp_path / "rows.parquet")])
        (read,) = [parse_row(one) for one in source.rows()]
        assert isinstance(read, Conversation), read
        plain = parsed(row)
        assert (read.messages, read.tools, read.template_kwargs) == (plain.messages, plain.tools, plain.template_kwargs)
        assert read.tools


def test_answers_written_anew_keep_what_stands_beside_their_turns() -> None:
    row = {"messages": [*chat("a", "b"), *HI], "enable_thinking": False}
    row["messages"][1]["weight"] = 0  # type: ignore[index]
    conversation = parsed(row)
    rewrite = Rewrite.of(0, conversation, None, "last", {"style": "short"})
    assert rewrite.digest != Rewrite.of(0, parsed({"messages": row["messages"]}), None, "last").digest
    assert rewrite.advance()
    rewrite.take(Reply("hey"))
    written = parsed(rewrite.row())
    assert written.template_kwargs == {"enable_thinking": False, "style": "short"}
    assert written.untaught == {1}
    assert [message["content"] for message in written.messages] == ["a", "b", "hi", "hey"]


def test_prompts_keep_the_tools_and_the_switches_of_their_row(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "adder"}}]
    lines = [{"messages": HI, "tools": tools, "enable_thinking": False}, {"messages": HI}, {"messages": HI}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    variants = (Variant(name="french", user_suffix=" Answer in French."),)
    report = write_prompts([str(tmp_path / "chats.jsonl")], tmp_path / "p.jsonl", Augmentation(variants=variants))
    prompts = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    # A question with tools is another question than the same without.
    assert (report.written, report.duplicates) == (4, 2)
    for prompt in prompts[:2]:
        assert prompt["tools"] == tools
        assert prompt["chat_template_kwargs"] == {"enable_thinking": False}
    for prompt in prompts[2:]:
        assert not {"tools", "chat_template_kwargs"} & prompt.keys()


def test_parquet_keeps_every_member_of_a_message(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    answer = {"role": "assistant", "content": "a", "tool_calls": [call], "weight": 0, "finish_reason": "length"}
    thoughts = {"reasoning_content": "so", "reasoning": "well", "thinking": "hm"}
    messages = [{"role": "user", "content": "q", "name": "ann"}, answer | thoughts]
    messages.append({"role": "tool", "content": "5", "tool_call_id": "1"})
    row = {"messages": messages, "tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": True}}
    with rows_into(tmp_path / "rows.parquet") as write:
        write(row)
    (source,) = open_sources([str(tmp_path / "rows.parquet")])
    (read,) = [parse_row(one) for one in source.rows()]
    assert isinstance(read, Conversation), read
    plain = parsed(row)
    assert (read.messages, read.tools, read.cut, read.untaught) == (plain.messages, plain.tools, {1}, {1})
    assert read.template_kwargs == plain.template_kwargs == {"enable_thinking": True}


def test_prompts_keep_who_speaks_and_join_the_turns_of_one_speaker_alone(tmp_path: Path) -> None:
    said = [("ann", "one"), ("ann", "two"), ("bob", "three"), (None, "four"), (None, "five")]
    turns = [{"role": "user", "content": text, **({"name": name} if name else {})} for name, text in said]
    rows = [{"messages": [*turns, HI[1]]}, {"messages": [{**BRIEF, "name": "host"}, *HI]}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_prompts([str(tmp_path / "chats.jsonl")], tmp_path / "p.jsonl")
    first, second = (json.loads(line)["messages"] for line in (tmp_path / "p.jsonl").read_text().splitlines())
    assert first == [
        {"role": "user", "name": "ann", "content": "one\n\ntwo"},
        {"role": "user", "name": "bob", "content": "three"},
        {"role": "user", "content": "four\n\nfive"},
    ]
    assert second == [{"role": "system", "name": "host", "content": "be brief"}, HI[0]]


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ({"history": 3}, "history is a number, expected pairs"),
        ({"history": "long ago"}, "history is no JSON"),
        ({"system": {"id": 7}}, "system is an object, expected text"),
        (
            {"system": "be kind", "system_prompt": "be brief"},
            "system and system_prompt are system messages that differ",
        ),
        ({"functions": "weather"}, "functions is no JSON"),
    ],
)
def test_a_refusal_names_the_member_and_what_keeps_the_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], beside: dict[str, Any], says: str
) -> None:
    problem = parse_row(Row("f:1", {**PAIR, **beside}, 1))
    assert isinstance(problem, Problem)
    assert says in problem.detail
    chats = write_rows(tmp_path / "c.jsonl", [{**PAIR, **beside}, PAIR])
    for name, more in (("data", ["--target", tiny_target(tmp_path / "target"), "--val", "0"]), ("p", [])):
        mode = [] if more else ["--mode", "generate"]
        with pytest.raises(SystemExit) as ended:
            main(["prepare", chats, "-o", str(tmp_path / name), *more, *mode])
        shown = " ".join(capsys.readouterr().err.split())
        assert ended.value.code == 0, shown
        assert f"means something else ({problem.reason}): jq -c 'del(.MEMBER)' INPUT" in shown
    alone, target = [write_rows(tmp_path / "b.jsonl", [{**PAIR, **beside}])], str(tmp_path / "target")
    refused: list[Callable[[], object]] = [
        lambda: prepare(alone, tmp_path / "d", target),
        lambda: write_prompts(alone, tmp_path / "q"),
        lambda: regenerate(
            RegenerateOptions(tuple(alone), tmp_path / "a.jsonl", server="http://127.0.0.1:9", model="m")
        ),
    ]
    for run in refused:
        with pytest.raises(ConfigError, match=says) as caught:
            run()
        assert "jq -c" in str(caught.value.hint)


Q, A, TEXT = "Why?", "So.", "Rain fell."
QA, BEHIND = chat(Q, A), chat(f"{Q}\n\n{TEXT}", A)
SHAREGPT = [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]
ALPACA = f"### Instruction:\n{Q}\n\n### Response:"
KNOWING = [{"role": "system", "content": f"You know: {TEXT}"}, *QA]
THOUGHT = [QA[0], {**QA[1], "reasoning": "Well"}]

PUBLISHED: dict[str, tuple[dict[str, Any], list[dict[str, Any]] | str]] = {
    "alpaca": ({"instruction": Q, "input": TEXT, "output": A, "text": f"{ALPACA}\n{A}"}, BEHIND),
    "dolly": ({"instruction": Q, "context": TEXT, "response": A, "category": "closed_qa"}, BEHIND),
    "dolly without context": ({"instruction": Q, "context": "", "response": A, "category": "open_qa"}, QA),
    "sql-create-context": ({"question": Q, "context": TEXT, "answer": A}, BEHIND),
    "prompt and input": ({"prompt": Q, "input": TEXT, "completion": A}, BEHIND),
    "openorca": ({"id": "t0.1", "system_prompt": "be brief", "question": Q, "response": A}, [BRIEF, *QA]),
    "gsm8k": ({"question": Q, "answer": A}, QA),
    "ultrachat": ({"prompt": Q, "prompt_id": "1", "messages": QA}, QA),
    "ultrafeedback": ({"prompt": Q, "chosen": QA, "rejected": chat(Q, "No."), "messages": QA, "score_chosen": 8.0}, QA),
    "openhermes": ({"conversations": SHAREGPT, "custom_instruction": False, "system_prompt": None, "topic": "t"}, QA),
    "magpie": ({"conversations": SHAREGPT, "instruction": Q, "response": A, "difficulty": "easy"}, QA),
    "nemotron v1": ({"messages": QA, "reasoning": "on", "category": "chat", "metadata": "{}"}, QA),
    "nemotron v1 in columns": ({"messages": QA[:1], "output": A, "reasoning": "off"}, QA),
    "openr1-math": ({"problem": Q, "solution": "Long.", "answer": "5", "messages": QA, "generations": [A]}, QA),
    "openthoughts": ({"system": "be brief", "conversations": SHAREGPT}, [BRIEF, *QA]),
    "lmsys-chat": ({"conversation_id": "1", "model": "m", "conversation": QA, "turn": 1, "redacted": False}, QA),
    "dolphin-r1": ({"messages": QA[:1], "reasoning": "Well", "answer": A, "model": "m"}, THOUGHT),
    "reasoning-0.01": ({"instruction": Q, "reasoning": "Well", "output": A, "reasoning_chains": []}, THOUGHT),
    "thoughts told twice": (
        {"prompt": Q, "reasoning": "Well\n", "response": f"<think>\nWell\n</think>{A}"},
        chat(Q, f"<think>\nWell\n</think>{A}"),
    ),
    "limo": ({"question": Q, "solution": A, "answer": "5"}, QA),
    "a whole answer and its result": ({"prompt": Q, "completion": A, "solution": "Long.", "answer": "5"}, QA),
    "verifiers": ({"question": Q, "prompt": [BRIEF, QA[0]], "answer": A}, [BRIEF, *QA]),
    "verl": ({"prompt": QA[:1], "completion": QA[1:], "answer": "5", "reward": 1.0}, QA),
    "turns that end with a question": ({"messages": [*HI, QA[0]], "response": A}, [*HI, *QA]),
    "python-code-18k": ({"instruction": Q, "input": "", "output": A, "prompt": f"{ALPACA}\n{A}"}, "columns-differ"),
    "self-oss-instruct": ({"prompt": "Invent one.", "instruction": Q, "response": A, "id": 1}, "columns-differ"),
    "two whole answers": ({"prompt": Q, "response": A, "output": "No."}, "columns-differ"),
    "dolly-hhrlhf": ({"prompt": f"{ALPACA}\n", "response": A}, "question-rendered"),
    "full-hh-rlhf": ({"prompt": f"\n\nHuman: {Q}\n\nAssistant:", "response": A, "chosen": A}, "question-rendered"),
    "helpsteer2": (
        {"prompt": f"a\n<extra_id_1>Assistant\nb\n<extra_id_1>User\n{Q}", "response": A},
        "question-rendered",
    ),
    "mmlu-pro": ({"question": Q, "options": ["rain", "sun"], "answer": "A", "answer_index": 0}, "context-outside"),
    "options in the question": (
        {"question": f"{Q} rain or sun", "options": ["rain", "sun"], "answer": A},
        [
            {"role": "user", "content": f"{Q} rain or sun"},
            QA[1],
        ],
    ),
    "ragbench": ({"question": Q, "documents": [TEXT], "response": A}, "context-outside"),
    "halubench": ({"passage": TEXT, "question": Q, "answer": A, "label": "PASS"}, "context-outside"),
    "chatqa": ({"messages": [*QA, HI[0]], "document": TEXT, "answers": ["b"]}, "context-outside"),
    "messages made of a document": ({"messages": BEHIND, "document": f"{TEXT}\n"}, BEHIND),
    "hotpotqa": ({"question": Q, "answer": A, "context": {"sentences": [[TEXT]]}}, "content-not-text"),
    "llama-nemotron": ({"input": QA[:1], "output": A, "reasoning": "on", "system_prompt": ""}, "no-messages"),
    "metamath": ({"query": Q, "response": A, "type": "GSM_SV", "original_question": Q}, "no-messages"),
    "hh-rlhf": ({"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": "No."}, "no-messages"),
    "openassistant": ({"message_id": "1", "parent_id": "0", "text": Q, "role": "prompter"}, "no-messages"),
    "capybara": ({"source": "s", "conversation": [{"input": Q, "output": A}]}, "unknown-role"),
    "lima": ({"conversations": [Q, A], "source": "s"}, "message-not-an-object"),
    "a result alone": ({"messages": QA[:1], "answer": "5", "solution": "Long."}, QA[:1]),
    "a result that is a number": ({"messages": QA[:1], "answer": 5, "reasoning": "Well"}, QA[:1]),
    "answers by the number": ({"messages": QA[:1], "output": ["a", "b"]}, QA[:1]),
    "messages and an empty answer": ({"messages": QA[:1], "response": " "}, QA[:1]),
    "messages and two answers": ({"messages": QA[:1], "response": A, "output": "No."}, "columns-differ"),
    "openai's replies": ({"messages": QA[:1], "choices": [{"message": QA[1], "finish_reason": "stop"}]}, QA[:1]),
    "ollama's settings": ({"messages": QA, "options": {"temperature": 0.7, "stop": ["<|im_end|>"]}}, QA),
    "medqa": ({"question": Q, "options": {"A": "rain", "B": "sun"}, "answer": "rain"}, "context-outside"),
    "commonsense-qa": ({"question": Q, "choices": {"label": ["A"], "text": ["rain"]}, "answer": A}, "context-outside"),
    "documents in the system column": ({"system": f"You know: {TEXT}", "messages": QA, "documents": [TEXT]}, KNOWING),
    "context in the system column": (
        {"system": f"You know: {TEXT}", "question": Q, "context": TEXT, "answer": A},
        KNOWING,
    ),
    "context in the question": ({"prompt": f"{Q}\n\n{TEXT}", "context": f"{TEXT}\n", "response": A}, BEHIND),
    "context in a list": ({"prompt": BEHIND[:1], "input": TEXT, "completion": BEHIND[1:]}, BEHIND),
    "input and context alike": ({"prompt": Q, "input": TEXT, "context": TEXT, "response": A}, BEHIND),
    "alpaca's word": ({"instruction": Q, "input": "Why", "output": A}, chat(f"{Q}\n\nWhy", A)),
    "a result in solution": ({"question": Q, "answer": A, "solution": "5"}, QA),
    "effort in reasoning": ({"prompt": Q, "response": A, "reasoning": " High"}, QA),
}
"""Columns of published datasets as of November 2026, and of rows like theirs; what is to be read, or why not."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_columns_of_published_datasets_are_read_whole_or_refused(name: str, tmp_path: Path) -> None:
    row, expected = PUBLISHED[name]
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    items = [parse_row(Row("f:1", row, 1))]
    if expected == "no-messages" and not {"prompt", "question", "instruction", "messages"} & row.keys():
        with pytest.raises(ConfigError, match="has no column"):
            open_sources([str(tmp_path / "rows.parquet")])
    else:
        (source,) = open_sources([str(tmp_path / "rows.parquet")])
        items += map(parse_row, source.rows())
    for item in items:
        assert (item.messages if isinstance(item, Conversation) else item.reason) == expected


def test_answers_that_are_thrown_away_refuse_no_question(tmp_path: Path) -> None:
    two = {"response": A, "output": "No."}
    rows: list[dict[str, Any]] = [
        *({"messages": QA[:1], **beside} for beside in ({"answer": 5}, {"output": ["a", "b"]}, two)),
        *({"prompt": Q, **beside} for beside in (two, {"completion": "", **two})),
    ]
    for number, row in enumerate(rows):
        chats = write_rows(tmp_path / f"{number}.jsonl", [row])
        with pytest.raises(SystemExit) as ended:
            main(["prepare", chats, "--mode", "generate", "-o", str(tmp_path / f"p{number}")])
        assert ended.value.code == 0, row
        assert json.loads((tmp_path / f"p{number}").read_text())["messages"] == QA[:1]


def test_rows_with_several_answers_are_answered_anew(tmp_path: Path, double: ChatDouble) -> None:
    base = options(tmp_path, double)
    two = {"response": A, "output": "No."}
    rows = [{"messages": QA[:1], "answer": 5}, {"messages": QA[:1], **two}, {"prompt": Q, **two}]
    report = regenerate(replace(base, inputs=(write_rows(tmp_path / "rows.jsonl", rows),)))
    assert texts(report.out) == [[Q, f"reply 1 to {Q}"]] * 3
