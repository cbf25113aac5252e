"""Splits kept as JSON whose rows differ in their members, as the sets with tool calls and reasoning are published."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from collectors.conversations.datasets import open_named
from collectors.conversations.hub import HubSplit, open_dataset, open_table
from collectors.conversations.mix import open_sources
from hiddenstore.conversation import Conversation, Problem, Source, parse_row
from hiddenstore.errors import ConfigError

DATASET = "dataset:nemotron-v3-safety"
HUB = "nvidia/Nemotron-SFT-Safety-v1"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def conversation(question: str, name: str, **arguments: Any) -> dict[str, Any]:
    """A row as the agents' sets have it: every turn with the members of its role, every tool with its own schema."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {key: {"type": type(value).__name__} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "assistant", "content": f"{name} is done."},
        ],
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        "metadata": {name: len(question)},
    }


ROWS = [
    conversation("Add.", "add", a=1, b=2),
    conversation("Say it.", "say", text="hello", loud=True, to=None),
    conversation("Stop.", "stop"),
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def copy_of(root: Path, **files: bytes) -> Path:
    """A copy as ``hf download`` leaves it: files under data/ and the card that says which of them the split has."""
    folder = root / HUB
    (folder / "data").mkdir(parents=True)
    for name, content in files.items():
        (folder / "data" / name.replace("_", ".")).write_bytes(content)
    splits = [{"split": "train", "path": [f"data/{name.replace('_', '.')}" for name in files]}]
    card = {"configs": [{"config_name": "default", "data_files": splits}]}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    return folder


def same(source: Source, rows: list[dict[str, Any]]) -> None:
    found = [parse_row(row) for row in source.rows()]
    assert [item for item in found if isinstance(item, Problem)] == []
    for item, row in zip(found, rows, strict=True):
        assert isinstance(item, Conversation)
        assert (item.messages, item.tools) == (row["messages"], row["tools"])


def questions(source: Source) -> list[str]:
    found = [parse_row(row) for row in source.rows()]
    return [item.messages[0]["content"] if isinstance(item, Conversation) else item.reason for item in found]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a_jsonl", lines(ROWS)), ("a_jsonl_gz", gzip.compress(lines(ROWS))), ("a_json", json.dumps(ROWS).encode())],
)
def test_every_row_keeps_the_members_it_has_and_no_others(tmp_path: Path, name: str, content: bytes) -> None:
    copy_of(tmp_path, **{name: content})
    (source,) = open_named(DATASET, tmp_path)
    same(source, ROWS)


def test_the_table_reader_gives_turns_of_unlike_members_too(tmp_path: Path) -> None:
    same(open_table(HubSplit(str(copy_of(tmp_path, a_jsonl=lines(ROWS))), None, "train")), ROWS)


def test_a_line_that_is_no_json_costs_itself_alone(tmp_path: Path) -> None:
    copy_of(tmp_path, a_jsonl=lines(ROWS[:1]) + b"{oops\n" + lines(ROWS[1:]))
    (source,) = open_named(DATASET, tmp_path)
    assert questions(source) == ["Add.", "invalid-json", "Say it.", "Stop."]
    assert [row.location for row in source.rows()] == [f"{HUB}:train:{number}" for number in (1, 2, 3, 4)]


def test_the_files_of_a_split_are_one_source(tmp_path: Path) -> None:
    copy_of(tmp_path, a_jsonl=lines(ROWS[:2]), b_jsonl=lines(ROWS[2:]))
    (source,) = open_named(DATASET, tmp_path)
    same(source, ROWS)
    assert [row.location for row in source.rows()][-1] == f"{HUB}:train/b.jsonl:1"
    assert source.size == len(lines(ROWS))


@pytest.mark.parametrize(
    ("cut", "expected"), [("[:2]", [0, 1]), ("[1:]", [1, 2]), ("[1:2]", [1]), ("[-1:]", [2]), ("[:34%]", [0])]
)
def test_a_split_kept_as_json_can_be_cut(tmp_path: Path, cut: str, expected: list[int]) -> None:
    copy_of(tmp_path, a_jsonl=lines(ROWS))
    (source,) = open_named(f"{DATASET}:train{cut}", tmp_path)
    same(source, [ROWS[number] for number in expected])


def test_a_split_without_the_columns_of_its_entry_is_refused_at_once(tmp_path: Path) -> None:
    copy_of(tmp_path, a_jsonl=b'{"prompt": "Add.", "answer": "3"}\n')
    with pytest.raises(ConfigError, match="has no column messages; it has prompt, answer") as caught:
        open_named(DATASET, tmp_path)
    assert caught.value.kind == "input-columns"


@pytest.mark.parametrize("text", ["gsm8k[main", "gsm8k]:train", "gsm8k:", ":train"])
def test_what_names_neither_a_file_nor_a_split_is_refused_with_the_spelling(text: str) -> None:
    with pytest.raises(ConfigError, match=r"written name\[config\]:split") as caught:
        open_dataset(text)
    assert caught.value.kind == "dataset-spec"


def test_an_empty_cut_of_a_split_is_refused(tmp_path: Path) -> None:
    copy_of(tmp_path, a_jsonl=lines(ROWS))
    with pytest.raises(ConfigError, match="is empty"):
        open_named(f"{DATASET}:train[5:]", tmp_path)


def saved(folder: Path, count: int) -> Path:
    import datasets

    rows = [{"prompt": f"question {number}", "completion": "x"} for number in range(count)]
    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict(train=table, test=table).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("part", ["[2:4]", "[test]", "[test]:train[2:4]"])
def test_a_saved_folder_has_no_config_and_says_how_its_rows_are_chosen(tmp_path: Path, part: str) -> None:
    folder = saved(tmp_path / "saved", 10)
    with pytest.raises(ConfigError, match=r"has no config") as caught:
        open_dataset(f"{folder}{part}")
    assert (caught.value.kind, f"{folder}:train[:1000]" in str(caught.value.hint)) == ("dataset-spec", True)
    assert questions(open_dataset(f"{folder}:test[2:4]")) == ["question 2", "question 3"]


@pytest.mark.parametrize("name", ["run [2] of 2026-11-29T10:00", "s[x]:y", "s:train[:2]"])
def test_a_saved_folder_and_rows_of_it_are_read_whatever_its_name_has(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / name, 3)
    assert questions(open_dataset(str(folder))) == ["question 0", "question 1", "question 2"]
    assert questions(open_dataset(f"{folder}:test[1:2]")) == ["question 1"]
    with pytest.raises(ConfigError, match=r"has no config 'test'") as caught:
        open_dataset(f"{folder}[test]")
    assert f"{folder}:train[:1000]" in str(caught.value.hint)


def test_rows_of_a_file_are_read_whatever_its_name_has(tmp_path: Path) -> None:
    file = tmp_path / "run [2] of 2026-11-29T10:00.jsonl"
    file.write_bytes(lines(ROWS))
    (source,) = open_sources([f"{file}:train[1:2]"])
    assert questions(source) == ["Say it."]
    with pytest.raises(ConfigError, match="chooses no rows of a file"):
        open_sources([f"{file}:train[:50%]"])


def test_what_was_fetched_once_is_read_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / f"datasets--{HUB.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    (kept / "snapshots").mkdir()
    copy_of(tmp_path, a_jsonl=lines(ROWS)).rename(kept / "snapshots" / ("0" * 40))
    (source,) = open_named(DATASET)
    assert source.label == f"{HUB}:train"
    same(source, ROWS)
