"""The only printer: one object, three modes (human, json, quiet). stdout is the answer, stderr is everything else.

A command is written like this::

    @click.command(epilog=examples("hiddenstore info STORE", "hiddenstore info STORE --json"))
    @click.argument("store")
    @common_options
    def info(store: str) -> None:
        \"\"\"What a store holds, on one screen.\"\"\"
        document = …
        output().data(document, human=lambda: output().pairs([…]))
        output().hint("hiddenstore", "ls", store)
"""

import json
import logging
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, environ, fspath
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hiddenstore.console.text import clean, folded
from hiddenstore.errors import HiddenstoreError

if TYPE_CHECKING:
    from rich.console import Console

    from hiddenstore.console.text import Column

F = TypeVar("F", bound=Callable[..., Any])

_META_KEY = "hiddenstore.output"
INNER = "HIDDENSTORE_INNER"
"""Set for a process that is one command of a larger one."""
_WIDTH_OF_A_FILE = 120
_WIDER_THAN_ANY_ROW = 10_000
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_default: "Output | None" = None
_NOISY = (
    *("datasets", "transformers", "urllib3", "httpx2", "httpcore2", "filelock", "fsspec", "numcodecs", "zarr"),
    "py.warnings",
)


def is_piped(console: "Console") -> bool:
    """Whether its lines stay whole, to be read by a program: FORCE_COLOR makes no terminal of a file."""
    return not console.file.isatty()


class Output:
    """What a command prints through: ``mode`` human, json, quiet or silent; ``verbose`` counts ``-v``."""

    def __init__(self) -> None:
        self.mode = "human"
        self.verbose = 0
        self.is_inner = INNER in environ
        self.document: Mapping[str, Any] = {}
        self._out: Console | None = None
        self._err: Console | None = None

    @property
    def is_human(self) -> bool:
        return self.mode == "human"

    @property
    def out(self) -> "Console":
        """The rich console on today's ``sys.stdout``: who calls the library may have put another in its place."""
        if self._out is None or self._out.file is not _real(sys.stdout):
            self._out = _make_console(_real(sys.stdout))
        return self._out

    @property
    def err(self) -> "Console":
        """The rich console on today's ``sys.stderr``."""
        if self._err is None or self._err.file is not _real(sys.stderr):
            self._err = _make_console(_real(sys.stderr))
        return self._err

    def data(self, document: Mapping[str, Any], human: Any = None, quiet: Any = None) -> None:
        """The answer: the document under ``--json``, else ``human`` (a callable that prints, or something printable).

        ``quiet`` is printed under ``-q`` when given (``""`` prints nothing); without it ``-q`` prints ``human`` too.
        A missing ``schema`` member becomes ``hiddenstore.<command>/1``. The document stays readable as ``document``.
        """
        self.document = document
        if self.mode == "silent":
            return
        if self.mode == "json":
            sys.stdout.write(json_text({"schema": _schema_of_command(), **document}) + "\n")
            return
        answer = quiet if self.mode == "quiet" and quiet is not None else human
        if callable(answer):
            answer = answer()
        if answer is not None and answer != "":
            self.print(answer)

    def print(self, renderable: Any = "") -> None:
        """Print to stdout; a ``str`` is cleaned of control characters and taken literally (no markup)."""
        text = isinstance(renderable, str)
        self._show(clean(renderable) if text else renderable, soft_wrap=text)

    def well(self, text: str) -> None:
        """``✓ text`` on stdout: one line in a file or pipe, so that it can be grepped."""
        from rich.text import Text

        self._show(Text.assemble(("✓ ", "green"), clean(text)), soft_wrap=is_piped(self.out))

    def table(
        self, columns: "Sequence[Column | str]", rows: Iterable[Sequence[Any]], parts: Sequence[Sequence[int]] = ()
    ) -> None:
        """Print a table to stdout; ``">name"`` aligns a column to the right. Files and pipes get every cell uncut.
        Where a terminal is too narrow for that and there are ``parts``, each is a table of the columns of these
        numbers."""
        from hiddenstore.console.text import build, fits

        width = self.out.width
        if not self.out.is_terminal and not environ.get("COLUMNS"):
            self.out.width = _WIDER_THAN_ANY_ROW
        rows = list(rows)
        if not parts or fits(columns, rows, self.out.width):
            parts = [range(len(columns))]
        for part in parts:
            cells = [[row[number] for number in part if number < len(row)] for row in rows]
            self._show(build([columns[number] for number in part], cells, self.out.width))
        self.out.width = width

    def pairs(self, rows: Iterable[tuple[Any, Any]]) -> None:
        """Print labels and values, one pair a line, to stdout."""
        from hiddenstore.console.text import pairs

        self._show(pairs(rows))

    def note(self, text: str) -> None:
        """A remark on stderr; only in human mode. A terminal breaks its lines between words."""
        if self.is_human:
            self._say(text, "dim", soft_wrap=is_piped(self.err))

    def detail(self, text: str) -> None:
        """A remark on stderr that only ``-v`` shows, in any mode."""
        if self.verbose:
            self._say(text, "dim")

    def warn(self, text: str) -> None:
        """A warning on stderr, in every mode: something was skipped, guessed or is about to surprise."""
        self._say(f"warning: {text}", "yellow", soft_wrap=is_piped(self.err))

    def hint(self, *command: str | PathLike[str], label: str = "next") -> None:
        """``next: …`` on stderr after a success; several words are quoted as a shell would need them. Inside a larger
        command, which says itself what comes next, nothing."""
        if not self.is_human or self.is_inner:
            return
        line = fspath(command[0]) if len(command) == 1 else shlex.join(fspath(word) for word in command)
        self._say(f"{label}: {line}", "cyan")

    def command(self, *words: str) -> None:
        """``$ words`` on stderr before they run; on a terminal folded as a shell reads it."""
        if self.is_human:
            width = self.err.width if self.err.is_terminal else _WIDER_THAN_ANY_ROW
            self._say(folded(words, width), "dim")

    def error(self, error: HiddenstoreError) -> None:
        """``error: what [kind]`` and ``fix: …`` on stderr; one line of JSON under ``--json``."""
        if self.mode == "json":
            document = {
                "schema": "hiddenstore.error/1",
                "kind": error.kind,
                "message": error.message,
                "fix": error.hint,
                "exit_code": error.exit_code,
            }
            sys.stderr.write(json_text(document, indent=None) + "\n")
            return
        from rich.text import Text

        first, *rest = clean(error.message).splitlines() or [""]
        lines = [Text.assemble(("error: ", "bold red"), first, (f"  [{error.kind}]", "dim"))]
        lines += [Text(f"  {more.removeprefix('  ')}") for more in rest]
        for line in lines:
            self.err.print(line, soft_wrap=is_piped(self.err))
        if error.hint:
            # Whole, to be copied.
            self.err.print(Text.assemble(("  fix: ", "cyan"), clean(error.hint)), soft_wrap=True)

    def _say(self, text: str, style: str, soft_wrap: bool = True) -> None:
        from rich.text import Text

        self.err.print(Text(clean(text), style=style), soft_wrap=soft_wrap)

    def _show(self, renderable: Any, soft_wrap: bool = False) -> None:
        """Print to stdout; into a file or pipe without the blanks that tables are padded with."""
        if self.out.is_terminal:
            self.out.print(renderable, soft_wrap=soft_wrap)
            return
        with self.out.capture() as capture:
            self.out.print(renderable, soft_wrap=soft_wrap)
        sys.stdout.write("\n".join(line.rstrip(" ") for line in capture.get().split("\n")))


def output() -> Output:
    """The printer of the running command; outside a command, one in human mode."""
    context = click.get_current_context(silent=True)
    if context is not None:
        printer: Output = context.meta.setdefault(_META_KEY, Output())
        return printer
    global _default
    _default = _default or Output()
    return _default


@contextmanager
def swapped_output(mode: str) -> Iterator[Output]:
    """A fresh printer for a command that runs inside another; ``silent`` prints no answer at all."""
    context = click.get_current_context()
    before = output()
    inner = context.meta[_META_KEY] = Output()
    inner.mode, inner.verbose, inner.is_inner = mode, before.verbose, True
    try:
        yield inner
    finally:
        context.meta[_META_KEY] = before


def common_options(function: F) -> F:
    """``--json``, ``-q`` and ``-v``: every command has them, and they set the mode of ``output()``."""
    options = (
        click.option("--json", is_flag=True, expose_value=False, callback=_set_json, help="Answer in JSON."),
        click.option("-q", "--quiet", is_flag=True, expose_value=False, callback=_set_quiet, help="Only the answer."),
        click.option("-v", "--verbose", count=True, expose_value=False, callback=_set_verbose, help="Say more."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def examples(*lines: str) -> str:
    """An epilog of copy-paste examples; every command has at least two."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def json_text(document: Any, indent: int | None = 2) -> str:
    """JSON of a document: NaN and infinities become null, numpy scalars numbers, models and paths plain values."""
    text = json.dumps(_plain_value(document), indent=indent, ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain_value(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, PathLike):
        return fspath(value)
    for to_plain in ("model_dump", "tolist", "item"):
        if hasattr(value, to_plain):
            return _plain_value(getattr(value, to_plain)())
    return str(value)


def _schema_of_command() -> str:
    context = click.get_current_context(silent=True)
    return f"hiddenstore.{context.info_name if context else 'output'}/1"


def _real(stream: Any) -> Any:
    """The stream itself, also while a progress bar of rich stands before it."""
    return getattr(stream, "rich_proxied_file", stream)


def _make_console(stream: Any) -> "Console":
    from rich.console import Console

    class PipeConsole(Console):
        """A console that ends quietly, as other Unix tools do, when the reader of a pipe has gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    is_terminal = bool(getattr(stream, "isatty", lambda: False)())
    width = None if is_terminal or environ.get("COLUMNS") else _WIDTH_OF_A_FILE
    return PipeConsole(file=stream, width=width, highlight=False, markup=False, emoji=False)


def _set_json(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        output().mode = "json"


def _set_quiet(_context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and output().mode == "human":
        output().mode = "quiet"


def _set_verbose(_context: click.Context, _parameter: click.Parameter, value: int) -> None:
    output().verbose = value
    _set_up_logging(value)


class _CurrentStderr(logging.Handler):
    """Writes to the stderr of the moment, so that a redirected or replaced stream is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(clean(self.format(record)) + "\n")


def _set_up_logging(verbose: int) -> None:
    """Warnings by default; ``-v`` shows our info messages; ``-vv`` everything, of every library."""
    root = logging.getLogger()
    if not any(isinstance(handler, _CurrentStderr) for handler in root.handlers):
        handler = _CurrentStderr()
        # It has a handler of its own: without this every line of it would be printed twice.
        handler.addFilter(lambda record: not record.name.startswith("huggingface_hub"))
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(level if verbose > 1 else logging.ERROR)
