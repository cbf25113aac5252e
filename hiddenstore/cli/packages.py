"""Start-up check: our four packages come from one place.

``trainer`` is also the import name of another distribution; installed over ours it would run instead, silently.
"""

from importlib.util import find_spec
from pathlib import Path

from hiddenstore.errors import StorageError

PACKAGES = ("schemas", "hiddenstore", "collectors", "trainer")


def package_parents() -> dict[str, str | None]:
    """The folder each of our packages lies in; None when it cannot be found. Imports nothing."""
    parents: dict[str, str | None] = {}
    for name in PACKAGES:
        spec = find_spec(name)
        parents[name] = str(Path(spec.origin).parent.parent) if spec is not None and spec.origin else None
    return parents


def check_packages() -> None:
    """Raise StorageError ``packages-scattered`` unless the four packages share one parent folder."""
    parents = package_parents()
    home = parents["hiddenstore"]
    strangers = [f"{name} from {place or 'nowhere'}" for name, place in parents.items() if place != home]
    if strangers:
        raise StorageError(
            f"hiddenstore is loaded from {home}, but {', '.join(strangers)}\n"
            "another distribution ships a package of that name, or this installation is incomplete",
            kind="packages-scattered",
            hint="an environment of its own: python -m venv fresh && fresh/bin/pip install hiddenstore",
        )
