"""Benchmark questions by task: MT-Bench, GSM8K, MATH and HumanEval files as published, or JSONL of one's own."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, NotFoundError

FIELDS = ("messages", "conversations", "turns", "prompt", "question", "problem")
TURNS = ("turns", "prompt")
"""Those that may list the texts of a user's turns."""
NAMED = 3
"""Rows that a message about several names."""
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One conversation to be answered: ``history`` ends with a user's message; ``more`` are the user's next ones, each
    asked after the answer to the one before."""

    task: str
    history: tuple[Message, ...]
    more: tuple[str, ...] = ()


def read_questions(files: Sequence[str], unusable: list[str], count: int | None = None) -> list[Question]:
    """Questions in file order, at most ``count`` of each task; rows that ask nothing are put into ``unusable``.

    Raises:
        NotFoundError: ``prompts-missing``.
        ConfigError: ``prompts-empty``.
    """
    found: list[Question] = []
    kept: dict[str, int] = {}
    for name in files:
        for question in questions_of(Path(name), unusable):
            kept[question.task] = kept.get(question.task, 0) + 1
            if count is None or kept[question.task] <= count:
                found.append(question)
    if not found:
        raise no_prompt(", ".join(files), unusable)
    return found


def questions_of(path: Path, unusable: list[str]) -> Iterator[Question]:
    """Questions of a JSONL file, in order. Rows that ask nothing are put into ``unusable``, as ``file:line: why``.

    A line holds ``messages`` or ``conversations``, ``turns`` (MT-Bench), ``prompt`` (HumanEval, a text or a list of a
    user's turns), ``question`` (GSM8K) or ``problem`` (MATH). Its task is ``task``, else ``category``, else the file's
    name.

    Raises:
        NotFoundError: ``prompts-missing``.
    """
    if not path.is_file():
        raise NotFoundError(f"no prompts at {path}: expected a JSONL file", kind="prompts-missing")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            question = _question(line, path.stem)
            if isinstance(question, Question):
                yield question
            else:
                unusable.append(f"{path}:{number}: {question}")


def no_prompt(source: str, unusable: Sequence[str]) -> ConfigError:
    """What to raise for a source without a single prompt."""
    why = f"; of {len(unusable)} rows the first: {unusable[0]}" if unusable else ""
    return ConfigError(f"{source} holds no prompt{why}", kind="prompts-empty")


def left_out(unusable: Sequence[str]) -> str:
    """One line about rows that ask nothing."""
    first = "; ".join(unusable[:NAMED])
    more = f" and {len(unusable) - NAMED} more" if len(unusable) > NAMED else ""
    return f"{len(unusable)} {'row holds' if len(unusable) == 1 else 'rows hold'} no prompt, left out: {first}{more}"


def _question(line: bytes, stem: str) -> Question | str:
    """The question of a row, or why there is none."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return f"{error.msg} at column {error.colno}"
    except UnicodeDecodeError as error:
        return f"no UTF-8 at byte {error.start}"
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets in thousands.
        return f"no JSON that can be read: {error}"
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        return "expected an object"
    task = str(row.get("task") or row.get("category") or stem)
    name = next((name for name in FIELDS if row.get(name)), "")
    asked = row.get(name)
    if isinstance(asked, str):
        return Question(task, ({"role": "user", "content": asked},))
    if name in TURNS and isinstance(asked, list) and all(isinstance(turn, str) for turn in asked):
        return Question(task, ({"role": "user", "content": asked[0]},), tuple(asked[1:]))
    if isinstance(asked, list) and all(isinstance(turn, dict) for turn in asked):
        return _from_messages(task, asked)
    return f"expected one of {', '.join(FIELDS)}"


def _from_messages(task: str, turns: Sequence[Mapping[str, Any]]) -> Question | str:
    """The messages up to the last one of the user; answers after it are cut off."""
    messages = []
    for number, turn in enumerate(turns):
        role = str(turn.get("role", turn.get("from", "user")))
        text = _text(turn.get("content", turn.get("value")))
        if text is None:
            return f"message {number} holds no text"
        messages.append({"role": _ROLES.get(role, role), "content": text})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if all(message["role"] != "user" for message in messages):
        return "nothing is left to answer"
    return Question(task, tuple(messages))


def _text(content: Any) -> str | None:
    """The text of a message; of several parts, as chat APIs have them, those that are text."""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        return "\n".join(texts) if texts else None
    return content if isinstance(content, str) else None
