"""Whether our four packages lie in one folder: every command looks first, so little is imported here."""

from importlib import util
from pathlib import Path

from hiddenstore.errors import Kind, StorageError

PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")


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
