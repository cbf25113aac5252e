"""Readers and parsers of conversations: formats, places, reasons, bounded memory."""

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors.conversations import files
from collectors.conversations.mix import open_sources
from hiddenstore.conversation import Conversation, Problem, Row, parse_row
from hiddenstore.errors import ConfigError, HiddenstoreError, NotFoundError, StorageError
from schemas.manifest import ROLES

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def parsed(payload: Any) -> Conversation | Problem:
    return parse_row(Row("f:1", payload if isinstance(payload, bytes) else json.dumps(payload).encode(), 1))


def reason(payload: Any) -> str:
    result = parsed(payload)
    assert isinstance(result, Problem), result
    return result.reason


def messages(payload: Any) -> list[dict[str, Any]]:
    result = parsed(payload)
    assert isinstance(result, Conversation), result
    return result.messages


def test_openai_messages_are_taken_as_they_are() -> None:
    assert messages({"messages": CHAT, "id": 7}) == CHAT


def test_sharegpt_turns_become_roles_and_contents() -> None:
    row = {
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"},
            {"from": "function", "value": "42"},
        ]
    }
    found = messages(row)
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert [message["content"] for message in found] == ["be brief", "hi", "hello", "42"]


def test_sharegpt_with_role_and_content_is_read_too() -> None:
    assert messages({"conversations": CHAT}) == CHAT


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "hi", "completion": "hello"}, CHAT),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"question": "hi", "answer": "hello", "id": 3}, CHAT),
        ({"instruction": "hi", "input": "", "output": "hello"}, CHAT),
        (
            {"instruction": "Add", "input": "1 2", "output": "3", "system": "s"},
            [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "Add\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
        ({"prompt": "hi", "messages": None}, CHAT[:1]),
    ],
)
def test_questions_and_answers_are_conversations_of_two_turns(
    row: dict[str, Any], expected: Any, tmp_path: Path
) -> None:
    assert messages(row) == expected
    if None in row.values():
        return
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row]), file)
    (source,) = open_sources([str(file)])
    (found,) = [parse_row(one) for one in source.rows()]
    assert isinstance(found, Conversation), found
    assert found.messages == expected


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": CHAT}, {"conversations": CHAT}],
        [{"prompt": "hi", "completion": "hello"}, {"instruction": "hi", "output": "hello"}, {"messages": CHAT}],
        [{"instruction": "hi", "response": "hello"}, {"instruction": "hi", "output": "hello"}],
    ],
)
def test_a_table_merged_of_several_kinds_of_rows_gives_every_one(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    names = {name: None for row in rows for name in row}
    pq.write_table(pa.Table.from_pylist([names | row for row in rows]), file)
    (source,) = open_sources([str(file)])
    found = [parse_row(row) for row in source.rows()]
    assert [item.messages if isinstance(item, Conversation) else item for item in found] == [CHAT] * len(rows)


def test_an_answer_that_is_no_text_costs_its_row() -> None:
    assert reason({"prompt": "hi", "completion": 7}) == "content-not-text"
    assert reason({"prompt": "", "completion": "x"}) == "empty-content"


@pytest.mark.parametrize("prompt", [{"prompt": []}, {"prompt": [], "completion": []}])
@pytest.mark.parametrize("beside", [{}, {"system": "be brief"}])
def test_a_question_that_is_an_empty_list_costs_its_row(prompt: dict[str, Any], beside: dict[str, Any]) -> None:
    assert reason(prompt | beside) == "no-messages"


@pytest.mark.parametrize(
    ("instruction", "topic"), [(CHAT[:1], "1 2"), (5, "1 2"), ("Add", ["1 2"]), ("Add", {"numbers": "1 2"})]
)
def test_what_an_instruction_is_about_is_joined_to_a_text_alone(instruction: Any, topic: Any) -> None:
    assert reason({"instruction": instruction, "input": topic, "output": "3"}) == "content-not-text"
    assert messages({"instruction": CHAT[:1], "input": " ", "output": "hello"}) == CHAT


def test_text_parts_are_joined_into_one_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert messages({"messages": [{"role": "user", "content": parts}, CHAT[1]]})[0]["content"] == "one two"


def test_an_image_is_refused_naming_the_message_and_the_part() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
    result = parsed({"messages": [{"role": "user", "content": parts}, CHAT[1]]})
    assert isinstance(result, Problem)
    assert result.reason == "content-not-text"
    assert "message 1" in result.detail
    assert "image_url" in result.detail


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"messages": [', "invalid-json"),
        (b"\xff\xfe{}", "not-utf8"),
        (b"[" * 100_000, "invalid-json"),
        ([1], "not-an-object"),
        ({"text": "hello"}, "no-messages"),
        ({"messages": []}, "no-messages"),
        ({"messages": {"role": "user"}}, "messages-not-a-list"),
        ({"messages": "not json"}, "messages-not-a-list"),
        ({"messages": ["hi"]}, "message-not-an-object"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "unknown-role"),
        ({"messages": [{"content": "hi"}]}, "unknown-role"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "unknown-role"),
        ({"messages": [{"role": "user", "content": "  \n"}]}, "empty-content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "empty-content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content-not-text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "content-not-text"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "content-not-text"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not-unicode"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, "tool-calls-invalid"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"function": "add"}]}]}, "tool-calls-invalid"),
        ({"messages": [CHAT[0], {**CHAT[1], "function_call": True}]}, "tool-calls-invalid"),
        ({"messages": CHAT, "tools": "{broken"}, "tools-invalid"),
        ({"messages": CHAT, "tools": '[{"name": "\\ud800"}]'}, "not-unicode"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"id": "\ud800"}]}]}, "not-unicode"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(payload: Any, expected: str) -> None:
    assert reason(payload) == expected


def test_tools_of_a_table_that_json_cannot_hold_are_refused() -> None:
    called = [CHAT[0], {**CHAT[1], "tool_calls": [{"id": b"1"}]}]
    for row in ({"messages": called}, {"messages": CHAT, "tools": [{"since": date(2026, 11, 23)}]}):
        result = parse_row(Row("f:1", row, 1))
        assert isinstance(result, Problem)
        assert result.reason in ("tool-calls-invalid", "tools-invalid")


def test_empty_system_message_is_kept() -> None:
    assert messages({"messages": [{"role": "system", "content": ""}, *CHAT]})[0] == {"role": "system", "content": ""}


def test_tool_calls_carry_their_arguments_as_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}, CHAT[1]]}
    found = messages(row)[1]
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    "calls", [{"tool_calls": [{"function": "now"}]}, {"tool_calls": [{"function": ""}]}, {"function_call": ["now"]}]
)
def test_a_call_whose_function_is_no_object_costs_its_row(calls: dict[str, Any]) -> None:
    assert reason({"messages": [CHAT[0], {"role": "assistant"} | calls]}) == "tool-calls-invalid"


@pytest.mark.parametrize("beside", [{"completion": []}, {"system": "be brief"}])
def test_a_question_without_a_message_costs_its_row(beside: dict[str, Any]) -> None:
    assert reason({"prompt": []} | beside) == "no-messages"


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(
                    ["messages", "conversations", "role", "from", "content", "value", "type", "text", "tools"]
                )
                | st.text(max_size=3),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_json_value_can_break_the_parser(value: Any) -> None:
    result = parse_row(Row("f:1", json.dumps(value).encode(), 1))
    if isinstance(result, Conversation):
        assert result.messages
        assert all(message["role"] in ROLES and isinstance(message["content"], str) for message in result.messages)
    else:
        assert result.location == "f:1"
        assert result.reason
        assert result.detail


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_can_break_the_parser(line: bytes) -> None:
    assert isinstance(parse_row(Row("f:1", line, 1)), Conversation | Problem)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(min_size=1).filter(lambda t: t.strip())),
        min_size=1,
        max_size=5,
    )
)
def test_a_conversation_survives_json_and_both_dialects(turns: list[tuple[str, str]]) -> None:
    openai = [{"role": role, "content": text} for role, text in turns]
    sharegpt = [{"from": role, "value": text} for role, text in turns]
    assert messages({"messages": openai}) == messages({"conversations": sharegpt}) == openai


def read_conversations(inputs: list[str]) -> Iterator[Conversation | Problem]:
    return (parse_row(row) for source in open_sources(inputs) for row in source.rows())


def conversation_row(number: int) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"question {number}"}, CHAT[1]]}


def questions(path: Path | str) -> list[str]:
    found = list(read_conversations([str(path)]))
    assert all(isinstance(item, Conversation) for item in found), found
    return [item.messages[0]["content"] for item in found if isinstance(item, Conversation)]


def test_jsonl_places_name_the_line_and_blank_lines_count_as_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(conversation_row(0)).encode() + b"\n\n{oops\r\n")
    first, second = read_conversations([str(path)])
    assert isinstance(first, Conversation)
    assert first.location == "a.jsonl:1"
    assert isinstance(second, Problem)
    assert (second.location, second.reason) == ("a.jsonl:3", "invalid-json")


def test_every_format_gives_the_same_conversations(tmp_path: Path) -> None:
    rows = [conversation_row(number) for number in range(150)]
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.json").write_bytes(lines)
    (tmp_path / "d.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "e.parquet", row_group_size=40)
    expected = [f"question {number}" for number in range(150)]
    for path in sorted(tmp_path.iterdir()):
        assert questions(path) == expected, path.name
    assert questions(tmp_path) == expected * 6


@pytest.mark.parametrize("refused", ["__init__", "iter_batches"])
def test_a_disk_that_refuses_a_parquet_file_is_no_fault_of_the_file(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.Table.from_pylist([{"messages": [{"role": "user", "content": "a"}]}]), tmp_path / "a.parquet")

    def refuse(*_words: Any, **_more: Any) -> None:
        # As Arrow words it.
        raise OSError(errno.EIO, "Error reading bytes from file. Detail: [errno 5] Input/output error")

    monkeypatch.setattr(pq.ParquetFile, refused, refuse)
    with pytest.raises(StorageError, match=r"a\.parquet: Input/output error") as caught:
        list(files.open_file(tmp_path / "a.parquet", "a").rows())
    assert caught.value.kind == "io-error"


def test_parquet_members_that_were_absent_do_not_come_back_as_null(tmp_path: Path) -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"function": {"name": "add", "description": "a sum"}}, {"function": {"name": "stop", "strict": True}}]
    rows = [
        {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": tools},
        {"messages": [{**CHAT[0], "name": "bob"}, CHAT[1]]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = read_conversations([str(tmp_path / "a.parquet")])
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.location == "a.parquet:1"
    assert second.messages == [{**CHAT[0], "name": "bob"}, CHAT[1]]
    assert first.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert first.tools == tools


def test_a_json_array_is_decoded_in_pieces_with_the_line_of_each_element(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [conversation_row(number) for number in range(20)]
    rows[7]["messages"][0]["content"] = "ä漢🙂" * 30
    path = tmp_path / "a.json"
    path.write_text("[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]\n")
    expected = [row["messages"][0]["content"] for row in rows]
    for chunk in (1, 2, 3, 7, 64):
        monkeypatch.setattr(files, "_PIECE_BYTES", chunk)
        found = list(read_conversations([str(path)]))
        assert [item.location for item in found] == [f"a.json:{line}" for line in range(2, 22)]
        assert [item.messages[0]["content"] for item in found if isinstance(item, Conversation)] == expected


@pytest.mark.parametrize("text", ["[{}, ]", "[{} {}]", "[{}", '[{"a": }]', "[{}] x", '["\\x"]', "[" * 5000])
def test_a_broken_json_array_is_an_error_naming_the_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n" + text)
    with pytest.raises(ConfigError, match="line 2") as caught:
        list(read_conversations([str(path)]))
    assert caught.value.kind == "input-unreadable"


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize("value", [conversation_row(0), {"data": [conversation_row(0), conversation_row(1)]}])
def test_an_object_over_several_lines_is_refused_as_a_file_and_not_line_by_line(
    tmp_path: Path, name: str, value: dict[str, object]
) -> None:
    path = tmp_path / name
    text = json.dumps(value, indent=2).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(ConfigError, match="an object over several lines") as caught:
        open_sources([str(path)])
    assert caught.value.kind == "input-unreadable"
    assert "jq -c '.data[]'" in (caught.value.hint or "")


def test_an_array_over_several_lines_is_read_under_the_name_of_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps([conversation_row(number) for number in range(3)], indent=1))
    assert all(isinstance(item, Conversation) for item in read_conversations([str(path)]))
    path.write_text(f"[]\n{json.dumps(conversation_row(1))}\n")
    assert [isinstance(item, Conversation) for item in read_conversations([str(path)])] == [False, True]


def test_the_values_of_a_json_array_are_those_of_its_text(tmp_path: Path) -> None:
    values = [
        {"a": 12345678901234567890, "b": [1e-3, -2, None, True]},
        "\ud800",
        '\\"\u00e4',
        7,
        [],
        {},
        {"c": {"d": []}},
    ]
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + json.dumps(values).encode())
    (source,) = open_sources([str(path)])
    assert [row.payload for row in source.rows()] == values
    assert {row.location for row in source.rows()} == {"a.json:2"}


def test_an_element_nested_without_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + "[" * 600 + "]" * 600 + "]")
    with pytest.raises(ConfigError, match="line 1: it is nested too deeply"):
        read_all(path)


def test_an_element_beyond_the_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW_BYTES", 5_000)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([conversation_row(number) for number in range(200)], indent=1))
    assert len(read_all(path)) == 200
    path.write_text(json.dumps([{"messages": ["x" * 100_000]}]))
    with pytest.raises(ConfigError, match="a row may have"):
        read_all(path)


def read_all(path: Path) -> list[Conversation | Problem]:
    return list(read_conversations([str(path)]))


def test_folders_are_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    for name in ("b/2.jsonl", "a/1.jsonl", ".hidden/3.jsonl", "notes.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(conversation_row(0)))
    assert [item.location for item in read_conversations([str(folder)])] == ["chats/a/1.jsonl:1", "chats/b/2.jsonl:1"]


def test_labels_tell_files_of_one_name_apart_without_showing_home_folders(tmp_path: Path) -> None:
    for name in ("x/a.jsonl", "y/a.jsonl", "y/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    paths = [str(tmp_path / name) for name in ("x/a.jsonl", "y/a.jsonl", "y/b.jsonl", "y/b.jsonl")]
    assert [source.label for source in open_sources(paths)] == ["x/a.jsonl", "y/a.jsonl", "b.jsonl", "b.jsonl"]


def test_a_name_that_reads_like_the_bytes_of_another_has_its_label_too(tmp_path: Path) -> None:
    for name in ("\\xff.jsonl", os.fsdecode(b"\xff.jsonl")):
        (tmp_path / name).write_text(json.dumps({"messages": CHAT}))
    labels = [source.label for source in open_sources([str(tmp_path)])]
    assert labels == [f"{tmp_path.name}/\\xff.jsonl"] * 2


def make_bad_input(folder: Path, case: str) -> str:
    path = folder / {"broken-gzip": "a.jsonl.gz", "parquet-cut": "a.parquet"}.get(case, "a.jsonl")
    if case == "empty":
        path.write_bytes(b"")
    elif case == "broken-gzip":
        path.write_bytes(gzip.compress(b'{"messages": []}\n' * 50)[:-12])
    elif case == "parquet-cut":
        path.write_bytes(b"PAR1 and then nothing")
    elif case == "no-column":
        path = folder / "a.parquet"
        pq.write_table(pa.table({"text": ["hi"]}), path)
    elif case == "unknown-format":
        path = folder / "a.csv"
        path.write_text("role,content\n")
    elif case == "empty-folder":
        path = folder / "nothing"
        path.mkdir()
    return str(path)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("missing", "path-missing"),
        ("empty", "input-empty"),
        ("broken-gzip", "input-unreadable"),
        ("parquet-cut", "input-unreadable"),
        ("no-column", "input-columns"),
        ("unknown-format", "input-unreadable"),
        ("empty-folder", "input-empty"),
    ],
)
def test_an_input_that_cannot_be_read_is_an_error_of_its_own_kind(tmp_path: Path, case: str, kind: str) -> None:
    text = make_bad_input(tmp_path, case)
    with pytest.raises(HiddenstoreError) as caught:
        list(read_conversations([text]))
    assert caught.value.kind == kind
    assert Path(text).name in caught.value.message


def test_a_row_beyond_the_limit_is_refused_and_the_next_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectors.conversations.files.MAX_ROW_BYTES", 200)
    path = tmp_path / "a.jsonl"
    huge = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]})
    path.write_text(huge + "\n" + json.dumps(conversation_row(1)) + "\n")
    first, second = read_conversations([str(path)])
    assert isinstance(first, Problem)
    assert (first.reason, first.location) == ("row-too-large", "a.jsonl:1")
    assert isinstance(second, Conversation)
    assert second.location == "a.jsonl:2"


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)


@pytest.mark.usefixtures("dataset_cache")
def test_a_dataset_is_read_by_split_and_slice(tmp_path: Path) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    for split, count in (("train", 12), ("test", 4)):
        rows = [json.dumps(conversation_row(number)) for number in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(rows))
    assert questions(f"{folder}:test") == [f"question {number}" for number in range(4)]
    assert questions(f"{folder}:train[2:5]") == ["question 2", "question 3", "question 4"]
    assert questions(f"{folder}[default]:train[:25%]") == ["question 0", "question 1", "question 2"]
    first = next(iter(read_conversations([f"{folder}:train[2:5]"])))
    assert first.location == "chats:train[2:5]:1"


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "chats.parquet"])
def test_some_rows_of_a_local_file_are_read_at_their_places(tmp_path: Path, name: str) -> None:
    file, rows = tmp_path / name, [conversation_row(number) for number in range(6)]
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows))
    assert questions(f"{file}:train[2:4]") == ["question 2", "question 3"]
    assert questions(f"{file}[4:]") == ["question 4", "question 5"]
    assert questions(f"{file}:train[:1]") == ["question 0"]
    with pytest.raises(ConfigError, match=r"\[6:\] holds no row") as caught:
        open_sources([f"{file}:[6:]"])
    assert caught.value.kind == "input-empty"
    if name.endswith(".jsonl"):
        assert [one.location for one in read_conversations([f"{file}:train[2:4]"])] == [f"{name}:3", f"{name}:4"]


@pytest.mark.usefixtures("dataset_cache")
def test_a_dataset_saved_to_disk_is_read_with_slices(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list([conversation_row(number) for number in range(10)])
    datasets.DatasetDict(train=table, extra=table).save_to_disk(str(tmp_path / "saved"))
    assert questions(tmp_path / "saved") == [f"question {number}" for number in range(10)]
    assert questions(f"{tmp_path / 'saved'}:extra[8:]") == ["question 8", "question 9"]


@pytest.mark.usefixtures("dataset_cache")
@pytest.mark.parametrize("part", [":train[:50%]", "[-3:]", ":validation[:2]", ":train"])
def test_rows_that_a_file_cannot_choose_are_refused_with_those_it_can(part: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"messages": CHAT}))
    with pytest.raises(ConfigError, match=r"expected .*a\.jsonl:train\[FIRST:LAST\]") as caught:
        open_sources([f"{file}{part}"])
    assert caught.value.kind == "dataset-spec"


@pytest.mark.parametrize("spec", [":nosuch", "[nosuch]:train", ":train[oops]"])
def test_a_split_or_config_that_does_not_exist_is_an_error(tmp_path: Path, spec: str) -> None:
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(conversation_row(0)))
    with pytest.raises(ConfigError) as caught:
        list(read_conversations([f"{folder}{spec}"]))
    assert caught.value.kind == "input-unreadable"


@pytest.mark.usefixtures("dataset_cache")
def test_a_dataset_that_cannot_be_found_is_not_found() -> None:
    with pytest.raises((NotFoundError, ConfigError, StorageError)) as caught:
        list(read_conversations(["nobody/nothing-of-that-name:train"]))
    assert "nobody/nothing-of-that-name" in caught.value.message


@pytest.mark.parametrize("written", [json.dumps, lambda value: value], ids=["text", "objects"])
def test_nulls_that_json_writes_in_arguments_tools_and_template_kwargs_stay(
    written: Callable[[Any], Any], tmp_path: Path
) -> None:
    arguments = {"a": None, "b": [None, {"c": None}]}
    call = {"id": None, "type": "function", "function": {"name": "find", "arguments": written(arguments)}}
    tools = [{"type": "function", "function": {"name": "find", "default": None, "enum": [None, "x"]}}]
    turns = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    row = {"messages": turns, "tools": written(tools), "chat_template_kwargs": written({"date": None})}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (tmp_path / "b.json").write_text(json.dumps([row], indent=1))
    for item in read_conversations([str(tmp_path)]):
        assert isinstance(item, Conversation)
        assert item.messages[1]["tool_calls"] == [
            {"type": "function", "function": {"name": "find", "arguments": arguments}}
        ]
        assert (item.tools, item.template_kwargs) == (tools, {"date": None})
