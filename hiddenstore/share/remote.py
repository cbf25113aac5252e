"""Where stores and drafters are shared: what push and pull ask of it, and object storage in that role.

``SHA256SUMS``, which ``sha256sum -c`` reads, names every file of what was pushed and is put there last: what it does
not name is not part of it, and without it a push was not finished.
"""

import hashlib
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hiddenstore.commit import commit_of, latest_revisions, lost_samples
from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.files.layout import COMMITS_DIR, STORE_JSON, parse_commits
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.seam import Filesystem, is_inside, storage_error
from schemas.manifest import CommitRecord

SUMS, CARD = "SHA256SUMS", "README.md"
PIECE_BYTES = 32 << 20

Advance = Callable[[int], None]
Begin = Callable[[str, int], Advance]
"""A person's view of one pass over the bytes: its name and how many there are; returns what is told of each piece."""

_BEGUN = f"{SUMS}.pushing"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")


@dataclass(frozen=True)
class LocalFile:
    """One file to push: where it lies, or its bytes. ``replaces``: it may take the place of another of its name."""

    path: str
    source: Path | bytes
    size: int
    sha256: str
    replaces: bool


class Remote(Protocol):
    """A place to share: a repository of the hub, or a prefix of a bucket."""

    address: str
    keeps_history: bool
    """Whether what is replaced can be brought back."""

    def begin(self, sums: Mapping[str, str], public: bool) -> None:
        """Make the place; ``sums`` is what the push will end with."""

    def digests(self, files: Sequence[LocalFile]) -> dict[str, str]:
        """sha256 of those names of ``files`` that are there whole; empty where it is not known."""

    def put(self, files: Sequence[LocalFile], advance: Advance) -> None:
        """Bring files over; ``advance`` is told the bytes of each. Where there is history, all at once."""

    def size(self, path: str) -> int | None:
        """Bytes of a file, None when there is none."""

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of a file, fewer where it ends before."""


def sums_text(digests: Mapping[str, str]) -> bytes:
    """``SHA256SUMS`` of files by path."""
    return "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items())).encode()


def parse_sums(data: bytes, where: str) -> dict[str, str]:
    """sha256 by path. Raises CorruptionError ``document-corrupt``; ConfigError ``path-unsafe``."""
    digests = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            message = f"{where}: line {number} is no sha256 and name: {line[:80]!r}"
            raise CorruptionError(message, kind=Kind.DOCUMENT_CORRUPT, path=SUMS)
        if not is_inside(match[2]) or match[2] == SUMS:
            raise ConfigError(f"{where} names {match[2]!r}", kind=Kind.PATH_UNSAFE)
        digests[match[2]] = match[1]
    return digests


def read_sums(remote: Remote) -> dict[str, str]:
    """What was pushed to ``remote``; nothing where no push was finished. Raises as ``parse_sums``; StorageError
    ``io-error``: less came than there is, and lines that are missing would be files that nobody pushed."""
    size, where = remote.size(SUMS), f"{remote.address}/{SUMS}"
    if size is None:
        return {}
    data = remote.read_range(SUMS, 0, size)
    if len(data) != size:
        problem = f"{where}: {len(data):,} bytes came of {size:,}"
        raise StorageError(problem, kind=Kind.IO_ERROR, hint="the same command goes on")
    return parse_sums(data, where)


def lost_units(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Units of a store that one push names and a later one does not: it is of another store, as a store keeps its
    units. Their ``store.json`` says what was captured, not of which text, so that it may be the same."""

    return sorted({unit for unit, _ in _records(before)} - {unit for unit, _ in _records(after)})


def lossy_units(root: Path, remote: Remote, sums: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Units of which a repair dropped samples that the other side has: those that lack them in the store at ``root``,
    and those that lack them in what ``sums`` says was pushed. Only records that differ are read of the place."""
    fs = LocalFilesystem(root)
    latest, local_losses, remote_losses = latest_revisions(fs), list[str](), list[str]()
    for unit, path in _records(sums):
        if unit not in latest:
            continue
        data = fs.read(f"{COMMITS_DIR}/{latest[unit][1]}")
        if hashlib.sha256(data).hexdigest() == sums[path]:
            continue
        # Of a record that is damaged nobody reads a sample.
        with suppress(CorruptionError):
            local = commit_of(data, latest[unit][1], str(root)).record
            pushed = commit_of(_read(remote, path), path.rpartition("/")[2], remote.address).record
            if _has_lost_of(pushed, local):
                local_losses.append(unit)
            if _has_lost_of(local, pushed):
                remote_losses.append(unit)
    return local_losses, remote_losses


def restore_hint(remote: Remote, source: str, destination: str) -> str:
    """The commands that bring samples back which a repair dropped; ``PUSHED`` is what is pulled."""
    commands = ["hiddenstore", "pull", remote.address, "PUSHED"], ["hiddenstore", "copy", source, destination]
    return " && ".join(map(shlex.join, commands))


def _records(sums: Mapping[str, str]) -> list[tuple[str, str]]:
    """The units that are named, and the path of the record of each."""
    start = f"{COMMITS_DIR}/"
    names = (path.removeprefix(start) for path in sums if path.startswith(start))
    return [(unit, f"{start}{name}") for unit, _, name in parse_commits(names)]


def _has_lost_of(record: CommitRecord, lossy: CommitRecord) -> bool:
    lost = lost_samples(lossy)
    return any(entry.id in lost for entry in record.samples)


def _read(remote: Remote, path: str) -> bytes:
    """A whole file; what came of it where it ends before, nothing where there is none."""
    size = remote.size(path)
    return remote.read_range(path, 0, size) if size else b""


class StorageRemote:
    """Object storage, through the seam. What a killed push brought is known by the sums it meant to end with."""

    keeps_history = False

    def __init__(self, fs: Filesystem) -> None:
        self.address, self._fs = fs.root, fs

    def begin(self, sums: Mapping[str, str], public: bool) -> None:
        before = self._sums()
        if not before and self._fs.size(CARD) is not None:
            message = f"{self.address} holds a {CARD} that no push put there, and a push would take its place"
            raise ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint="another name")
        others = sorted(before.keys() - sums.keys())
        # A store that has grown or was repaired is the same one; a drafter is all of its files.
        if others and STORE_JSON not in before.keys() & sums.keys():
            message = f"{self.address} holds {others[0]} of something else that was pushed there, which would be lost"
            raise ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint="another name")
        self._replace(_BEGUN, sums_text({**before, **sums}))

    def digests(self, files: Sequence[LocalFile]) -> dict[str, str]:
        before, sizes = self._sums(), {file.path: self._fs.size(file.path) for file in files}
        is_cut = self._fs.size(_BEGUN) is not None

        def digest(file: LocalFile) -> str:
            if sizes[file.path] != file.size:
                # Under a known digest: put there by a push that ended before it, with other bytes.
                return "other"
            if file.replaces:
                # What a push that was cut was to replace may be the old file or the new one.
                return "" if is_cut else before.get(file.path, "")
            # A later push that left a file out names it no more, and it is still there.
            return before.get(file.path) or self._sha256(file)

        return {file.path: digest(file) for file in files if sizes[file.path] is not None}

    def put(self, files: Sequence[LocalFile], advance: Advance) -> None:
        for file in files:
            if isinstance(file.source, bytes):
                self._replace(file.path, file.source)
            else:
                self._upload(file, file.source)
            advance(file.size)
            if file.path == SUMS:
                self._fs.remove_tree(_BEGUN)

    def size(self, path: str) -> int | None:
        with suppress(NotFoundError):
            self._fs.drop_cache(path)
        return self._fs.size(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._fs.read_range(path, offset, length)

    def _sha256(self, file: LocalFile) -> str:
        digest = hashlib.sha256()
        for offset in range(0, file.size, PIECE_BYTES):
            digest.update(self._fs.read_range(file.path, offset, min(PIECE_BYTES, file.size - offset)))
        return digest.hexdigest()

    def _sums(self) -> dict[str, str]:
        before: dict[str, str] = {}
        for name in (SUMS, _BEGUN):
            with suppress(NotFoundError):
                before |= parse_sums(self._fs.read(name), f"{self.address}/{name}")
        return before

    def _replace(self, path: str, data: bytes) -> None:
        self._fs.remove_tree(path)
        if not self._fs.put_if_absent(path, data):
            raise StorageError(f"{self.address}/{path} was written by another push", kind=Kind.IO_ERROR)

    def _upload(self, file: LocalFile, source: Path) -> None:
        if file.replaces:
            self._fs.remove_tree(file.path)
        writer = self._fs.create(file.path)
        try:
            with source.open("rb") as content:
                while data := content.read(PIECE_BYTES):
                    writer.append(data)
            writer.close()
        except BaseException as error:
            writer.abort()
            if isinstance(error, OSError):
                raise storage_error(error, str(source)) from error
            raise
