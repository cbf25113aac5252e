"""The arrows between the packages and the calls nobody may make, read from the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import names

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "schemas": {"schemas"},
    "hiddenstore": {"schemas", "hiddenstore"},
    "collectors": {"schemas", "hiddenstore", "collectors"},
    "trainer": {"schemas", "hiddenstore", "trainer"},
}
HEAVY = {"torch", "zarr", "transformers", "datasets", "webdataset", "matplotlib", "pyarrow", "numcodecs"}
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 60
FORBIDDEN_CALLS = {"eval", "exec"}
# SpecForge and ModelOpt read torch's own files and nothing else.
WRITES_TORCH_FILES = "hiddenstore/dumps/common.py"
FORBIDDEN_ATTRIBUTES = {("torch", "save"), ("yaml", "load"), ("yaml", "unsafe_load"), ("tarfile", "extractall")}
RENAMES = {"rename", "renames", "replace", "link", "hardlink_to", "move"}
MAY_RENAME = {
    "hiddenstore/fs/publish.py": "the one publisher of files and folders",
    "hiddenstore/fs/disk.py": "put-if-absent of the seam",
    "hiddenstore/fs/local.py": "put-if-absent of the seam",
    "hiddenstore/fs/cache.py": "blocks that anybody may lose, each with its checksum",
    "hiddenstore/share/pull.py": "a file begun by an interrupted pull, once its digest is right",
    "hiddenstore/doctor/machine.py": "whether a disk knows links",
    "collectors/engines/resources.py": "scratch that goes with its process",
    "trainer/train/checkpoint.py": "a checkpoint that goes",
}
# What begins a command line, and what names a place there.
COMMAND = re.compile(r"(?:^|[\s`(])(?:rm|mv|ls|df|mkdir|pip install|hiddenstore [a-z-]+)(?: -[a-z]+)* (?:[^`;…]* )?$")
PLACES = {"path", "folder", "file", "out", "root", "run", "store", "data", "parent", "address", "location", "source"}
SOURCES = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]
COMMANDS = [path for path in SOURCES if path.parent.name == "cli"]


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "imports are absolute"
            yield node.module


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_arrows_point_one_way(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {module.split(".")[0] for module in imported(ast.parse(path.read_text()))} & set(MAY_IMPORT)
    assert ours <= MAY_IMPORT[package], f"{name_of(path)} imports {sorted(ours - MAY_IMPORT[package])}"


def test_files_and_functions_can_be_seen_whole() -> None:
    too_long = []
    for path in SOURCES:
        text = path.read_text()
        if text.count("\n") > MOST_LINES_OF_A_FILE:
            too_long.append(name_of(path))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION:
                too_long.append(f"{name_of(path)}: {node.name}")
    assert too_long == []


def test_schemas_stand_on_pydantic_alone() -> None:
    import sys

    for path in (ROOT / "schemas").rglob("*.py"):
        outside = {module.split(".")[0] for module in imported(ast.parse(path.read_text()))}
        assert outside - set(sys.stdlib_module_names) <= {"schemas", "pydantic"}, name_of(path)


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_a_command_module_imports_nothing_heavy_at_the_top(path: Path) -> None:
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {module.split(".")[0] for node in top for module in imported(node)}
    assert not names & HEAVY


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_source_file_calls_what_can_run_code_or_swallow_errors(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in set(imported(node)), f"{name_of(path)}:{node.lineno}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                assert node.func.id not in FORBIDDEN_CALLS, f"{name_of(path)}:{node.lineno}"
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                found = (node.func.value.id, node.func.attr)
                excused = found == ("torch", "save") and name_of(path) == WRITES_TORCH_FILES
                assert excused or found not in FORBIDDEN_ATTRIBUTES, f"{name_of(path)}:{node.lineno}"
                if found == ("torch", "load"):
                    safe = {keyword.arg for keyword in node.keywords}
                    assert "weights_only" in safe, f"{name_of(path)}:{node.lineno} torch.load without weights_only"
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not shell, f"{name_of(path)}:{node.lineno} shell="
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name_of(path)}:{node.lineno} bare except"


def renames(call: ast.Call) -> bool:
    """Whether a call gives a file another name; ``replace`` of text takes two arguments, of a document keywords."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in RENAMES:
        return False
    is_of_module = isinstance(call.func.value, ast.Name) and call.func.value.id in ("os", "shutil")
    return is_of_module or call.func.attr != "replace" or (len(call.args) == 1 and not call.keywords)


def test_a16_nobody_but_the_publisher_gives_a_file_its_name() -> None:
    found = {
        name_of(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and renames(node)
    }
    assert found == set(MAY_RENAME)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_outside_a_command_line_imports_one(path: Path) -> None:
    if "cli" not in path.relative_to(ROOT).parts:
        lines = {module for module in imported(ast.parse(path.read_text())) if "cli" in module.split(".")}
        assert not lines, f"{name_of(path)} imports {sorted(lines)}"


def unquoted(text: ast.JoinedStr) -> Iterator[str]:
    """The places that a command line in a text names as they are, so that a blank in one makes two words of it."""
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += part.value
        elif isinstance(part, ast.FormattedValue):
            name = ast.unparse(part.value)
            if COMMAND.search(before) and name.rpartition(".")[2] in PLACES:
                yield name
            before += "X"


def test_a_command_in_a_text_quotes_the_places_it_names() -> None:
    lines = [
        f"{name_of(path)}:{node.lineno} {name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        for name in unquoted(node)
    ]
    assert not lines, "\n".join(lines)


def test_names_are_nouns() -> None:
    dialect, total = names.count(*(ROOT / package for package in MAY_IMPORT))
    assert len(dialect) <= names.MOST * total, "python -m tests.names lists them"
