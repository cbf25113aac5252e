"""Errors of others in our words: click's usage errors, the operating system's refusals, and our own bugs."""

import errno
import os
import platform
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import click

from hiddenstore.errors import ConfigError, HiddenstoreError, InterruptError, Kind, NotFoundError, StorageError

INTERRUPTED_EXIT = 75
RUN_AGAIN = "run the same command again"
PIPE_EXIT = 141

_NO_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "failed to map segment",
    "cannot map zero-fill pages",
    "cannot allocate memory",
    "std::bad_alloc",
)
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_OS_KINDS = {
    errno.EIO: Kind.IO_ERROR,
    errno.ESTALE: Kind.IO_ERROR,
    errno.EMFILE: Kind.TOO_MANY_OPEN_FILES,
    errno.ENFILE: Kind.TOO_MANY_OPEN_FILES,
    errno.ENOMEM: Kind.OUT_OF_MEMORY,
    errno.ETIMEDOUT: Kind.IO_ERROR,
    errno.ECONNREFUSED: Kind.IO_ERROR,
    errno.ECONNRESET: Kind.IO_ERROR,
    errno.ENOTDIR: Kind.PATH_INVALID,
    # A folder was to be made where a file is.
    errno.EEXIST: Kind.PATH_INVALID,
    errno.EISDIR: Kind.PATH_INVALID,
    errno.ENAMETOOLONG: Kind.PATH_INVALID,
}


def usage_error(error: click.ClickException) -> ConfigError:
    """A click error as ours; it names the command whose ``--help`` tells more."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hiddenstore"
    message = error.format_message().rstrip(".")
    if message[1:2].islower():
        # Not RUN, which is the name of an argument.
        message = message[0].lower() + message[1:]
    return ConfigError(message, kind=Kind.USAGE, hint=f"{command} --help")


def as_hiddenstore_error(error: Exception, arguments: Sequence[str]) -> HiddenstoreError:
    """Our errors as they are; the operating system's with a kind; anything else is a bug and leaves a log file."""
    if isinstance(error, InterruptError) and error.hint is None:
        error.hint = RUN_AGAIN
    if isinstance(error, HiddenstoreError):
        return error
    if isinstance(error, FileNotFoundError) and error.filename:
        return NotFoundError(f"{error.filename} does not exist", kind=Kind.PATH_MISSING)
    if isinstance(error, OSError) and error.errno in _STORAGE:
        from hiddenstore.fs.seam import storage_error

        return storage_error(error, str(error.filename or "the disk"))
    if isinstance(error, OSError) and error.errno in _OS_KINDS:
        where = f" ({error.filename})" if error.filename else ""
        return StorageError(f"{error.strerror}{where}", kind=_OS_KINDS[error.errno])
    if _is_out_of_memory(error):
        first = (str(error).splitlines() or ["no memory left"])[0]
        return StorageError(f"out of memory: {first}", kind=Kind.OUT_OF_MEMORY, hint="use smaller batches")
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        message = "the system starts no more threads for this user or container"
        return StorageError(message, kind=Kind.TOO_MANY_THREADS, hint="ulimit -u; export OMP_NUM_THREADS=1")
    return _bug(error, arguments)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    # torch has a class for a full GPU, and none for a full machine; the loader of libraries has no class.
    return isinstance(error, RuntimeError | ImportError) and any(words in str(error).lower() for words in _NO_MEMORY)


def _bug(error: Exception, arguments: Sequence[str]) -> HiddenstoreError:
    try:
        log = str(write_crash_log(error, arguments))
    except OSError as failure:
        log = f"not written ({failure.strerror}); run again with -v"
    first = (str(error).splitlines() or [""])[0]
    problem = f"this is a bug: {type(error).__name__}: {first}\ntraceback: {log}"
    return HiddenstoreError(problem, kind=Kind.INTERNAL, hint="report it with that file attached")


def write_crash_log(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the traceback and the versions of this machine to a new file in the temporary folder; its path."""
    versions = [f"{name} {_version(name)}" for name in ("hiddenstore", "torch", "transformers", "zarr", "numpy")]
    lines = [
        f"hiddenstore {' '.join(arguments)}",
        f"python {platform.python_version()} on {platform.platform()}; {', '.join(versions)}",
        "",
        *traceback.format_exception(error),
    ]
    descriptor, path = tempfile.mkstemp(prefix="hiddenstore-error-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
        log.write("\n".join(lines))
    return Path(path)


def _version(name: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
