"""Every kind of error is raised somewhere, tested by name and described in docs/errors.md."""

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from hiddenstore.errors import ConfigError, CorruptionError, Kind
from tests.errors_page import PAGE, page

ROOT = Path(__file__).parents[2]
CLASSES = {kind.error.__name__ for kind in Kind}
SELF = {Path(__file__), ROOT / "hiddenstore" / "errors.py"}


def text_of(*folders: str) -> str:
    files = chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders)
    return "\n".join(path.read_text(encoding="utf-8") for path in files if path not in SELF)


def test_every_kind_is_raised_somewhere() -> None:
    used = set(re.findall(r"\bKind\.([A-Z_0-9]+)\b", text_of("hiddenstore", "collectors", "trainer")))
    assert used == {kind.name for kind in Kind}


def test_every_kind_is_named_by_a_test() -> None:
    text = text_of("tests")
    words = set(re.findall(r"""["'\[]([a-z0-9]+(?:-[a-z0-9]+)*)["'\]]""", text))
    members = set(re.findall(r"\bKind\.([A-Z_0-9]+)\b", text))
    assert [str(kind) for kind in Kind if kind not in words and kind.name not in members] == []


def test_every_kind_is_raised_as_its_own_class() -> None:
    for call in (node for node in ast.walk(ast.parse(text_of("hiddenstore", "collectors", "trainer")))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in CLASSES:
            named = re.findall(r"kind=Kind\.([A-Z_0-9]+)", ast.unparse(call))
            assert {Kind[name].error.__name__ for name in named} <= {ast.unparse(call.func)}, ast.unparse(call)


def test_docs_errors_md_is_what_the_kinds_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_kind_of_another_class_is_refused() -> None:
    error = CorruptionError("torn", kind=Kind.FILE_SHORT)
    assert (error.kind, error.kind.error, error.exit_code) == ("file-short", CorruptionError, 3)
    with pytest.raises(TypeError, match="file-short is a CorruptionError, not a ConfigError"):
        ConfigError("torn", kind=Kind.FILE_SHORT)
