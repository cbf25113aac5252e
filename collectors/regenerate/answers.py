"""The answers of one shard as they come: JSON lines beside the output, so that a killed run goes on where it was.

A line is one reply; the last line of a finished shard says how many conversations it looked at. A line that a kill cut
in two is taken away on opening. The folder and its settings belong to one output and one way of answering.

Where a larger limit leaves answers that ended as they are, a cut one names its ``limit``: a run with a larger one takes
it for unanswered, and the next line of its turn takes its place and that of what followed it.
"""

import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from collectors.regenerate.options import TARGET_DIGESTS
from collectors.regenerate.rewrite import Reply, Rewrite
from hiddenstore.errors import ConflictError, CorruptionError, Kind
from hiddenstore.files.documents import canonical, foreign_json
from hiddenstore.files.lock import lock_or_warn
from hiddenstore.fs.disk import lock
from hiddenstore.fs.local import LocalFilesystem
from hiddenstore.fs.publish import replace_file
from hiddenstore.fs.seam import Filesystem, storage_error, storage_errors

SETTINGS = "settings.json"
SYNC_EVERY_S = 2.0


def claim_settings(
    fs: Filesystem, name: str, settings: Mapping[str, Any], problem: str, hint: str, may_grow: str | None = None
) -> None:
    """Write the settings that answers depend on, or find the same ones there; one of them ``may_grow``. Raises
    ConflictError: ``answers-differ``: ``problem``, and each that differs; StorageError: the disk refused."""
    if fs.put_if_absent(name, canonical(settings)):
        return
    recorded = _settings_in(fs.read(name), fs.local_path(name))
    require_same(settings, recorded, problem, hint, may_grow)
    if canonical(settings) != canonical(recorded):
        replace_file(fs.local_path(name), canonical(settings))


def _settings_in(data: bytes, path: Path) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(settings := foreign_json(data), dict):
            return settings
    hint = f"{shlex.join(['rm', str(path)])} where nothing has changed since; else the answers beside it too"
    raise damaged(path, "it holds no settings", hint)


def damaged(path: Path, fault: str, hint: str) -> CorruptionError:
    """``file-corrupt``: a file that a run goes on from is not what one wrote."""
    return CorruptionError(f"{path} is damaged: {fault}", kind=Kind.FILE_CORRUPT, path=str(path), hint=hint)


def require_same(
    settings: Mapping[str, Any], recorded: Mapping[str, Any], problem: str, hint: str, may_grow: str | None = None
) -> None:
    """Raises ConflictError: ``answers-differ``, as ``claim_settings``."""
    # Runs that were begun before these were compared do not name them.
    recorded = {**{name: settings[name] for name in TARGET_DIGESTS if name in settings}, **recorded}
    if may_grow is not None and settings[may_grow] > recorded.get(may_grow, settings[may_grow]):
        recorded[may_grow] = settings[may_grow]
    differing = sorted(key for key in {*settings, *recorded} if settings.get(key) != recorded.get(key))
    if differing:
        details = ", ".join(f"{key} {recorded.get(key)!r} (now {settings.get(key)!r})" for key in differing)
        raise ConflictError(f"{problem}: {details}", kind=Kind.ANSWERS_DIFFER, hint=hint)


class AnswersFolder:
    """``OUT.answers``: the settings of the run and one file of answers for each of ``shards`` shards. ``limit``: how
    long an answer may be, where that may grow."""

    def __init__(self, out: Path, shards: int, limit: int | None = None) -> None:
        self.path = out.with_name(f"{out.name}.answers")
        self.shards, self._limit = shards, limit

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Make the folder for these settings, or find that it was made for them. Raises ConflictError:
        ``answers-differ`` names what differs; StorageError: the disk refused."""
        anew = shlex.join(["rm", "-r", str(self.path)])
        hint = f"the same settings go on with it; {anew} starts anew; or name another file with -o"
        problem = f"{self.path} holds answers of another run"
        fs, name = LocalFilesystem(self.path.parent), f"{self.path.name}/{SETTINGS}"
        claim_settings(fs, name, {**settings, "shards": self.shards}, problem, hint, self._may_grow)

    def require(self, settings: Mapping[str, Any]) -> None:
        """Find that the answers were made under these settings, save a ``model`` that they leave out. Raises
        ConflictError: ``answers-differ`` names what differs; StorageError: the disk refused."""
        with storage_errors(self.path / SETTINGS):
            recorded = _settings_in((self.path / SETTINGS).read_bytes(), self.path / SETTINGS)
        if "model" not in settings:
            recorded.pop("model", None)
        hint = "the settings of the run that answers, and --take FILE"
        problem = f"the answers in {self.path} were made otherwise"
        require_same({**settings, "shards": self.shards}, recorded, problem, hint, self._may_grow)

    @property
    def _may_grow(self) -> str | None:
        return None if self._limit is None else "max_new_tokens"

    def file(self, shard: int) -> Path:
        """The answers of shard 1 … ``shards``."""
        return self.path / f"answers-{shard}-of-{self.shards}.jsonl"

    def unfinished(self, conversations: int) -> list[int]:
        """Shards without their last line, or with one that says less than their share of so many conversations."""
        shares = {shard: len(range(shard - 1, conversations, self.shards)) for shard in range(1, self.shards + 1)}
        return [shard for shard, share in shares.items() if _ended(self.file(shard), self._limit) < share]

    def holds_answers(self) -> bool:
        """Whether the target has answered any conversation of any shard."""
        for shard in range(1, self.shards + 1):
            with suppress(FileNotFoundError), self.file(shard).open("rb") as file:
                if any(_is_answer(line) for line in file):
                    return True
        return False

    def remove_if_empty(self) -> None:
        """Take the folder away when it holds no answer, and nobody waits for the first one."""
        files = list(self.path.glob("answers-*.jsonl"))
        with ExitStack() as locks, suppress(FileNotFoundError):
            if any(path.stat().st_size for path in files):
                return
            for path in files:
                # NFS locks for writing only what is open for it.
                file = locks.enter_context(path.open("r+b"))
                try:
                    is_locked = lock(file.fileno())
                except BlockingIOError:
                    return
                if not is_locked or os.fstat(file.fileno()).st_size:
                    return
            shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[bool]:
        """Whether no other shard writes the output while the block lasts; False too once the folder is gone."""
        with ExitStack() as stack:
            try:
                file = stack.enter_context((self.path / SETTINGS).open("r+b"))
                # Without locks the second of two finds the output there.
                lock(file.fileno())
                is_ours = True
            except (FileNotFoundError, BlockingIOError):
                is_ours = False
            yield is_ours

    def remove(self) -> None:
        """Take the folder away: its answers are in the output."""
        shutil.rmtree(self.path, ignore_errors=True)


def _is_answer(line: bytes) -> bool:
    """False for one that its writer has not ended yet, too."""
    with suppress(ValueError, TypeError):
        record = json.loads(line)
        return "row" in record and Reply.of(record).is_answer
    return False


def _ended(path: Path, limit: int | None) -> int:
    """Conversations of a shard by its last line; -1 where that does not end it, or under a smaller limit."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 256))
            last = file.read().splitlines()[-1]
        return _end_of(json.loads(last), limit) if last.startswith(b'{"end":') else -1
    except (FileNotFoundError, IndexError, ValueError):
        return -1
    except OSError as error:
        raise storage_error(error, str(path)) from error


def _end_of(record: Mapping[str, Any], limit: int | None) -> int:
    return -1 if limit is not None and int(record.get("limit", 0)) < limit else int(record["end"])


@dataclass(frozen=True)
class _Line:
    """Where an answer is in its file, and the limit that cut it; None where none did."""

    offset: int
    cut_at: int | None


class AnswerLog:
    """One file of answers; ``append`` may be called by many threads. ``limit``: answers that a smaller one cut count as
    unanswered; None where the limit cannot grow. Raises ConflictError: ``answers-running``, another process writes it;
    StorageError: the disk refused."""

    def __init__(self, path: Path, limit: int | None = None, *, is_read_only: bool = False) -> None:
        self.path, self._limit = path, limit
        self._end: int | None = None
        self._lock = threading.Lock()
        self._lines: dict[int, list[_Line]] = {}
        self._synced_s = time.monotonic()
        with storage_errors(path):
            self._file: BinaryIO = path.open("rb" if is_read_only else "a+b")
        try:
            if not is_read_only:
                lock_or_warn(self._file.fileno(), path.parent)
                if not os.fstat(self._file.fileno()).st_nlink:
                    raise BlockingIOError  # removed between the opening and the lock, by one that found it empty
            self._load(is_read_only)
        except BlockingIOError as error:
            self._file.close()
            raise ConflictError(f"another process is writing {path}", kind=Kind.ANSWERS_RUNNING) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerLog":
        return self

    def __exit__(self, *_error: object) -> None:
        # What a full disk refused is still in the buffer: closing tries once more.
        with self._lock, storage_errors(self.path, "free some space; the same command goes on"):
            self._file.close()

    def replies(self, rewrite: Rewrite) -> list[Reply]:
        """What was answered so far, in order of turns. Raises ConflictError: ``answers-differ``, the answers belong to
        another conversation."""
        replies: list[Reply] = []
        for kept in self._lines.get(rewrite.number, ()):
            with self._lock:
                self._file.seek(kept.offset)
                line = json.loads(self._file.readline())
            if line["input"] != rewrite.digest:
                raise ConflictError(
                    f"{self.path} has answers for another conversation {rewrite.number + 1} than the input holds now",
                    kind=Kind.ANSWERS_DIFFER,
                    hint=f"give the same INPUT again, or start anew: {shlex.join(['rm', '-r', str(self.path.parent)])}",
                )
            replies.append(Reply.of(line))
        return replies

    def append(self, rewrite: Rewrite, reply: Reply) -> bool:
        """Keep the next answer of a conversation; False when it came from here, or the run was stopped meanwhile."""
        line = {"row": rewrite.number, "turn": rewrite.turn, "input": rewrite.digest, **reply.document()}
        if reply.is_cut and self._limit is not None:
            line["limit"] = self._limit
        with self._lock:
            if self._file.closed:
                return False
            lines = self._lines.setdefault(rewrite.number, [])
            is_new = rewrite.turn >= len(lines)
            if is_new:
                lines.append(_Line(self._write(line), _cut_at(line)))
                # Of an input that has grown: its end is to be said again, behind this.
                self._end = None
            return is_new

    def finish(self, conversations: int) -> None:
        """Say that every conversation of this shard has its answers."""
        with self._lock:
            if self._end != conversations:
                limit = {} if self._limit is None else {"limit": self._limit}
                self._write({"end": conversations, **limit}, is_last=True)
                self._end = conversations

    def _write(self, line: dict[str, Any], is_last: bool = False) -> int:
        with storage_errors(self.path, "free some space; the same command goes on"):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
            self._file.flush()
            if is_last or time.monotonic() - self._synced_s > SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced_s = time.monotonic()
        return offset

    def _load(self, is_read_only: bool) -> None:
        offset = 0
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                if not is_read_only:
                    self._file.truncate(offset)
                break
            self._index(line, offset)
            offset += len(line)
        limit = self._limit or 0
        for lines in self._lines.values():
            lines[:] = takewhile(lambda line: line.cut_at is None or line.cut_at >= limit, lines)

    def _index(self, line: bytes, offset: int) -> None:
        try:
            record = foreign_json(line)
            if "end" in record:
                self._end = _end_of(record, self._limit)
                return
            lines = self._lines.setdefault(int(record["row"]), [])
            turn = record["turn"]
            if turn < len(lines) and lines[turn].cut_at is not None:
                del lines[turn:]
            # An in-process batch that a kill cut in two is answered again, with the same answers.
            if turn == len(lines):
                lines.append(_Line(offset, _cut_at(record)))
            self._end = None
        except (ValueError, KeyError, TypeError) as error:
            hint = f"{shlex.join(['rm', str(self.path)])} has these answers written again"
            raise damaged(self.path, f"at byte {offset} is no answer", hint) from error


def _cut_at(record: Mapping[str, Any]) -> int | None:
    """Where no limit is named, the answer's own length says it."""
    return int(record.get("limit", record.get("tokens", 0))) if record.get("is_cut") else None
