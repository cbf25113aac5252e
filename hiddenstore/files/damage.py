"""What counts as damage, for whoever acts on it.

Damage is bytes that were read and found wrong twice, the second time past the page cache, or a file that is known to be
absent. An error of reading (StorageError) is neither: it passes through everything here, and whoever meets it stops.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hiddenstore.errors import CorruptionError, FormatError, Kind, NotFoundError, StorageError
from hiddenstore.files.layout import STORE_JSON
from hiddenstore.fs.seam import Filesystem, storage_error

_OF_THE_FILE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL}
_REFUSED = re.compile(r"(?:unable to (?:open|mmap)[^\n]*\(|[^\n]*\(os error (?=\d+\)$))(\d+)\)")
"""How torch begins and safetensors ends to say what the system answered; elsewhere a message may quote the file."""

DAMAGE = (CorruptionError, FormatError, NotFoundError)
"""Errors that speak of bytes, never of the storage that should have brought them."""

_HINT = (
    "nothing was changed; run it again once the storage answers. A file that a disk refuses time and again counts as "
    "lost once you remove it"
)

T = TypeVar("T")


def twice(fs: Filesystem, look: Callable[[], T], *paths: str) -> T:
    """What ``look`` returns; where it finds the files at ``paths`` damaged, what a second look past the cache returns.
    Raises CorruptionError, FormatError, NotFoundError: what the second look raises: damage; StorageError: the storage
    refused, or a file is not there but not known to be gone."""
    try:
        return look()
    except DAMAGE:
        drop_caches(fs, paths)
    try:
        return look()
    except DAMAGE:
        for path in paths:
            if fs.size(path) is None:
                require_absent(fs, path)
        raise


def drop_caches(fs: Filesystem, paths: Iterable[str]) -> None:
    """The next read of each file comes from the storage itself."""
    for path in paths:
        if fs.size(path) is not None:
            fs.drop_cache(path)


def require_absent(fs: Filesystem, path: str) -> None:
    """Return when a file is known to be gone.

    Known means that store.json is there, and that the nearest folder above which holds anything does not list it.
    Raises StorageError: ``absence-unknown``; or the storage refused to say."""
    child = path
    while True:
        parent, _, name = child.rpartition("/")
        if parent and fs.size(parent) is not None:
            break
        names = fs.list(parent)
        if child == path and name in names:
            raise _unknown(fs, path, "its folder lists it: a link to a disk that is not mounted, or no file")
        if names or not parent:
            break
        child = parent
    if path != STORE_JSON and STORE_JSON not in fs.list(""):
        raise _unknown(fs, path, f"{STORE_JSON} is not there either; is the disk mounted?")


@contextmanager
def reading_only() -> Iterator[None]:
    """A refusal of the storage leaves the block with what to do about it; nothing may be changed in the block."""
    try:
        yield
    except StorageError as error:
        error.hint = error.hint or _HINT
        raise


def raise_refusal(error: Exception, where: str | Path, hint: str | None = None) -> None:
    """StorageError for an error of somebody else's software that is the operating system's; what speaks of the file
    itself, or is none of the system's, returns."""
    if isinstance(error, StorageError):
        raise error
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := _REFUSED.match(str(error))):
        number = int(said[1])
    if number is not None and number not in _OF_THE_FILE:
        raise storage_error(OSError(number, os.strerror(number)), str(where), hint) from error


def _unknown(fs: Filesystem, path: str, reason: str) -> StorageError:
    message = f"{fs.root}/{path} cannot be opened, but is not known to be gone: {reason}"
    return StorageError(message, kind=Kind.ABSENCE_UNKNOWN)
