"""The page docs/tree.md, made from the first sentence of every module: ``python -m tests.tree``, or ``make tree``."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tree.md"
PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")
HEAD = """# The tree

Every module of the four packages with its first sentence (`make tree` writes this page, a test compares it). Arrows
point one way: `schemas ← hiddenstore ← collectors | trainer`; the rooms are in the README.
"""


def page() -> str:
    """The page as the sources have it now."""
    parts = [HEAD]
    for package in PACKAGES:
        for folder in (ROOT / package, *sorted(path.parent for path in (ROOT / package).rglob("*/__init__.py"))):
            files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            if folder == ROOT / package or files or folder.name == "recipes":
                parts.append(f"## {folder.relative_to(ROOT)}/\n\n{first_sentence(folder / '__init__.py')}.\n")
            if files:
                rows = [f"| `{path.name}` | {first_sentence(path)} |" for path in files]
                parts.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|").replace("``", "`")
    return re.split(r"\.(?: |$)", paragraph)[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
