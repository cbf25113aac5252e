"""What a person typed: STORE (a path, or ``path@snapshot``), DATA, RUN and names of tables.

Where it is something else, that is said while click reads the words of a command, before the command imports torch.
"""

import shlex
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.files.layout import DATA_JSON, STORE_JSON, kind_of, missing, refuse_snapshot, split_snapshot

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


class FiniteRange(click.FloatRange):
    """A number of a range, which ``nan`` lies in for click: nothing it is compared with is beyond it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class Name(click.ParamType):
    """A word that ``require`` judges; completed to one of ``names``, beside which there may be others."""

    name = "text"

    def __init__(self, require: Callable[[str], Any], names: Iterable[str]) -> None:
        self._require, self._names = require, names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        self._require(value)
        return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in self._names if name.startswith(incomplete)]


def _require_store(text: str) -> None:
    from hiddenstore.fs import open_filesystem

    fs = open_filesystem(split_snapshot(text)[0])
    if fs.size(STORE_JSON) is None:
        raise missing("store", fs.root)


def _require_no_snapshot(text: str) -> None:
    path, snapshot = split_snapshot(text)
    if snapshot is not None:
        problem = f"{text} names a snapshot, and this command is of all of a store"
        raise ConfigError(problem, kind=Kind.USAGE, hint=f"the same command with {shlex.quote(path)}")
    _require_store(text)


def _require_data(path: str) -> None:
    from hiddenstore.fs import is_address, open_filesystem

    if (open_filesystem(path).size(DATA_JSON) is None) if is_address(path) else kind_of(path) != "data":
        raise missing("data", path)


def _require_run(path: str) -> None:
    # A checkpoint of a run has a kind of its own, which only what opens it can tell.
    if Path(path).name == "LATEST" and Path(path).is_file():
        return
    if kind_of(path) not in ("run", None) or not Path(path).is_dir():
        raise missing("run", path)


STORE, DATA, RUN = Place(_require_store), Place(_require_data), Place(_require_run)
STORE_NOW = Place(_require_no_snapshot)
OUT = Place(refuse_snapshot)
"""Where a command writes."""

same_target_option = click.option(
    "--same-target", is_flag=True, help="Take a cast copy of the target, if the stored layer profile is also its own."
)


class _Layers(click.ParamType):
    """``15`` or ``2,15,27``: aux layers."""

    name = "layers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(layer) for layer in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of layers such as 2,15,27", param, ctx)


layers_option = click.option("--layers", type=_Layers(), metavar="2,15,…", help="Only these aux layers. Default: all.")

revision_option = click.option("--revision", help="Commit, tag or branch of a hub id.")

remote_code_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run the target's own Python: of a folder, or of a hub id with --revision COMMIT.",
)

adapter_option = click.option(
    "--adapter", type=click.Path(), metavar="DIR", help="A LoRA as peft writes it, merged into the target."
)


def target_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How ``--target`` is opened beyond its name: ``revision``, ``trust_remote_code``, ``adapter``."""
    return revision_option(remote_code_option(adapter_option(command)))


def opening_words(target: str, template: str | None, revision: str | None, trust_remote_code: bool) -> list[str]:
    """``--target T`` as it was opened, for the next command: it would read other tokens otherwise, or refuse."""
    options = (("--target", target), ("--template", template), ("--revision", revision))
    words = [word for name, value in options if value for word in (name, value)]
    return [*words, "--trust-remote-code"] if trust_remote_code else words


def open_store(text: str, *, strict: bool = True) -> "Store":
    """The store at ``text``, a path or ``path@snapshot``. Raises NotFoundError, CorruptionError, FormatError,
    ConfigError: as ``Store.open``."""
    from hiddenstore.store import Store

    return Store.open(*split_snapshot(text), strict=strict)


class _Paths(ShellComplete):
    """Completes a word of a command that nothing else is known of as a path."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem]:
        items = super().get_completions(args, incomplete)
        is_word_of_command = bool(args) and not incomplete.startswith("-")
        return items or ([CompletionItem(incomplete, type="file")] if is_word_of_command else [])


def complete_paths() -> None:
    """Make click complete paths too, in every shell it knows."""
    for shell in (BashComplete, ZshComplete, FishComplete):
        add_completion_class(type(shell.__name__, (_Paths, shell), {}))


def cache_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds ``cache`` (str or None) and ``cache_bytes`` to the arguments of a command."""
    folder = click.option(
        "--cache", metavar="DIR", type=click.Path(), help="Keep what is read from object storage there."
    )
    room = click.option(
        "--cache-bytes",
        type=click.IntRange(min=16 << 20),
        default=64 << 30,
        show_default=True,
        help="Room for --cache, over all processes that share it.",
    )
    return folder(room(command))
