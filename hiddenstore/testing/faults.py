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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hiddenstore.errors import StorageError
from hiddenstore.fs_local import LocalFilesystem
from hiddenstore.testing.disk_tree import Data, File, Folder, Names, ancestors, surviving_folder, walk

ROOT = "/fault/store"

Kind = Literal["crash", "enospc", "eio", "exists", "reply-lost"]
Moment = Literal["before", "half", "after"]


class SimulatedCrash(BaseException):
    """The process is dead: no handler may tidy up, and every later operation raises this again."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong at operation ``at`` (counted from 0).

    ``half`` lets a write put down half of its bytes; other operations are atomic and count as not done. ``exists``
    performs a link and answers EEXIST, as NFS does when the first reply was lost; ``reply-lost`` performs the whole
    put-if-absent number ``at`` and raises StorageError ``reply-lost``, as an object store does on a timeout.
    """

    at: int
    kind: Kind = "crash"
    moment: Moment = "before"


class FaultDisk:
    """A ``Disk`` in memory.

    ``operations`` lists what was done so far, ``capacity`` bounds the bytes it holds. ``observer`` is called at every
    moment a crash could fall on, so that one run shows all of them: before each operation and half-way through a write.
    """

    def __init__(self, fault: Fault | None = None, capacity: int | None = None) -> None:
        self.operations: list[str] = []
        self.fault = fault
        self.capacity = capacity
        self.observer: Callable[[], None] | None = None
        self._root = Folder()
        self._open: dict[int, File] = {}
        self._dead = False
        for folder in ancestors(ROOT):
            self._put(folder, Folder(), durable=True)

    def survivor(self, data: Data, names: Names) -> "FaultDisk":
        """The disk after the machine went down now and came up again; everything on it is durable."""
        disk = FaultDisk(capacity=self.capacity)
        disk._root = surviving_folder(self._root, data, names, {})
        return disk

    def state(self) -> bytes:
        """Bytes that are equal for equal visible contents."""
        parts = []
        for path, file in self.files().items():
            parts += [path.encode(), b"\0", str(len(file)).encode(), b"\0", file]
        return b"".join(parts)

    def files(self) -> dict[str, bytes]:
        """Every file by absolute path, as a running process sees it; empty folders end with a slash."""
        return dict(walk("", self._root))

    def overwrite(self, path: str, data: bytes | None) -> None:
        """Damage behind the store's back: give a file other bytes, add it, or remove it with None."""
        for folder in ancestors(path):
            if self._find(folder) is None:
                self._put(folder, Folder(), durable=True)
        if data is None:
            folder_node, name = self._parent(path)
            del folder_node.names[name]
        else:
            self._put(path, File(bytearray(data), data), durable=True)

    def make_folder(self, path: str) -> None:
        with _Operation(self, f"make_folder {path}"):
            folder, name = self._parent(path)
            folder.names.setdefault(name, Folder())

    def create(self, path: str) -> int:
        with _Operation(self, f"create {path}"):
            folder, name = self._parent(path)
            if name in folder.names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            file = folder.names[name] = File()
            handle = len(self._open) + 1
            self._open[handle] = file
            return handle

    def write(self, handle: int, data: memoryview) -> None:
        file = self._open[handle]
        half = _HalfWrite(file, data)
        with _Operation(self, f"write {len(data)} bytes", half):
            if self.capacity is not None and self.used() + len(data) > self.capacity:
                file.data.extend(data[: max(0, self.capacity - self.used())])
                raise _error(errno.ENOSPC)
            file.data.extend(data)

    def write_all(self, handle: int, pieces: Sequence[memoryview]) -> None:
        self.write(handle, memoryview(b"".join(pieces)))

    def sync_file(self, handle: int) -> None:
        with _Operation(self, "sync_file"):
            file = self._open[handle]
            file.durable = bytes(file.data)

    def close(self, handle: int) -> None:
        self._alive()

    def link(self, source: str, target: str) -> None:
        with _Operation(self, f"link {target}"):
            folder, name = self._parent(target)
            if name in folder.names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            folder.names[name] = self._file(source)

    def unlink(self, path: str) -> None:
        with _Operation(self, f"unlink {path}"):
            folder, name = self._parent(path)
            if name not in folder.names:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            del folder.names[name]

    def remove_folder(self, path: str) -> None:
        with _Operation(self, f"remove_folder {path}"):
            folder, name = self._parent(path)
            gone = folder.names.get(name)
            if not isinstance(gone, Folder) or gone.names:
                raise _error(errno.ENOTEMPTY)
            del folder.names[name]

    def sync_folder(self, path: str) -> None:
        with _Operation(self, f"sync_folder {path}"):
            folder = self._find(path)
            if not isinstance(folder, Folder):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            folder.durable = dict(folder.names)

    def same_file(self, one: str, other: str) -> bool:
        return self._find(one) is self._find(other)

    def is_folder(self, path: str) -> bool:
        return isinstance(self._find(path), Folder)

    def size(self, path: str) -> int | None:
        found = self._find(path)
        return len(found.data) if isinstance(found, File) else None

    def list(self, path: str) -> list[str]:
        found = self._find(path)
        return list(found.names) if isinstance(found, Folder) else []

    def read(self, path: str) -> bytes:
        return bytes(self._file(path).data)

    def read_into(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        data, done = memoryview(self._file(path).data), 0
        for buffer in buffers:
            part = data[offset + done : offset + done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def free_bytes(self, path: str) -> int:
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used())

    def used(self) -> int:
        """Bytes of all files."""
        return sum(len(data) for data in self.files().values())

    def _alive(self) -> None:
        if self._dead:
            raise SimulatedCrash

    def _find(self, path: str) -> "File | Folder | None":
        self._alive()
        return self._root.find(path)

    def _file(self, path: str) -> File:
        found = self._find(path)
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    def _parent(self, path: str) -> tuple[Folder, str]:
        folder, _, name = path.rpartition("/")
        found = self._find(folder) if folder else self._root
        if not isinstance(found, Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found, name

    def _put(self, path: str, node: "File | Folder", durable: bool) -> None:
        folder, name = self._parent(path)
        folder.names[name] = node
        if durable:
            folder.durable[name] = node


class FaultFilesystem(LocalFilesystem):
    """``LocalFilesystem`` over a ``FaultDisk``. ``disk.operations`` numbers what it did."""

    def __init__(
        self, fault: Fault | None = None, *, capacity: int | None = None, disk: FaultDisk | None = None
    ) -> None:
        self.disk = disk or FaultDisk(fault, capacity)
        self.puts = 0
        super().__init__(ROOT, self.disk)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        won = super().put_if_absent(path, data)
        number, self.puts = self.puts, self.puts + 1
        fault = self.disk.fault
        if fault is not None and fault.kind == "reply-lost" and fault.at == number:
            raise StorageError(f"{self.root}/{path}: no reply", kind="reply-lost")
        return won

    def after_crash(self, data: Data, names: Names) -> "FaultFilesystem":
        """What a process finds after a restart; ``kept, kept`` is a kill, the rest are power losses."""
        return FaultFilesystem(disk=self.disk.survivor(data, names))

    def copy(self) -> "FaultFilesystem":
        """The same contents on a disk of its own, without a fault."""
        return self.after_crash("kept", "kept")


class _HalfWrite:
    def __init__(self, file: File, data: memoryview) -> None:
        self._file, self._data, self._length = file, data, len(file.data)

    def apply(self) -> None:
        self._file.data.extend(self._data[: len(self._data) // 2])

    def undo(self) -> None:
        del self._file.data[self._length :]


class _Operation:
    """Counts one operation and lets the fault strike before, in the middle of or after it."""

    def __init__(self, disk: FaultDisk, name: str, half: "_HalfWrite | None" = None) -> None:
        self._disk, self._name, self._half = disk, name, half

    def __enter__(self) -> None:
        disk = self._disk
        disk._alive()
        if disk.observer is not None:
            disk.observer()
        if disk.observer is not None and self._half is not None:
            self._half.apply()
            disk.observer()
            self._half.undo()
        number = len(disk.operations)
        disk.operations.append(self._name)
        fault = disk.fault
        self._struck = fault is not None and fault.kind != "reply-lost" and fault.at == number
        if self._struck and fault is not None and fault.kind != "exists" and fault.moment != "after":
            if fault.moment == "half" and self._half is not None:
                self._half.apply()
            self._strike(fault)

    def __exit__(self, error_type: object, error: object, trace: object) -> None:
        fault = self._disk.fault
        if error is None and self._struck and fault is not None:
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        if fault.kind == "crash":
            self._disk._dead = True
            raise SimulatedCrash(f"crash {fault.moment} operation {fault.at}: {self._name}")
        raise _error({"enospc": errno.ENOSPC, "eio": errno.EIO, "exists": errno.EEXIST}[fault.kind])


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
