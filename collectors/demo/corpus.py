"""Question–answer conversations from text every Python installation holds: the standard library's docstrings.

Nothing is imported and nothing downloaded: modules are read with ``ast``, language topics from ``pydoc_data``.
The text is under the PSF licence (see NOTICE).
"""

import argparse
import ast
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.errors import Kind, NotFoundError

MAX_ANSWER_CHARACTERS = 1600
MIN_DOCSTRING_CHARACTERS = 24

_QUESTIONS = (
    "What does `{name}` do?",
    "Explain `{name}`.",
    "How do I use `{name}`?",
    "Describe the {kind} `{name}`.",
    "What is `{name}`?",
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_TOPIC_QUESTIONS = ("Tell me about `{name}` in Python.", "Explain the topic `{name}`.")


@dataclass(frozen=True)
class Entry:
    """One documented thing: qualified name, kind (function, class, module, topic), signature and text."""

    name: str
    kind: str
    signature: str
    text: str


def conversations(library: Path | None = None) -> list[dict[str, list[dict[str, str]]]]:
    """OpenAI ``messages`` rows, in a fixed order; NotFoundError where the installation carries no library sources."""
    folder = library or Path(sysconfig.get_path("stdlib"))
    rows, answers = [], set()
    for entry in _entries(folder):
        answer = f"{entry.signature}\n\n{entry.text}" if entry.signature else entry.text
        if answer in answers:
            continue
        answers.add(answer)
        choice = hashlib.sha256(entry.name.encode()).digest()[0]
        questions = _TOPIC_QUESTIONS if entry.kind == "topic" else _QUESTIONS
        question = questions[choice % len(questions)].format(name=entry.name, kind=entry.kind)
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    if not rows:
        raise NotFoundError(
            f"no docstrings found under {folder}: this Python installation ships no library sources",
            kind=Kind.PATH_MISSING,
        )
    return rows


def _entries(folder: Path) -> Iterator[Entry]:
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if {"site-packages", "dist-packages", "__pycache__"} & set(parts) or parts[0] == "pydoc_data":
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(name for name in parts if name != "__init__")
        yield from _documented(tree, module, "module")
    yield from _topics(folder)


def _documented(node: ast.AST, name: str, kind: str) -> Iterator[Entry]:
    docstring = ast.get_docstring(node) if isinstance(node, _DOCUMENTED) else None
    if docstring and len(docstring) >= MIN_DOCSTRING_CHARACTERS:
        for piece in _pieces(docstring):
            signature = f"{node.name}({ast.unparse(node.args)})" if isinstance(node, _FUNCTIONS) else ""
            yield Entry(name, kind, signature, piece)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, f"{name}.{child.name}", "class")
        elif isinstance(child, _FUNCTIONS):
            inside = "method" if isinstance(node, ast.ClassDef) else "function"
            yield from _documented(child, f"{name}.{child.name}", inside)


def _topics(folder: Path) -> Iterator[Entry]:
    path = folder / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(statement.value)
            for name, text in topics.items():
                for piece in _pieces(inspect.cleandoc(text)):
                    yield Entry(name, "topic", "", piece)


def _pieces(text: str) -> Iterator[str]:
    """Pieces of at most ``MAX_ANSWER_CHARACTERS``, cut at the end of a paragraph, else of a line."""
    text = text.strip().replace("\t", "    ")
    while len(text) > MAX_ANSWER_CHARACTERS:
        head = text[:MAX_ANSWER_CHARACTERS]
        cuts = [head.rfind(separator) for separator in ("\n\n", "\n")]
        cut = next((cut for cut in cuts if cut > MAX_ANSWER_CHARACTERS // 4), MAX_ANSWER_CHARACTERS)
        yield text[:cut].rstrip()
        text = text[cut:].strip("\n")
    if len(text) >= MIN_DOCSTRING_CHARACTERS:
        yield text


def main() -> None:
    """Write the conversations as JSONL: ``python -m collectors.demo.corpus -o corpus.jsonl``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    rows = conversations()
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    characters = sum(len(row["messages"][1]["content"]) for row in rows)
    sys.stdout.write(f"{len(rows):,} conversations, {characters:,} characters of answers\n")


if __name__ == "__main__":
    main()
