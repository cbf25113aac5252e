"""The filesystem seam on a POSIX disk: publication by temporary file, fsync and link.

The algorithms stand on the few operations of ``PosixDisk``; ``tests/faults.py`` puts one in its place that crashes and
lies.
"""

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISREG

from hiddenstore.errors import (
    ConfigError,
    ConflictError,
    CorruptionError,
    HiddenstoreError,
    Kind,
    NotFoundError,
    StorageError,
)
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.fs.seam import FULL, TEMP_PREFIX, WritableFile, is_inside, storage_error

# What is appended goes to the disk in blocks, past the page cache where it can: that takes a sixth of the system's time
# that pages of the cache take, and pushes nothing else out of it (docs/design/002).
_BLOCK_BYTES = 1 << 21
_MOST_SPARE = 8
_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV}


class LocalFilesystem:
    """A folder of a POSIX filesystem. Safe to use from many threads; pickles as its root."""

    prefers_few_files = False

    def __init__(self, root: str | Path, disk: PosixDisk | None = None) -> None:
        self.root = str(Path(root).absolute()) if disk is None else str(root)
        self._disk = disk or PosixDisk()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def __reduce__(self) -> tuple[type["LocalFilesystem"], tuple[str]]:
        return LocalFilesystem, (self.root,)

    @property
    def address(self) -> str:
        return str(Path(self.root).resolve())

    def create(self, path: str) -> WritableFile:
        with self._at(path) as full:
            self._make_folders(os.path.dirname(full))
            handle = self._disk.create(full)
        return _NewFile(self, path, handle)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._at(path, needed=len(data)) as full:
            folder = os.path.dirname(full)
            temp = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(8)}"
            self._make_folders(folder)
            try:
                handle = self._disk.create(temp)
                try:
                    self._disk.write(handle, memoryview(data))
                    self._disk.note_host(handle)
                    self._disk.sync_file(handle)
                finally:
                    self._disk.close(handle)
                published = self._link(temp, full, path)
            finally:
                with contextlib.suppress(OSError):
                    self._disk.unlink(temp)
            self._sync_up(folder)
        return published

    def read(self, path: str) -> bytes:
        with self._at(path) as full:
            return self._disk.read(full)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        size = self.size(path)
        if size is not None and offset + length > size:
            raise self._short(path, offset + length, size)
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.read_scatter(path, offset, [buffer.cast("B") if buffer.ndim != 1 or buffer.format != "B" else buffer])

    def read_scatter(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        length, full = sum(map(len, buffers)), self._full(path)
        # No ``_at``: a context manager costs as much as a short read.
        try:
            count = self._disk.read_into(full, offset, buffers)
        except StorageError:
            raise
        except OSError as error:
            raise self._error(error, path, None) from error
        if count != length:
            raise self._short(path, offset + length, offset + count)

    def size(self, path: str) -> int | None:
        with self._at(path) as full:
            return self._disk.size(full)

    def list(self, folder: str) -> list[str]:
        with self._at(folder) as full:
            return sorted(self._disk.list(full))

    def drop_cache(self, path: str) -> None:
        with self._at(path) as full:
            self._disk.drop_cache(full)

    def let_go(self) -> None:
        self._disk.let_go()

    def sync_folder(self, path: str) -> None:
        with self._at(path) as full:
            self._sync_below(full)
            if full != self.root:
                self._sync_up(os.path.dirname(full))

    def remove_tree(self, path: str) -> None:
        if path in ("", "."):
            raise ValueError("remove_tree never removes the root")
        with self._at(path) as full:
            self._remove(full)

    def remove_empty(self, folder: str) -> None:
        for path in (self._full(folder), self.root):
            with contextlib.suppress(OSError):
                self._disk.remove_folder(path)

    def usage(self, path: str) -> tuple[int, float]:
        root = self.local_path(path)
        try:
            members = [root, *root.rglob("*")] if root.is_dir() else [root]
            states = [member.stat() for member in members]
        except OSError:
            return 0, 0.0
        size = sum(state.st_size for state in states if S_ISREG(state.st_mode))
        return size, max(0.0, time.time() - max(state.st_mtime for state in states))

    def free_bytes(self) -> int:
        return self._disk.free_bytes(self.root)

    def local_path(self, path: str) -> Path:
        return Path(self._full(path))

    @contextlib.contextmanager
    def local_copy(self, path: str, without: str = "") -> Iterator[Path]:
        yield self.local_path(path)

    def require_atomic_put(self) -> None:
        """``put_if_absent`` itself finds out whether there are hard links."""

    @contextlib.contextmanager
    def _at(self, path: str, needed: int | None = None) -> Iterator[str]:
        """The absolute path, for a block whose OSErrors become ours; ``needed`` bytes are to be written in it."""
        full = self._full(path)
        try:
            yield full
        except StorageError:
            raise
        except OSError as error:
            raise self._error(error, path, needed) from error

    def _full(self, path: str) -> str:
        if path in ("", "."):
            return self.root
        if not is_inside(path):
            raise ConfigError(f"path {path!r} leaves {self.root}", kind=Kind.PATH_UNSAFE)
        return f"{self.root}/{path}"

    def _make_folders(self, full: str) -> None:
        """The root and what is above it are made durable here; folders inside it by whoever publishes from them."""
        missing: list[str] = []
        while not self._disk.is_folder(full):
            missing.append(full)
            full = os.path.dirname(full)
        for folder in reversed(missing):
            self._disk.make_folder(folder)
            if len(folder) <= len(self.root):
                self._disk.sync_folder(os.path.dirname(folder))

    def _link(self, temp: str, full: str, path: str) -> bool:
        try:
            self._disk.link(temp, full)
        except FileExistsError:
            # NFS may answer EEXIST to the retry of a link whose first reply was lost.
            return self._disk.same_file(temp, full)
        except OSError as error:
            if error.errno in _NO_LINK:
                raise StorageError(
                    f"{self.root} cannot publish {path}: its filesystem has no hard links ({os.strerror(error.errno)})",
                    kind=Kind.NO_HARD_LINKS,
                    hint="put the store on a local disk, NFS, Lustre or another POSIX filesystem",
                ) from error
            raise
        return True

    def _sync_up(self, full: str) -> None:
        """A folder and its ancestors: another process may have made them and died before syncing their names."""
        self._disk.sync_folder(full)
        while full != self.root:
            full = os.path.dirname(full)
            self._disk.sync_folder(full)

    def _sync_below(self, full: str) -> None:
        for name in sorted(self._disk.list(full)):
            child = f"{full}/{name}"
            if self._disk.is_folder(child):
                self._sync_below(child)
        self._disk.sync_folder(full)

    def _remove(self, full: str) -> None:
        if self._disk.is_folder(full):
            for name in sorted(self._disk.list(full)):
                self._remove(f"{full}/{name}")
            # Somebody else may sweep the same folder.
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove_folder(full)
        else:
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(full)

    def _short(self, path: str, expected: int, size: int) -> CorruptionError:
        message = f"{self.root}/{path} is too short: expected {expected} bytes, found {size}"
        return CorruptionError(message, kind=Kind.FILE_SHORT, path=path)

    def _error(self, error: OSError, path: str, needed: int | None) -> HiddenstoreError:
        where = f"{self.root}/{path}" if path else self.root
        if isinstance(error, FileNotFoundError):
            return NotFoundError(f"{where} does not exist", kind=Kind.PATH_MISSING)
        if isinstance(error, FileExistsError):
            return ConflictError(f"{where} exists already", kind=Kind.FILE_EXISTS)
        if error.errno not in FULL:
            return storage_error(error, where)
        # A failed try has given one back.
        if self._disk.free_files(self.root) in (0, 1):
            hint = "remove some files, or use a disk with more inodes; --container webdataset writes fewer files"
            message = f"no room for another file while writing {where}: all inodes of its disk are used"
            return StorageError(message, kind=Kind.INODES_USED_UP, hint=hint)
        lacking = f"needs {needed:,} more bytes, " if needed is not None else ""
        room = f": {lacking}{self._disk.free_bytes(self.root):,} bytes free"
        hint = "free some space and run the same command again: what is committed stays"
        return storage_error(error, where, hint, room)


class _NewFile:
    """Pieces wait in a block of memory until it is full. Nobody knows what a write that failed has left, so nothing
    can follow it."""

    def __init__(self, filesystem: LocalFilesystem, path: str, handle: int) -> None:
        self._fs, self._path = filesystem, path
        self._handle: int | None = handle
        self._block: memoryview | None = None
        self._filled = 0
        self._is_direct: bool | None = None
        self._is_broken = False

    def write(self, data: bytes | memoryview) -> None:
        view, handle = memoryview(data).cast("B"), self._open_handle()
        with self._fs._at(self._path, needed=self._filled + len(view)):
            self._put_rest(handle)
            self._put(handle, view)

    def append(self, data: bytes | memoryview) -> None:
        view, handle = memoryview(data).cast("B"), self._open_handle()
        # No ``_at``, as in ``read_scatter``.
        try:
            self._gather(handle, view)
        except StorageError:
            raise
        except OSError as error:
            raise self._fs._error(error, self._path, max(self._filled, len(view))) from error

    def close(self) -> None:
        if self._handle is None:
            return
        with self._fs._at(self._path, needed=self._filled or None):
            try:
                handle = self._open_handle()
                self._put_rest(handle)
                self._fs._disk.sync_file(handle)
            finally:
                self._end()

    def abort(self) -> None:
        with contextlib.suppress(OSError):
            self._end()
            self._fs._disk.unlink(self._fs._full(self._path))

    def _open_handle(self) -> int:
        assert self._handle is not None, "write after close"
        if self._is_broken:
            where = f"{self._fs.root}/{self._path}"
            raise StorageError(f"{where} is not whole: a write before this one failed", kind=Kind.IO_ERROR)
        return self._handle

    def _gather(self, handle: int, piece: memoryview) -> None:
        if self._block is None:
            self._block = _free_block()
        block, done, size = self._block, 0, len(piece)
        while done < size:
            taken = min(size - done, _BLOCK_BYTES - self._filled)
            block[self._filled : self._filled + taken] = piece[done : done + taken]
            self._filled += taken
            done += taken
            if self._filled == _BLOCK_BYTES:
                if self._is_direct is None:
                    self._is_direct = self._fs._disk.begin_direct(handle)
                self._put(handle, block)
                self._filled = 0

    def _put_rest(self, handle: int) -> None:
        """What waits goes through the page cache, as does what comes after it: it ends on no page."""
        if self._is_direct:
            self._fs._disk.end_direct(handle)
        self._is_direct = False
        if self._block is not None and self._filled:
            self._put(handle, self._block[: self._filled])
            self._filled = 0

    def _put(self, handle: int, data: memoryview) -> None:
        self._is_broken = True
        self._fs._disk.write(handle, data)
        self._is_broken = False

    def _end(self) -> None:
        block, handle = self._block, self._handle
        self._block = self._handle = None
        if block is not None:
            _SPARE.append(block)
        if handle is not None:
            self._fs._disk.close(handle)


_SPARE: deque[memoryview] = deque(maxlen=_MOST_SPARE)


def _free_block() -> memoryview:
    """Memory that begins on a page and nothing else uses, of any content."""
    try:
        return _SPARE.pop()
    except IndexError:
        # Private: a block of a parent is none of its children's.
        return memoryview(mmap.mmap(-1, _BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
