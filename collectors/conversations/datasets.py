"""Datasets by name, from ``datasets.yaml``: ``dataset:NAME``, or ``dataset:NAME:SPLIT[slice]`` for one of its splits.

A dataset comes from a copy below ``--dataset-root`` where there is one, else through ``datasets`` from its cache or
hub. How its rows become rows with ``messages`` is one small function for each shape of row.
"""

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from collectors.conversations.files import open_file, rows_within
from collectors.conversations.hub import HubSplit, open_json_split, open_table, parse_cut
from hiddenstore.conversation import MESSAGE_COLUMNS, TOOLS_COLUMN, Problem, Row, Source, decoded_row
from hiddenstore.errors import ConfigError, Kind, NotFoundError
from hiddenstore.registry import nearest

Table = dict[str, Any]

_LEFT_OUT = "-"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """``read`` makes of one row ``messages`` and maybe ``tools``, from ``columns`` and ``optional`` ones."""

    columns: tuple[str, ...]
    read: Callable[[Table], Table]
    optional: tuple[str, ...] = ()
    is_prompt: bool = False

    def select(self, names: Sequence[str], table: str) -> list[str]:
        """The columns to load of those a table has; ConfigError ``input-columns``."""
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise ConfigError(
                f"{table} has no column {' or '.join(missing)}; it has {', '.join(names) or 'none'}",
                kind=Kind.INPUT_COLUMNS,
                hint="give the file itself where its rows hold messages, or another copy with --dataset-root DIR",
            )
        return [name for name in names if name in (*self.columns, *self.optional)]


def shape_of(text: str | dict[str, Any]) -> Shape:
    """What ``datasets.yaml`` writes as a shape: a name of ``SHAPES``, ``{pair: [Q, A]}`` or ``{prompt: Q}``."""
    if isinstance(text, str):
        return SHAPES[text]
    return _prompt(text["prompt"]) if "prompt" in text else _pair(*text["pair"])


def _prompt(column: str, text: Callable[[Any], Any] = lambda value: value) -> Shape:
    return Shape((column,), lambda row: {"messages": [_message("user", text(row[column]))]}, is_prompt=True)


def _pair(question: str, answer: str, text: Callable[[Any], Any] = lambda value: value) -> Shape:
    def read(row: Table) -> Table:
        return {"messages": [_message("user", text(row[question])), _message("assistant", row[answer])]}

    return Shape((question, answer), read)


def leaves_question_out(messages: Any) -> bool:
    """Whether a user's turn is the dash that stands for a question its publisher may not give away."""
    return any(
        turn.get("role") == "user" and isinstance(turn.get("content"), str) and turn["content"].strip() == _LEFT_OUT
        for turn in (messages if isinstance(messages, list) else [])
        if isinstance(turn, dict)
    )


def _message(role: str, content: Any) -> Table:
    return {"role": role, "content": content}


def _system(text: Any) -> list[Table]:
    return [_message("system", text)] if isinstance(text, str) and text.strip() else []


def _with_tools(messages: Any, tools: Any) -> Table:
    return {"messages": messages} | ({TOOLS_COLUMN: tools} if tools is not None else {})


def _role_and_text(turn: Table) -> tuple[Any, Any]:
    return turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value") or ""


def _messages(row: Table) -> Any:
    """Messages as they are, without the empty system turns that some sets begin with."""
    turns = row[next(name for name in MESSAGE_COLUMNS if name in row)]
    while isinstance(turns, list) and turns and isinstance(turns[0], dict):
        role, text = _role_and_text(turns[0])
        if role != "system" or not isinstance(text, str) or text.strip():
            break
        turns = turns[1:]
    return turns


def _turns(row: Table) -> Table:
    return _with_tools(_messages(row), row.get(TOOLS_COLUMN))


def _with_tools_in_metadata(row: Table) -> Table:
    """Nemotron v1: ``metadata`` is text, a JSON object with the tools where a conversation has some."""
    metadata = row.get("metadata") or ""
    members = json.loads(metadata) if metadata.lstrip().startswith("{") else {}
    tools = members.get(TOOLS_COLUMN)
    return _with_tools(_messages(row), row.get(TOOLS_COLUMN) if tools is None else tools)


def _hermes(row: Table) -> Table:
    """Tool calls written into the text of turns; the system turn with the tools goes, as templates write them."""
    if not row.get(TOOLS_COLUMN):
        return _turns(row)
    messages: list[Table] = []
    for turn in _messages(row):
        role, text = _role_and_text(turn)
        if not isinstance(text, str):
            raise ValueError(f"a turn holds {type(text).__name__}, expected text")
        if role == "system" and "<tools>" in text:
            continue
        if role == "tool":
            messages += [_message("tool", response) for response in _RESPONSE.findall(text) or [text]]
        elif calls := _CALL.findall(text):
            tool_calls = [_tool_call(call) for call in calls]
            messages.append({**_message(role, _CALL.sub("", text).strip()), "tool_calls": tool_calls})
        else:
            messages.append(_message(role, text))
    return _with_tools(messages, row[TOOLS_COLUMN])


def _tool_call(text: str) -> Table:
    """From JSON, or from the Python that printed it."""
    try:
        call = json.loads(text)
    except ValueError:
        try:
            call = ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(f"a tool call is neither JSON nor a Python literal: {text[:80]}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a tool call is no object with a name: {text[:80]}")
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}


def _input_and_output(row: Table) -> Table:
    """Llama-Nemotron: the turns before the answer are a list in ``input``."""
    turns = row["input"] if isinstance(row["input"], list) else [_message("user", row["input"])]
    return {"messages": [*_system(row.get("system_prompt")), *turns, _message("assistant", row["output"])]}


def _instruction(row: Table) -> Table:
    """Alpaca: ``input`` is what the instruction is about, often empty."""
    topic = row.get("input") or ""
    question = f"{row['instruction']}\n\n{topic}" if topic.strip() else row["instruction"]
    return {"messages": [_message("user", question), _message("assistant", row["output"])]}


_CODE = "Complete this Python function so that it does what its docstring says.\n```python\n{}\n```"
_NEWS = "Summarize this article in a few sentences.\n\n{}"

SHAPES = {
    "messages": Shape(("messages",), _turns, (TOOLS_COLUMN,)),
    "conversations": Shape(("conversations",), _turns, (TOOLS_COLUMN,)),
    "messages_and_metadata": Shape(("messages",), _with_tools_in_metadata, ("metadata",)),
    "hermes": Shape(("conversations",), _hermes, (TOOLS_COLUMN,)),
    # Nebius: the question is the first turn of the conversation, its own answer stands beside it.
    "generated_answer": Shape(
        ("conversation", "generated_message"),
        lambda row: {"messages": [row["conversation"][0], row["generated_message"]]},
    ),
    "news": _pair("article", "highlights", _NEWS.format),
    "conversations_and_system": Shape(
        ("conversations",), lambda row: {"messages": [*_system(row.get("system")), *_messages(row)]}, ("system",)
    ),
    "input_output": Shape(("input", "output"), _input_and_output, ("system_prompt",)),
    "instruction": Shape(("instruction", "output"), _instruction, ("input",)),
    # MT-Bench: the user's turns as a list of texts, which FastChat's own file calls ``turns``.
    "questions": Shape(
        ("prompt",),
        lambda row: {"messages": [_message("user", text) for text in row.get("prompt") or row["turns"]]},
        is_prompt=True,
    ),
    "unfinished_code": _prompt("prompt", _CODE.format),
}


DATASET = "dataset:"
"""What an input that names a dataset of the table begins with."""

_NAME = re.compile(r"([^:]+)(?::(.+))?")
_FILES = (".jsonl", ".json", ".parquet", ".jsonl.gz")


@dataclass(frozen=True)
class NamedDataset:
    """A dataset by name. ``is_multilingual``: variants that ask for another language should leave it alone."""

    name: str
    about: str
    shape: Shape
    splits: tuple[HubSplit, ...]
    is_multilingual: bool = False


@cache
def named_datasets() -> dict[str, NamedDataset]:
    """The table, in its order."""
    table = yaml.safe_load(Path(__file__).with_name("datasets.yaml").read_text(encoding="utf-8"))
    return {
        name: NamedDataset(name, **{**row, "shape": shape_of(row["shape"]), "splits": tuple(_splits(row["splits"]))})
        for name, row in table.items()
    }


def _splits(ids: Any) -> Iterator[HubSplit]:
    """From an id, or lists of them in lists."""
    if isinstance(ids, list):
        for item in ids:
            yield from _splits(item)
    elif split := HubSplit.parse(ids):
        yield replace(split, split=split.split or "train")
    else:
        raise ValueError(f"datasets.yaml: {ids!r} is no name[config]:split")


def find_dataset(name: str) -> NamedDataset:
    """A dataset by name; NotFoundError ``name-unknown`` names the nearest."""
    datasets = named_datasets()
    if name in datasets:
        return datasets[name]
    problem = f"there is no dataset {name!r}" + (f"; did you mean {near}?" if (near := nearest(name, datasets)) else "")
    hint = "hiddenstore prepare --list-datasets"
    if "/" in name:
        hint += f"; an id of the hub is written without dataset:, in a mix as {{hub: {name}}}"
    raise ConfigError(problem, kind=Kind.NAME_UNKNOWN, hint=hint)


def open_named(text: str, root: str | Path | None = None) -> list[Source]:
    """The sources behind ``dataset:NAME[:SPLIT]``, one for each of its splits; ``root`` holds local copies. Raises
    NotFoundError: ``name-unknown``, ``path-missing`` (not below ``root``); ConfigError: ``dataset-split``,
    ``input-columns`` and what ``open_table`` raises."""
    match = _NAME.fullmatch(text.removeprefix(DATASET))
    name, split = match.groups() if match else (text.removeprefix(DATASET), None)
    dataset = find_dataset(name)
    file = _single_file(root, name)
    if file is not None:
        sources = [_open_single_file(file, dataset, split)]
    else:
        sources = [_open(one, dataset.shape, root) for one in _select(dataset, split)]
    return [replace(source, rows=partial(_rows, source, dataset.shape)) for source in sources]


def dataset_rows() -> list[dict[str, Any]]:
    """The table for people and scripts, in its order."""
    return [
        {
            "name": dataset.name,
            "parts": [str(split) for split in dataset.splits],
            "columns": list(dataset.shape.columns),
            "answers": not dataset.shape.is_prompt,
            "multilingual": dataset.is_multilingual,
            "about": dataset.about,
        }
        for dataset in named_datasets().values()
    ]


def _select(dataset: NamedDataset, sliced: str | None) -> tuple[HubSplit, ...]:
    """Its splits, or the one that ``sliced`` names (with a slice, perhaps)."""
    if sliced is None:
        return dataset.splits
    name = re.split(r"[\[+]", sliced)[0]
    splits = tuple(split for split in dataset.splits if split.split == name)
    if not splits and len({(split.name, split.config) for split in dataset.splits}) == 1:
        splits = dataset.splits[:1]  # A split that the table leaves out, such as a test split.
    if splits:
        return tuple(replace(split, split=sliced) for split in splits)
    names = ", ".join(dict.fromkeys(str(split.split) for split in dataset.splits))
    problem = f"dataset {dataset.name} has no split {name!r}; it has {names}"
    raise ConfigError(problem, kind=Kind.DATASET_SPLIT, hint="hiddenstore prepare --list-datasets")


def _single_file(root: str | Path | None, name: str) -> Path | None:
    """A file named after the dataset, such as one that somebody exported; it stands for all its splits."""
    if root is None:
        return None
    return next((path for suffix in _FILES if (path := Path(root) / f"{name}{suffix}").is_file()), None)


def _open_single_file(file: Path, dataset: NamedDataset, sliced: str | None) -> Source:
    """All of a file, or some of its rows where the dataset has one split."""
    source = open_file(file, dataset.name, dataset.shape.select)
    if sliced is None:
        return source
    name, cut = parse_cut(sliced) or (sliced, None)
    first, *more = dataset.splits
    if cut is not None and name == first.split and not more:
        return rows_within(source, cut)
    names = ", ".join(dict.fromkeys(str(split.split) for split in dataset.splits))
    way = f"{DATASET}{dataset.name}:{first.split}[FIRST:LAST] for rows counted from 0"
    if more:
        copy = shlex.join(["hf", "download", first.name, "--local-dir", str(file.parent / first.name)])
        way = f"a copy in the place of that file: {copy} --repo-type dataset"
    raise ConfigError(
        f"{file} stands for all of dataset {dataset.name} ({names}): {sliced} cannot be told apart in it",
        kind=Kind.DATASET_SPLIT,
        hint=f"{DATASET}{dataset.name} for every row, or {way}",
    )


def _open(split: HubSplit, shape: Shape, root: str | Path | None) -> Source:
    local = split if root is None else _local_copy(split, Path(root))
    source = open_json_split(local, shape.select, str(split))
    return source or open_table(local, shape.select, split.name)


def _local_copy(split: HubSplit, root: Path) -> HubSplit:
    paths = [root / split.name, root / split.name.replace("/", "--"), root / split.name.rpartition("/")[2]]
    folder = next((path for path in paths if path.is_dir()), None)
    if folder is None:
        names = ", ".join(str(path.relative_to(root)) for path in paths)
        raise NotFoundError(
            f"{split.name} is not below {root} (looked for {names})",
            kind=Kind.PATH_MISSING,
            hint=f"hf download {split.name} --repo-type dataset --local-dir {root / split.name}",
        )
    if split.config is not None and not (folder / "README.md").is_file() and (folder / split.config).is_dir():
        # Without its card nothing else says which files a config has.
        return HubSplit(str(folder / split.config), None, split.split)
    return replace(split, name=str(folder))


def _rows(source: Source, shape: Shape) -> Iterator[Row]:
    for row in source.rows():
        yield row if isinstance(row.payload, Problem) else replace(row, payload=_read(row, shape))


def _read(row: Row, shape: Shape) -> Any:
    value = decoded_row(row)
    if isinstance(value, Problem):
        return value
    try:
        shaped = shape.read(value)
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration, RecursionError) as error:
        detail = f"a row of this dataset holds {', '.join(shape.columns)}: {type(error).__name__} {error}"
        return Problem(row.location, "dataset-row", detail)
    if leaves_question_out(shaped["messages"]):
        detail = "the publisher left the question out; it has to be put back from the set that it came from"
        return Problem(row.location, "question-left-out", detail)
    return shaped
