"""The filesystem seam on object storage: ``s3://``, ``gs://`` and ``az://`` through obstore.

An object appears whole or not at all and its name is durable at once, so nothing here is temporary and nothing is
synced. ``put_if_absent`` is one conditional put. Every request is repeated, at random and growing intervals, until it
is answered or a deadline has passed. What a server says is never quoted: it may hold names of keys and signed text.
"""

import io
import os
import re
import secrets
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple, TypeVar

from hiddenstore.errors import ConfigError, ConflictError, CorruptionError, Kind, NotFoundError, StorageError
from hiddenstore.fs.seam import CREDENTIALS, TEMP_PREFIX, WritableFile, is_inside, parse_address, storage_errors
from hiddenstore.threads import Threads

DEADLINE_S = 120.0
"""How long a request is repeated before it counts as refused."""
PART_BYTES = 8 << 20
"""Reads and writes beyond this go in parts of it, several at a time."""
PARALLEL = 8

_WAIT_S, _LONGEST_WAIT_S = 0.1, 8.0
_MOST_KNOWN = 1 << 16
_WINDOW_BYTES = 1 << 16
# S3 takes 5 GiB in one request.
_LARGEST_PUT = 5 << 30
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_WITHOUT_ROLE = re.compile(r"169\.254\.|metadata\.google|instance metadata", re.IGNORECASE)
_JITTER = SystemRandom()
_REFUSING = {401, 403}
_PASSING = {408, 409, 425, 429}

T = TypeVar("T")
Entries = list[Any]


class RefusedError(StorageError):
    """A server refused, or did not answer in time. ``status`` is that of HTTP, None without an answer."""

    def __init__(self, message: str, *, kind: Kind, hint: str | None, status: int | None) -> None:
        super().__init__(message, kind=kind, hint=hint)
        self.status = status


class ObjectFilesystem:
    """A prefix of a bucket. Safe to use from many threads; pickles as its address. Raises ConfigError:
    ``scheme-unsupported``, ``address-invalid``."""

    prefers_few_files = True

    def __init__(self, address: str) -> None:
        self._parsed = parse_address(address)
        scheme, bucket, prefix = self._parsed
        self.root = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
        # Files of a store never change, so what was measured once is not asked again until ``drop_cache``.
        self._known: dict[str, tuple[int, str]] = {}
        self._windows, self._drops = threading.local(), 0
        self._lock = threading.Lock()
        self._puts_are_atomic = False
        self._clients: dict[int, Any] = {}
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def __reduce__(self) -> tuple[type["ObjectFilesystem"], tuple[str]]:
        return type(self), (self.root,)

    @property
    def address(self) -> str:
        return self.root

    def create(self, path: str) -> WritableFile:
        self.require_atomic_put()
        return _NewObject(self, path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self.require_atomic_put()
        return self._put(path, data)

    def read(self, path: str) -> bytes:
        return self._read(path, None)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        buffer = bytearray(length)
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.read_scatter(path, offset, [buffer.cast("B") if buffer.ndim != 1 or buffer.format != "B" else buffer])

    def read_scatter(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        length, done = sum(map(len, buffers)), 0
        data = memoryview(self._read(path, (offset, length)))
        if len(data) != length:
            message = f"{self.root}/{path} is too short: expected {offset + length} bytes, found {offset + len(data)}"
            raise CorruptionError(message, kind=Kind.FILE_SHORT, path=path)
        for buffer in buffers:
            buffer[:] = data[done : done + len(buffer)]
            done += len(buffer)

    def size(self, path: str) -> int | None:
        try:
            return self._identity(path)[0]
        except NotFoundError:
            return None

    def _identity(self, path: str) -> tuple[int, str]:
        """Bytes and entity tag of an object."""
        known = self._known.get(path)
        if known is None:
            entry = self._ask(path, lambda api, key: api.head(self._bucket, key))
            known = int(entry["size"]), str(entry["e_tag"])
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[path] = known
        return known

    def list(self, folder: str) -> list[str]:
        try:
            answer = self._ask(folder, lambda api, key: api.list_with_delimiter(self._bucket, key or None))
        except NotFoundError:
            return []
        paths = [*answer["common_prefixes"], *(entry["path"] for entry in answer["objects"])]
        return sorted({path.rpartition("/")[2] for path in paths})

    def drop_cache(self, path: str) -> None:
        self._forget(path)

    def let_go(self) -> None:
        """Nothing is open between reads but connections, which belong to the process."""

    def _forget(self, *paths: str) -> None:
        self._drops += 1
        for path in paths:
            self._known.pop(path, None)

    def sync_folder(self, path: str) -> None:
        """An object is durable when its put is answered."""

    def remove_tree(self, path: str) -> None:
        if path in ("", "."):
            raise ValueError("remove_tree never removes the root")
        keys = [entry["path"] for entry in self._below(path)]
        try:
            if keys:
                self._ask(path, lambda api, _key: api.delete(self._bucket, keys))
        except NotFoundError:
            # Google answers 404 for a key that somebody else removed meanwhile, and obstore then leaves the rest.
            [*_pool().map(self._remove, keys)]
        self._remove(path)
        self._forget(*keys)

    def _remove(self, path: str) -> None:
        """One object, which may be absent."""
        with suppress(NotFoundError):
            self._ask(path, lambda api, key: api.delete(self._bucket, key))
        self._forget(path)

    def remove_empty(self, folder: str) -> None:
        """A prefix that nothing begins with is not there."""

    def usage(self, path: str) -> tuple[int, float]:
        entries = self._below(path)
        with suppress(NotFoundError):
            entries.append(self._ask(path, lambda api, key: api.head(self._bucket, key)))
        if not entries:
            return 0, 0.0
        youngest: datetime = max(entry["last_modified"] for entry in entries)
        age_s = (datetime.now(UTC) - youngest).total_seconds()
        return sum(entry["size"] for entry in entries), max(0.0, age_s)

    def free_bytes(self) -> None:
        return None

    def local_path(self, path: str) -> Path:
        problem = f"{self.root}/{path} is not on a local disk, and stock readers open local files"
        raise ConfigError(problem, kind=Kind.STORE_REMOTE, hint=shlex.join(["hiddenstore", "copy", self.root, "LOCAL"]))

    @contextmanager
    def local_copy(self, path: str, without: str = "") -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="hiddenstore-") as folder:
            copy = Path(folder, path.rpartition("/")[2])
            size = self.size(path)
            if size is not None:
                self._download(path, size, copy)
            for entry in [] if size is not None else self._below(path):
                name = entry["path"].removeprefix(f"{path}/")
                if not is_inside(name):
                    raise ConfigError(f"{self.root}/{path} holds {name!r}", kind=Kind.PATH_UNSAFE)
                if not without or not name.endswith(without):
                    self._download(entry["path"], entry["size"], copy / name)
            yield copy

    def require_atomic_put(self) -> None:
        """Put an object twice, once in the life of this; the second time has to be refused."""
        with self._lock:
            if self._puts_are_atomic:
                return
            name, refusal = f"{TEMP_PREFIX}{secrets.token_hex(8)}", ""
            try:
                self._put(name, b"first")
                if self._put(name, b"second"):
                    refusal = "it let an object be put over another"
            except RefusedError as error:
                if error.status not in (400, 405, 501):
                    raise
                refusal = f"it answered {error.status}"
            finally:
                with suppress(StorageError):
                    self.remove_tree(name)
            if refusal:
                raise StorageError(
                    f"{self.root} can be read, not written: its server has no conditional put, which commits need "
                    f"({refusal})",
                    kind=Kind.NO_ATOMIC_PUT,
                    hint="write to a local disk, or to a server that knows If-None-Match: *",
                )
            self._puts_are_atomic = True

    @property
    def _bucket(self) -> Any:
        return self._opened(60)

    @property
    def _patient_bucket(self) -> Any:
        """For a large body in one request, as a condition demands."""
        return self._opened(1800)

    def _opened(self, timeout_s: int) -> Any:
        """One client for each time-out. Raises ConfigError: ``option-invalid``: in a forked process, where its threads
        are not and every request would wait for ever."""
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self.root} was opened before this process was forked",
                kind=Kind.OPTION_INVALID,
                hint='DataLoader(..., multiprocessing_context="spawn"), as hiddenstore.loader has it; or open it here',
            )
        if timeout_s not in self._clients:
            self._clients[timeout_s] = self._client(timeout_s)
        return self._clients[timeout_s]

    def _client(self, timeout_s: int) -> Any:
        from obstore.exceptions import BaseError

        try:
            return _open_bucket(*self._parsed, timeout_s)
        except (BaseError, ValueError):
            reason = "the environment lacks what it takes to open it, or holds what cannot be"
            raise _refusal(self.root, 403, reason, False) from None

    def _put(self, path: str, data: bytes) -> bool:
        """Whether ``path`` now holds ``data``: an earlier try of this very put may have been lost on its way back."""
        from obstore.exceptions import AlreadyExistsError

        bucket = self._bucket if len(data) <= PART_BYTES else self._patient_bucket
        try:
            if len(data) > _LARGEST_PUT:
                self._put_file(path, io.BytesIO(data), len(data))
            else:
                self._ask(path, lambda api, key: api.put(bucket, key, data, mode="create", use_multipart=False), True)
        except AlreadyExistsError:
            return self.read(path) == data
        except ConflictError:
            return False
        return True

    def _put_file(self, path: str, file: Any, size: int) -> None:
        """A large new object in parts; a name that is taken is refused unless it holds the very same bytes."""

        def send(api: Any, key: str) -> None:
            file.seek(0)
            api.put(self._bucket, key, file, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=PARALLEL)

        if self.size(path) is None:
            self._ask(path, send, True)
        elif self.size(path) != size or not self._holds(path, file, size):
            raise _taken(self.root, path)

    def _holds(self, path: str, file: Any, size: int) -> bool:
        file.seek(0)
        return all(part == file.read(len(part)) for part in self._parts(path, 0, size))

    def _read(self, path: str, part: tuple[int, int] | None) -> bytes:
        """All of an object, or its part of an offset and a length as far as there is one."""
        if part is None:
            answer = self._ask(path, lambda api, key: _small_body(api.get(self._bucket, key)))
            if not isinstance(answer, int):
                return bytes(answer)
            part = (0, answer)
        offset, length = part
        if length <= PART_BYTES:
            return self._part(path, offset, length)
        return b"".join(self._parts(path, offset, length))

    def _part(self, path: str, offset: int, length: int) -> bytes:
        """At most one part. Small neighbours, such as tokens, mask and spans of a sample, are one request."""
        if length == 0 or length >= _WINDOW_BYTES:
            return self._range(path, offset, length) if length else b""
        window: _Window | None = getattr(self._windows, "last", None)
        if window is None or not window.holds(path, offset, length, self._drops):
            window = _Window(path, offset, self._range(path, offset, _WINDOW_BYTES), self._drops)
            self._windows.last = window
        return window.data[offset - window.start :][:length]

    def _range(self, path: str, offset: int, length: int) -> bytes:
        try:
            get = self._ask(path, lambda api, key: api.get_range(self._bucket, key, start=offset, length=length))
        except RefusedError as error:
            if error.status == 416:
                return b""
            raise
        return bytes(get)

    def _parts(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        """Consecutive parts, read several at a time, no more than those in memory."""
        starts = list(range(offset, offset + length, PART_BYTES))
        for first in range(0, len(starts), PARALLEL):
            batch = starts[first : first + PARALLEL]
            ends = [min(start + PART_BYTES, offset + length) for start in batch]
            yield from _pool().map(lambda start, end: self._part(path, start, end - start), batch, ends)

    def _download(self, path: str, size: int, copy: Path) -> None:
        with storage_errors(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with copy.open("xb") as file:
                for part in self._parts(path, 0, size):
                    file.write(part)

    def _below(self, path: str) -> Entries:
        """What a listing says of every object below a path."""
        return self._ask(path, lambda api, key: [*chain.from_iterable(api.list(self._bucket, f"{key}/"))])

    def _ask(self, path: str, action: Callable[[Any, str], T], is_put: bool = False) -> T:
        """What ``action`` gets from obstore and a key, repeated while the failure is one that passes. Raises
        NotFoundError: ``path-missing``; StorageError: ``permission-denied``, ``io-error``; ``reply-lost``: a put that
        may have been done; obstore.exceptions.AlreadyExistsError: a conditional put was refused."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError

        key = path if path not in (".",) else ""
        if key and not is_inside(key):
            raise ConfigError(f"path {path!r} leaves {self.root}", kind=Kind.PATH_UNSAFE)
        where = f"{self.root}/{key}" if key else self.root
        ends, wait_s, is_unanswered = time.monotonic() + DEADLINE_S, _WAIT_S, False
        while True:
            try:
                return action(obstore, key)
            except AlreadyExistsError:
                raise
            except (BaseError, FileNotFoundError, PermissionError, ConnectionError, TimeoutError) as error:
                # From None: the text of the original may name keys and signatures.
                status, reason = _meaning(error)
                if status == 404:
                    raise NotFoundError(f"{where} does not exist", kind=Kind.PATH_MISSING) from None
                is_unanswered |= is_put and status is None
                is_passing = status is None or status in _PASSING or (status >= 500 and status != 501)
                if not is_passing or reason in (_NO_ROLE, _NO_HTTP) or time.monotonic() + wait_s > ends:
                    raise _refusal(where, status, reason, is_unanswered) from None
            time.sleep(_JITTER.uniform(0, wait_s))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


class _Window(NamedTuple):
    """What a thread read last of a file, and a little beyond; ``drops`` counts the ``drop_cache`` before it."""

    path: str
    start: int
    data: bytes
    drops: int

    def holds(self, path: str, offset: int, length: int, drops: int) -> bool:
        is_same = (path, drops) == (self.path, self.drops)
        return is_same and self.start <= offset and offset + length <= self.start + len(self.data)


class _NewObject:
    """Bytes on their way into an object, kept here (in memory, beyond one part in TMPDIR) until ``close`` sends them:
    a retry can then begin anew."""

    def __init__(self, filesystem: ObjectFilesystem, path: str) -> None:
        self._fs, self._path, self._size = filesystem, path, 0
        self._file = tempfile.SpooledTemporaryFile(max_size=PART_BYTES, prefix="hiddenstore-")  # noqa: SIM115

    def write(self, data: bytes | memoryview) -> None:
        with storage_errors(f"a temporary file in {tempfile.gettempdir()}"):
            self._file.write(data)
            self._size += memoryview(data).nbytes

    append = write

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file as file:
            if self._size > PART_BYTES:
                self._fs._put_file(self._path, file, self._size)
                return
            file.seek(0)
            if not self._fs._put(self._path, file.read()):
                raise _taken(self._fs.root, self._path)

    def abort(self) -> None:
        self._file.close()


def _open_bucket(scheme: str, bucket: str, prefix: str, timeout_s: int) -> Any:
    from obstore.store import AzureStore, GCSStore, S3Store

    options: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=timeout_s),
            # obstore forgets what the environment says of it where it is given any option of its client.
            "allow_http": os.environ.get(f"{_VARIABLES[scheme]}_ALLOW_HTTP", "").lower() in ("1", "true"),
        },
        # Our own repetition comes on top: obstore's stays within a request, so that one part of many is sent again.
        "retry_config": {"max_retries": 3, "retry_timeout": timedelta(seconds=30)},
    }
    opener: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    return opener(bucket, prefix=prefix or None, **options)


def _small_body(answer: Any) -> Any:
    """The bytes of an object of one part, the length of a longer one."""
    size = int(answer.meta["size"])
    return size if size > PART_BYTES else answer.bytes()


_VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
_NO_ROLE = "no credentials in the environment, and this machine has no role"
_NO_HTTP = "its endpoint is http://, which takes AWS_ALLOW_HTTP=true (GOOGLE_, AZURE_)"


def _meaning(error: Exception) -> tuple[int | None, str]:
    """HTTP status of a failure, None where nothing was answered, and the reason in our words."""
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error)
    match, code = _STATUS.search(text), _CODE.search(text)
    status = int(match[1]) if match else None
    if isinstance(error, FileNotFoundError):
        status = 404
    elif isinstance(error, PermissionDeniedError | PermissionError | UnauthenticatedError):
        status = status or 403
    if code is not None and code[1] == "RequestTimeout":
        status = 408
    if status is None and "StartTooLarge" in text:
        # Azure sends an empty range at the very end of a blob, which obstore refuses by itself.
        status = 416
    if _WITHOUT_ROLE.search(text):
        return status, _NO_ROLE
    if status is None:
        return None, _NO_HTTP if "BadScheme" in text else "no whole answer came"
    return status, f"the server answered {status}{f' {code[1]}' if code else ''}"


def _refusal(where: str, status: int | None, reason: str, is_unanswered: bool) -> "RefusedError":
    if status in _REFUSING or reason in (_NO_ROLE, _NO_HTTP):
        return RefusedError(f"{where}: {reason}", kind=Kind.PERMISSION_DENIED, hint=CREDENTIALS, status=status)
    kind, hint = Kind.REPLY_LOST if is_unanswered else Kind.IO_ERROR, "run it again: what is committed stays"
    return RefusedError(f"{where}: {reason}", kind=kind, hint=hint, status=status)


def _taken(root: str, path: str) -> ConflictError:
    return ConflictError(f"{root}/{path} exists already", kind=Kind.FILE_EXISTS)


@cache
def _pool() -> Threads:
    return Threads(PARALLEL, thread_name_prefix="objects")
