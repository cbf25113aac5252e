"""What was pushed, brought here: every file is compared with its sha256 while it comes, and goes on at any byte.

``SHA256SUMS`` lands first and says whose folder this is; the file that makes it a store or a drafter lands last.
"""

import hashlib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from hiddenstore.console.text import plural
from hiddenstore.errors import ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.files.layout import COMMITS_DIR, INDEX_DIR, SNAPSHOTS_DIR, STORE_JSON, refuse_snapshot
from hiddenstore.files.lock import lock_or_warn
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.publish import make_folder, replace_file, sweep_killed
from hiddenstore.fs.seam import TEMP_PREFIX, storage_errors
from hiddenstore.share.remote import (
    CARD,
    PIECE_BYTES,
    SUMS,
    Advance,
    Begin,
    Remote,
    lossy_units,
    lost_units,
    parse_sums,
    read_sums,
    restore_hint,
    sums_text,
)
from hiddenstore.threads import Threads

PARALLEL = 4
DRAFTER_JSON = "hiddenstore.json"
_TURNS = ({COMMITS_DIR}, {INDEX_DIR, SNAPSHOTS_DIR}, {STORE_JSON, DRAFTER_JSON})
"""After segments and all else: records, what lists them, and what makes a store or a drafter of the folder."""


@dataclass(frozen=True)
class PullReport:
    """What a pull did; ``bytes_read`` came now, ``replaced`` names files that were there with other bytes, ``removed``
    those of an older drafter that the newer one does not have, ``lossy`` units of which a repair here dropped samples
    that were pushed."""

    files: int
    bytes: int
    bytes_read: int
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    lossy: tuple[str, ...]


@dataclass(frozen=True)
class _File:
    path: str
    size: int
    sha256: str
    out: Path

    @property
    def part(self) -> Path:
        """What an interrupted pull left of it."""
        return self.out.with_name(f"{TEMP_PREFIX}pull-{self.out.name}")


def pull(remote: Remote, out: Path, begin: Begin) -> PullReport:
    """Bring what ``remote`` holds to the folder ``out``; the same pull again continues, or brings what was added.
    Raises NotFoundError: ``push-unfinished``, nothing whole was pushed there; ConflictError: ``output-exists``: the
    folder holds something else, or samples that a repair dropped there, or another pull writes it; CorruptionError:
    ``file-corrupt``: bytes came twice that are not those that were pushed; StorageError: disk or place refused;
    ``disk-full`` before the first byte where it can be known; ConfigError: ``usage``: ``out`` names a snapshot."""
    refuse_snapshot(out)
    digests = read_sums(remote)
    sizes = {path: remote.size(path) for path in digests}
    absent = SUMS if not digests else next((path for path, size in sizes.items() if size is None), None)
    if absent is not None:
        raise NotFoundError(
            f"{remote.address} holds no {absent}: nothing was pushed there, or the push has not come to its end",
            kind=Kind.PUSH_UNFINISHED,
            hint=f"hiddenstore push SOURCE {shlex.quote(remote.address)}   (the same command goes on)",
        )
    files = [_File(path, sizes[path] or 0, digest, out / path) for path, digest in digests.items()]
    total = sum(file.size for file in files)
    with _writing(out):
        older = _require_same(out, digests)
        lossy = _require_no_loss(out, remote, digests)
        before = {file.path for file in files if file.out.is_file()}
        advance = begin("pull", total)
        missing = [file for file in files if not _is_there(file, advance)]
        replaced = before & {file.path for file in missing}
        _require_room(out, missing)
        left_behind = _left_behind(out, older, digests)
        if left_behind or replaced - {CARD}:
            missing += _taken_apart(files, missing, advance)
        for path in left_behind:
            (out / path).unlink()
        replace_file(out / SUMS, sums_text(digests))
        came = 0
        # What names others comes after them, into a store that grows too, and what makes a store of the folder last.
        for turn in range(len(_TURNS) + 1):
            came += _bring_all(remote, [file for file in missing if _turn(file.path) == turn], advance)
            LocalFilesystem(out).sync_folder("")
    return PullReport(len(files), total, came, tuple(sorted(replaced)), tuple(left_behind), tuple(lossy))


def _turn(path: str) -> int:
    """When a file is brought, each turn durable before the next."""
    name = path.partition("/")[0]
    return next((number for number, names in enumerate(_TURNS, 1) if name in names), 0)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """The folder, made and locked: two pulls into one would write into each other's files."""
    if out.exists() and not out.is_dir():
        raise ConflictError(f"{out} is no folder", kind=Kind.OUTPUT_EXISTS, hint="another DEST")
    with storage_errors(out):
        make_folder(out)
        handle = os.open(out, os.O_RDONLY)
    try:
        lock_or_warn(handle, out)
        yield
        os.fsync(handle)
    except BlockingIOError as error:
        raise ConflictError(f"another pull writes {out}", kind=Kind.OUTPUT_EXISTS, hint="wait for it") from error
    finally:
        os.close(handle)


def _require_same(out: Path, digests: Mapping[str, str]) -> dict[str, str]:
    """The sums of an earlier pull. Refused are a folder that no pull made, and one into which another store, or a
    drafter instead, was pulled."""
    sweep_killed(out, SUMS)
    if not any(out.iterdir()):
        return {}
    if not (out / SUMS).is_file():
        raise ConflictError(f"{out} exists already, and no pull made it", kind=Kind.OUTPUT_EXISTS, hint="another DEST")
    before = _sums_here(out)
    if before.get(STORE_JSON) != digests.get(STORE_JSON) or lost_units(before, digests):
        message = f"another store was pulled to {out}, or a later push of this one"
        raise ConflictError(message, kind=Kind.OUTPUT_EXISTS, hint="another DEST")
    return before


def _require_no_loss(out: Path, remote: Remote, digests: Mapping[str, str]) -> list[str]:
    """Units that lack samples here, as ``PullReport.lossy``; refused are records that lack samples which are here."""
    lossy, remote_losses = lossy_units(out, remote, digests)
    if remote_losses:
        raise ConflictError(
            f"{out} holds samples of {plural(len(remote_losses), 'unit')}, such as {remote_losses[0]}, that a repair "
            f"of what {remote.address} holds dropped and that would be lost; nothing was brought",
            kind=Kind.OUTPUT_EXISTS,
            hint=restore_hint(remote, str(out), "PUSHED"),
        )
    return lossy


def _sums_here(out: Path) -> dict[str, str]:
    """What an earlier pull brought. Raises CorruptionError: its list is damaged, and no store is there that says it."""
    try:
        return parse_sums((out / SUMS).read_bytes(), str(out / SUMS))
    except CorruptionError:
        if not (out / STORE_JSON).is_file():
            raise
        records = [f"{COMMITS_DIR}/{path.name}" for path in (out / COMMITS_DIR).iterdir()]
        return {STORE_JSON: _sha256(out / STORE_JSON), **dict.fromkeys(records, "")}


def _left_behind(out: Path, older: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """Files of an older drafter, as they were pulled, that are no part of this one: an engine might read them too."""
    paths = sorted(older.keys() - digests.keys()) if STORE_JSON not in digests else []
    return [path for path in paths if (out / path).is_file() and _sha256(out / path) == older[path]]


def _taken_apart(files: Sequence[_File], missing: Sequence[_File], advance: Advance) -> list[_File]:
    """What makes a drafter of the folder goes, to come last of all: half of another one is none."""
    makers = [file for file in files if file.path == DRAFTER_JSON]
    for file in makers:
        file.out.unlink(missing_ok=True)
    again = [file for file in makers if file not in missing]
    advance(-sum(file.size for file in again))
    return again


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _is_there(file: _File, advance: Advance) -> bool:
    if not file.out.is_file() or file.out.stat().st_size != file.size:
        return False
    is_same = _sha256(file.out) == file.sha256
    advance(file.size if is_same else 0)
    return is_same


def _require_room(out: Path, missing: list[_File]) -> None:
    needed = sum(file.size - (file.part.stat().st_size if file.part.is_file() else 0) for file in missing)
    free = shutil.disk_usage(out).free
    if needed > free:
        message = f"{out} needs {needed:,} bytes more, and its disk has {free:,}"
        raise StorageError(message, kind=Kind.DISK_FULL, hint="free some space and run the same command again")


def _bring_all(remote: Remote, files: list[_File], advance: Advance) -> int:
    """Several at once; bytes that came. What ends one of them, or the person who waits, ends them all."""
    over = Event()
    with Threads(PARALLEL) as pool:
        try:
            return sum(pool.map(lambda file: _bring(remote, file, advance, over), files))
        finally:
            over.set()


def _bring(remote: Remote, file: _File, advance: Advance, over: Event) -> int:
    """One file, on from what an interrupted pull left of it; bytes that came."""
    came = 0
    with storage_errors(file.out, "the same command goes on where it stopped"):
        file.out.parent.mkdir(parents=True, exist_ok=True)
        for _ in (1, 2):
            digest, offset = _begun(file)
            advance(offset)
            with file.part.open("ab") as writer:
                while offset < file.size:
                    if over.is_set():
                        return came
                    data = remote.read_range(file.path, offset, min(PIECE_BYTES, file.size - offset))
                    if not data:
                        message = f"{remote.address}/{file.path} ends at byte {offset:,} of {file.size:,}"
                        raise CorruptionError(message, kind=Kind.FILE_SHORT, path=file.path)
                    writer.write(data)
                    digest.update(data)
                    offset += len(data)
                    came += len(data)
                    advance(len(data))
                writer.flush()
                os.fsync(writer.fileno())
            if digest.hexdigest() == file.sha256:
                file.part.replace(file.out)
                return came
            file.part.unlink()
            advance(-offset)
    raise CorruptionError(
        f"{remote.address}/{file.path} is not what was pushed: expected sha256 {file.sha256[:12]}…, twice another came",
        kind=Kind.FILE_CORRUPT,
        path=file.path,
        hint=f"remove {file.path} there, which a push takes for whole, and push again from where it is",
    )


def _begun(file: _File) -> "tuple[hashlib._Hash, int]":
    """The digest of what is there of a file, and how many bytes that is."""
    if not file.part.is_file() or file.part.stat().st_size > file.size:
        file.part.unlink(missing_ok=True)
        return hashlib.sha256(), 0
    with file.part.open("rb") as content:
        return hashlib.file_digest(content, "sha256"), file.part.stat().st_size
