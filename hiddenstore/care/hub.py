"""A repository of the Hugging Face hub as a place to share, through ``huggingface_hub`` and its own chain of tokens.

Uploads go by the hub's own client, a few files a commit; what it has, by sha256, is not sent again. Reads are ranges,
so that a pull goes on at any byte. Addresses of its storage are signed: none of them is quoted.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from hiddenstore.care.remote import LocalFile, Remote, StorageRemote, remote_sums
from hiddenstore.errors import ConfigError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.fs import open_filesystem
from hiddenstore.http import retry_wait_s

MOST_FILES, MOST_IN_FOLDER, MOST_BYTES = 100_000, 10_000, 50_000_000_000
"""Of a repository, of one of its folders, of one file: beyond these the hub refuses or advises against it."""
COMMIT_FILES, COMMIT_BYTES = 100, 8 << 30
TRIES = 5

_ADDRESS = re.compile(r"hf://(datasets/)?([\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?/*")
_TIMEOUT_S = 120
_PASSING = {408, 429, 500, 502, 503, 504}


def open_remote(address: str) -> Remote:
    """The place at ``hf://datasets/OWNER/NAME``, ``hf://OWNER/NAME``, or an address of object storage. Raises
    ConfigError: ``address-invalid``, ``scheme-unsupported``."""
    if not address.startswith("hf://"):
        return StorageRemote(open_filesystem(address))
    match = _ADDRESS.fullmatch(address)
    if match is None:
        message = "hf://… is no repository: expected hf://datasets/OWNER/NAME, or hf://OWNER/NAME for a drafter"
        raise ConfigError(message, kind=Kind.ADDRESS_INVALID)
    return HubRemote(match[2], "dataset" if match[1] else "model", match[3])


def require_limits(files: Sequence[tuple[str, int]]) -> None:
    """Refuse files, by path and size, that the hub does not take: ConfigError ``hub-limit``."""
    folders: dict[str, set[str]] = {}
    for path, _ in files:
        parts = path.split("/")
        for depth, name in enumerate(parts):
            folders.setdefault("/".join(parts[:depth]), set()).add(name)
    fullest = max(folders, key=lambda folder: len(folders[folder]), default="")
    path, largest = max(files, key=lambda file: file[1], default=("", 0))
    for text, number, most in (
        ("files", len(files), MOST_FILES),
        (f"entries in {fullest or 'its root'}", len(folders.get(fullest, ())), MOST_IN_FOLDER),
        (f"bytes in {path}", largest, MOST_BYTES),
    ):
        if number > most:
            raise ConfigError(
                f"the hub takes at most {most:,} {text.partition(' in ')[0]} there, and these are {number:,} {text}",
                kind=Kind.HUB_LIMIT,
                hint="push it in parts, to several repositories: --where, --split; or to object storage: s3://…",
            )


class HubRemote:
    """A repository; ``revision`` is a branch, tag or commit to read at."""

    keeps_history = True

    def __init__(self, repo: str, kind: str, revision: str | None = None) -> None:
        self.address = f"hf://{'datasets/' if kind == 'dataset' else ''}{repo}" + (f"@{revision}" if revision else "")
        self.repo, self.kind, self.revision = repo, kind, revision
        self._where = {"repo_id": repo, "repo_type": kind}

    def begin(self, sums: bytes, public: bool) -> None:
        with self._asking():
            self._api.create_repo(**self._where, private=not public, exist_ok=True)
            is_private = self._api.repo_info(**self._where).private
        if not (is_private or public):
            message = f"{self.address} can be read by everybody, and --public was not given"
            raise ConfigError(message, kind=Kind.OPTION_INVALID, hint="--public, or another name")

    def digests(self, files: Sequence[LocalFile]) -> dict[str, str]:
        try:
            tree = self._tree
        except NotFoundError:
            return {}
        known = remote_sums(self) or {}
        # What the hub keeps in git itself has no sha256 there; what we listed of it does.
        listed = {path: tree[path][1] or known.get(path, "") for path in tree.keys() & {file.path for file in files}}
        return {file.path: listed[file.path] for file in files if file.path in listed}

    def put(self, files: Sequence[LocalFile], advance: Callable[[int], None]) -> None:
        from huggingface_hub import CommitOperationAdd

        last = [file for file in files if file.replaces]
        for batch in filter(None, [*_batches([file for file in files if not file.replaces]), last]):
            for number in range(1, TRIES + 1):
                # An operation that was sent is spent; files the hub has by then are not sent again.
                operations = [CommitOperationAdd(file.path, _source(file)) for file in batch]
                try:
                    with self._asking():
                        message = f"hiddenstore push: {len(batch)} files, {batch[0].path} …"
                        self._api.create_commit(**self._where, operations=operations, commit_message=message)
                    break
                except StorageError as error:
                    if number == TRIES or error.kind not in (Kind.SERVER_FAILING, Kind.SERVER_UNREACHABLE):
                        raise
                    time.sleep(retry_wait_s(number))
            advance(sum(file.size for file in batch))
        for name in ("_tree", "_commit"):
            self.__dict__.pop(name, None)

    def size(self, path: str) -> int | None:
        return self._tree[path][0] if path in self._tree else None

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        if length <= 0:
            return b""
        with self._asking():
            url = hf_hub_url(filename=path, revision=self._commit, endpoint=self._api.endpoint, **self._where)
            headers = {"range": f"bytes={offset}-{offset + length - 1}", **build_hf_headers()}
            response = http_backoff("GET", url, headers=headers, timeout=_TIMEOUT_S)
            hf_raise_for_status(response)
        data = bytes(response.content)
        # A server that knows no ranges sends the whole file.
        return data[offset : offset + length] if response.status_code == 200 else data

    @cached_property
    def _api(self) -> Any:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, logging

        disable_progress_bars()
        # Its warnings quote addresses with signatures.
        logging.set_verbosity_error()
        return HfApi()

    @cached_property
    def _commit(self) -> str:
        """What is read is read at one commit, whatever is pushed meanwhile."""
        with self._asking():
            return str(self._api.repo_info(**self._where, revision=self.revision).sha)

    @cached_property
    def _tree(self) -> dict[str, tuple[int, str]]:
        """Size and sha256 (empty where the hub has none) by path."""
        commit = self._commit
        with self._asking():
            entries = list(self._api.list_repo_tree(**self._where, revision=commit, recursive=True))
        files = [entry for entry in entries if hasattr(entry, "size")]
        return {file.path: (file.size, file.lfs.sha256 if file.lfs else "") for file in files}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from httpx2 import HTTPError

        try:
            yield
        except HiddenstoreError:
            raise
        # The hub's client wraps what failed in errors of many kinds.
        except (HTTPError, OSError, RuntimeError, ValueError) as error:
            raise _refusal(self.address, error, self._api.endpoint) from None


def _refusal(address: str, error: BaseException, endpoint: str) -> HiddenstoreError:
    """What the hub's client raised, without the addresses it asked."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    response = next((answer for cause in causes if (answer := getattr(cause, "response", None)) is not None), None)
    if response is None:
        if any(type(cause).__name__ == "OfflineModeIsEnabled" for cause in causes):
            text, hint = "HF_HUB_OFFLINE is set, and the hub is not here", "HF_HUB_OFFLINE=0 and the same command"
            return StorageError(f"{address}: {text}", kind=Kind.SERVER_UNREACHABLE, hint=hint)
        reason = type(causes[-1]).__name__
        return StorageError(f"{address}: no answer from the hub ({reason})", kind=Kind.SERVER_UNREACHABLE)
    status = int(response.status_code)
    words = f"the hub answered {status}"
    if urlsplit(str(response.url)).netloc == urlsplit(endpoint).netloc:
        said = [str(own) for cause in causes if (own := getattr(cause, "server_message", None))]
        words += f": {' '.join(said[0].split())[:200]}" if said else ""
    if status in (401, 403):
        hint = "hf auth login, or HF_TOKEN in the environment; a repository nobody may see answers so too"
        return StorageError(f"{address}: {words}", kind=Kind.PERMISSION_DENIED, hint=hint)
    if status == 404:
        return NotFoundError(f"{address}: {words}", kind=Kind.PATH_MISSING)
    if status in _PASSING or status >= 500:
        hint = "the same command goes on where it stopped"
        return StorageError(f"{address}: {words}, again and again", kind=Kind.SERVER_FAILING, hint=hint)
    return ConfigError(f"{address}: {words}", kind=Kind.SERVER_REFUSED)


def _source(file: LocalFile) -> str | bytes:
    return file.source if isinstance(file.source, bytes) else str(file.source)


def _batches(files: Sequence[LocalFile]) -> Iterator[list[LocalFile]]:
    batch: list[LocalFile] = []
    for file in files:
        if batch and (len(batch) == COMMIT_FILES or sum(f.size for f in batch) + file.size > COMMIT_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch
