"""What a person typed as STORE (a path, or ``path@snapshot``), DATA or RUN: refused at once where it is something else.

A command is told so while click reads its words, before it imports torch.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hiddenstore.folders import kind_of, missing
from hiddenstore.layout import STORE_JSON

if TYPE_CHECKING:
    from hiddenstore.store import Store

WORDS_ONLY = "hiddenstore.words-only"
"""In a context's ``meta``: words are judged before what they name is there."""


class Place(click.Path):
    """A path that ``require`` judges; completed as one."""

    def __init__(self, require: Callable[[str], None]) -> None:
        super().__init__()
        self._require = require

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if ctx is None or not ctx.meta.get(WORDS_ONLY):
            self._require(value)
        return value


def _require_store(text: str) -> None:
    from hiddenstore.fs import open_filesystem

    fs = open_filesystem(split_snapshot(text)[0])
    if fs.size(STORE_JSON) is None:
        raise missing("store", fs.root)


def _require_data(path: str) -> None:
    if kind_of(path) != "data":
        raise missing("data", path)


def _require_run(path: str) -> None:
    # A checkpoint of a run has a kind of its own, which only what opens it can tell.
    if kind_of(path) not in ("run", None) or not Path(path).is_dir():
        raise missing("run", path)


STORE, DATA, RUN = Place(_require_store), Place(_require_data), Place(_require_run)


def split_snapshot(text: str) -> tuple[str, str | None]:
    """Path and snapshot of ``path@name``; no snapshot where a folder has that very name."""
    path, at, snapshot = text.rpartition("@")
    if at and path and snapshot and not Path(text).exists() and "/" not in snapshot:
        return path, snapshot
    return text, None


def open_store(text: str, *, strict: bool = True) -> "Store":
    """The store at ``text``, a path or ``path@snapshot``.

    Raises:
        NotFoundError, CorruptionError, FormatError, ConfigError: as ``Store.open``.
    """
    from hiddenstore.store import Store

    return Store.open(*split_snapshot(text), strict=strict)
