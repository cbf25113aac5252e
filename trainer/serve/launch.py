"""Writing a plan's files and becoming the engine's process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from hiddenstore.errors import ConfigError, ConflictError, NotFoundError
from hiddenstore.fs import storage_error
from trainer.serve.plan import ServePlan, ServingEngine


def write_files(files: Mapping[str, str]) -> None:
    """Write each file; one that stands there with the same text stays.

    Raises:
        ConflictError: a file of that name says something else.
        StorageError: the disk refused.
    """
    for name, text in files.items():
        path = Path(name)
        try:
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise ConflictError(f"{path} exists and says something else", kind="out-exists", hint="-o ANOTHER.yaml")
            path.write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise storage_error(OSError(str(error)), name) from error


def require_installed(plan: ServePlan, engine: ServingEngine, form: str) -> None:
    """Raise NotFoundError ``engine-missing``, with how to get it, unless the plan's program can be started."""
    if not plan.command:
        raise ConfigError(
            "the Python form is a program to keep, not a server to start",
            kind="serve-form",
            hint="add --print-only, and redirect it to a file",
        )
    program = plan.command[0]
    if shutil.which(program) is None:
        how = "install Docker with the NVIDIA container toolkit" if form == "container" else engine.install
        raise NotFoundError(f"{program} is not installed here", kind="engine-missing", hint=_hint(how, engine, form))
    if plan.command[1:2] == ("-m",) and not _has_module(program, plan.command[2].partition(".")[0]):
        raise NotFoundError(
            f"{program} has no module {plan.command[2]}",
            kind="engine-missing",
            hint=_hint(engine.install, engine, form),
        )


def become(plan: ServePlan) -> NoReturn:
    """Replace this process by the engine's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.env})


def _has_module(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def _hint(how: str, engine: ServingEngine, form: str) -> str:
    container = "" if form == "container" or "container" in how else ", or --form container"
    return f"{how}{container}, or --print-only to run the command where {engine.title} is"
