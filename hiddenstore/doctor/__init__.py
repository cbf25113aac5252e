"""What ``hiddenstore doctor`` is made of: a check, which other packages give too, and how a package is installed.

Every command imports this room for ``packages``, so the metadata of distributions is imported where it is read.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "absent", "warning", "problem"]


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
