"""Prompts from DATA, stores and JSONL end exactly where the target's answer begins."""

import json

import pytest
from tiny_target import make_tokenizer

from hiddenstore.errors import ConfigError, FormatError, NotFoundError
from hiddenstore.inputs import PreparedInput
from hiddenstore.testing.builders import capture_spec, make_data, make_store
from trainer.evaluate.prompts import questions_of, read_prompts

IDENTITY = capture_spec().target


def ids(source, split="validation", identity=IDENTITY):
    return [prompt.ids for prompt in read_prompts(str(source), make_tokenizer(), identity, split, [])]


def test_prompts_of_data_and_of_its_store_are_the_held_out_text_before_the_answer(tmp_path):
    data = make_data(tmp_path / "data", samples=12)
    expected = [
        s.input_ids[: int(s.loss_mask.argmax())].tolist()
        for s in PreparedInput.open(data).samples()
        if s.split == "validation"
    ]
    assert len(expected) == 2
    assert ids(data) == expected
    store = make_store(tmp_path / "made", samples=12)
    assert sorted(ids(store.path)) == sorted(expected)
    assert len(ids(data, "train")) == 10


def test_data_of_another_tokenizer_is_refused(tmp_path):
    other = IDENTITY.model_copy(update={"tokenizer_sha256": "f" * 64})
    for source in (make_data(tmp_path / "data"), make_store(tmp_path / "made").path):
        with pytest.raises(FormatError) as caught:
            ids(source, identity=other)
        assert caught.value.kind == "target-mismatch"


def test_a_last_assistant_message_is_cut_off_and_the_template_asks_for_an_answer(tmp_path):
    file = tmp_path / "p.jsonl"
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "fg")]
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n\n")
    (prompt,) = read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", [])
    assert make_tokenizer().decode(prompt.ids).replace(" ", "") == "<user>ab<assistant>cd</s><user>e<assistant>"
    assert [m["role"] for m in prompt.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    "row",
    [
        {"question_id": 81, "category": "writing", "turns": ["ab", "cd"]},
        {"question": "ab", "answer": "cd"},
        {"problem": "ab", "solution": "cd"},
        {"task_id": "HumanEval/0", "prompt": "ab"},
    ],
)
def test_questions_as_published_are_asked(tmp_path, row):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(row) + "\n")
    (prompt,) = read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", [])
    assert prompt.messages == [{"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    "line",
    ["{", "3", '{"messages": []}', '{"messages": ["x"]}', '{"messages": [{"role": "assistant", "content": "x"}]}'],
)
def test_a_line_that_is_no_conversation_is_left_out_and_named(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + '\n{"prompt": "too"}\n')
    unusable = []
    found = read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", unusable)
    assert [prompt.messages[0]["content"] for prompt in found] == ["fine", "too"]
    (why,) = unusable
    assert "p.jsonl:2: " in why


def test_a_file_without_a_prompt_says_why_of_its_first_row(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"text": "a"}\n{\n"\xff\xfe"\n')
    with pytest.raises(ConfigError, match=r"of 3 rows the first: .*p\.jsonl:1: expected one of") as caught:
        ids(file)
    assert "a question a line: prompt, turns" in str(caught.value.hint)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"prompt": ' + "9" * 5000 + "}",
        '{"messages": [{"role": "user", "content": null}]}',
        '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
        '{"messages": [{"role": "system", "content": "x"}]}',
    ],
)
def test_rows_without_a_user_s_text_are_left_out(tmp_path, line):
    file = tmp_path / "p.jsonl"
    file.write_text(line + '\n{"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]}\n')
    unusable = []
    found = read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", unusable)
    assert [prompt.messages for prompt in found] == [[{"role": "user", "content": "ab"}]]
    assert len(unusable) == 1


def test_a_conversation_that_the_template_refuses_is_left_out(tmp_path):
    file, tokenizer, unusable = tmp_path / "p.jsonl", make_tokenizer(), []
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[-1].content }}"
    )
    asked = {"role": "user", "content": "ab"}
    lines = [{"messages": [{"role": "system", "content": "x"}, asked]}, {"messages": [asked]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert len(list(read_prompts(str(file), tokenizer, IDENTITY, "validation", unusable))) == 1
    assert unusable == [f"prompt 1 of {file}: the chat template refuses it: no system"]


def test_a_folder_that_is_neither_data_nor_a_store_is_refused(tmp_path):
    with pytest.raises(NotFoundError, match="expected a JSONL file, DATA or a store"):
        ids(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere"):
        ids(tmp_path / "nowhere")


def test_a18_a_template_that_never_ends_is_a_named_error_of_the_prompt(tmp_path, monkeypatch):
    monkeypatch.setattr("hiddenstore.targets.rendering.RENDER_S", 0.2)
    file, tokenizer = tmp_path / "p.jsonl", make_tokenizer()
    file.write_text('{"prompt": "ab"}\n')
    tokenizer.chat_template = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(FormatError, match=f"prompt 1 of {file}") as caught:
        next(read_prompts(str(file), tokenizer, IDENTITY, "validation", []))
    assert caught.value.kind == "template-endless"


OFF = {"enable_thinking": False}


@pytest.mark.parametrize("beside", [OFF, {"chat_template_kwargs": OFF}, {"chat_template_kwargs": {}, **OFF}])
def test_switches_beside_a_prompt_go_to_the_chat_template(tmp_path, beside):
    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}off{% endif %}"
    file.write_text("".join(json.dumps({"prompt": "ab", **more}) + "\n" for more in ({}, beside)))
    plain, off = read_prompts(str(file), tokenizer, IDENTITY, "validation", [])
    assert tokenizer.decode(off.ids).replace(" ", "") == tokenizer.decode(plain.ids).replace(" ", "") + "off"
    assert (plain.beside.template_kwargs, off.beside.template_kwargs) == ({}, OFF)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}


def test_tools_system_messages_and_calls_reach_the_chat_template_as_prepare_reads_them(tmp_path):
    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{% for m in messages %}{{ m.role[0] }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.at + 1 }}{% endfor %}{% endfor %}"
    )
    called = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [CALL]}]
    rows = [
        {"prompt": "ab", "system": "e", "tools": json.dumps([TOOL])},
        {"messages": [*called, {"role": "tool", "content": "d"}], "functions": [TOOL["function"]]},
        {"instruction": "ab", "input": "cd", "history": [["e", "f"]]},
        {"turns": ["ab", "cd"], "system_prompt": "e"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = list(read_prompts(str(file), tokenizer, IDENTITY, "validation", []))
    texts = ("[look]seuab", "[look]uaa4td", "ueafuab\n\ncd", "seuab")
    assert [prompt.ids for prompt in prompts] == [tokenizer.encode(text) for text in texts]
    assert [prompt.beside.columns().get("tools") for prompt in prompts] == [[TOOL], [TOOL], None, None]
    (question,) = (one for one in questions_of(file, []) if one.more)
    assert (len(question.history), question.more) == (2, ("cd",))


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"tools": "{"}, "tools is no JSON"),
        ({"tools": [3]}, "tools is a list, expected a list of objects"),
        ({"system": ["a"]}, "system is a list, expected text"),
        ({"image": "cat.png"}, "an image beside the messages"),
    ],
)
def test_what_stands_beside_a_prompt_and_cannot_be_read_leaves_it_out(tmp_path, beside, why):
    file, unusable = tmp_path / "p.jsonl", []
    file.write_text("".join(json.dumps({"prompt": "ab", **more}) + "\n" for more in ({}, beside)))
    assert len(list(read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", unusable))) == 1
    assert f"p.jsonl:2: {why}" in unusable[0]


def test_switches_that_no_chat_template_takes_leave_their_prompt_out(tmp_path):
    file, unusable = tmp_path / "p.jsonl", []
    rows = [
        {"enable_thinking": "no"},
        {"chat_template_kwargs": "off"},
        {"chat_template_kwargs": {"chat_template": "a"}},
        {"chat_template_kwargs": {"truncation": True, "max_length": 2}},
        {"chat_template_kwargs": {"enable_thinking": True}, **OFF},
        {},
    ]
    file.write_text("".join(json.dumps({"prompt": "ab", **more}) + "\n" for more in rows))
    assert len(list(read_prompts(str(file), make_tokenizer(), IDENTITY, "validation", unusable))) == 1
    assert len(unusable) == len(rows) - 1
    said = "\n".join(sorted(unusable))
    assert "enable_thinking is 'no', expected one boolean" in said
    assert "chat_template_kwargs is no JSON" in said
    assert "enable_thinking is False, expected one boolean" in said
    assert "chat_template_kwargs cannot give chat_template" in said
    assert "chat_template_kwargs cannot give max_length" in said


def test_tools_are_rendered_by_the_template_that_a_tokenizer_has_for_them(tmp_path):
    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "tool_use": "[{{ tools[0].function.name }}]"}
    file.write_text("".join(json.dumps({"prompt": "ab", **more}) + "\n" for more in ({}, {"tools": [TOOL]})))
    prompts = read_prompts(str(file), tokenizer, IDENTITY, "validation", [])
    assert [prompt.ids for prompt in prompts] == [tokenizer.encode(text) for text in ("ab", "[look]")]


def test_earlier_thoughts_reach_a_template_under_the_name_that_it_reads(tmp_path):
    tokenizer, file = make_tokenizer(), tmp_path / "p.jsonl"
    tokenizer.chat_template = "{% for m in messages %}{{ m.reasoning or '' }}{{ m.content }}{% endfor %}"
    turns = [{"role": "assistant", "content": "b", "reasoning_content": "c"}, {"role": "user", "content": "d"}]
    file.write_text(json.dumps([{"role": "user", "content": "a"}, *turns]))
    (prompt,) = read_prompts(str(file), tokenizer, IDENTITY, "validation", [])
    assert prompt.ids == tokenizer.encode("acbd")


ASKED = {"role": "user", "content": "ab"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, {"role": "assistant", "content": ""}]},
        {"messages": [ASKED, {"role": "assistant", "content": "cd", "weight": 0.5}]},
        {"messages": [ASKED, {"role": "assistant", "content": [{"type": "image"}]}]},
        {"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": ""}]},
        {"messages": [{"content": "ab"}]},
        {"prompt": "ab", "conversation": "id7"},
        [ASKED],
    ],
)
def test_what_stands_behind_the_question_cannot_leave_it_out(tmp_path, row):
    file, unusable = tmp_path / "p.jsonl", []
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode())
    (question,) = questions_of(file, unusable)
    assert (question.history, question.location, unusable) == ((ASKED,), f"{file}:1", [])


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "x", "task": "\\ud800"}', "half of a character"),
        ('[{"role": "user", "content": "a"}], "tools": []', "no JSON"),
        ('{"conversation": "id7"}', "conversation is no JSON"),
        ('{"prompt": "x", "tools": "calc"}', "jq -c 'del(.MEMBER)'"),
    ],
)
def test_a_row_that_cannot_be_asked_says_why_in_its_own_words(tmp_path, line, why):
    file, unusable = tmp_path / "p.jsonl", []
    file.write_text(line)
    assert list(questions_of(file, unusable)) == []
    assert why in unusable[0]
