"""One command of the installed command line, run inside another: the demo and ``hiddenstore run`` are made of these."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import click

from hiddenstore.cli import INTERRUPTED_EXIT
from hiddenstore.cli.words import WORDS_ONLY
from hiddenstore.console.output import INNER, output, swapped_output
from hiddenstore.errors import CaptureError, InterruptError, Kind


@runtime_checkable
class Checked(Protocol):
    """A command whose words can be judged before what it reads is there."""

    def check(self, **params: Any) -> None:
        """Take the parameters of the command; raise what it would raise because of them alone."""


def find(name: str) -> click.Command:
    """The installed command ``name``."""
    context = click.get_current_context()
    group = context.find_root().command
    assert isinstance(group, click.Group)
    command = group.get_command(context, name)
    assert command is not None, f"command {name} is not installed"
    return command


def do(name: str, *words: str, quiet: bool = False) -> Mapping[str, Any]:
    """Print a command line and run it in this process; what it answers as a document."""
    out = output()
    if not quiet:
        out.command("hiddenstore", name, *words)
    mode = "human" if out.is_human and not quiet else "silent"
    with swapped_output(mode) as inner, _context(name, words) as child:
        child.command.invoke(child)
    return inner.document


def check(name: str, words: Sequence[str]) -> None:
    """Read a command line as the command would, and do nothing. Raises click.UsageError: it takes no such option or
    value; HiddenstoreError: it refuses what its words say, whatever it would read."""
    meta = click.get_current_context().meta
    meta[WORDS_ONLY] = True
    try:
        with swapped_output("silent"):
            context = _context(name, words)
    finally:
        del meta[WORDS_ONLY]
    if isinstance(context.command, Checked):
        context.command.check(**context.params)


def _context(name: str, words: Sequence[str]) -> click.Context:
    # Under the root, so that an error names the command as it is typed.
    return find(name).make_context(name, list(words), parent=click.get_current_context().find_root())


def do_on_ranks(ranks: int, name: str, words: Sequence[str]) -> None:
    """Print a command line and run it under torchrun, a process of one thread for each rank. Raises InterruptError: it
    was interrupted; CaptureError: it failed; it has said why."""
    out = output()
    out.command("torchrun", "--nproc-per-node", str(ranks), "--no-python", "hiddenstore", name, *words)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    shown = None if out.is_human else subprocess.DEVNULL
    environment = {**os.environ, "OMP_NUM_THREADS": "1", INNER: "1"}
    done = subprocess.run(
        [*launcher, "-m", "hiddenstore.cli", name, *words], env=environment, stdout=shown, stderr=shown, check=False
    )
    if not done.returncode:
        return
    again = shlex.join(["hiddenstore", name, *words])
    if done.returncode == INTERRUPTED_EXIT:
        raise InterruptError(f"hiddenstore {name} was interrupted", kind=Kind.INTERRUPTED, hint=again)
    problem = f"hiddenstore {name} on {ranks} ranks stopped with exit code {done.returncode}"
    raise CaptureError(problem, kind=Kind.RANKS_FAILED, hint=again)
