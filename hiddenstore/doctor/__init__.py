"""What ``hiddenstore doctor`` looks at: a module a subject, others' by entry point ``hiddenstore.doctor``."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from hiddenstore.doctor import compute, disk, installation
from hiddenstore.doctor.check import Check

GROUP = "hiddenstore.doctor"


def examine(folder: Path) -> list[Check]:
    """Every check; ``folder`` is where a store would be written, and gets a small trial file."""
    return [*installation.checks(), *compute.checks(), *_added(), *disk.checks(folder)]


def _added() -> Iterator[Check]:
    """What the upper packages and other distributions look at: functions that return checks."""
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            yield from point.load()()
        except ImportError as error:
            yield Check(point.name, "problem", f"{point.value} cannot be imported: {error}")
