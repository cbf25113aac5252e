"""The POSIX operations the local filesystem stands on, with absolute paths and OSError."""

import contextlib
import errno
import os
import stat
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

OPEN_FILES = 128


class PosixDisk:
    """One operation of the operating system per method; a crash may fall between any two.

    Files of a store never change, so open read handles are kept and shared.
    """

    def __init__(self) -> None:
        self._handles = _ReadHandles(OPEN_FILES)

    def make_folder(self, path: str) -> None:
        """mkdir; a folder that exists is no error."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def create(self, path: str) -> int:
        """A handle to a new empty file; FileExistsError when the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``."""
        done = 0
        while done < len(data):
            done += os.write(handle, data[done:])

    def write_all(self, handle: int, pieces: Sequence[memoryview]) -> None:
        """Append at most 1,024 pieces of bytes in one call."""
        done = os.writev(handle, pieces)
        if done != sum(map(len, pieces)):
            self.write(handle, memoryview(b"".join(pieces))[done:])

    def sync_file(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def link(self, source: str, target: str) -> None:
        """A second name for a file; FileExistsError when the name is taken."""
        os.link(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_folder(self, path: str) -> None:
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        """fsync of a folder: its names become durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def same_file(self, one: str, other: str) -> bool:
        """Whether two names are one file."""
        return os.path.samestat(os.lstat(one), os.lstat(other))

    def is_folder(self, path: str) -> bool:
        """Whether a real folder (no link to one) is there."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, path: str) -> list[str]:
        """Names in a folder, empty when there is none."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        with os.fdopen(_open_regular(path), "rb", buffering=0) as file:
            return file.read()

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Bytes read into buffers of bytes one after the other, fewer than they hold only at the end of the file."""
        entry = self._handles.borrow(path)
        try:
            done = os.preadv(entry.handle, buffers, offset)
            if done != sum(map(len, buffers)):
                done += _read_on(entry.handle, offset + done, buffers, done)
        finally:
            self._handles.give_back(entry)
        return done

    def free_bytes(self, path: str) -> int:
        """Bytes an unprivileged user can still write."""
        status = self._status(path)
        return status.f_bavail * status.f_frsize

    def has_inodes(self, path: str) -> bool:
        """Whether another file can be made, not counting the one that a failed try gave back; True where none count."""
        status = self._status(path)
        return not status.f_files or status.f_favail > 1

    def _status(self, path: str) -> os.statvfs_result:
        while not os.path.exists(path):
            path = os.path.dirname(path)
        return os.statvfs(path)


@dataclass(eq=False, slots=True)
class _ReadHandle:
    handle: int
    users: int = 0


class _ReadHandles:
    """Open read descriptors, least recently used closed first, never one that a thread is reading from."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, _ReadHandle] = OrderedDict()
        weakref.finalize(self, _close_all, self._open)

    def borrow(self, path: str) -> _ReadHandle:
        with self._lock:
            entry = self._open.get(path)
            if entry is None:
                entry = self._open[path] = _ReadHandle(_open_regular(path))
            self._open.move_to_end(path)
            entry.users += 1
        return entry

    def give_back(self, entry: _ReadHandle) -> None:
        with self._lock:
            entry.users -= 1
            while len(self._open) > self._limit:
                unused = next((path for path, entry in self._open.items() if entry.users == 0), None)
                if unused is None:
                    return
                os.close(self._open.pop(unused).handle)


def _read_on(handle: int, offset: int, buffers: Sequence[memoryview], filled: int) -> int:
    """Bytes read from ``offset`` on into what is left of buffers whose first ``filled`` bytes are there."""
    done, left = 0, list(buffers)
    count = filled
    while True:
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if not left:
            return done
        left[0] = left[0][count:]
        count = os.preadv(handle, left, offset + done)
        if count == 0:
            return done
        done += count


def _open_regular(path: str) -> int:
    """A read handle to a file; a pipe or device in its place would hang or never end, so it counts as absent."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return handle


def _close_all(entries: dict[str, _ReadHandle]) -> None:
    for entry in entries.values():
        with contextlib.suppress(OSError):
            os.close(entry.handle)
    entries.clear()
