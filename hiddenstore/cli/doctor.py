"""``hiddenstore doctor``: what this machine can do, in one screen."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hiddenstore.console.output import common_options, examples, output

if TYPE_CHECKING:
    from hiddenstore.doctor.installation import DoctorCheck

_MARKS = {"ok": ("✓", "green"), "absent": ("·", "dim"), "warning": ("!", "yellow"), "problem": ("✗", "red")}
_PROBLEM_EXIT = 5


@click.command(epilog=examples("hiddenstore doctor", "hiddenstore doctor /data --json"))
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@common_options
def doctor(folder: Path) -> None:
    """This machine: versions, GPUs, engines, and how fast FOLDER (where a store would go) writes, syncs and reads.

    Writes and removes a 32 MB trial file in FOLDER. Exits 5 when something would not work.
    """
    from hiddenstore.doctor.machine import examine

    checks = examine(folder)
    problems = [check for check in checks if check.status == "problem"]
    document = {
        "ok": not problems,
        "folder": str(folder),
        "checks": [
            {"name": check.name, "status": check.status, "detail": check.detail, "fix": check.fix} for check in checks
        ],
    }
    output().data(document, human=lambda: _view(checks), quiet="\n".join(check.detail for check in problems))
    if problems:
        raise click.exceptions.Exit(_PROBLEM_EXIT)
    output().hint("hiddenstore demo")


def _view(checks: "list[DoctorCheck]") -> None:
    from rich.text import Text

    rows = []
    for check in checks:
        mark, style = _MARKS[check.status]
        detail = Text(check.detail).append(f"   {check.fix}" if check.fix else "", style="cyan")
        rows.append((Text.assemble((f"{mark} ", style), (check.name, "dim")), detail))
    output().pairs(rows)
