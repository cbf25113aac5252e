"""One writer a folder: a lock that dies with its process, in a file that says which process it is.

Several ranks of one run are one writer: rank 0 takes the lock for all. Readers need none.
"""

import json
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from hiddenstore.console.output import output
from hiddenstore.errors import ConflictError, Kind
from hiddenstore.fs.disk import lock
from hiddenstore.fs.seam import storage_errors

WRITER = ".writer"
_ANOTHER_RUN = "wait for it or stop it, or start another run with another -o"


class FolderLock:
    """The right to write one folder, a run's where ``what`` names no other, given back at the end of the block.
    ``take`` is asked for it once the folder exists; the file of the lock goes when the lock does. ``hint``: what to do
    about another process that has it."""

    def __init__(self, folder: Path, what: str = "run", hint: str = _ANOTHER_RUN) -> None:
        self.path, self._what, self._hint = folder / WRITER, what, hint
        self._handle: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the folder free, where this process has it."""
        if self._handle is not None:
            # Removed before it is unlocked, so that nobody else's is; in a folder that was made anew it is somebody's.
            if _is_at(self.path, self._handle):
                self.path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def take(self) -> None:
        """Lock the folder; nothing where this process has it. Raises ConflictError: ``run-in-use``, naming process and
        machine; StorageError: the disk refused."""
        while self._handle is None:
            with storage_errors(self.path):
                handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    self._lock(handle)
                    # Whoever had it may have removed the file in between: then the lock is on nothing.
                    if _is_at(self.path, handle):
                        self._sign(handle)
                        self._handle = handle
                finally:
                    if self._handle is None:
                        os.close(handle)

    def _sign(self, handle: int) -> None:
        try:
            os.truncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError:
            self.path.unlink(missing_ok=True)
            raise

    def _lock(self, handle: int) -> None:
        folder = self.path.parent
        try:
            lock_or_warn(handle, folder)
        except BlockingIOError as error:
            raise ConflictError(
                f"{folder} is being written by {_holder(handle)}: one process at a time writes a {self._what}",
                kind=Kind.RUN_IN_USE,
                hint=self._hint,
            ) from error


def lock_or_warn(handle: int, folder: Path) -> None:
    """``lock`` an open file or folder for who writes ``folder``; a warning on a filesystem without locks. Raises as
    ``lock``."""
    if not lock(handle):
        output().warn(f"{folder} lies on a filesystem without locks: nothing keeps a second process out of it")


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _holder(handle: int) -> str:
    """``process 123 on host``; the writer's own words may not be there yet."""
    try:
        words = json.loads(os.pread(handle, 4096, 0))
        return f"process {words['pid']} on {words['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
