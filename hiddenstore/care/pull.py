"""What was pushed, brought here: every file is compared with its sha256 while it comes, and goes on at any byte.

``SHA256SUMS`` lands first and says whose folder this is; the file that makes it a store or a drafter lands last.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hiddenstore.care.remote import PIECE_BYTES, SUMS, Remote, require_pushed, sums_text
from hiddenstore.errors import ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.fs.publish import replace_file
from hiddenstore.fs.seam import TEMP_PREFIX, storage_error
from hiddenstore.layout import STORE_JSON

PARALLEL = 4
_LAST = (STORE_JSON, "hiddenstore.json")

Advance = Callable[[int], None]


@dataclass(frozen=True)
class PullReport:
    """What a pull did; ``bytes_read`` came now, ``replaced`` names files that were there with other bytes."""

    files: int
    bytes: int
    bytes_read: int
    replaced: tuple[str, ...]


def pull(remote: Remote, out: Path, begin: Callable[[str, int], Advance]) -> PullReport:
    """Bring what ``remote`` holds to the folder ``out``; the same pull again continues, or brings what was added.

    Raises:
        NotFoundError: ``push-unfinished``, nothing whole was pushed there.
        ConflictError: ``output-exists``: the folder holds something else, or another pull writes it.
        CorruptionError: ``file-corrupt``: bytes came twice that are not those that were pushed.
        StorageError: disk or place refused; ``disk-full`` before the first byte where it can be known.
    """
    digests = require_pushed(remote)
    if out.exists() and not (out.is_dir() and ((out / SUMS).is_file() or not any(out.iterdir()))):
        raise ConflictError(f"{out} exists already, and no pull made it", kind=Kind.OUTPUT_EXISTS, hint="another DEST")
    sizes = {path: _size(remote, path) for path in digests}
    with _writing(out):
        before = {path for path in digests if (out / path).is_file()}
        advance = begin("pull", sum(sizes.values()))
        missing = [path for path in digests if not _is_there(out / path, sizes[path], digests[path], advance)]
        _require_room(out, sum(sizes[path] for path in missing))
        replace_file(out / SUMS, sums_text(digests))

        def bring(path: str) -> int:
            return _bring(remote, path, sizes[path], digests[path], out / path, advance)

        with ThreadPoolExecutor(PARALLEL) as pool:
            came = sum(pool.map(bring, [path for path in missing if path not in _LAST]))
        came += sum(bring(path) for path in missing if path in _LAST)
    return PullReport(len(digests), sum(sizes.values()), came, tuple(sorted(before & set(missing))))


def _size(remote: Remote, path: str) -> int:
    size = remote.size(path)
    if size is None:
        raise NotFoundError(
            f"{remote.address} lacks {path}, which its {SUMS} names",
            kind=Kind.PUSH_UNFINISHED,
            hint=f"hiddenstore push SOURCE {remote.address}   (the same command goes on)",
        )
    return size


def _is_there(file: Path, size: int, digest: str, advance: Advance) -> bool:
    if not file.is_file() or file.stat().st_size != size:
        return False
    with file.open("rb") as content:
        is_same = hashlib.file_digest(content, "sha256").hexdigest() == digest
    advance(size if is_same else 0)
    return is_same


def _require_room(out: Path, needed: int) -> None:
    status = os.statvfs(out)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        raise StorageError(
            f"{out} needs {needed:,} bytes more, and its disk has {free:,}", kind=Kind.DISK_FULL, hint="free some space"
        )


def _bring(remote: Remote, path: str, size: int, sha256: str, file: Path, advance: Advance) -> int:
    """One file, on from what an interrupted pull left of it; bytes that came."""
    part = file.with_name(f"{TEMP_PREFIX}pull-{file.name}")
    came = 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        for _ in (1, 2):
            digest, offset = _begun(part, size)
            advance(offset)
            with part.open("ab") as writer:
                while offset < size:
                    data = remote.read_range(path, offset, min(PIECE_BYTES, size - offset))
                    if not data:
                        raise CorruptionError(
                            f"{remote.address}/{path} ends at byte {offset:,} of {size:,}",
                            kind=Kind.FILE_SHORT,
                            path=path,
                        )
                    writer.write(data)
                    digest.update(data)
                    offset += len(data)
                    came += len(data)
                    advance(len(data))
                writer.flush()
                os.fsync(writer.fileno())
            if digest.hexdigest() == sha256:
                part.replace(file)
                return came
            part.unlink()
            advance(-size)
    except OSError as error:
        raise storage_error(error, str(file), "the same command goes on where it stopped") from error
    raise CorruptionError(
        f"{remote.address}/{path} is not what was pushed: expected sha256 {sha256[:16]}…, twice found another",
        kind=Kind.FILE_CORRUPT,
        path=path,
        hint="push it again from where it is whole",
    )


def _begun(part: Path, size: int) -> "tuple[hashlib._Hash, int]":
    """The digest of what is there of a file, and how many bytes that is."""
    digest = hashlib.sha256()
    if not part.is_file() or part.stat().st_size > size:
        part.unlink(missing_ok=True)
        return digest, 0
    with part.open("rb") as file:
        while data := file.read(PIECE_BYTES):
            digest.update(data)
    return digest, part.stat().st_size


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """The folder, made and locked: two pulls into one would write into each other's files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise storage_error(error, str(out)) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(f"another pull writes {out}", kind=Kind.OUTPUT_EXISTS, hint="wait for it") from error
        yield
        os.fsync(handle)
    finally:
        os.close(handle)
