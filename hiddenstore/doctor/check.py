"""One line of ``doctor``, and what several subjects ask of an installation."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Status = Literal["ok", "absent", "warning", "problem"]


@dataclass(frozen=True)
class Check:
    """``absent`` is fine unless wanted; ``problem`` stops something from working; ``fix`` is a command."""

    name: str
    status: Status
    detail: str
    fix: str | None = None


def version_of(*distributions: str) -> str | None:
    """The installed version of the first of these distributions that is there."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def install_command(distribution: str, extra: str | None = None) -> str:
    """``pip install`` of what is missing, as our extra where this hiddenstore has it."""
    known = extra is not None and extra in _extras()
    return f"pip install 'hiddenstore[{extra}]'" if known else f"pip install {distribution}"


def _extras() -> Iterable[str]:
    with suppress(metadata.PackageNotFoundError):
        return metadata.metadata("hiddenstore").get_all("Provides-Extra") or []
    return []
