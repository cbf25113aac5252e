"""Datasets by name: every entry through the real loading code, from tiny copies with rows as documented."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from collectors.conversations.datasets import named_datasets, open_named
from collectors.conversations.hub import HubSplit
from hiddenstore.cli import main
from hiddenstore.conversation import Conversation, Problem, parse_row
from hiddenstore.errors import ConfigError, HiddenstoreError, NotFoundError

DATASETS = named_datasets()
Q, A = "What is two and two?", "It is four."
MESSAGES = {"messages": [{"role": "user", "content": Q}, {"role": "assistant", "content": A}]}
SHAREGPT = {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
NEMOTRON = {"messages": [{"role": "system", "content": ""}, *MESSAGES["messages"]], "category": "chat", "uuid": "u"}

DOCUMENTED: dict[str, dict[str, Any]] = {
    "ultrachat": {"prompt": Q, "prompt_id": "f0e3", **MESSAGES},
    "sharegpt": {"id": "QWJhYvA_0", **SHAREGPT},
    "perfectblend": {**SHAREGPT, "source": "orca"},
    "magpie": {"uuid": "u", "instruction": Q, "response": A, **SHAREGPT, "task_category": "Math"},
    "daring-anteater": {
        "system": "",
        "mask": "User",
        "dataset": "synthetic_conv",
        "conversations": [
            {"from": "User", "value": Q, "label": None},
            {"from": "Assistant", "value": A, "label": "quality:4"},
        ],
    },
    "nemotron-v1": {**NEMOTRON, "reasoning": "on", "metadata": json.dumps({"tools": [TOOL]})},
    "nemotron-v2": NEMOTRON,
    "nemotron-v3-science": {**MESSAGES, "uuid": "u", "tools": None},
    "llama-nemotron": {
        "input": [{"role": "user", "content": Q}],
        "output": A,
        "category": "chat",
        "system_prompt": "detailed thinking off",
    },
    "smoltalk": {**MESSAGES, "source": "smol-magpie-ultra"},
    "tulu-3": {"id": "x", **MESSAGES, "source": "ai2"},
    "hermes-tools": {
        "id": "x",
        "conversations": [
            {"from": "system", "value": f"You call functions. <tools>\n{[TOOL]}\n</tools> …"},
            *SHAREGPT["conversations"],
        ],
        "tools": json.dumps([TOOL]),
        "task": "t",
    },
    "openthoughts-114k": {
        "system": "Think first.",
        "conversations": [{"from": "user", "value": Q}, {"from": "assistant", "value": A}],
    },
    "infinity-llama3.1-8b": {
        "id": 1,
        "conversation": [{"role": "user", "content": Q}],
        "generated_message": {"role": "assistant", "content": A},
    },
    "cnn-dailymail": {"article": Q, "highlights": A, "id": "42c0"},
    "alpaca": {"instruction": "Answer.", "input": Q, "output": A, "text": "…"},
    "opencodeinstruct": {"id": "x", "input": Q, "output": A, "domain": "generic", "average_test_score": "1"},
    "openmathreasoning": {"problem": Q, "generated_solution": A, "expected_answer": "4"},
    "magicoder-evol": {"instruction": Q, "response": A},
    "opc": {"instruction": Q, "output": A, "tag": "t"},
    "camel": {"role_1": "r", "topic;": "t", "message_1": Q, "message_2": A},
    "gsm8k": {"question": Q, "answer": A},
    "hendrycks-math": {"problem": Q, "level": "Level 1", "type": "Algebra", "solution": A},
    "mt-bench": {"prompt": [Q, "And three?"], "prompt_id": 81, "category": "math", "reference": []},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "…", "entry_point": "f"},
    "mbpp": {"source_file": "s", "task_id": 2, "prompt": Q, "code": "…", "test_list": ["assert True"]},
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def copy_of(root: Path, split: HubSplit, row: dict[str, Any]) -> None:
    """A copy as ``hf download`` makes it: parquet under data/, or where the card says that a config lies."""
    folder = root / split.name / (split.config or "data")
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row]), folder / f"{split.split}-00000-of-00001.parquet")
    if split.config is not None:
        configs = [
            {"config_name": at.name, "data_files": [{"split": split.split, "path": f"{at.name}/{split.split}-*"}]}
            for at in sorted(folder.parent.iterdir())
            if at.is_dir()
        ]
        (folder.parent / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def conversations(name: str, root: Path) -> list[Conversation]:
    found = [parse_row(row) for source in open_named(f"dataset:{name}", root) for row in source.rows()]
    assert not [item for item in found if isinstance(item, Problem)], found
    return [item for item in found if isinstance(item, Conversation)]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_row_as_documented_becomes_a_conversation(name: str, tmp_path: Path) -> None:
    for split in DATASETS[name].splits:
        copy_of(tmp_path, split, DOCUMENTED[name])
    found = conversations(name, tmp_path)
    assert len(found) == len(DATASETS[name].splits)
    said = [(message["role"], message["content"]) for message in found[0].messages]
    if name == "mt-bench":
        assert said == [("user", Q), ("user", "And three?")]
    elif name == "humaneval":
        assert said[0][0] == "user"
        assert "```python\ndef f():\n" in said[0][1]
    elif name == "mbpp":
        assert said == [("user", Q)]
    elif name == "alpaca":
        assert said == [("user", f"Answer.\n\n{Q}"), ("assistant", A)]
    elif name == "cnn-dailymail":
        assert said == [("user", f"Summarize this article in a few sentences.\n\n{Q}"), ("assistant", A)]
    else:
        first = {"openthoughts-114k": "Think first.", "llama-nemotron": "detailed thinking off"}.get(name)
        assert said == [*([("system", first)] if first else []), ("user", Q), ("assistant", A)]
    assert found[0].tools == ([TOOL] if name in ("hermes-tools", "nemotron-v1") else None)


def test_tool_calls_that_a_set_writes_into_its_text_become_members(tmp_path: Path) -> None:
    turns = [
        {"from": "system", "value": f"You call functions.\n<tools>\n{[TOOL]}\n</tools>\n"},
        {"from": "human", "value": Q},
        {"from": "gpt", "value": "<tool_call>\n{'arguments': {'a': 2, 'b': True}, 'name': 'add'}\n</tool_call>\n"},
        {"from": "tool", "value": '<tool_response>\n{"name": "add", "content": 4}\n</tool_response>\n'},
        {"from": "gpt", "value": 'So:\n<tool_call>{"name": "add", "arguments": {}}</tool_call>'},
        {"from": "tool", "value": "<tool_response>1</tool_response>\n<tool_response>2</tool_response>"},
        {"from": "gpt", "value": A},
    ]
    row = {"conversations": turns, "tools": json.dumps([TOOL])}
    (tmp_path / "hermes-tools.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = conversations("hermes-tools", tmp_path)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": True}}}
    assert found.messages == [
        {"role": "user", "content": Q},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"name": "add", "content": 4}'},
        {
            "role": "assistant",
            "content": "So:",
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": A},
    ]
    assert found.tools == [TOOL]


@pytest.mark.parametrize("call", ["{add", "__import__('os').getcwd()", "[1]", '{"arguments": {}}', "[" * 100_000])
def test_a_tool_call_that_cannot_be_read_costs_its_row_alone(tmp_path: Path, call: str) -> None:
    asked = {"from": "human", "value": Q}
    row = {"conversations": [asked, {"from": "gpt", "value": f"<tool_call>{call}</tool_call>"}], "tools": "[{}]"}
    (tmp_path / "hermes-tools.jsonl").write_text(json.dumps(row) + "\n")
    (source,) = open_named("dataset:hermes-tools", tmp_path)
    (found,) = [parse_row(item) for item in source.rows()]
    assert isinstance(found, Problem)
    assert found.reason == "dataset-row"


@pytest.mark.parametrize(("name", "key"), [("nemotron-v3-code", "messages"), ("opencodereasoning", None)])
def test_a_row_whose_question_was_left_out_is_a_problem(tmp_path: Path, name: str, key: str | None) -> None:
    def row(question: str) -> dict[str, Any]:
        asked = {"role": "user", "content": question}
        return {key: [asked, {"role": "assistant", "content": A}]} if key else {"input": question, "output": A}

    (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(row(question)) for question in ("-", Q)) + "\n")
    (source,) = open_named(f"dataset:{name}", tmp_path)
    assert [getattr(parse_row(item), "reason", "") for item in source.rows()] == ["question-left-out", ""]


@pytest.mark.parametrize("metadata", [None, "", "from a forum", "{}", '{"tools": null}'])
def test_a_row_of_nemotron_v1_without_tools_is_a_conversation(tmp_path: Path, metadata: str | None) -> None:
    (tmp_path / "nemotron-v1.jsonl").write_text(json.dumps({**NEMOTRON, "metadata": metadata}) + "\n")
    (found,) = conversations("nemotron-v1", tmp_path)
    assert found.tools is None


def test_the_code_of_nemotron_v1_is_read_only_when_it_is_asked_for(tmp_path: Path) -> None:
    assert "code" not in [split.split for split in DATASETS["nemotron-v1"].splits]
    copy_of(tmp_path, HubSplit(DATASETS["nemotron-v1"].splits[0].name, split="code"), DOCUMENTED["nemotron-v1"])
    (source,) = open_named("dataset:nemotron-v1:code", tmp_path)
    assert source.count == 1


def test_the_question_file_of_fastchat_serves_as_mt_bench(tmp_path: Path) -> None:
    row = {"question_id": 81, "category": "writing", "turns": [Q, "And three?"]}
    (tmp_path / "mt-bench.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = conversations("mt-bench", tmp_path)
    assert [message["content"] for message in found.messages] == [Q, "And three?"]


def test_every_dataset_has_the_shape_of_a_documented_one() -> None:
    known = {id(DATASETS[name].shape) for name in DOCUMENTED} | {DATASETS[name].shape.columns for name in DOCUMENTED}
    for name, dataset in DATASETS.items():
        assert id(dataset.shape) in known or dataset.shape.columns in known, name
        assert dataset.splits, name
        assert all("/" in split.name for split in dataset.splits), name


def test_one_split_of_a_dataset_can_be_cut_out(tmp_path: Path) -> None:
    for split in ("chat", "math"):
        copy_of(tmp_path, HubSplit("nvidia/Nemotron-Post-Training-Dataset-v2", split=split), NEMOTRON)
    (source,) = open_named("dataset:nemotron-v2:math[:1]", tmp_path)
    assert source.label.startswith("nvidia/Nemotron-Post-Training-Dataset-v2:math")
    assert [row.location.rpartition(":")[2] for row in source.rows()] == ["1"]


def test_the_folder_of_a_config_is_enough_without_a_card(tmp_path: Path) -> None:
    copy_of(tmp_path, DATASETS["gsm8k"].splits[0], DOCUMENTED["gsm8k"])
    (tmp_path / "openai" / "gsm8k" / "README.md").unlink()
    assert len(conversations("gsm8k", tmp_path)) == 1


def test_a_file_named_after_the_dataset_stands_for_it(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(DOCUMENTED["gsm8k"]) + "\n")
    (found,) = conversations("gsm8k", tmp_path)
    assert (found.location, found.messages[1]["content"]) == ("gsm8k:1", A)


def test_a_slice_takes_rows_of_a_file_that_stands_for_a_dataset_of_one_split(tmp_path: Path) -> None:
    lines = [json.dumps(DOCUMENTED["gsm8k"] | {"question": f"{number}?"}) for number in range(5)]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    parts = [conversations(f"gsm8k:train{part}", tmp_path) for part in ("", "[:2]", "[2:]")]
    assert [[item.messages[0]["content"] for item in part] for part in parts] == [
        ["0?", "1?", "2?", "3?", "4?"],
        ["0?", "1?"],
        ["2?", "3?", "4?"],
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gsm8k:test", "gsm8k:train[FIRST:LAST]"),
        ("gsm8k:train[:50%]", "gsm8k:train[FIRST:LAST]"),
        ("nemotron-v3-math:low", "hf download nvidia/"),
        ("nemotron-v3-math:low[:5]", "hf download nvidia/"),
    ],
)
def test_a_split_that_a_file_for_all_of_them_cannot_tell_apart_is_refused(tmp_path: Path, text: str, said: str) -> None:
    name, _, split = text.partition(":")
    (tmp_path / f"{name}.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{split} cannot be told apart")) as caught:
        open_named(f"dataset:{text}", tmp_path)
    assert caught.value.kind == "dataset-split"
    assert said in str(caught.value.hint)


def test_a_row_of_another_shape_is_a_problem_and_not_the_end(tmp_path: Path) -> None:
    lines = ["{oops", json.dumps({"question": Q}), json.dumps(DOCUMENTED["gsm8k"])]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    (source,) = open_named("dataset:gsm8k", tmp_path)
    found = [parse_row(row) for row in source.rows()]
    assert [getattr(item, "reason", "") for item in found] == ["invalid-json", "dataset-row", ""]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ("dataset:ultrachad", "name-unknown", "did you mean ultrachat"),
        ("dataset:a/b", "name-unknown", "in a mix as {hub: a/b}"),
        ("dataset:gsm8k", "path-missing", "hf download openai/gsm8k"),
        ("dataset:camel:chat", "dataset-split", "train"),
        ("dataset:mbpp", "input-columns", "no column prompt"),
    ],
)
def test_what_cannot_be_opened_says_why(tmp_path: Path, text: str, kind: str, said: str) -> None:
    copy_of(tmp_path, DATASETS["mbpp"].splits[0], {"text": Q, "code": "…"})
    with pytest.raises(HiddenstoreError) as caught:
        open_named(text, tmp_path)
    assert caught.value.kind == kind
    assert said in f"{caught.value.message} {caught.value.hint}"
    assert isinstance(caught.value, NotFoundError | ConfigError)


def test_without_a_copy_the_dataset_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    with pytest.raises(HiddenstoreError, match="openai/gsm8k") as caught:
        open_named("dataset:gsm8k")
    assert caught.value.kind == "dataset-unreachable"


def test_the_list_of_datasets_is_a_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["prepare", "--list-datasets", "--json"])
    assert caught.value.code == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "hiddenstore.prepare/1"
    assert [row["name"] for row in document["datasets"]] == list(DATASETS)
    assert {row["name"] for row in document["datasets"] if not row["answers"]} == {"mt-bench", "humaneval", "mbpp"}
