"""Files and folders in memory that know what a power loss would leave of them.

Beside the bytes and names a running process sees, a file keeps its bytes at the last fsync and a folder its names at
its own: what came since may be kept, dropped or, for bytes, torn.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

SECTOR_BYTES = 512

Data = Literal["kept", "dropped", "torn"]
Names = Literal["kept", "dropped"]

SURVIVALS: tuple[tuple[Data, Names], ...] = tuple(product(("kept", "dropped", "torn"), ("kept", "dropped")))


@dataclass(eq=False)
class File:
    """``data`` as a process sees it, ``durable`` as of the last fsync."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(eq=False)
class Folder:
    """``names`` as a process sees them, ``durable`` as of the last fsync of the folder."""

    names: "dict[str, File | Folder]" = field(default_factory=dict)
    durable: "dict[str, File | Folder]" = field(default_factory=dict)

    def find(self, path: str) -> "File | Folder | None":
        """What lies at a path below this folder."""
        found: File | Folder | None = self
        for name in path.strip("/").split("/"):
            found = found.names.get(name) if isinstance(found, Folder) else None
        return found


def ancestors(path: str) -> Iterator[str]:
    """The folders above an absolute path, the highest first."""
    parts = path.strip("/").split("/")[:-1]
    for count in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:count])


def walk(prefix: str, folder: Folder) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder by path; empty folders end with a slash."""
    for name in sorted(folder.names):
        node = folder.names[name]
        if isinstance(node, File):
            yield f"{prefix}/{name}", bytes(node.data)
        elif node.names:
            yield from walk(f"{prefix}/{name}", node)
        else:
            yield f"{prefix}/{name}/", b""


def surviving_folder(folder: Folder, data: Data, names: Names, seen: dict[int, File]) -> Folder:
    """A folder after a power loss, all of it durable; ``seen`` keeps a file of two names one file."""
    kept: dict[str, File | Folder] = {}
    for name, node in (folder.names if names == "kept" else folder.durable).items():
        if isinstance(node, Folder):
            kept[name] = surviving_folder(node, data, names, seen)
        else:
            kept[name] = seen.setdefault(id(node), _surviving_file(node, data))
    return Folder(kept, dict(kept))


def _surviving_file(file: File, data: Data) -> File:
    """Torn: the first half of what was not synced, in whole sectors, then zeros up to the length written."""
    content = bytes(file.data)
    if data == "dropped":
        content = file.durable
    elif data == "torn" and content != file.durable:
        start = len(file.durable)
        whole = start + (len(content) - start) // 2 // SECTOR_BYTES * SECTOR_BYTES
        content = content[:whole] + bytes(len(content) - whole)
    return File(bytearray(content), content)
