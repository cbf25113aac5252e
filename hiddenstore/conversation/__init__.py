"""What a reader of any source yields: rows, problems, and the columns a conversation table must have; and conversations
as a chat template takes them, from OpenAI ``messages`` and ShareGPT ``conversations`` rows, and from questions with
or without an answer (``prompt`` and ``completion``, ``instruction`` and ``output`` of Alpaca).

A row becomes a ``Conversation`` or a ``Problem`` that says why not; nothing is repaired silently. Accepted as the same
thing is JSON text for a list of messages.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenstore.conversation.messages import (
    CUT,
    FINISH_REASON,
    REASONING,
    Message,
    UnusableError,
    is_list_of_objects,
    is_taught,
    json_value,
    kind_of,
    message_of,
    role_of,
    said,
    shortened,
    text_of,
    writable,
)
from hiddenstore.errors import ConfigError, Kind

NO_ANSWER = "no-assistant"
"""Why a row cannot be learned from that holds a question alone."""
TABLE_BATCH_ROWS = 64
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
TOOLS_COLUMN, FUNCTIONS_COLUMN = "tools", "functions"
SYSTEMS = ("system", "system_prompt")
HISTORY = "history"
"""Alpaca's turns before the question: pairs of a question and its answer."""
TEMPLATE_KWARGS, ENABLE_THINKING = "chat_template_kwargs", "enable_thinking"
BESIDE_TURNS = (TOOLS_COLUMN, FUNCTIONS_COLUMN, *SYSTEMS, HISTORY, TEMPLATE_KWARGS, ENABLE_THINKING)
_OF_MEMBERS = {
    *("system-invalid", "history-invalid", "tools-invalid", "template-kwargs-invalid"),
    *("columns-differ", "context-outside"),
}
"""Reasons of members beside the turns, which may mean something else in their source."""
_OF_TEMPLATES = {
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask", "strftime_now"),
}
"""What a template is given that a row cannot choose."""
IMAGE_KEYS = ("image", "images")
QUESTIONS = ("prompt", "instruction", "question")
COMPLETIONS = ("completion", "response", "output")
SOLUTION, RESULT = "solution", "answer"
ANSWERS = (*COMPLETIONS, SOLUTION, RESULT)
"""``answer`` is the result alone beside a whole answer, or beside a longer solution, as LIMO has it."""
BESIDE_QUESTION = ("input", "context")
"""What a question is about, as a text; Alpaca has the one, Dolly the other."""
CHOICES = ("choices", "options")
ABOUT = ("context", "passage", "passages", "document", "documents", *CHOICES)
"""What no answer can be taught without, where no turn has its words."""
_HEADER = re.compile(r"(\n\nAssistant:|### ?Response:|<\|im_start\|>assistant|\[/INST\])\s*\Z|<extra_id_1>")
"""Questions that a template has rendered already: Anthropic's, Alpaca's, ChatML, Llama 2's; SteerLM's of several turns.
"""
_SWITCHES = ("", "on", "off", "true", "false", "none", "minimal", "low", "medium", "high")
"""What a column of thoughts holds where it says how much was thought, as Nemotron's ``reasoning`` does."""

ColumnFilter = Callable[[Sequence[str], str], list[str]]
"""Names of a table's columns and where the table is → the columns to read."""


@dataclass(frozen=True)
class Problem:
    """A row that cannot be used. ``reason`` is a stable kebab-case kind, ``detail`` a sentence for people."""

    location: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Row:
    """One row at ``file:line``, ``size`` bytes; ``payload`` is bytes, a decoded value, or the problem of reading it.
    A null within a decoded value was written there: what a table gives to every row, its reader takes out again.
    ``folder``: where paths in it begin, None where it comes from no file. The rows of a parquet file have equal shares
    of its ``size``; ``text_size`` is what the values of each have as text."""

    location: str
    payload: Any
    size: int
    folder: Path | None = None
    text_size: int | None = None


@dataclass(frozen=True)
class Source:
    """One file or one split. ``size`` is its bytes, a parquet file's unpacked; ``count`` its rows where that is known
    before reading."""

    label: str
    size: int
    rows: Callable[[], Iterator[Row]]
    count: int | None = None


def conversation_columns(names: Sequence[str], table: str) -> list[str]:
    """The columns of a table that may hold a conversation, or a question and its answer, and what stands beside either:
    tools, images and the like; ConfigError ``input-columns``."""
    turns = (*MESSAGE_COLUMNS, *QUESTIONS)
    if not any(name in names for name in turns):
        raise ConfigError(
            f"{table} has no column {' or '.join(turns)}; it has {', '.join(names) or 'none'}",
            kind=Kind.INPUT_COLUMNS,
        )
    # Tables merged from several sources hold the turns of each row in columns of its own.
    columns = (*turns, *ANSWERS, *REASONING, *BESIDE_QUESTION, *ABOUT, *BESIDE_TURNS, *IMAGE_KEYS)
    return [name for name in dict.fromkeys(columns) if name in names]


@dataclass(frozen=True)
class Conversation:
    """Messages with ``role`` (of ``ROLES``), ``content`` text, maybe ``tool_calls`` and ``MEMBERS_OF_TEXT``.

    ``cut``: indices of answers that their token limit ended, so that the target never wrote their end; ``untaught``:
    those of weight 0. ``images``: what the image parts name, in order, a path, URI or the bytes of a file; the content
    of messages with some is a list of parts. ``template_kwargs``: what its chat template is given besides.
    """

    location: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    cut: frozenset[int] = frozenset()
    images: tuple[str | bytes, ...] = ()
    untaught: frozenset[int] = frozenset()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_answer(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)


def parse_row(row: Row, takes_images: bool = False) -> Conversation | Problem:
    """What one row says, or why it cannot be used; ``takes_images``: the target reads images."""
    value = decoded_row(row)
    if isinstance(value, Problem):
        return value
    try:
        entries = _entries(value)
        images: list[str | bytes] | None = [] if takes_images else None
        messages = [message_of(entry, f"message {number}", images) for number, entry in enumerate(entries, start=1)]
        _require_named(value, images)
        cut = frozenset(index for index, entry in enumerate(entries) if entry.get(FINISH_REASON) == CUT)
        untaught = frozenset(
            index
            for index, (entry, message) in enumerate(zip(entries, messages, strict=True))
            if message["role"] == "assistant" and not is_taught(entry, f"message {index + 1}")
        )
        pictures, kwargs = tuple(images or ()), _template_kwargs(value)
        return Conversation(row.location, messages, _row_tools(value), cut, pictures, untaught, kwargs)
    except UnusableError as error:
        return Problem(row.location, *error.args)
    except RecursionError as error:
        return Problem(row.location, "invalid-json", str(error))


def way_to_keep(reasons: Iterable[str]) -> str | None:
    """What keeps the rows that are refused for these reasons where a member beside the turns means something else; None
    where no such member is the reason."""
    named = sorted(_OF_MEMBERS & set(reasons))
    what = f"a member beside the turns means something else ({', '.join(named)})"
    return f"where {what}: jq -c 'del(.MEMBER)' INPUT > rows.jsonl" if named else None


def decoded_row(row: Row) -> dict[str, Any] | Problem:
    """The object a row holds, before anything in it is looked at, or why it holds none."""
    value = row.payload
    if isinstance(value, Problem):
        return value
    try:
        if isinstance(value, bytes):
            value = json_value(value.decode("utf-8"), "invalid-json")
        if not isinstance(value, dict):
            raise UnusableError("not-an-object", f"expected an object with messages, found {kind_of(value)}")
    except UnicodeDecodeError as error:
        return Problem(row.location, "not-utf8", f"byte {error.start + 1}: {error.reason}")
    except UnusableError as error:
        return Problem(row.location, *error.args)
    return value


def _entries(row: dict[str, Any]) -> list[Any]:
    name = next((name for name in MESSAGE_COLUMNS if row.get(name) is not None), None)
    turns = _with_system(row, _entries_of_pair(row) if name is None else _entries_of_messages(row, name))
    about = {name: row[name] for name in ABOUT if row.get(name) and (name not in CHOICES or _are_choices(row[name]))}
    asking = [said(turn) for turn in turns if about and isinstance(turn, dict) and role_of(turn) != "assistant"]
    words = "\n".join(_texts(asking))
    if outside := [name for name, value in about.items() if any(text not in words for text in _texts(value))]:
        raise UnusableError("context-outside", f"{outside[0]} holds words of no turn: write them into the question")
    return turns


def _are_choices(value: Any) -> bool:
    """Whether a column holds what a question lets choose from: logs of servers have settings and answers there."""
    texts = value.get("text", list(value.values())) if isinstance(value, dict) else value
    return all(isinstance(text, str) for text in (texts if isinstance(texts, list) else [texts]))


def _entries_of_messages(row: dict[str, Any], name: str) -> list[Any]:
    """The turns of a list of messages; where they end without an answer, one that stands beside them ends them, as
    Dolphin-R1 has it."""
    messages = row[name]
    if isinstance(messages, str):
        messages = json_value(messages, "messages-not-a-list", name)
    if not isinstance(messages, list):
        raise UnusableError("messages-not-a-list", f"{name} is {kind_of(messages)}")
    if not messages:
        raise UnusableError("no-messages", f"{name} is an empty list")
    if isinstance(row.get(HISTORY), list) and row[HISTORY]:
        raise UnusableError("history-invalid", f"{HISTORY} beside {name}: which turns come first is not said")
    if role_of(messages[-1]) == "assistant":
        return messages
    # A result without its thoughts, as rows of reinforcement learning have it, is not what the target would say.
    column = _column(row, COMPLETIONS) or (RESULT if _thoughts(row) else "")
    stated = row.get(column)
    is_answer = all(map(role_of, stated)) if isinstance(stated, list) else isinstance(stated, str) and stated.strip()
    return [*messages, *_answer(row, column)] if is_answer else messages


def _entries_of_pair(row: dict[str, Any]) -> list[Any]:
    """The turns of a question (TRL's ``prompt``, Alpaca's ``instruction``) and its answer, each a text or a list of
    messages, as TRL has them."""
    name = _column(row, QUESTIONS)
    if name is None:
        names = ", ".join(sorted(str(key) for key in row)[:8]) or "nothing"
        raise UnusableError("no-messages", f"expected messages, conversations or a prompt, found {shortened(names)}")
    question, answer = row[name], _answer(row, _column(row, COMPLETIONS) or _longer_result(row))
    if answer and isinstance(question, str) and (header := _HEADER.search(question)):
        detail = f"{name} holds {header[0].strip()}, as a template writes it: give the turns that it was made of"
        raise UnusableError("question-rendered", detail)
    for beside in BESIDE_QUESTION:
        topic = row.get(beside)
        # What Alpaca's instruction is done to may be one of its words.
        words = [] if (name, beside) == ("instruction", "input") else _texts([question, *map(row.get, SYSTEMS)])
        if topic and not _is_blank(topic) and not (isinstance(topic, str) and topic.strip() in "\n".join(words)):
            if not (isinstance(topic, str) and isinstance(question, str)):
                kinds = f"{name} is {kind_of(question)} and {beside} {kind_of(topic)}"
                raise UnusableError("content-not-text", f"{kinds}, expected text in both")
            question = f"{question}\n\n{topic}"
    prompt = question if isinstance(question, list) else [{"role": "user", "content": question}]
    turns = [*_history(row.get(HISTORY)), *prompt, *answer]
    if not turns:
        raise UnusableError("no-messages", f"{name} is an empty list")
    return turns


def _answer(row: dict[str, Any], name: str) -> list[Any]:
    """The turns of the answer in a column, with its thoughts where the text does not hold them; none without one."""
    answer = row.get(name)
    if answer is None or isinstance(answer, list):
        return answer or []
    more = {key: text for key, text in _thoughts(row).items() if text.strip() not in str(answer)}
    return [{"role": "assistant", "content": answer, **more}]


def _longer_result(row: dict[str, Any]) -> str:
    """The column of a result, or of its solution where that says more, as LIMO's does."""
    result, solution = row.get(RESULT), row.get(SOLUTION)
    is_longer = result is not None and isinstance(solution, str) and len(solution.strip()) > len(str(result).strip())
    return SOLUTION if is_longer else RESULT


def _thoughts(row: dict[str, Any]) -> dict[str, str]:
    texts = {key: row[key] for key in REASONING if isinstance(row.get(key), str)}
    return {key: text for key, text in texts.items() if text.strip().lower() not in _SWITCHES}


def _column(row: dict[str, Any], names: Sequence[str]) -> str | None:
    """The one of these columns that a row fills, None without any; a list of messages before its text."""
    columns = [name for name in names if row.get(name) is not None]
    columns = [name for name in columns if not _is_blank(row[name])] or columns[:1]
    if lists := [name for name in columns if isinstance(row[name], list)]:
        return lists[0]
    if len({str(row[name]).strip() for name in columns}) > 1:
        raise UnusableError("columns-differ", f"{' and '.join(columns)} differ: which one counts is not said")
    return columns[0] if columns else None


def _is_blank(value: Any) -> bool:
    return isinstance(value, str) and not value.strip()


def _texts(value: Any) -> Iterator[str]:
    """Every text within a value of JSON, without white space around it."""
    if isinstance(value, str):
        yield value.strip()
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _with_system(row: dict[str, Any], entries: list[Any]) -> list[Any]:
    """The turns behind the system message that a row states beside them; a row may state it twice, in equal words."""
    for name in SYSTEMS:
        if row.get(name) is not None and not isinstance(row[name], str):
            raise UnusableError("system-invalid", f"{name} is {kind_of(row[name])}, expected text")
    stated = {name: row[name] for name in SYSTEMS if (row.get(name) or "").strip()}
    if not stated:
        return entries
    is_opened = role_of(entries[0]) == "system"
    opening = text_of(said(entries[0]), "message 1") if is_opened else ""
    if opening.strip():
        stated["message 1"] = opening
    if len({text.strip() for text in stated.values()}) > 1:
        raise UnusableError("system-invalid", f"{' and '.join(stated)} are system messages that differ")
    text = next(iter(stated.values()))
    return entries if opening.strip() else [{"role": "system", "content": text}, *entries[is_opened:]]


def _history(history: Any) -> list[Any]:
    """The turns before an Alpaca question."""
    if isinstance(history, str):
        history = json_value(history, "history-invalid", HISTORY) if history.strip() else None
    if not isinstance(history, list | None):
        raise UnusableError(
            "history-invalid", f"{HISTORY} is {kind_of(history)}, expected pairs of question and answer"
        )
    turns: list[Any] = []
    for number, pair in enumerate(history or [], start=1):
        if not isinstance(pair, list) or len(pair) != 2:
            raise UnusableError("history-invalid", f"entry {number} of {HISTORY} is no pair of question and answer")
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


def _require_named(row: dict[str, Any], images: list[str | bytes] | None) -> None:
    """Refuse a row with more images beside its messages than its parts name: it would be taught as text alone."""
    columns = [row.get(name) for name in IMAGE_KEYS]
    beside = [image for value in columns for image in (value if isinstance(value, list) else [value]) if image]
    if len(beside) > len(images or ()):
        reason = "content-not-text" if images is None else "image-missing"
        raise UnusableError(reason, "an image beside the messages, named by no part of them")


def _row_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools of a row, which OpenAI called functions before, without what stands around them now."""
    tools, functions = (_tools(row.get(name), name) for name in (TOOLS_COLUMN, FUNCTIONS_COLUMN))
    if functions is None:
        return tools
    functions = [one if "function" in one else {"type": "function", "function": one} for one in functions]
    if tools not in (None, functions):
        raise UnusableError("tools-invalid", f"{TOOLS_COLUMN} and {FUNCTIONS_COLUMN} are not the same")
    return functions


def _template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    """What a row gives its chat template by name, such as ``enable_thinking``."""
    kwargs = row.get(TEMPLATE_KWARGS)
    if isinstance(kwargs, str):
        kwargs = json_value(kwargs, "template-kwargs-invalid", TEMPLATE_KWARGS) if kwargs.strip() else None
    if not isinstance(kwargs, dict | None):
        raise UnusableError("template-kwargs-invalid", f"{TEMPLATE_KWARGS} is {kind_of(kwargs)}, expected an object")
    named = dict(kwargs or {})
    if (switch := row.get(ENABLE_THINKING)) is not None:
        if not isinstance(switch, bool) or named.get(ENABLE_THINKING, switch) != switch:
            detail = f"{ENABLE_THINKING} is {shortened(repr(switch))}, expected one boolean"
            raise UnusableError("template-kwargs-invalid", detail)
        named[ENABLE_THINKING] = switch
    for name in named:
        if name in _OF_TEMPLATES or not name.isidentifier():
            raise UnusableError("template-kwargs-invalid", f"{TEMPLATE_KWARGS} cannot give {shortened(name)}")
    (written,) = writable([named], "template-kwargs-invalid", TEMPLATE_KWARGS)
    return written


def _tools(tools: Any, name: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        tools = json_value(tools, "tools-invalid", name) if tools.strip() else None
    if not tools:
        return None
    if not is_list_of_objects(tools):
        raise UnusableError("tools-invalid", f"{name} is {kind_of(tools)}, expected a list of objects")
    return writable(tools, "tools-invalid", name)
