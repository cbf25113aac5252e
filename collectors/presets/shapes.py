"""How a row of a published dataset becomes a row with ``messages``: one small function for each shape of row."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectors.presets.hermes import structured_turns
from collectors.rows import MESSAGE_COLUMNS, TOOLS_COLUMN
from hiddenstore.errors import ConfigError

Table = dict[str, Any]

_LEFT_OUT = "-"


@dataclass(frozen=True)
class Shape:
    """``read`` takes one row and gives ``messages``, with ``tools`` where it has them.

    A dataset must have ``columns``; ``optional`` ones are used where it has them. ``is_prompt``: no answers in it.
    """

    columns: tuple[str, ...]
    read: Callable[[Table], Table]
    optional: tuple[str, ...] = ()
    is_prompt: bool = False

    def wanted(self, names: Sequence[str], where: str) -> list[str]:
        """The columns to load of those a table has.

        Raises:
            ConfigError: ``preset-columns`` when the dataset is no longer as its preset knows it.
        """
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise ConfigError(
                f"{where} has no column {' or '.join(missing)}; it has {', '.join(names) or 'none'}",
                kind="preset-columns",
                hint="give the file itself where its rows hold messages, or another copy with --preset-root DIR",
            )
        return [name for name in names if name in (*self.columns, *self.optional)]


def _turns(row: Table) -> Table:
    """Messages as they are, without the empty system turns that some sets begin with."""
    name = next(name for name in MESSAGE_COLUMNS if name in row)
    listed = row[name]
    while isinstance(listed, list) and listed and _is_empty_system(listed[0]):
        listed = listed[1:]
    return _with_tools({"messages": listed}, row)


def _is_empty_system(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    role, text = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value") or ""
    return role == "system" and isinstance(text, str) and not text.strip()


def _with_system_column(row: Table) -> Table:
    messages = _turns(row)["messages"]
    return {"messages": [*_system(row.get("system")), *messages]}


def _with_tools_in_metadata(row: Table) -> Table:
    """Nemotron v1: ``metadata`` is text, a JSON object with the tools where a conversation has some."""
    metadata = row.get("metadata") or ""
    about = json.loads(metadata) if metadata.lstrip().startswith("{") else {}
    return _with_tools(_turns(row), {TOOLS_COLUMN: about.get(TOOLS_COLUMN)})


def _hermes(row: Table) -> Table:
    messages = _turns(row)["messages"]
    return _with_tools({"messages": structured_turns(messages) if row.get(TOOLS_COLUMN) else messages}, row)


def _with_generated_answer(row: Table) -> Table:
    """Nebius: the question is the first turn of the conversation, its own answer stands beside it."""
    return {"messages": [row["conversation"][0], row["generated_message"]]}


def _system(text: Any) -> list[Table]:
    return [_message("system", text)] if isinstance(text, str) and text.strip() else []


def _input_and_output(row: Table) -> Table:
    """Llama-Nemotron: the turns before the answer are a list in ``input``."""
    turns = row["input"] if isinstance(row["input"], list) else [_message("user", row["input"])]
    return {"messages": [*_system(row.get("system_prompt")), *turns, _message("assistant", row["output"])]}


def _instruction(row: Table) -> Table:
    """Alpaca: ``input`` is what the instruction is about, often empty."""
    about = row.get("input") or ""
    question = f"{row['instruction']}\n\n{about}" if about.strip() else row["instruction"]
    return {"messages": [_message("user", question), _message("assistant", row["output"])]}


def _questions(row: Table) -> Table:
    """MT-Bench: the user's turns as a list of texts, which FastChat's own file calls ``turns``."""
    return {"messages": [_message("user", text) for text in row.get("prompt") or row["turns"]]}


def _unfinished_code(row: Table) -> Table:
    asked = "Complete this Python function so that it does what its docstring says."
    return {"messages": [_message("user", f"{asked}\n```python\n{row['prompt']}\n```")]}


def _news(row: Table) -> Table:
    question = f"Summarize this article in a few sentences.\n\n{row['article']}"
    return {"messages": [_message("user", question), _message("assistant", row["highlights"])]}


def _message(role: str, content: Any) -> Table:
    return {"role": role, "content": content}


def _with_tools(found: Table, row: Table) -> Table:
    return found | ({TOOLS_COLUMN: row[TOOLS_COLUMN]} if row.get(TOOLS_COLUMN) is not None else {})


def leaves_question_out(messages: Any) -> bool:
    """Whether a user's turn is the dash that stands for a question its publisher may not give away."""
    turns = messages if isinstance(messages, list) else []
    return any(
        turn.get("role") == "user" and isinstance(turn.get("content"), str) and turn["content"].strip() == _LEFT_OUT
        for turn in turns
        if isinstance(turn, dict)
    )


def pair(question: str, answer: str) -> Shape:
    """One question and one answer, each in a column of its own."""

    def read(row: Table) -> Table:
        return {"messages": [_message("user", row[question]), _message("assistant", row[answer])]}

    return Shape((question, answer), read)


def prompt(question: str) -> Shape:
    """One question without an answer."""
    return Shape((question,), lambda row: {"messages": [_message("user", row[question])]}, is_prompt=True)


MESSAGES = Shape(("messages",), _turns, (TOOLS_COLUMN,))
CONVERSATIONS = Shape(("conversations",), _turns, (TOOLS_COLUMN,))
MESSAGES_AND_METADATA = Shape(("messages",), _with_tools_in_metadata, ("metadata",))
HERMES = Shape(("conversations",), _hermes, (TOOLS_COLUMN,))
GENERATED_ANSWER = Shape(("conversation", "generated_message"), _with_generated_answer)
NEWS = Shape(("article", "highlights"), _news)
CONVERSATIONS_AND_SYSTEM = Shape(("conversations",), _with_system_column, ("system",))
INPUT_OUTPUT = Shape(("input", "output"), _input_and_output, ("system_prompt",))
INSTRUCTION = Shape(("instruction", "output"), _instruction, ("input",))
QUESTIONS = Shape(("prompt",), _questions, is_prompt=True)
UNFINISHED_CODE = Shape(("prompt",), _unfinished_code, is_prompt=True)
