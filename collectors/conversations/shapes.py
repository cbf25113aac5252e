"""How a row of a published dataset becomes a row with ``messages``: one small function for each shape of row."""

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectors.conversations.rows import MESSAGE_COLUMNS, TOOLS_COLUMN
from hiddenstore.errors import ConfigError, Kind

Table = dict[str, Any]

_LEFT_OUT = "-"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)


@dataclass(frozen=True)
class Shape:
    """``read`` takes one row and gives ``messages``, with ``tools`` where it has them.

    A dataset must have ``columns``; ``optional`` ones are used where it has them. ``is_prompt``: no answers in it.
    """

    columns: tuple[str, ...]
    read: Callable[[Table], Table]
    optional: tuple[str, ...] = ()
    is_prompt: bool = False

    def select(self, names: Sequence[str], table: str) -> list[str]:
        """The columns to load of those a table has.

        Raises:
            ConfigError: ``input-columns`` when the dataset is no longer as the table of datasets has it.
        """
        missing = [name for name in self.columns if name not in names]
        if missing:
            raise ConfigError(
                f"{table} has no column {' or '.join(missing)}; it has {', '.join(names) or 'none'}",
                kind=Kind.INPUT_COLUMNS,
                hint="give the file itself where its rows hold messages, or another copy with --preset-root DIR",
            )
        return [name for name in names if name in (*self.columns, *self.optional)]


def shape_of(text: str | dict[str, Any]) -> Shape:
    """What ``datasets.yaml`` writes as a shape: a name of ``SHAPES``, ``{pair: [Q, A]}`` or ``{prompt: Q}``."""
    if isinstance(text, str):
        return SHAPES[text]
    if "prompt" in text:
        column = text["prompt"]
        return Shape((column,), lambda row: {"messages": [_message("user", row[column])]}, is_prompt=True)
    question, answer = text["pair"]

    def read(row: Table) -> Table:
        return {"messages": [_message("user", row[question]), _message("assistant", row[answer])]}

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


def _with_system_column(row: Table) -> Table:
    return {"messages": [*_system(row.get("system")), *_messages(row)]}


def _with_tools_in_metadata(row: Table) -> Table:
    """Nemotron v1: ``metadata`` is text, a JSON object with the tools where a conversation has some."""
    metadata = row.get("metadata") or ""
    members = json.loads(metadata) if metadata.lstrip().startswith("{") else {}
    tools = members.get(TOOLS_COLUMN)
    return _with_tools(_messages(row), row.get(TOOLS_COLUMN) if tools is None else tools)


def _hermes(row: Table) -> Table:
    """Hermes writes tool calls into the text of turns; templates render them from members of their own.

    Its turns hold ``<tool_call>`` blocks, its tool turns ``<tool_response>`` blocks, and its system turn the tools,
    which is dropped: a template given those and the ``tools`` would write each of them twice.

    Raises:
        ValueError: a call is no object with a name, or a turn holds no text.
    """
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


def _with_generated_answer(row: Table) -> Table:
    """Nebius: the question is the first turn of the conversation, its own answer stands beside it."""
    return {"messages": [row["conversation"][0], row["generated_message"]]}


def _input_and_output(row: Table) -> Table:
    """Llama-Nemotron: the turns before the answer are a list in ``input``."""
    turns = row["input"] if isinstance(row["input"], list) else [_message("user", row["input"])]
    return {"messages": [*_system(row.get("system_prompt")), *turns, _message("assistant", row["output"])]}


def _instruction(row: Table) -> Table:
    """Alpaca: ``input`` is what the instruction is about, often empty."""
    topic = row.get("input") or ""
    question = f"{row['instruction']}\n\n{topic}" if topic.strip() else row["instruction"]
    return {"messages": [_message("user", question), _message("assistant", row["output"])]}


def _questions(row: Table) -> Table:
    """MT-Bench: the user's turns as a list of texts, which FastChat's own file calls ``turns``."""
    return {"messages": [_message("user", text) for text in row.get("prompt") or row["turns"]]}


def _unfinished_code(row: Table) -> Table:
    request = "Complete this Python function so that it does what its docstring says."
    return {"messages": [_message("user", f"{request}\n```python\n{row['prompt']}\n```")]}


def _news(row: Table) -> Table:
    question = f"Summarize this article in a few sentences.\n\n{row['article']}"
    return {"messages": [_message("user", question), _message("assistant", row["highlights"])]}


SHAPES = {
    "messages": Shape(("messages",), _turns, (TOOLS_COLUMN,)),
    "conversations": Shape(("conversations",), _turns, (TOOLS_COLUMN,)),
    "messages_and_metadata": Shape(("messages",), _with_tools_in_metadata, ("metadata",)),
    "hermes": Shape(("conversations",), _hermes, (TOOLS_COLUMN,)),
    "generated_answer": Shape(("conversation", "generated_message"), _with_generated_answer),
    "news": Shape(("article", "highlights"), _news),
    "conversations_and_system": Shape(("conversations",), _with_system_column, ("system",)),
    "input_output": Shape(("input", "output"), _input_and_output, ("system_prompt",)),
    "instruction": Shape(("instruction", "output"), _instruction, ("input",)),
    "questions": Shape(("prompt",), _questions, is_prompt=True),
    "unfinished_code": Shape(("prompt",), _unfinished_code, is_prompt=True),
}
