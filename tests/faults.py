"""The fault-injecting twin of the filesystem seam: the same algorithms over a disk that crashes, forgets and fills up.

``FaultDisk`` keeps files in memory and, beside what a running process sees, what a power loss would leave: bytes since
the last fsync of a file and names since the last fsync of their folder may be kept, dropped or torn. Every operation
that changes the disk has a number; a ``Fault`` strikes at one of them.

>>> fs = FaultFilesystem(Fault(at=3, kind="crash", moment="half"))
>>> try:
...     fs.put_if_absent("commits/a.json", b"x" * 2000)
... except SimulatedCrash:
...     fs = fs.after_crash("torn", "kept")
>>> fs.size("commits/a.json") is None
True
"""

import errno
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, Literal

from hiddenstore.errors import Kind, StorageError
from hiddenstore.fs.disk import PosixDisk
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.testing.suite import SimulatedCrash
from hiddenstore.testing.workload import Backend

ROOT = "/fault/store"
SECTOR_BYTES = 512

Data = Literal["kept", "dropped", "torn"]
Names = Literal["kept", "dropped"]
FaultKind = Literal["crash", "enospc", "eio", "exists", "reply-lost"]
Moment = Literal["before", "half", "after"]

SURVIVALS: tuple[tuple[Data, Names], ...] = tuple(product(("kept", "dropped", "torn"), ("kept", "dropped")))

_ERRNO = {"enospc": errno.ENOSPC, "eio": errno.EIO, "exists": errno.EEXIST}


@dataclass(frozen=True)
class Fault:
    """What goes wrong at operation ``at`` (counted from 0).

    ``half`` lets a write put down half of its bytes; other operations are atomic and count as not done. ``exists``
    performs a link and answers EEXIST, as NFS does when the first reply was lost; ``reply-lost`` performs the complete
    put-if-absent number ``at`` and raises StorageError ``reply-lost``, as an object store does on a timeout.
    """

    at: int
    kind: FaultKind = "crash"
    moment: Moment = "before"


@dataclass(frozen=True)
class ReadFault:
    """Read number ``at`` (counted from 0) fails once with an error number; ENOENT answers that nothing is there."""

    at: int
    error: int = errno.EIO


@dataclass(eq=False)
class _File:
    """``data`` as a process sees it, ``durable`` as of the last fsync."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""

    def survivor(self, data: Data) -> "_File":
        """Torn: the first half of what was not synced, in full sectors, then zeros up to the length written."""
        content = bytes(self.data)
        if data == "dropped":
            content = self.durable
        elif data == "torn" and content != self.durable:
            start = len(self.durable)
            end = start + (len(content) - start) // 2 // SECTOR_BYTES * SECTOR_BYTES
            content = content[:end] + bytes(len(content) - end)
        return _File(bytearray(content), content)


@dataclass(eq=False)
class _Folder:
    """``names`` as a process sees them, ``durable`` as of the last fsync of the folder."""

    names: "dict[str, _File | _Folder]" = field(default_factory=dict)
    durable: "dict[str, _File | _Folder]" = field(default_factory=dict)

    def survivor(self, data: Data, names: Names, files: dict[int, _File]) -> "_Folder":
        """The folder after a power loss, all of it durable; ``files`` keeps a file of two names one file."""
        survivors: dict[str, _File | _Folder] = {}
        for name, node in (self.names if names == "kept" else self.durable).items():
            if isinstance(node, _Folder):
                survivors[name] = node.survivor(data, names, files)
            else:
                survivors[name] = files.setdefault(id(node), node.survivor(data))
        return _Folder(survivors, dict(survivors))

    def walk(self, prefix: str) -> Iterator[tuple[str, bytes]]:
        """Every file below the folder by path; empty folders end with a slash."""
        for name, node in sorted(self.names.items()):
            if isinstance(node, _File):
                yield f"{prefix}/{name}", bytes(node.data)
            elif node.names:
                yield from node.walk(f"{prefix}/{name}")
            else:
                yield f"{prefix}/{name}/", b""


class FaultDisk(PosixDisk):
    """Every operation of a ``PosixDisk``, in memory.

    ``operations`` lists what was done so far, ``capacity`` bounds the bytes it holds. ``observer`` is called at every
    moment a crash could fall on, so that one run shows all of them: before each operation and half-way through a write.

    ``reads`` lists what was asked of it, and ``read_fault`` strikes there. ``cached`` are bytes by path that reads give
    in place of what the disk holds, until the cache of the file is dropped: a page gone bad in memory.
    """

    def __init__(self, fault: Fault | None = None, capacity: int | None = None) -> None:
        self.operations: list[str] = []
        self.reads: list[str] = []
        self.read_fault: ReadFault | None = None
        self.cached: dict[str, bytes] = {}
        self.fault = fault
        self.capacity = capacity
        self.observer: Callable[[], None] | None = None
        self._root = _Folder()
        self._open: dict[int, _File] = {}
        self._handles = count(1)
        self._dead = False
        self._make_durable_parents(f"{ROOT}/x")

    def survivor(self, data: Data, names: Names) -> "FaultDisk":
        """The disk after the machine went down now and came up again; everything on it is durable."""
        disk = FaultDisk(capacity=self.capacity)
        disk._root = self._root.survivor(data, names, {})
        return disk

    def state(self) -> bytes:
        """Bytes that are equal for equal visible contents."""
        return b"".join(b"%s\0%d\0%s" % (path.encode(), len(file), file) for path, file in self.files().items())

    def files(self) -> dict[str, bytes]:
        """Every file by absolute path, as a running process sees it; empty folders end with a slash."""
        return dict(self._root.walk(""))

    def overwrite(self, path: str, data: bytes | None) -> None:
        """Damage behind the store's back: give a file other bytes, add it, or remove it with None."""
        self._make_durable_parents(path)
        folder, name = self._parent(path)
        if data is None:
            del folder.names[name]
        else:
            folder.names[name] = folder.durable[name] = _File(bytearray(data), data)

    @property
    def is_quiet(self) -> bool:
        """Whether no file is being written."""
        return not self._open

    def become(self, other: "FaultDisk") -> None:
        """Hold what another disk holds; no file may be open."""
        self._root = other.survivor("kept", "kept")._root

    def make_folder(self, path: str) -> None:
        with self._operation(f"make_folder {path}"):
            folder, name = self._parent(path)
            folder.names.setdefault(name, _Folder())

    def create(self, path: str) -> int:
        with self._operation(f"create {path}"):
            folder, name = self._parent(path)
            if name in folder.names:
                raise _error(errno.EEXIST, path)
            file = folder.names[name] = _File()
            handle = next(self._handles)
            self._open[handle] = file
            return handle

    def write(self, handle: int, data: memoryview) -> None:
        file = self._open[handle].data
        with self._operation(f"write {len(data)} bytes", file, data[: len(data) // 2]):
            room = len(data) if self.capacity is None else max(0, self.capacity - self.used())
            file.extend(data[:room])
            if len(data) > room:
                raise _error(errno.ENOSPC)

    def begin_direct(self, handle: int) -> bool:
        self._require_alive()
        return True

    def end_direct(self, handle: int) -> bool:
        self._require_alive()
        return True

    def sync_file(self, handle: int) -> None:
        with self._operation("sync_file"):
            file = self._open[handle]
            file.durable = bytes(file.data)

    def note_host(self, handle: int) -> None:
        self._require_alive()

    def close(self, handle: int) -> None:
        self._require_alive()
        del self._open[handle]

    def link(self, source: str, target: str) -> None:
        with self._operation(f"link {target}"):
            folder, name = self._parent(target)
            if name in folder.names:
                raise _error(errno.EEXIST, target)
            folder.names[name] = self._file(source)

    def unlink(self, path: str) -> None:
        with self._operation(f"unlink {path}"):
            folder, name = self._parent(path)
            if name not in folder.names:
                raise _error(errno.ENOENT, path)
            del folder.names[name]

    def remove_folder(self, path: str) -> None:
        with self._operation(f"remove_folder {path}"):
            folder, name = self._parent(path)
            gone = folder.names.get(name)
            if gone is None:
                raise _error(errno.ENOENT, path)
            if not isinstance(gone, _Folder) or gone.names:
                raise _error(errno.ENOTEMPTY)
            del folder.names[name]

    def sync_folder(self, path: str) -> None:
        with self._operation(f"sync_folder {path}"):
            folder = self._folder(path)
            folder.durable = dict(folder.names)

    def same_file(self, one: str, other: str) -> bool:
        return self._find(one) is self._find(other)

    def is_folder(self, path: str) -> bool:
        return isinstance(self._find(path), _Folder)

    def size(self, path: str) -> int | None:
        node = self._find(path)
        if self._read_fails("size", path):
            return None
        return len(node.data) if isinstance(node, _File) else None

    def list(self, path: str) -> list[str]:
        node = self._find(path)
        if self._read_fails("list", path):
            return []
        return list(node.names) if isinstance(node, _Folder) else []

    def read(self, path: str) -> bytes:
        return bytes(self._seen("read", path))

    def drop_cache(self, path: str) -> None:
        self._seen("drop_cache", path)
        self.cached.pop(path, None)

    def let_go(self) -> None:
        """Nothing is open."""

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        data, done = memoryview(self._seen("read_into", path))[offset:], 0
        for buffer in buffers:
            block = data[done : done + len(buffer)]
            buffer[: len(block)] = block
            done += len(block)
        return done

    def free_bytes(self, path: str) -> int:
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used())

    def free_files(self, path: str) -> None:
        return None

    def used(self) -> int:
        """Bytes of all files."""
        return sum(map(len, self.files().values()))

    def _seen(self, name: str, path: str) -> bytes | bytearray:
        """What a read of a file gives."""
        data = self._file(path).data
        if self._read_fails(name, path):
            raise _error(errno.ENOENT, path)
        return self.cached.get(path, data)

    def _read_fails(self, name: str, path: str) -> bool:
        """Counts one read; whether it finds nothing there. Raises the fault that strikes."""
        strikes = self.read_fault is not None and self.read_fault.at == len(self.reads)
        self.reads.append(f"{name} {path}")
        if not strikes or self.read_fault is None:
            return False
        if self.read_fault.error == errno.ENOENT:
            return True
        raise _error(self.read_fault.error, path)

    @contextmanager
    def _operation(self, name: str, file: bytearray | None = None, half: memoryview | None = None) -> Iterator[None]:
        """Counts one operation and lets the fault strike before, in the middle of or after it; half-way through a
        write ``file`` has got ``half`` of the bytes."""
        self._require_alive()
        if self.observer is not None:
            self.observer()
        # An observer may have taken itself off.
        if self.observer is not None and file is not None and half is not None:
            length = len(file)
            file.extend(half)
            self.observer()
            del file[length:]
        fault = self.fault if self.fault is not None and self.fault.kind != "reply-lost" else None
        strikes = fault is not None and fault.at == len(self.operations)
        self.operations.append(name)
        if strikes and fault is not None and fault.kind != "exists" and fault.moment != "after":
            if fault.moment == "half" and file is not None and half is not None:
                file.extend(half)
            self._strike(fault, name)
        yield
        if strikes and fault is not None:
            self._strike(fault, name)

    def _strike(self, fault: Fault, name: str) -> None:
        if fault.kind == "crash":
            self._dead = True
            raise SimulatedCrash(f"crash {fault.moment} operation {fault.at}: {name}")
        raise _error(_ERRNO[fault.kind])

    def _require_alive(self) -> None:
        if self._dead:
            raise SimulatedCrash

    def _find(self, path: str) -> _File | _Folder | None:
        self._require_alive()
        node: _File | _Folder | None = self._root
        for name in path.strip("/").split("/") if path.strip("/") else ():
            node = node.names.get(name) if isinstance(node, _Folder) else None
        return node

    def _file(self, path: str) -> _File:
        node = self._find(path)
        if not isinstance(node, _File):
            raise _error(errno.ENOENT, path)
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._find(path)
        if not isinstance(node, _Folder):
            raise _error(errno.ENOENT, path)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def _make_durable_parents(self, path: str) -> None:
        folder = self._root
        for name in path.strip("/").split("/")[:-1]:
            if name not in folder.names:
                folder.names[name] = folder.durable[name] = _Folder()
            node = folder.names[name]
            assert isinstance(node, _Folder)
            folder = node


class SleepyDisk(PosixDisk):
    """A disk as a process sees it that sleeps before its operation ``at`` (counted from 0, reads too): ``meanwhile`` is
    what others do until it wakes. ``operation`` is the one it slept before, None where it has done fewer."""

    def __init__(self, disk: FaultDisk, at: int, meanwhile: Callable[[], None]) -> None:
        self.operation: str | None = None
        self._disk, self._at, self._meanwhile = disk, at, meanwhile
        self._count, self._lock = count(), threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name not in _OPERATIONS:
            return object.__getattribute__(self, name)
        method = getattr(self._disk, name)

        def operate(*words: Any) -> Any:
            with self._lock:
                if next(self._count) == self._at:
                    self.operation = f"{name} {words[0]}"
                    self._meanwhile()
            return method(*words)

        return operate


_OPERATIONS = {name for name in vars(PosixDisk) if not name.startswith("_")}


class FaultFilesystem(LocalFilesystem):
    """``LocalFilesystem`` over a ``FaultDisk``. ``disk.operations`` numbers what it did."""

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        capacity: int | None = None,
        disk: FaultDisk | None = None,
        root: str = ROOT,
    ) -> None:
        self.disk = disk or FaultDisk(fault, capacity)
        self.puts = 0
        super().__init__(root, self.disk)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = super().put_if_absent(path, data)
        number, self.puts = self.puts, self.puts + 1
        if self.disk.fault is not None and (self.disk.fault.kind, self.disk.fault.at) == ("reply-lost", number):
            raise StorageError(f"{self.root}/{path}: no reply", kind=Kind.REPLY_LOST)
        return won

    def after_crash(self, data: Data, names: Names) -> "FaultFilesystem":
        """What a process finds after a restart; ``kept, kept`` is a kill, the rest are power losses."""
        return FaultFilesystem(disk=self.disk.survivor(data, names))

    def copy(self) -> "FaultFilesystem":
        """The same contents on a disk of its own, without a fault."""
        return self.after_crash("kept", "kept")


def memory_backend() -> Backend:
    """Disks in memory by name."""
    disks: dict[str, FaultDisk] = defaultdict(FaultDisk)
    return lambda name: FaultFilesystem(disk=disks[name])


def _error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)
