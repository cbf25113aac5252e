"""The README against the repository: its tree is whole, and nothing committed names a place of this machine."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")
ROOMS = sorted(
    path.parent.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*/__init__.py")
)


@pytest.mark.parametrize("room", [room for room in ROOMS if room.name not in ("cli", "dump")], ids=str)
def test_every_room_has_a_place_in_the_house(room: Path) -> None:
    house = README.split("## The house")[1].split("```")[1]
    assert re.search(rf"\b{room.name}/", house), "add it to the house in README.md"


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
