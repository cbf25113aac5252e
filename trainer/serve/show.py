"""A plan for a person: coloured in a terminal, a runnable script in a pipe."""

import shlex
from typing import Any

from hiddenstore.cli.output import output
from hiddenstore.cli.terminal import clean
from trainer.serve.plan import ServePlan, ServeRequest, shell_lines, smoke_test


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
