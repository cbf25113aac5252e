"""One message as a chat template and a server take it, and what sources call its members.

Accepted as another spelling of the same thing: ``from``/``value`` for ``role``/``content``, the role names of
``ROLE_OF``, a list of text parts for one text, calls of tools as JSON text.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

Message = dict[str, Any]

_ROLE_NAMES = {
    "system": "system developer",
    "user": "user human prompter",
    "assistant": "assistant gpt chatgpt bing bard bot model function_call",
    "tool": "tool function function_response observation ipython",
}
ROLE_OF = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}
"""What sources call the four roles; anything else is refused."""

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_MEMBERS = ("bytes", "image_url", "image", "path", "url")
"""Where an image part says which image it is, as OpenAI and Hugging Face have them; bytes before their former path."""
REASONING = ("reasoning_content", "reasoning", "thinking")
MEMBERS_OF_TEXT = ("name", "tool_call_id", *REASONING)
FINISH_REASON, CUT = "finish_reason", "length"
"""What a message says of an answer that its token limit cut, in the words of OpenAI's API."""
_SHOWN = 80
WEIGHT = "weight"
"""Of OpenAI's fine-tuning: an answer of weight 0 is not learned from."""


class UnusableError(Exception):
    """Its arguments are the reason and the detail of a ``Problem``."""


def for_server(message: Message) -> Message:
    """A message as OpenAI's API takes it, arguments as JSON text. Earlier reasoning stays here: some servers refuse it,
    and templates leave it out but between calls of tools."""
    sent: Message = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_call_for_server(call, number) for number, call in enumerate(calls)]
    return sent


def _call_for_server(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = dict(call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call})
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": function}


def with_known_reasoning(messages: Sequence[Message], template: str) -> list[Message]:
    """Messages whose reasoning has a name that the template reads: servers write ``reasoning_content``, templates of
    gpt-oss read ``thinking``, of Solar ``reasoning``. Where one that is given is read, or none, they stay as they
    are. transformers 4.57 renames nothing, later ones not to ``reasoning``."""
    read = _names_read(template)
    renamed = []
    for message in messages:
        names = [name for name in REASONING if message.get(name)]
        if read and names and not any(name in read for name in names):
            rest = {name: value for name, value in message.items() if name not in REASONING}
            message = {**rest, read[0]: message[names[0]]}
        renamed.append(message)
    return renamed


@lru_cache(maxsize=8)
def _names_read(template: str) -> tuple[str, ...]:
    """Members of reasoning that a template names as one reads a member."""
    return tuple(name for name in REASONING if re.search(rf"""[.'"]{name}\b""", template))


def has_open_seam(messages: Sequence[Message]) -> bool:
    """Whether white space stands between the thoughts and the words of an answer, on either side of the seam."""
    return any(
        message.get(name) and (message[name][-1].isspace() or str(message.get("content") or "")[:1].isspace())
        for message in messages
        for name in REASONING
    )


def without_seam(messages: Sequence[Message], before: str, after: str) -> list[Message]:
    """Messages whose thoughts do not end with ``before``, nor their words begin with ``after``: the white space that
    the template itself writes on the two sides of ``</think>``. Parsers of vLLM leave it in (those of MiniMax-M2,
    Step-3.5 and Nemotron 3 at the words), so that it would stand there twice."""
    closed = []
    for message in messages:
        thoughts = {
            name: message[name].removesuffix(before) or message[name] for name in REASONING if message.get(name)
        }
        if thoughts and isinstance(content := message.get("content"), str):
            message = {**message, **thoughts, "content": content.removeprefix(after)}
        closed.append(message)
    return closed


def json_value(text: str, reason: str, title: str = "the row") -> Any:
    """What a text of JSON holds; UnusableError with ``reason`` where it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UnusableError(reason, f"{title} is no JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableError(reason, f"{title} is no JSON: {error}") from error


def message_of(entry: Any, title: str, images: list[str | bytes] | None) -> Message:
    """The message that an entry of a row states; its images are put behind ``images``, refused where that is None."""
    if not isinstance(entry, dict):
        raise UnusableError("message-not-an-object", f"{title} is {kind_of(entry)}")
    name = _role_name(entry)
    role = ROLE_OF.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise UnusableError("unknown-role", f"{title} has role {shortened(repr(name))}")
    message: Message = {"role": role, "content": _content(said(entry), title, images if role != "assistant" else None)}
    if calls := _tool_calls(entry.get("tool_calls"), title) or _function_call(entry.get("function_call"), title):
        message["tool_calls"] = calls
    message.update({key: _unicode(entry[key], title) for key in MEMBERS_OF_TEXT if isinstance(entry.get(key), str)})
    # An empty system message or tool answer says something; an empty turn is a hole in the data.
    if role in ("user", "assistant") and not calls and isinstance(text := message["content"], str) and not text.strip():
        raise UnusableError("empty-content", f"{title} ({role}) is empty")
    return message


def role_of(entry: Any) -> str | None:
    """Of a turn that nothing is known about yet; None where it has none."""
    return ROLE_OF.get(str(_role_name(entry)).strip().lower()) if isinstance(entry, dict) else None


def _role_name(entry: dict[str, Any]) -> Any:
    return entry.get("role") if entry.get("role") is not None else entry.get("from")


def said(entry: dict[str, Any]) -> Any:
    """What a turn says, in whichever member it stands."""
    return entry.get("content") if entry.get("content") is not None else entry.get("value")


def is_taught(entry: dict[str, Any], title: str) -> bool:
    """Whether an answer is learned from, as OpenAI's fine-tuning says it."""
    weight = entry.get(WEIGHT)
    if weight is None or (isinstance(weight, int | float) and weight in (0, 1)):
        return weight is None or bool(weight)
    raise UnusableError("weight-invalid", f"{title} has weight {shortened(repr(weight))}, expected 0 or 1")


def _content(content: Any, title: str, images: list[str | bytes] | None) -> str | list[dict[str, str]]:
    """The text of a message, or its parts where one is an image, which is named behind ``images``."""
    if images is None or not isinstance(content, list) or not any(map(_is_image, content)):
        return text_of(content, title)
    parts = []
    for part in content:
        if _is_image(part):
            image = _image(part)
            if image is None:
                raise UnusableError("image-missing", f"{title} holds an image part that names no image")
            images.append(image)
            parts.append({"type": "image"})
        else:
            parts.append({"type": "text", "text": _text_part(part, title)})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in IMAGE_PARTS


def _image(part: dict[str, Any]) -> str | bytes | None:
    """What an image part names; a table gives each part every member, and of an image its path and maybe its bytes."""
    for name in IMAGE_MEMBERS:
        value = part.get(name)
        if isinstance(value, dict):
            value = _image(value)
        if value and (isinstance(value, bytes) or (isinstance(value, str) and name != "bytes")):
            return value
    return None


def text_of(content: Any, title: str) -> str:
    """The text of a content, a list of text parts joined."""
    if content is None or isinstance(content, str):
        return _unicode(content or "", title)
    if isinstance(content, list):
        return "".join(_text_part(part, title) for part in content)
    raise UnusableError("content-not-text", f"the content of {title} is {kind_of(content)}")


def _text_part(part: Any, title: str) -> str:
    if isinstance(part, str):
        return _unicode(part, title)
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if kind in TEXT_PARTS and isinstance(part.get("text"), str):
        return _unicode(part["text"], title)
    content = f"a part of type {shortened(repr(kind))}" if kind is not None else kind_of(part)
    raise UnusableError("content-not-text", f"{title} holds {content}; only text can be used")


def _tool_calls(calls: Any, title: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object, which is what chat templates expect of OpenAI's JSON text."""
    if isinstance(calls, str):
        calls = json_value(calls, "tool-calls-invalid", f"the tool_calls of {title}") if calls.strip() else None
    if not calls:
        return []
    if not is_list_of_objects(calls):
        raise UnusableError("tool-calls-invalid", f"the tool_calls of {title} are not a list of objects")
    if not is_list_of_objects([call.get("function") or {} for call in calls]):
        raise UnusableError("tool-calls-invalid", f"a function that {title} calls is not an object")
    return writable([_tool_call(call) for call in calls], "tool-calls-invalid", f"the tool_calls of {title}")


def _function_call(call: Any, title: str) -> list[dict[str, Any]]:
    """The one call of a message in the form that OpenAI had before ``tool_calls``."""
    if isinstance(call, str):
        call = json_value(call, "tool-calls-invalid", f"the function_call of {title}") if call.strip() else None
    call = _without_null(call) if isinstance(call, dict) else call
    return _tool_calls([{"type": "function", "function": call}], title) if call else []


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call without the members that clients of OpenAI write as null; those of its arguments are the target's."""
    members = _without_null(call)
    if "function" not in members:
        return members
    if not isinstance(members["function"], dict):
        kind = kind_of(members["function"])
        raise UnusableError("tool-calls-invalid", f"the function of a call is {kind}, expected an object")
    function = _without_null(members["function"])
    if isinstance(function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(function["arguments"])
    return {**members, "function": function}


def _without_null(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def writable(objects: list[dict[str, Any]], reason: str, title: str) -> list[dict[str, Any]]:
    """Objects that JSON can hold, as templates and servers get them: a table may hold dates and bytes."""
    try:
        _unicode(json.dumps(objects, ensure_ascii=False), title)
    except (TypeError, ValueError) as error:
        raise UnusableError(reason, f"{title}: {error}") from error
    return objects


def is_list_of_objects(value: Any) -> bool:
    """Whether every item is an object of JSON."""
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _unicode(text: str, title: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UnusableError("not-unicode", f"{title}: lone surrogate at character {error.start + 1}") from error
    return text


def kind_of(value: Any) -> str:
    """What people call a value of JSON."""
    names = {bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def shortened(text: str) -> str:
    """What a message shows of a text that may be long, or no Unicode."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
