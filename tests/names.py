"""How much of the code is named by participles and deictics instead of nouns: ``python -m tests.names [PATH…]``."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")
WORDS = frozenset(
    {
        *("found", "asked", "said", "held", "here", "there", "wanted", "taken", "kept", "known", "chosen", "own"),
        *("mine", "place", "whole", "part", "together", "hold", "meet", "given", "made", "seen", "told"),
    }
)
MOST = 0.015


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that is bound: variables, parameters, attributes, functions, classes; with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.ExceptHandler):
            yield node.name or "", node.lineno


def is_dialect(name: str) -> bool:
    """Whether one of the words of a name is on the list: ``found_rows``, ``HeldLayers``."""
    return bool(set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")) & WORDS)


def count(*folders: Path) -> tuple[list[str], int]:
    """``path:line name`` of every dialect name below the folders, and how many bindings there are in all."""
    dialect, total = [], 0
    for path in sorted(path for folder in folders for path in ([folder] if folder.is_file() else folder.rglob("*.py"))):
        for name, line in bindings(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            if is_dialect(name):
                dialect.append(f"{path.relative_to(ROOT)}:{line} {name}")
    return dialect, total


if __name__ == "__main__":
    listed, number = count(*[Path(word).resolve() for word in sys.argv[1:]] or [ROOT / name for name in PACKAGES])
    share = len(listed) / max(1, number)
    sys.stdout.write("\n".join([*listed, f"{len(listed)} of {number:,} bindings, {share:.2%}\n"]))
