"""A bounded local cache of what training reads again and again from object storage, shared by processes.

Blocks of segment files lie under the digest of address, path, size and entity tag, each with its crc32c at the end. A
block that a kill or a full disk left torn does not fit its checksum and is fetched again; nothing here is ever truth.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

from awscrt.checksums import crc32c

from hiddenstore.errors import ConfigError, Kind
from hiddenstore.fs.disk import lock
from hiddenstore.fs.objects import ObjectFilesystem
from hiddenstore.fs.seam import is_address, storage_errors

BLOCK_BYTES = 1 << 20
LEAST_BYTES = 16 * BLOCK_BYTES

_CRC_BYTES = 4
_KEPT_SHARE = 0.9


class CachedFilesystem(ObjectFilesystem):
    """Object storage of which what lies below ``cached`` is read through a local folder of about ``most_bytes``.

    The blocks read longest ago are dropped first. Raises ConfigError: ``option-invalid``: a local store, or fewer bytes
    than 16 MiB; StorageError: the folder cannot be made."""

    def __init__(self, address: str, folder: str | Path, most_bytes: int, cached: str) -> None:
        if not is_address(address):
            raise ConfigError(f"a cache is for object storage; {address} is local", kind=Kind.OPTION_INVALID)
        if most_bytes < LEAST_BYTES:
            least = f"a cache of {most_bytes:,} bytes is too small: expected {LEAST_BYTES:,} or more"
            raise ConfigError(least, kind=Kind.OPTION_INVALID)
        super().__init__(address)
        self._folder, self._most_bytes, self._cached_below = Path(folder).absolute(), most_bytes, cached
        # Processes see each other's blocks only when they look: each looks after a small part of the bound.
        self._unseen_bytes = most_bytes
        with storage_errors(folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def __reduce__(self) -> tuple[type["CachedFilesystem"], tuple[str, str, int, str]]:  # type: ignore[override]
        return type(self), (self.root, str(self._folder), self._most_bytes, self._cached_below)

    def drop_cache(self, path: str) -> None:
        with storage_errors(self._folder):
            for number in range(-(-(self.size(path) or 0) // BLOCK_BYTES)):
                self._file(path, number).unlink(missing_ok=True)
        super().drop_cache(path)

    def _read(self, path: str, part: tuple[int, int] | None) -> bytes:
        size = self.size(path) if path.startswith(f"{self._cached_below}/") else None
        if size is None:
            return super()._read(path, part)
        offset, length = part or (0, size)
        end = min(offset + length, size)
        first = offset // BLOCK_BYTES
        numbers = range(first, -(-end // BLOCK_BYTES))
        blocks = {number: self._cached(path, number, size) for number in numbers}
        for run in _runs(number for number in numbers if blocks[number] is None):
            start = run[0] * BLOCK_BYTES
            data = memoryview(super()._read(path, (start, min(len(run) * BLOCK_BYTES, size - start))))
            for place, number in enumerate(run):
                block = data[place * BLOCK_BYTES : (place + 1) * BLOCK_BYTES]
                blocks[number] = bytes(block)
                if len(block) == _length(number, size):
                    self._keep(path, number, bytes(block))
        whole = b"".join(block or b"" for block in blocks.values())
        return whole[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def _file(self, path: str, number: int) -> Path:
        key = "\0".join((self.root, path, *map(str, self._identity(path)), str(number)))
        name = hashlib.sha256(key.encode()).hexdigest()
        return self._folder / name[:2] / name

    def _cached(self, path: str, number: int, size: int) -> bytes | None:
        """A block that lies here whole; None for one that does not."""
        file = self._file(path, number)
        try:
            data = file.read_bytes()
        except OSError:
            return None
        # The folder may be somebody's who shares it to read.
        with suppress(OSError):
            os.utime(file)
        block = data[:-_CRC_BYTES]
        if len(block) != _length(number, size) or _crc(block) != data[-_CRC_BYTES:]:
            return None
        return block

    def _keep(self, path: str, number: int, block: bytes) -> None:
        """Best effort: where the disk has no room, the next reader asks the storage again."""
        file = self._file(path, number)
        temporary = file.with_name(f"{secrets.token_hex(8)}.tmp")
        with suppress(OSError):
            file.parent.mkdir(exist_ok=True)
            try:
                temporary.write_bytes(block + _crc(block))
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)
        self._unseen_bytes += len(block)
        if self._unseen_bytes >= self._most_bytes // 64:
            self._unseen_bytes = 0
            # A full disk, or the folder of somebody who shares it to read.
            with suppress(OSError):
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        with _only_one(self._folder / ".lock") as is_mine:
            if not is_mine:
                return
            states = []
            for file in self._folder.glob("*/*"):
                with suppress(OSError):
                    state = file.stat()
                    states.append((state.st_mtime_ns, state.st_size, file))
            total = sum(size for _, size, _ in states)
            if total <= self._most_bytes * _KEPT_SHARE:
                return
            for _, size, file in sorted(states):
                if total <= self._most_bytes * _KEPT_SHARE:
                    break
                with suppress(OSError):
                    file.unlink(missing_ok=True)
                    total -= size


def _length(number: int, size: int) -> int:
    return min(BLOCK_BYTES, size - number * BLOCK_BYTES)


def _crc(block: bytes) -> bytes:
    return crc32c(block).to_bytes(_CRC_BYTES, "little")


def _runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Consecutive numbers together."""
    ordered = list(numbers)
    borders = [0, *(place for place, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1), len(ordered)]
    yield from (ordered[start:end] for start, end in pairwise(borders) if end > start)


@contextmanager
def _only_one(path: Path) -> Iterator[bool]:
    """Whether no other process is in this block now, as far as there are locks."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        lock(handle)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)
