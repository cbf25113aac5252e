"""A plan shown to a person, as a runnable script or a document; its files written; this process become the engine's."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hiddenstore.console.output import output
from hiddenstore.console.text import clean
from hiddenstore.errors import ConfigError, ConflictError, Kind
from hiddenstore.fs.seam import storage_error
from trainer.serve.plan import ServePlan, ServeRequest, ServingEngine


def document_of(request: ServeRequest, plan: ServePlan, engine: str) -> dict[str, Any]:
    """``hiddenstore.serve/1``: everything that would run, in parts."""
    return {
        "engine": engine,
        "engine_version": request.version,
        "method": request.method,
        "target": request.target,
        "drafter": request.drafter,
        "draft_len": request.draft_len if request.method != "none" else 0,
        "form": request.form,
        "command": list(plan.command),
        "env": dict(plan.env),
        "files": dict(plan.files),
        "program": plan.program or None,
        "smoke_test": smoke_test(plan) if _serves(request) else None,
        "notes": list(plan.notes),
    }


def script(request: ServeRequest, plan: ServePlan) -> str:
    """The plan as one file: a shell script that writes the files and starts the engine, or a Python program."""
    if plan.program:
        return plan.program.rstrip("\n")
    parts = []
    for name, text in plan.files.items():
        parts.append("\n".join([f"cat > {shlex.quote(name)} <<'END_OF_FILE'", text.rstrip("\n"), "END_OF_FILE"]))
    parts.append("\n".join(shell_lines(plan.command, plan.env, plan.image)))
    if _serves(request):
        parts.append(
            "\n".join(["# once it is up, from another terminal:", *(f"# {line}" for line in _smoke_lines(plan))])
        )
    return "\n\n".join(parts)


def show(request: ServeRequest, plan: ServePlan, engine_title: str) -> None:
    """Print the plan to stdout."""
    if not output().out.is_terminal:
        output().print(script(request, plan))
        return
    what = request.method + (f" of {request.drafter}" if request.drafter else "")
    length = "" if request.method == "none" else f" · {request.draft_len} tokens a draft"
    _title(f"{engine_title} {request.version} · {what}{length}")
    if plan.program:
        _code(plan.program, "python")
        return
    for name, text in plan.files.items():
        _title(name)
        _code(text, "yaml")
    _title("runs" if request.form != "bench" else "measures")
    _code("\n".join(shell_lines(plan.command, plan.env, plan.image)), "bash")
    if _serves(request):
        _title("once it is up, from another terminal")
        _code("\n".join(_smoke_lines(plan)), "bash")


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
                what = f"{path} exists and says something else"
                raise ConflictError(what, kind=Kind.OUTPUT_EXISTS, hint="-o ANOTHER.yaml")
            path.write_text(text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise storage_error(OSError(str(error)), name) from error


def require_installed(plan: ServePlan, engine: ServingEngine, form: str) -> None:
    """Raise NotFoundError ``not-installed``, with how to get it, unless the plan's program can be started."""
    if not plan.command:
        raise ConfigError(
            "the Python form is a program to keep, not a server to start",
            kind=Kind.OPTION_INVALID,
            hint="add --print-only, and redirect it to a file",
        )
    program = plan.command[0]
    if shutil.which(program) is None:
        how = "install Docker with the NVIDIA container toolkit" if form == "container" else engine.install
        raise ConfigError(f"{program} is not installed here", kind=Kind.NOT_INSTALLED, hint=_hint(how, engine, form))
    if plan.command[1:2] == ("-m",) and not _has_module(program, plan.command[2].partition(".")[0]):
        raise ConfigError(
            f"{program} has no module {plan.command[2]}",
            kind=Kind.NOT_INSTALLED,
            hint=_hint(engine.install, engine, form),
        )


def become(plan: ServePlan) -> NoReturn:
    """Replace this process by the engine's."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(plan.command[0], list(plan.command), {**os.environ, **plan.env})


def smoke_test(plan: ServePlan) -> list[str]:
    """A curl command that asks the running server for a few tokens, as arguments."""
    body = {"model": plan.served_as, "prompt": "The capital of France is", "max_tokens": 32, "temperature": 0}
    return [
        "curl",
        f"http://localhost:{plan.port}/v1/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body, ensure_ascii=False),
    ]


def shell_lines(
    command: tuple[str, ...] | list[str], env: Mapping[str, str] | None = None, image: str = ""
) -> list[str]:
    """A command as a person would write it in a shell: each option with its values on a line, and the ``image``."""
    lines: list[list[str]] = [[f"{name}={shlex.quote(value)}" for name, value in (env or {}).items()]]
    for i, part in enumerate(command):
        is_option = part.startswith("-") and part not in ("-m", "-c") and i > 0
        if is_option or (image and part == image):
            lines.append([])
        lines[-1].append(shlex.quote(part))
    texts = [" ".join(line) for line in lines if line]
    return [("  " if i else "") + text + (" \\" if i + 1 < len(texts) else "") for i, text in enumerate(texts)]


def _serves(request: ServeRequest) -> bool:
    return request.form in ("command", "container") and request.method != "user-provided"


def _smoke_lines(plan: ServePlan) -> list[str]:
    return shell_lines(smoke_test(plan))


def _title(text: str) -> None:
    from rich.text import Text

    output().out.print(Text(clean(text), style="bold"), soft_wrap=True)


def _code(text: str, language: str) -> None:
    """Highlighted and never wrapped, so that it can be copied out of the terminal."""
    from rich.syntax import Syntax

    highlighted = Syntax("", language, theme="ansi_dark", background_color="default").highlight(
        clean(text.rstrip("\n"))
    )
    highlighted.rstrip()
    output().out.print(highlighted, soft_wrap=True)
    output().out.print()


def _has_module(python: str, name: str) -> bool:
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([python, "-c", code], check=False, capture_output=True).returncode == 0


def _hint(how: str, engine: ServingEngine, form: str) -> str:
    container = "" if form == "container" or "container" in how else ", or --form container"
    return f"{how}{container}, or --print-only to run the command where {engine.title} is"
