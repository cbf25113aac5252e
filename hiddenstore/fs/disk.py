"""The POSIX operations the local filesystem stands on, with absolute paths and OSError.

What lies behind a link to nowhere is out of reach, not absent: a disk that is not mounted looks like that. Operations
that would call it absent raise StorageError ``absence-unknown``.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import stat
import sys
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import count

from hiddenstore.errors import Kind, StorageError
from hiddenstore.threads import Lock

OPEN_FILES = 512
"""Most read descriptors that a process keeps open between reads, over all its stores."""
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
_HOST = "user.hiddenstore.host"
_O_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
# ext4 and xfs by the first word of Linux's statfs. Others have reasons of their own to keep a cache: a network, a
# checksum, a compression; and to some each write past it is a round trip.
_DIRECT_FILESYSTEMS = {0xEF53, 0x58465342}
_STATFS_BYTES = 512
# Through the cache, calls that end at multiples of this give it large pages: cheaper to write, and to read later. Pages
# of 1 MiB and more cost twice as much on a virtual machine whose host takes free memory of that size back.
_CACHED_BYTES = 1 << 19


class PosixDisk:
    """One operation of the operating system per method; a crash may fall between any two.

    Files of a store never change, so open read handles are kept, as many as the whole process may.
    """

    def __init__(self) -> None:
        self._owner = next(_OWNERS)
        weakref.finalize(self, _HANDLES.close_all, self._owner)

    def make_folder(self, path: str) -> None:
        """mkdir; a folder that exists is no error."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
            return
        if not os.path.isdir(path):
            require_whole_links(path)
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def create(self, path: str) -> int:
        """A handle to a new empty file; FileExistsError when the name is taken."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> None:
        """Append all of ``data``."""
        done, most = 0, len(data) if _is_direct(handle) else _CACHED_BYTES
        while done < len(data):
            try:
                done += os.write(handle, data[done : done + most])
            except OSError as error:
                # Past the cache goes what begins and ends on a sector, which the rest of a short write may not.
                if error.errno != errno.EINVAL or not self.end_direct(handle):
                    raise
                most = _CACHED_BYTES

    def begin_direct(self, handle: int) -> bool:
        """Append past the page cache from here on, where memory and file position are at whole pages; whether the
        filesystem is one that gains by it."""
        if not _O_DIRECT or not _is_of(handle, _DIRECT_FILESYSTEMS):
            return False
        with contextlib.suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | _O_DIRECT)
            return True
        return False

    def end_direct(self, handle: int) -> bool:
        """Append through the page cache again; whether it was not so."""
        was_direct = _is_direct(handle)
        if was_direct:
            fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_O_DIRECT)
        return was_direct

    def sync_file(self, handle: int) -> None:
        os.fsync(handle)

    def note_host(self, handle: int) -> None:
        """Name this machine in an extended attribute, beside the bytes of a file; nothing where there are none."""
        with contextlib.suppress(OSError, AttributeError):
            os.setxattr(handle, _HOST, os.uname().nodename.encode())

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
        except NotADirectoryError:
            return None
        except FileNotFoundError:
            require_whole_links(path)
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def list(self, path: str) -> list[str]:
        """Names in a folder, empty when there is none."""
        try:
            return os.listdir(path)
        except FileNotFoundError:
            require_whole_links(path)
            return []

    def read(self, path: str) -> bytes:
        """All bytes of a file."""
        return read_whole(path)

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Bytes read into buffers of bytes one after the other, fewer than they hold only at the end of the file."""
        entry = _HANDLES.of(self._owner, path)
        done = os.preadv(entry.handle, buffers, offset)
        if done != sum(map(len, buffers)):
            done += _read_on(entry.handle, offset + done, buffers, done)
        return done

    def drop_cache(self, path: str) -> None:
        """Forget what is open and cached of a file; opening it anew also asks a network's server for its size."""
        _HANDLES.forget(self._owner, path)
        handle = _open_regular(path)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)

    def let_go(self) -> None:
        """Close every read handle, once no thread reads from it."""
        _HANDLES.close_all(self._owner)

    def free_bytes(self, path: str) -> int:
        """Bytes an unprivileged user can still write."""
        status = _disk_status(path)
        return status.f_bavail * status.f_frsize

    def free_files(self, path: str) -> int | None:
        """Files an unprivileged user can still make; None where the filesystem does not count them."""
        status = _disk_status(path)
        return status.f_favail if status.f_files else None


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """All bytes of a file. A pipe, device or folder in its place counts as absent. Raises OSError; StorageError
    ``absence-unknown``: a link to nowhere."""
    with os.fdopen(_open_regular(os.fspath(path)), "rb", buffering=0) as file:
        return file.read()


def lock(handle: int, *, waits: bool = False) -> bool:
    """Lock an open file or folder until it is closed; False on a filesystem without locks. Raises BlockingIOError:
    another process has it, unless this one ``waits``; OSError: the disk refused."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def host_of(path: str) -> str:
    """The machine that ``note_host`` named; empty where that is not known: a copy by other programs, a filesystem or
    system without extended attributes. Anybody can write it: it is shown, never believed."""
    with contextlib.suppress(OSError, AttributeError):
        return os.getxattr(path, _HOST).decode("utf-8", "replace")
    return ""


class _ReadHandle:
    """An open read descriptor, closed with the last reference: a thread that reads from it has one."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.handle)


class _ReadHandles:
    """Open read descriptors of the whole process, the least recently used dropped first.

    Each belongs to an owner: a folder that was removed and made anew has new files under old names.
    """

    def __init__(self) -> None:
        # Not reentrant: ``close_all`` may come while this thread has it.
        self._lock = Lock(threading.Lock)
        self._open: OrderedDict[tuple[int, str], _ReadHandle] = OrderedDict()
        self._gone: deque[int] = deque()

    def of(self, owner: int, path: str) -> _ReadHandle:
        with self._lock:
            entry = self._open.get((owner, path))
            if entry is None:
                entry = self._open[owner, path] = _ReadHandle(self._opened(path))
                # To ask the system at every read costs as much as a short one.
                most = _most_open()
                while len(self._open) > most:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end((owner, path))
            if self._gone:
                self._close_gone()
        return entry

    def forget(self, owner: int, path: str) -> None:
        """Close the descriptor of a file, once no thread reads from it."""
        with self._lock:
            self._open.pop((owner, path), None)

    def close_all(self, owner: int) -> None:
        """Close what an owner has open that lets go or is dead; a collection of garbage may call this while this thread
        has the lock."""
        self._gone.append(owner)
        if self._lock.acquire_at_once():
            try:
                self._close_gone()
            finally:
                self._lock.release()

    def _close_gone(self) -> None:
        while self._gone:
            owner = self._gone.popleft()
            for name in [name for name in self._open if name[0] == owner]:
                del self._open[name]

    def _opened(self, path: str) -> int:
        try:
            return _open_regular(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self._open.clear()
            return _open_regular(path)


_HANDLES = _ReadHandles()
_OWNERS = count()


def _most_open() -> int:
    """How many descriptors stay open: a quarter of what the process may have, so that others find room."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else min(OPEN_FILES, soft // 4)


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


def _is_direct(handle: int) -> bool:
    return _O_DIRECT != 0 and fcntl.fcntl(handle, fcntl.F_GETFL) & _O_DIRECT != 0


def _is_of(handle: int, filesystems: Collection[int]) -> bool:
    """Whether a file is on one of these filesystems; False where the system cannot say."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    try:
        failed = ctypes.CDLL(None).fstatfs(handle, status)
    except (OSError, AttributeError):
        return False
    return not failed and ctypes.c_long.from_buffer(status).value in filesystems


def _disk_status(path: str) -> os.statvfs_result:
    """Of the disk that holds a path, or will."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return os.statvfs(path)


def _open_regular(path: str) -> int:
    """A read handle to a file; a pipe or device in its place would hang or never end, so it counts as absent."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        require_whole_links(path)
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return handle


def require_whole_links(path: str) -> None:
    """Return where a path that does not exist leads over no link to nowhere; StorageError ``absence-unknown``."""
    nearest = os.path.abspath(path)
    while not os.path.lexists(nearest):
        nearest = os.path.dirname(nearest)
    if os.path.islink(nearest) and not os.path.exists(nearest):
        raise StorageError(
            f"{path} cannot be opened, but is not known to be gone: {nearest} is a link to {os.readlink(nearest)}, "
            "which does not exist; is its disk mounted?",
            kind=Kind.ABSENCE_UNKNOWN,
        )
