"""The seam to storage: everything a store asks of a filesystem; how addresses of object storage read.

Paths are posix strings relative to the root. Two promises carry the store: ``create`` never replaces anything, and
after ``put_if_absent`` returned, the name holds exactly the given bytes and survives a power loss.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from hiddenstore.errors import ConfigError, Kind, StorageError

TEMP_PREFIX = ".tmp-"

FULL = {errno.ENOSPC, errno.EDQUOT}
"""Error numbers of a disk without room."""
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

CREDENTIALS = "credentials come from the environment or the provider's own chain, see docs/object-storage.md"
_ADDRESS = re.compile(r"(s3|gs|az)://([A-Za-z0-9][A-Za-z0-9._-]{1,254})((?:/[^/?#]+)*)/*")


class WritableFile(Protocol):
    """A new file; readers believe its bytes only once a commit record names them."""

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``; StorageError when the disk refuses."""

    def append(self, data: bytes | memoryview) -> None:
        """The same of a piece of much, copied here: it may wait in memory until a later call, which then raises what
        the disk refuses, and need not stay in the page cache."""

    def close(self) -> None:
        """Make the bytes durable and close; StorageError when the disk refuses."""

    def abort(self) -> None:
        """Close and remove the file."""


@runtime_checkable
class Filesystem(Protocol):
    """Everything a store asks of storage."""

    root: str
    prefers_few_files: bool
    """Whether every file costs so much that the container with the fewest is the default."""

    @property
    def address(self) -> str:
        """The root as every process names it: two of one address are one place."""

    def create(self, path: str) -> WritableFile:
        """A new file and its parent folders; ConflictError ``file-exists`` when the name is taken."""

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Publish ``data`` under ``path`` whole, durable and atomic; False when the name exists."""

    def read(self, path: str) -> bytes:
        """All bytes; NotFoundError ``path-missing`` when absent."""

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes; CorruptionError ``file-short`` when the file ends before."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` exactly; CorruptionError ``file-short`` when the file ends before."""

    def read_scatter(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill at most 1,024 buffers of bytes one after the other; CorruptionError ``file-short`` as above."""

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none."""

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted; empty when the folder is absent."""

    def drop_cache(self, path: str) -> None:
        """Let the next read of a file come from the storage itself, as far as it can be told to."""

    def let_go(self) -> None:
        """Close what is open between reads; what is read after that opens it again."""

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder, in the folders below it and in its ancestors durable."""

    def remove_tree(self, path: str) -> None:
        """Remove a file or a folder with everything in it; an absent one is no error."""

    def remove_empty(self, folder: str) -> None:
        """Remove a folder and the root where nothing is in them."""

    def usage(self, path: str) -> tuple[int, float]:
        """Bytes below a path and seconds since anything in it changed; 0 seconds where the storage cannot say."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where there is no end."""

    def local_path(self, path: str) -> Path:
        """Where a file or folder lies on this machine; ConfigError ``store-remote`` where it does not."""

    def local_copy(self, path: str, without: str = "") -> AbstractContextManager[Path]:
        """A file or folder for software that reads local paths; a copy of what is elsewhere ends with the block.

        Nobody needs the files of a folder whose names end with ``without``: they are not copied.
        """

    def require_atomic_put(self) -> None:
        """StorageError ``no-atomic-put`` where ``put_if_absent`` cannot keep its promise."""


def storage_error(error: OSError, where: str, hint: str | None = None, room: str = "") -> StorageError:
    """A refusal of the operating system as ours: ``disk-full``, ``permission-denied`` or ``io-error``.

    ``room`` says how much a full disk lacks.
    """
    if isinstance(error, StorageError):
        return error
    reason = os.strerror(error.errno) if error.errno else str(error)
    if error.errno in FULL:
        message = f"disk full while writing {where}{room} ({reason})"
        return StorageError(message, kind=Kind.DISK_FULL, hint=hint or "free some space and run the same command again")
    kind = Kind.PERMISSION_DENIED if error.errno in _DENIED else Kind.IO_ERROR
    return StorageError(f"{where}: {reason}", kind=kind, hint=hint)


@contextmanager
def storage_errors(where: str | Path, hint: str | None = None) -> Iterator[None]:
    """What the operating system refuses in the block, raised as ``storage_error`` says it."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, str(where), hint) from error


def is_temporary(name: str) -> bool:
    """Whether a name is one that an interrupted ``put_if_absent`` leaves behind: garbage, never content."""
    return name.startswith(TEMP_PREFIX)


@lru_cache(maxsize=1 << 14)
def is_inside(path: str) -> bool:
    """Whether a relative posix path stays below the folder it is relative to, by its text alone."""
    is_plain = path.isprintable() and "\\" not in path and ":" not in path
    return is_plain and not {"", ".", ".."} & set(path.split("/"))


def is_address(location: object) -> bool:
    """Whether a location is written as a URL, of whatever scheme; of ours with one slash too, as a Path leaves it."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|(s3|gs|az|hf):/", str(location)) is not None


def parse_address(text: str) -> tuple[str, str, str]:
    """Scheme, bucket and prefix of an address. Raises ConfigError: ``scheme-unsupported``; ``address-invalid``: user,
    password or query, or no bucket. Neither is quoted: it may be a secret."""
    scheme = text.partition(":/")[0]
    if scheme not in ("s3", "gs", "az"):
        raise ConfigError(
            f"{scheme}:// cannot be opened: expected a local path, s3://, gs:// or az://", kind=Kind.SCHEME_UNSUPPORTED
        )
    match = _ADDRESS.fullmatch(text)
    if match is None or not is_inside(match[3][1:] or "x"):
        raise ConfigError(
            f"{scheme}://… is no address of a bucket: expected {scheme}://BUCKET/PATH without user, password or query",
            kind=Kind.ADDRESS_INVALID,
            hint=CREDENTIALS,
        )
    return scheme, match[2], match[3][1:]
