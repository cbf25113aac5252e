"""What ``hiddenstore doctor`` is made of: a check, which other packages give too, how a package is installed, and
whether our four packages lie in one folder: every command looks at that first, so little is imported here.
"""

from contextlib import suppress
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Literal

from hiddenstore.errors import Kind, StorageError

Status = Literal["ok", "absent", "warning", "problem"]
PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")


@dataclass(frozen=True)
class DoctorCheck:
    """``absent`` is fine unless a command needs it; ``problem`` stops something from working; ``fix`` is a command."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


def version_of(*distributions: str) -> str | None:
    """The installed version of the first of these distributions that is there."""
    from importlib import metadata

    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def install_command(distribution: str, extra: str | None = None) -> str:
    """``pip install`` of what is missing, as our extra where this hiddenstore has it."""
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        if extra in (metadata.metadata("hiddenstore").get_all("Provides-Extra") or ()):
            return f"pip install 'hiddenstore[{extra}]'"
    return f"pip install {distribution}"


def package_parents() -> dict[str, str | None]:
    """The folder each of our packages lies in; None when it cannot be found. Imports nothing."""
    parents: dict[str, str | None] = {}
    for name in PACKAGES:
        spec = util.find_spec(name)
        parents[name] = str(Path(spec.origin).parent.parent) if spec is not None and spec.origin else None
    return parents


def elsewhere() -> tuple[str | None, list[str]]:
    """Where hiddenstore lies, and each of our packages that lies in another folder."""
    parents = package_parents()
    home = parents["hiddenstore"]
    return home, [f"{name} from {parent or 'nowhere'}" for name, parent in parents.items() if parent != home]


def check_packages() -> None:
    """Raise StorageError ``packages-scattered`` unless the four packages share one parent folder."""
    home, strangers = elsewhere()
    if strangers:
        raise StorageError(
            f"hiddenstore is loaded from {home}, but {', '.join(strangers)}\n"
            "another distribution ships a package of that name, or this installation is incomplete",
            kind=Kind.PACKAGES_SCATTERED,
            hint="an environment of its own: python -m venv fresh && fresh/bin/pip install hiddenstore",
        )
