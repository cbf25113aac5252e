"""The command line: a lazy click group whose ``--help`` imports nothing heavy, and one place where errors,
ours, click's and the operating system's, become exits.

Exit codes: 0 ok · 1 our bug · 2 usage or configuration · 3 verify or diff found something · 4 incompatible · 5 storage
or environment · 6 conflict · 75 interrupted, resumable · 130 second interrupt · 141 the reader of a pipe has gone.
"""

import errno
import os
import platform
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import click

from hiddenstore.console.output import Output
from hiddenstore.console.text import clean
from hiddenstore.doctor import PACKAGES, check_packages, version_of
from hiddenstore.errors import ConfigError, HiddenstoreError, InterruptError, Kind, NotFoundError, StorageError
from hiddenstore.process import is_out_of_memory

__all__ = ["main"]

# Threads that spin while they wait cost up to 15x on a shared CPU; OpenMP reads this once, when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Pydantic would read what every installed package says of itself, in search of plug-ins.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

INTERRUPTED_EXIT = 75
RUN_AGAIN = "run the same command again"
PIPE_EXIT = 141

_NO_MEMORY = (
    "failed to map segment",
    "cannot map zero-fill pages",
    "cannot allocate memory",
    "std::bad_alloc",
)
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_OS_KINDS = {
    errno.EIO: Kind.IO_ERROR,
    errno.ESTALE: Kind.IO_ERROR,
    errno.EMFILE: Kind.TOO_MANY_OPEN_FILES,
    errno.ENFILE: Kind.TOO_MANY_OPEN_FILES,
    errno.ENOMEM: Kind.OUT_OF_MEMORY,
    errno.ETIMEDOUT: Kind.IO_ERROR,
    errno.ECONNREFUSED: Kind.IO_ERROR,
    errno.ECONNRESET: Kind.IO_ERROR,
    errno.ENOTDIR: Kind.PATH_INVALID,
    # A folder was to be made where a file is.
    errno.EEXIST: Kind.PATH_INVALID,
    errno.EISDIR: Kind.PATH_INVALID,
    errno.ENAMETOOLONG: Kind.PATH_INVALID,
    errno.ELOOP: Kind.PATH_INVALID,
}

ENTRY_POINT_GROUP = "hiddenstore.commands"
_ADDED = "Added"
_COMPLETE = "_HIDDENSTORE_COMPLETE"

# Section, name and one line of every command of ours, in the order of ``--help``.
_SUMMARIES: Mapping[str, Mapping[str, str]] = {
    "Make": {
        "demo": "The whole path on CPU with a tiny bundled target.",
        "run": "Conversations → exported drafter from one pipeline file.",
        "prepare": "Conversations → tokens, loss mask and turn spans.",
        "regenerate": "Let the target rewrite the answers itself.",
        "plan": "Bytes, files and hours, before anything is written.",
        "collect": "Capture the target's hidden states into a store; resumable.",
        "import": "Another project's dump of hidden states into a store; resumable.",
    },
    "Look": {
        "info": "What a store holds, on one screen.",
        "ls": "The samples of a store.",
        "show": "One sample: its text, what is trained on, norms per layer.",
        "stats": "Lengths, splits and norms per layer over the whole store.",
        "diff": "How two stores or snapshots differ: capture, samples, numbers.",
        "log": "Who wrote what into a store, and when.",
        "advise": "Which recipe the states can take, measured on them.",
        "report": "A store or a run as one HTML file: pictures and verdicts.",
        "compare": "Training runs beside each other, as one HTML file.",
    },
    "Care": {
        "verify": "Every byte there, intact, and meaning what it says.",
        "copy": "Merge, subset or re-encode stores; resumable.",
        "push": "A store or a drafter to the hub or object storage; resumable.",
        "pull": "What was pushed, checked while it comes; resumable.",
        "snapshot": "Freeze what a store holds under a name.",
        "repair": "Drop what is damaged, keep the rest; prints a plan first.",
        "gc": "Sweep what no commit names; prints a plan first.",
    },
    "Train": {
        "vocab": "The draft vocabulary, from supervised tokens.",
        "train": "Train a drafter from a store.",
        "import-drafter": "A published drafter as a run to start from.",
        "eval": "Accepted length on recorded text.",
        "decode": "Accepted length in real speculative decoding.",
        "export": "A drafter as an engine loads it.",
        "serve": "A drafter in an engine: the exact command and file, or run it.",
        "export-data": "A store's samples as another trainer reads them.",
    },
    "System": {"doctor": "This machine: versions, engines, disk speed."},
}
SECTIONS = (*_SUMMARIES, _ADDED)
OUR_COMMANDS = frozenset(name for commands in _SUMMARIES.values() for name in commands)

# Where the commands of this package lie. Those of the upper packages come from entry points: nothing points upward.
_BUILT_IN: Mapping[str, str] = {
    name: f"hiddenstore.cli.{module}:{name}"
    for module, names in {
        "look": ("info", "ls", "show", "stats", "diff"),
        "care": ("verify", "copy", "repair", "gc", "doctor"),
        "history": ("log", "snapshot"),
        "advise": ("advise",),
        "share": ("push", "pull"),
        "run": ("run",),
    }.items()
    for name in names
}


@dataclass(frozen=True)
class CommandSpec:
    """Where a command lives and its one line in ``--help``. ``target`` is ``module:attribute``."""

    name: str
    section: str
    summary: str
    target: str


# What people type first, coming from other tools.
OTHER_WORDS: Mapping[str, str] = {
    "convert": "copy",
    "merge": "copy",
    "subset": "copy",
    "reencode": "copy",
    "cp": "copy",
    "head": "ls",
    "list": "ls",
    "cat": "show",
    "inspect": "info",
    "status": "info",
    "validate": "verify",
    "check": "verify",
    "fsck": "verify",
    "evaluate": "eval",
    "tokenize": "prepare",
    "capture": "collect",
    "extract": "collect",
    "generate": "regenerate",
    "clean": "gc",
    "fix": "repair",
    "history": "log",
    "freeze": "snapshot",
    "tag": "snapshot",
    "upload": "push",
    "share": "push",
    "download": "pull",
}


@cache
def find_commands() -> Mapping[str, CommandSpec]:
    """Every command of this installation in the order of ``--help``: ours, then others'.

    A foreign entry point never replaces a command of ours.
    """
    from importlib import metadata

    points: dict[str, metadata.EntryPoint] = {}
    for point in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if point.name not in points or point.module.partition(".")[0] in PACKAGES:
            points[point.name] = point
    targets = {**{name: point.value for name, point in points.items()}, **_BUILT_IN}
    # The name of a distribution is parsed from all that it says of itself: ours are not asked.
    owners = {name: points[name].dist for name in sorted(targets.keys() - OUR_COMMANDS)}
    added = {name: f"From {owner.name if owner is not None else 'another package'}." for name, owner in owners.items()}
    return {
        name: CommandSpec(name, section, summary, targets[name])
        for section, summaries in {**_SUMMARIES, _ADDED: added}.items()
        for name, summary in summaries.items()
        if name in targets
    }


def _target_of(name: str) -> str | None:
    """Where a command lies. Our own are known without a look at what is installed, which takes a while."""
    spec = None if name in _BUILT_IN else find_commands().get(name)
    return spec.target if spec is not None else _BUILT_IN.get(name)


class CommandGroup(click.Group):
    """Commands are imported when they run; ``--help`` needs their names and summaries only."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(find_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = _target_of(cmd_name)
        if target is None:
            return None
        module_name, _, attribute = target.partition(":")
        try:
            command = getattr(import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            raise ConfigError(
                f"the command {cmd_name!r} is announced as {target}, but {error.name} is not installed",
                kind=Kind.NOT_INSTALLED,
                hint="pip install --force-reinstall hiddenstore",
            ) from error
        assert isinstance(command, click.Command), f"{target} is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if _target_of(name) is None and not name.startswith("-"):
            raise _unknown_command(name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise BrokenPipeError from error  # without an errno, which click would turn into exit 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = find_commands().values()
        for section in SECTIONS:
            rows = [(spec.name, spec.summary) for spec in commands if spec.section == section]
            if rows:
                with formatter.section(section):
                    formatter.write_dl([(name.ljust(11), summary) for name, summary in rows])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        if not extra.get("standalone_mode", True):
            return super().main(args, *rest, **extra)
        if _COMPLETE in os.environ:
            from hiddenstore.cli.words import complete_paths

            complete_paths()
        arguments = list(sys.argv[1:] if args is None else args)
        with _interruptible():
            sys.exit(_run(super().main, arguments, *rest, **{**extra, "standalone_mode": False}))


def _run(click_main: Any, arguments: list[str], *rest: Any, **extra: Any) -> int:
    """Run the command; the exit code. Every error is printed here and nowhere else."""
    printer = _printer_of(arguments)
    try:
        _make_streams_forgiving()
        check_packages()
        result = click_main(arguments, *rest, **extra)
        sys.stdout.flush()
        return result if isinstance(result, int) and not isinstance(result, bool) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.exceptions.Abort, KeyboardInterrupt):
        printer.error(InterruptError("interrupted", kind=Kind.INTERRUPTED, hint=RUN_AGAIN))
        return INTERRUPTED_EXIT
    except click.ClickException as error:
        problem: HiddenstoreError = usage_error(error)
        cause: BaseException = error
    except BrokenPipeError:
        _silence_stdout()
        return PIPE_EXIT
    except Exception as error:  # noqa: BLE001 - the one place where a bug becomes a message
        problem, cause = as_hiddenstore_error(error, arguments), error
    printer.error(problem)
    if printer.verbose:
        click.echo(clean("".join(traceback.format_exception(cause))), err=True, nl=False)
    return problem.exit_code


def _unknown_command(name: str) -> HiddenstoreError:
    from difflib import get_close_matches

    close = [OTHER_WORDS[name]] if name in OTHER_WORDS else get_close_matches(name, find_commands(), n=1)
    question = f"; did you mean {close[0]!r}?" if close else ""
    fix = f"hiddenstore {close[0]} --help" if close else "hiddenstore --help"
    return ConfigError(f"there is no command {name!r}{question}", kind=Kind.USAGE, hint=fix)


def _printer_of(arguments: Sequence[str]) -> Output:
    """The printer for errors: the command's own may not exist yet when its options cannot be parsed."""
    printer = Output()
    words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    printer.mode = "json" if "--json" in words else "human"
    printer.verbose = sum(w == "--verbose" or (w[:1] == "-" and w[1:].strip("vq") == "" and "v" in w) for w in words)
    return printer


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM interrupts like Ctrl-C. Commands with work to put away install ``rank.drain_on_signal`` over this."""

    def on_term(_signal: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, on_term)
    except ValueError:  # not the main thread: the owner of the process decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_streams_forgiving() -> None:
    """A terminal that cannot show a character shows its escape instead of ending the program; a stream that was closed
    shows nothing; and a log on a full disk does not decide how a command ends."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stderr is sys.__stderr__ and sys.stderr is not None:
        sys.stderr = cast(TextIO, _Log(sys.stderr))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class _Log:
    """stderr, of which a line that the disk refuses is given up."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about the closed pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


@click.group(
    cls=CommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nStart here:\n  hiddenstore demo\n  hiddenstore COMMAND --help\n\n"
    "\b\nCompletion of commands, options and paths (or zsh_source, fish_source):\n"
    f'  eval "$({_COMPLETE}=bash_source hiddenstore)"',
)
@click.version_option(package_name="hiddenstore", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Capture a target's hidden states once; train any speculative-decoding drafter from disk."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def usage_error(error: click.ClickException) -> ConfigError:
    """A click error as ours; it names the command whose ``--help`` tells more."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hiddenstore"
    # click's word for a number with bounds.
    message = re.sub(r"(is not a valid (?:integer|float)) range$", r"\1", error.format_message().rstrip("."))
    if message[1:2].islower():
        # Not RUN, which is the name of an argument.
        message = message[0].lower() + message[1:]
    return ConfigError(message, kind=Kind.USAGE, hint=f"{command} --help")


def as_hiddenstore_error(error: Exception, arguments: Sequence[str]) -> HiddenstoreError:
    """Our errors as they are; the operating system's with a kind; anything else is a bug and leaves a log file."""
    if isinstance(error, InterruptError) and error.hint is None:
        error.hint = RUN_AGAIN
    if isinstance(error, HiddenstoreError):
        return error
    if isinstance(error, FileNotFoundError) and error.filename:
        return NotFoundError(f"{error.filename} does not exist", kind=Kind.PATH_MISSING)
    if isinstance(error, OSError) and error.errno in _STORAGE:
        from hiddenstore.fs.seam import storage_error

        return storage_error(error, str(error.filename or "the disk"))
    if isinstance(error, OSError) and error.errno in _OS_KINDS:
        where = f" ({error.filename})" if error.filename else ""
        return StorageError(f"{error.strerror}{where}", kind=_OS_KINDS[error.errno])
    if _is_out_of_memory(error):
        first = (str(error).splitlines() or ["no memory left"])[0]
        return StorageError(f"out of memory: {first}", kind=Kind.OUT_OF_MEMORY, hint="use smaller batches")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        message = "the system starts no more threads for this user or container"
        return StorageError(message, kind=Kind.TOO_MANY_THREADS, hint="ulimit -u; export OMP_NUM_THREADS=1")
    return _bug(error, arguments)


def _is_out_of_memory(error: Exception) -> bool:
    if is_out_of_memory(error):
        return True
    # The loader of libraries has no class of its own.
    return isinstance(error, RuntimeError | ImportError) and any(words in str(error).lower() for words in _NO_MEMORY)


def _bug(error: Exception, arguments: Sequence[str]) -> HiddenstoreError:
    try:
        log = str(write_crash_log(error, arguments))
    except OSError as failure:
        log = f"not written ({failure.strerror}); run again with -v"
    first = (str(error).splitlines() or [""])[0]
    problem = f"this is a bug: {type(error).__name__}: {first}\ntraceback: {log}"
    return HiddenstoreError(problem, kind=Kind.INTERNAL, hint="report it with that file attached")


def write_crash_log(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the traceback and the versions of this machine to a new file in the temporary folder; its path."""
    versions = [
        f"{name} {version_of(name) or 'absent'}" for name in ("hiddenstore", "torch", "transformers", "zarr", "numpy")
    ]
    lines = [
        f"hiddenstore {' '.join(arguments)}",
        f"python {platform.python_version()} on {platform.platform()}; {', '.join(versions)}",
        "",
        *traceback.format_exception(error),
    ]
    descriptor, path = tempfile.mkstemp(prefix="hiddenstore-error-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
        log.write("\n".join(lines))
    return Path(path)
