"""Opening what a person typed as STORE: a path, or ``path@snapshot``."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hiddenstore.store import Store


def open_store(text: str, *, strict: bool = True) -> "Store":
    """The store at ``text``; ``path@name`` opens a saved snapshot unless a folder has that very name.

    Raises:
        NotFoundError, CorruptionError, FormatError, ConfigError: as ``Store.open``.
    """
    from hiddenstore.store import Store

    path, at, snapshot = text.rpartition("@")
    if at and path and snapshot and not Path(text).exists() and "/" not in snapshot:
        return Store.open(path, snapshot, strict=strict)
    return Store.open(text, strict=strict)
