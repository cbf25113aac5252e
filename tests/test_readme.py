"""The README against the repository: its tree is whole, the tests it cites exist, its figures have a source."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py")


def lines_of_the_tree() -> dict[str, str]:
    """``package/folder/file.py`` → what the README says of it."""
    found, package, folder = {}, "", ""
    for line in README.split("## The tree")[1].split("```")[1].splitlines():
        name, _, text = line.strip().partition(" ")
        depth = len(line) - len(line.lstrip())
        if name.endswith("/"):
            package, folder = (name, "") if depth == 0 else (package, name)
        elif name.endswith(".py"):
            found[f"{package}{folder if depth > 2 else ''}{name}"] = text.strip()
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tree_has_a_line_for_every_file(path: Path) -> None:
    assert lines_of_the_tree().get(str(path.relative_to(ROOT))), "add it to the tree in README.md"


def test_the_tree_names_no_file_that_is_gone() -> None:
    assert not [name for name in lines_of_the_tree() if not (ROOT / name).is_file()]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:tests|benchmarks|docs)/[\w/.-]+)`", README))))
def test_what_the_readme_cites_exists(name: str) -> None:
    assert (ROOT / name).exists()


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`make ([\w-]+)`", README))))
def test_a_make_target_the_readme_names_exists(command: str) -> None:
    assert re.search(rf"^{command}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"^hiddenstore ([\w-]+)", README, re.MULTILINE))))
def test_a_command_the_readme_shows_exists(name: str) -> None:
    from hiddenstore.cli.commands import find_commands

    assert name in find_commands()


def test_nothing_committed_names_a_package_registry_or_a_home_folder() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"pypi\.org|pythonhosted|download\.pytorch|/(?:root|home/\w+)/")
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        is_text = path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".sh", ""} and path.is_file()
        if is_text and path != Path(__file__):
            assert not pattern.search(path.read_text(encoding="utf-8", errors="replace")), name
