"""What a reader of any source yields: rows, problems, and the columns a conversation table must have."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenstore.errors import ConfigError, Kind

NO_ANSWER = "no-assistant"
"""Why a row cannot be learned from that holds a question alone."""
TABLE_BATCH_ROWS = 64
MESSAGE_COLUMNS = ("messages", "conversations", "conversation")
TOOLS_COLUMN = "tools"
IMAGE_KEYS = ("image", "images")
QUESTIONS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
BESIDE_QUESTION = ("input", "system")

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
    ``folder``: where paths in it begin, None where it comes from no file."""

    location: str
    payload: Any
    size: int
    folder: Path | None = None


@dataclass(frozen=True)
class Source:
    """One file or one split. ``size`` is its bytes, ``count`` its rows where that is known before reading."""

    label: str
    size: int
    rows: Callable[[], Iterator[Row]]
    count: int | None = None


def conversation_columns(names: Sequence[str], table: str) -> list[str]:
    """The columns of a table that hold a conversation and its tools, or a question and its answer, and the images
    beside either; ConfigError ``input-columns``."""
    column = next((name for name in MESSAGE_COLUMNS if name in names), None)
    read = pair_columns(names) if column is None else [column, TOOLS_COLUMN]
    if not read:
        raise ConfigError(
            f"{table} has no column {' or '.join((*MESSAGE_COLUMNS, *QUESTIONS))}; it has {', '.join(names) or 'none'}",
            kind=Kind.INPUT_COLUMNS,
        )
    return [name for name in (*read, *IMAGE_KEYS) if name in names]


def pair_columns(names: Iterable[str]) -> list[str]:
    """Those of a question (TRL's ``prompt``, Alpaca's ``instruction``), its answer and what stands beside it; none
    without a question."""
    named = set(names)
    question, answer = (next((name for name in which if name in named), None) for which in (QUESTIONS, ANSWERS))
    return [] if question is None else [name for name in (question, answer, *BESIDE_QUESTION) if name in named]
