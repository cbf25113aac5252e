"""A repository of the Hugging Face hub as a place to share, through ``huggingface_hub`` and its own chain of tokens.

Uploads go by the hub's own client, a few files a commit; what it has, by sha256, is not sent again. Reads are ranges,
so that a pull goes on at any byte. Addresses of its storage are signed: none of them is quoted.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from hiddenstore.errors import ConfigError, HiddenstoreError, Kind, NotFoundError, StorageError
from hiddenstore.fs import open_filesystem
from hiddenstore.fs.seam import storage_error
from hiddenstore.servers.http import retry_wait_s
from hiddenstore.share.remote import SUMS, Advance, LocalFile, Remote, StorageRemote, parse_sums, read_sums

MOST_FILES, MOST_IN_FOLDER, MOST_BYTES = 100_000, 10_000, 50_000_000_000
"""Of a repository, of one of its folders, of one file: beyond these the hub refuses or advises against it."""
COMMIT_FILES, COMMIT_BYTES = 100, 8 << 30
TRIES = 5
_AGAIN = (Kind.SERVER_FAILING, Kind.SERVER_TIMEOUT, Kind.SERVER_UNREACHABLE)

_ADDRESS = re.compile(r"hf://(datasets/)?((?!datasets/)[\w-][\w.-]*/[\w.-]+)(?:@([\w./-]+))?/*")
_TIMEOUT_S = 120


def open_remote(address: str) -> Remote:
    """The place at ``hf://datasets/OWNER/NAME``, ``hf://OWNER/NAME``, or an address of object storage. Raises
    ConfigError: ``address-invalid``, ``scheme-unsupported``."""
    if not address.startswith("hf:/"):
        return StorageRemote(open_filesystem(address))
    match = _ADDRESS.fullmatch(address)
    if match is None or ".." in match[2] or "--" in match[2]:
        message = "hf://… is no repository: expected hf://datasets/OWNER/NAME, or hf://OWNER/NAME for a drafter"
        raise ConfigError(message, kind=Kind.ADDRESS_INVALID)
    return HubRemote(match[2], "dataset" if match[1] else "model", match[3])


def require_limits(files: Sequence[tuple[str, int]]) -> None:
    """Refuse files, by path and size, that the hub does not take: ConfigError ``hub-limit``."""
    entries = {entry for path, _ in files for entry in (PurePosixPath(path), *PurePosixPath(path).parents[:-1])}
    ((folder, most_entries),) = Counter(entry.parent for entry in entries).most_common(1)
    path, largest = max(files, key=lambda file: file[1])
    for number, most, what, where in (
        (len(files), MOST_FILES, "files", ""),
        (most_entries, MOST_IN_FOLDER, "entries", f" in {folder}"),
        (largest, MOST_BYTES, "bytes", f" in {path}"),
    ):
        if number > most:
            message = f"the hub takes at most {most:,} {what} there, and these are {number:,} {what}{where}"
            hint = "push it in parts, to several repositories: --where, --split; or to object storage: s3://…"
            raise ConfigError(message, kind=Kind.HUB_LIMIT, hint=hint)


class HubRemote:
    """A repository; ``revision`` is a branch, tag or commit to read at."""

    keeps_history = True

    def __init__(self, repo: str, kind: str, revision: str | None = None) -> None:
        self.address = f"hf://{'datasets/' if kind == 'dataset' else ''}{repo}" + (f"@{revision}" if revision else "")
        self.repo, self.kind, self.revision = repo, kind, revision
        self._where = {"repo_id": repo, "repo_type": kind}

    def begin(self, sums: Mapping[str, str], public: bool) -> None:
        with self._asking():
            self._api.create_repo(**self._where, private=not public, exist_ok=True)
            is_private = self._api.repo_info(**self._where).private
        if not (is_private or public):
            message = f"{self.address} can be read by everybody, and --public was not given"
            raise ConfigError(message, kind=Kind.OPTION_INVALID, hint="--public, or another name")
        if is_private and public:
            message = f"{self.address} is private, and --public is of a new repository"
            hint = "without --public; the repository's own settings on the hub open it to everybody"
            raise ConfigError(message, kind=Kind.OPTION_INVALID, hint=hint)

    def digests(self, files: Sequence[LocalFile]) -> dict[str, str]:
        try:
            tree = self._tree
        except NotFoundError:
            return {}
        known = read_sums(self)
        # What the hub keeps in git itself has no sha256 there; what we listed of it does.
        return {f.path: tree[f.path][1] or known.get(f.path, "") for f in files if f.path in tree}

    def put(self, files: Sequence[LocalFile], advance: Advance) -> None:
        for batch in _batches(files):
            for number in range(1, TRIES + 1):
                try:
                    self._commit_files(batch)
                    break
                except StorageError as error:
                    if number == TRIES or error.kind not in _AGAIN:
                        raise
                    time.sleep(retry_wait_s(number))
                finally:
                    # A commit whose answer was lost may have been made.
                    for name in ("_tree", "_commit"):
                        self.__dict__.pop(name, None)
            advance(sum(file.size for file in batch))

    def _left_behind(self, files: Sequence[LocalFile]) -> list[str]:
        """What was pushed of an older drafter and is no part of the newer one."""
        sums = next((file.source for file in files if file.path == SUMS), b"")
        if self.kind != "model" or not isinstance(sums, bytes) or not sums:
            return []
        return sorted((read_sums(self).keys() & self._tree.keys()) - parse_sums(sums, SUMS).keys())

    def _commit_files(self, files: Sequence[LocalFile]) -> None:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        message = f"hiddenstore push: {len(files)} files, {files[0].path} …"
        with self._asking():
            for file in files:
                # The client's own error about a file that has gone names no file.
                _ = isinstance(file.source, bytes) or file.source.stat()
            # An operation that was sent is spent; files the hub has by then are not sent again.
            operations = [CommitOperationAdd(file.path, file.source) for file in files]
            operations += [CommitOperationDelete(path) for path in self._left_behind(files)]
            self._api.create_commit(**self._where, operations=operations, commit_message=message)

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

        from hiddenstore.servers.hub_session import bound_hub_requests

        bound_hub_requests()
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
            entries = self._api.list_repo_tree(**self._where, revision=commit, recursive=True)
            files = [entry for entry in entries if hasattr(entry, "size")]
            return {file.path: (int(file.size), file.lfs.sha256 if file.lfs else "") for file in files}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        from hiddenstore.servers.hub_session import http_errors

        try:
            yield
        except HiddenstoreError:
            raise
        # The hub's client wraps what failed in errors of many kinds, and stumbles over answers of another shape.
        except http_errors(OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            if isinstance(error, OSError) and error.filename:
                raise storage_error(error, str(error.filename)) from error
            raise _refusal(self.address, error, self._api.endpoint) from None


def _refusal(address: str, error: BaseException, endpoint: str) -> HiddenstoreError:
    """What the hub's client raised, without the addresses it asked and the token it sent."""
    from huggingface_hub import get_token

    from hiddenstore.servers.hub_session import http_errors

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    response = next((answer for cause in causes if (answer := getattr(cause, "response", None)) is not None), None)
    names = [type(cause).__name__ for cause in causes]
    late = next((cause for cause in causes if isinstance(cause, http_errors(name="TimeoutException"))), None)
    if response is None and late is not None:
        words = f"{address}: {late or type(late).__name__}"
        return StorageError(words, kind=Kind.SERVER_TIMEOUT, hint="the same command goes on where it stopped")
    if response is None:
        is_offline = "OfflineModeIsEnabled" in names
        words = (
            "HF_HUB_OFFLINE is set, and the hub is not here"
            if is_offline
            else f"no answer that can be read ({names[-1]})"
        )
        hint = "HF_HUB_OFFLINE=0 and the same command" if is_offline else None
        return StorageError(f"{address}: {words}", kind=Kind.SERVER_UNREACHABLE, hint=hint)
    status = int(response.status_code)
    words = f"{address}: the hub answered {status}"
    said = next((own for cause in causes if (own := getattr(cause, "server_message", None))), "")
    if said and urlsplit(str(response.url)).netloc == urlsplit(endpoint).netloc:
        words += f": {' '.join(str(said).replace(get_token() or chr(0), '…').split())[:200]}"
    if status in (401, 403):
        hint = "hf auth login, or HF_TOKEN in the environment; a repository nobody may see answers so too"
        return StorageError(words, kind=Kind.PERMISSION_DENIED, hint=hint)
    if status == 404:
        return NotFoundError(words, kind=Kind.PATH_MISSING)
    if status in (408, 429) or status >= 500:
        hint = "the same command goes on where it stopped"
        return StorageError(f"{words}, again and again", kind=Kind.SERVER_FAILING, hint=hint)
    return ConfigError(words, kind=Kind.SERVER_REFUSED)


def _batches(files: Sequence[LocalFile]) -> list[list[LocalFile]]:
    """Commits; what takes the place of other files comes last, all at once."""
    batches: list[list[LocalFile]] = [[]]
    for file in [file for file in files if not file.replaces]:
        if len(batches[-1]) == COMMIT_FILES or sum(f.size for f in batches[-1]) + file.size > COMMIT_BYTES:
            batches.append([])
        batches[-1].append(file)
    return [batch for batch in [*batches, [file for file in files if file.replaces]] if batch]
