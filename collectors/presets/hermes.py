"""Tool calls that Hermes' sets write into the text of turns, as the members that chat templates render.

Its turns hold ``<tool_call>`` blocks, its tool turns ``<tool_response>`` blocks, and its system turn the tools: a
template given those and the ``tools`` would write each of them twice. Calls are JSON, or the Python that printed them.
"""

import ast
import json
import re
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.DOTALL)

Message = dict[str, Any]


def structured_turns(turns: list[Message]) -> list[Message]:
    """The turns with ``tool_calls`` and one message for each response; the system turn that lists the tools is dropped.

    Raises:
        ValueError: a call is no object with a name, or a turn holds no text.
    """
    messages: list[Message] = []
    for turn in turns:
        role, text = turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content") or ""
        if not isinstance(text, str):
            raise ValueError(f"a turn holds {type(text).__name__}, expected text")
        if role == "system" and "<tools>" in text:
            continue
        if role == "tool":
            messages += [{"role": "tool", "content": said} for said in _RESPONSE.findall(text) or [text]]
        elif calls := _CALL.findall(text):
            content = _CALL.sub("", text).strip()
            messages.append({"role": role, "content": content, "tool_calls": [_call(call) for call in calls]})
        else:
            messages.append({"role": role, "content": text})
    return messages


def _call(text: str) -> dict[str, Any]:
    try:
        call = json.loads(text)
    except ValueError:
        call = _literal(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ValueError(f"a tool call is no object with a name: {text[:80]}")
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments") or {}}}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"a tool call is neither JSON nor a Python literal: {text[:80]}") from error
