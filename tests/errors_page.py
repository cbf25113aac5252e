"""Writes docs/errors.md from the kinds: ``python -m tests.errors_page``."""

from pathlib import Path

from hiddenstore.errors import HiddenstoreError, Kind

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
HEAD = """\
# Errors

Every error names its kind in brackets behind its first line; with `--json` it is `error.kind` on standard error. A
kind keeps its word and its exit code from release to release (CHANGELOG lists changes), and the message says what was
expected, what was found, and mostly the command that fixes it.
"""


def page() -> str:
    """Markdown: for each class its exit code and the sentence of its docstring, then its kinds."""
    parts = [HEAD]
    for error in sorted({kind.error for kind in Kind}, key=lambda error: (error.exit_code, error.__name__)):
        sentence = " ".join((error.__doc__ or "").partition("\n\n")[0].split())
        if error is HiddenstoreError:
            sentence = "A bug, or a process that stops because another one did."
        kinds = sorted(kind for kind in Kind if kind.error is error)
        rows = [f"| `{kind}` | {kind.meaning} |" for kind in kinds]
        table = ["| kind | meaning |", "|---|---|", *rows, ""]
        parts.append("\n".join([f"## Exit code {error.exit_code}: `{error.__name__}`", "", sentence, "", *table]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
