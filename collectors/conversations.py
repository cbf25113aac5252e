"""Conversations as a chat template takes them, from OpenAI ``messages`` and ShareGPT ``conversations`` rows.

A row becomes a ``Conversation`` or a ``Problem`` that says why not; nothing is repaired silently. What is accepted as
another spelling of the same thing: ``from``/``value`` for ``role``/``content``, the role names of ``ROLE_OF``, a list
of text parts for one text, JSON text for a list of messages.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from collectors.rows import MESSAGE_COLUMNS, TOOLS_COLUMN, Problem, Row
from collectors.sources import open_sources

Message = dict[str, Any]

ROLE_OF = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
"""What sources call the four roles; anything else is refused."""

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING = ("reasoning_content", "reasoning", "thinking")
KEPT_TEXTS = ("name", "tool_call_id", *REASONING)
_SHOWN = 80


@dataclass(frozen=True)
class Conversation:
    """Messages with ``role`` (one of ``schemas.ROLES``) and ``content`` text, and the tools the target was offered.

    A message may also carry ``tool_calls`` and the members of ``KEPT_TEXTS``, as chat templates read them.
    """

    place: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    @property
    def has_answer(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)


class _UnusableError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_conversations(inputs: Sequence[str]) -> Iterator[Conversation | Problem]:
    """Every row of paths, folders and ``datasets`` ids, in order, in bounded memory."""
    for source in open_sources(inputs):
        for row in source.rows():
            yield parse_row(row)


def parse_row(row: Row) -> Conversation | Problem:
    """What one row says, or why it cannot be used."""
    if isinstance(row.payload, Problem):
        return row.payload
    try:
        value = _decoded(row.payload)
        messages = _messages(value)
        tools = _tools(value.get(TOOLS_COLUMN))
    except _UnusableError as error:
        return Problem(row.place, error.reason, error.detail)
    return Conversation(row.place, messages, tools)


def decoded_row(row: Row) -> dict[str, Any] | Problem:
    """The object a row holds, before anything in it is looked at, or why it holds none."""
    if isinstance(row.payload, Problem):
        return row.payload
    try:
        return _decoded(row.payload)
    except _UnusableError as error:
        return Problem(row.place, error.reason, error.detail)


def _decoded(payload: Any) -> dict[str, Any]:
    if isinstance(payload, bytes):
        try:
            payload = payload.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _UnusableError("not-utf8", f"byte {error.start + 1}: {error.reason}") from error
        payload = _json(payload, "invalid-json")
    if not isinstance(payload, dict):
        raise _UnusableError("not-an-object", f"expected an object with messages, found {_kind(payload)}")
    return payload


def _json(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _UnusableError(reason, f"{error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _UnusableError(reason, str(error)) from error


def _messages(row: dict[str, Any]) -> list[Message]:
    name = next((name for name in MESSAGE_COLUMNS if row.get(name) is not None), None)
    if name is None:
        found = ", ".join(sorted(str(key) for key in row)[:8]) or "nothing"
        raise _UnusableError("no-messages", f"expected messages or conversations, found {_short(found)}")
    listed = row[name]
    if isinstance(listed, str):
        listed = _json(listed, "messages-not-a-list")
    if not isinstance(listed, list):
        raise _UnusableError("messages-not-a-list", f"{name} is {_kind(listed)}")
    if not listed:
        raise _UnusableError("no-messages", f"{name} is an empty list")
    return [_message(entry, number) for number, entry in enumerate(listed, start=1)]


def _message(entry: Any, number: int) -> Message:
    where = f"message {number}"
    if not isinstance(entry, dict):
        raise _UnusableError("message-not-an-object", f"{where} is {_kind(entry)}")
    said = entry.get("role") if entry.get("role") is not None else entry.get("from")
    role = ROLE_OF.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        raise _UnusableError("unknown-role", f"{where} has role {_short(repr(said))}")
    content = entry.get("content") if entry.get("content") is not None else entry.get("value")
    message: Message = {"role": role, "content": _text(content, where)}
    if calls := _tool_calls(entry.get("tool_calls"), where):
        message["tool_calls"] = calls
    message.update({key: _unicode(entry[key], where) for key in KEPT_TEXTS if isinstance(entry.get(key), str)})
    # An empty system message or tool answer says something; an empty turn is a hole in the data.
    if role in ("user", "assistant") and not message["content"].strip() and not calls:
        raise _UnusableError("empty-content", f"{where} ({role}) is empty")
    return message


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, where)
    if isinstance(content, list):
        return "".join(_part(part, where) for part in content)
    raise _UnusableError("content-not-text", f"the content of {where} is {_kind(content)}")


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return _unicode(part, where)
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return _unicode(part["text"], where)
    found = f"a part of type {_short(repr(kind))}" if kind is not None else _kind(part)
    raise _UnusableError("content-not-text", f"{where} holds {found}; only text can be used")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, which is what chat templates expect of OpenAI's JSON text."""
    if not calls:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise _UnusableError("tool-calls-invalid", f"the tool_calls of {where} are not a list of objects")
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return _without_none(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return _without_none(call)
    return _without_none({**call, "function": {**function, "arguments": arguments}})


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = _json(tools, "tools-invalid") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _UnusableError("tools-invalid", f"tools is {_kind(tools)}, expected a list of objects")
    return [_without_none(tool) for tool in tools]


def _without_none(value: Any) -> Any:
    """Parquet gives every member of a struct to every row; those that were absent come back as None."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _unicode(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _UnusableError("not-unicode", f"{where}: lone surrogate at character {error.start + 1}") from error
    return text


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
