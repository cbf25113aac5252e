"""Benchmark questions by task: MT-Bench, GSM8K and HumanEval files as published, or JSONL of one's own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, NotFoundError

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}

Message = dict[str, str]


@dataclass(frozen=True)
class Question:
    """One conversation to be answered: ``history`` ends with a user's message; ``more`` are the user's next ones, each
    asked after the answer to the one before."""

    task: str
    history: tuple[Message, ...]
    more: tuple[str, ...] = ()


def read_questions(files: Sequence[str], count: int | None = None) -> list[Question]:
    """Questions in file order, at most ``count`` of each task.

    A line holds ``messages`` or ``conversations``, ``turns`` (MT-Bench), ``prompt`` (HumanEval, a text or a list of a
    user's turns), ``question`` (GSM8K) or ``problem`` (MATH). Its task is ``task``, else ``category``, else the file's
    name.

    Raises:
        NotFoundError: ``prompts-missing``.
        ConfigError: a line that asks nothing, naming it; ``prompts-empty``.
    """
    found: list[Question] = []
    kept: dict[str, int] = {}
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise NotFoundError(f"no prompts at {name}: expected a JSONL file", kind="prompts-missing")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            question = _question(line, path.stem, f"{name}:{number}")
            kept[question.task] = kept.get(question.task, 0) + 1
            if count is None or kept[question.task] <= count:
                found.append(question)
    if not found:
        raise ConfigError(f"{', '.join(files)}: no prompt in there", kind="prompts-empty")
    return found


def _question(line: str, stem: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: {error.msg} at column {error.colno}", kind="prompts-invalid") from error
    row = {"messages": row} if isinstance(row, list) else row
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object", kind="prompts-invalid")
    task = str(row.get("task") or row.get("category") or stem)
    names = ("messages", "conversations", "turns", "prompt", "question", "problem")
    asked = next((row[name] for name in names if row.get(name)), None)
    if isinstance(asked, str):
        return Question(task, ({"role": "user", "content": asked},))
    if isinstance(asked, list) and asked and all(isinstance(turn, str) for turn in asked):
        return Question(task, ({"role": "user", "content": asked[0]},), tuple(asked[1:]))
    if isinstance(asked, list) and asked and all(isinstance(turn, dict) for turn in asked):
        return Question(task, _history(asked, where))
    raise ConfigError(f"{where}: expected one of {', '.join(names)}", kind="prompts-invalid")


def _history(turns: Sequence[Mapping[str, Any]], where: str) -> tuple[Message, ...]:
    """The messages up to the last one of the user; answers after it are cut off."""
    messages = []
    for turn in turns:
        role = str(turn.get("role", turn.get("from", "user")))
        messages.append({"role": _ROLES.get(role, role), "content": str(turn.get("content", turn.get("value", "")))})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"{where}: nothing is left to answer", kind="prompts-invalid")
    return tuple(messages)
