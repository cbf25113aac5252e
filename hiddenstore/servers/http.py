"""One server over HTTP, JSON in both directions: one rule each for deadlines, tries, keys, addresses and errors.

Requests come from any number of threads. They run as tasks of one event loop, because a task can be cancelled at its
deadline whatever the server does: silence, a byte now and then, 1xx for ever.
"""

import asyncio
import json
import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from hiddenstore.errors import CaptureError, ConfigError, Kind, StorageError

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

T = TypeVar("T")
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
MOST_BYTES = 64 << 20
# uvicorn closes connections that idle for 5 s; a request sent at that moment would be lost.
_IDLE_S = 2.0
_TRANSIENT = frozenset({408, 409, 425, 429})
_CLOSE_S = 2.0
_LONGEST_QUOTE = 300
_THIS_MACHINE = frozenset({"127.0.0.1", "localhost", "::1"})
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""What a request says where the most probable token is wanted: servers take what it leaves out from the model's
``generation_config.json``, and a penalty that a model ships changes the choice at temperature 0 too."""


@dataclass(frozen=True)
class ServerAccess:
    """How a server is reached.

    ``url``: its root, with or without ``/v1``. ``timeout_s`` bounds one try, from the name look-up to the last byte of
    the answer; all ``tries`` and the waits between them end within ``tries * (timeout_s + LONGEST_WAIT_S)``.
    ``api_key_env`` names the environment variable that holds the key, ``key_option`` how a user names it. ``hint`` says
    what to do about a server that does not answer.
    """

    url: str
    timeout_s: float = 600.0
    tries: int = 4
    api_key_env: str | None = None
    key_option: str = "--api-key-env NAME"
    hint: str | None = None


class RefusedError(ConfigError):
    """``server-refused``: HTTP ``status`` 3xx, 4xx or 501, which another try would get again."""

    def __init__(self, message: str, status: int, hint: str | None) -> None:
        super().__init__(message, kind=Kind.SERVER_REFUSED, hint=hint)
        self.status = status


class HttpClient:
    """Connections to one server, kept and shared by threads. Redirects are not followed: no other server gets the key.

    ``read`` turns JSON into what the caller needs; whatever it raises over another shape becomes ``server-answer``.
    Raises ConfigError: ``server-url``, ``api-key-missing``; by requests: ``server-refused`` (RefusedError);
    StorageError: by requests: ``server-unreachable``, ``server-timeout``; ``server-failing``: HTTP 5xx, 429 …;
    CaptureError: by requests: ``server-answer``: no JSON, another shape, more than ``MOST_BYTES``."""

    def __init__(self, access: ServerAccess) -> None:
        from httpx2 import AsyncClient, InvalidURL, Limits

        self.access = access
        self.url = server_root(access.url)
        self._key = key_from_environment(access.api_key_env)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "hiddenstore"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S)
        # A proxy would look for this machine's own servers on its own machine.
        proxied = urlsplit(self.url).hostname not in _THIS_MACHINE
        try:
            self._client = AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=proxied)
            self._client.build_request("GET", self.url)
        except (ImportError, ValueError, InvalidURL) as error:
            message = f"no way to {self.url}: {error}"
            raise ConfigError(message, kind=Kind.SERVER_URL, hint="env | grep -i proxy") from error
        self._closed, self._loop = threading.Event(), event_loop()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._end = weakref.finalize(self, _close, self._client, self._under_way, self._loop)
        self._end.atexit = False

    def close(self) -> None:
        """Close the connections; what is under way in other threads fails."""
        self._closed.set()
        ended = self._end()
        if ended is not None:
            with suppress(TimeoutError):
                ended.result(_CLOSE_S)

    def get(self, path: str, read: Callable[[Any], T]) -> T:
        """What ``read`` makes of the JSON at ``path``."""
        return self._request("GET", path, None, lambda body: read(json.loads(body)))

    def post(self, path: str, document: Any, read: Callable[[Any], T]) -> T:
        """What ``read`` makes of the JSON that answers ``document``."""
        return self._request("POST", path, json.dumps(document).encode(), lambda body: read(json.loads(body)))

    def text(self, path: str, read: Callable[[str], T]) -> T:
        """What ``read`` makes of the page at ``path``."""
        return self._request("GET", path, None, lambda body: read(body.decode()))

    def _request(self, method: str, path: str, content: bytes | None, read: Callable[[bytes], T]) -> T:
        tries, timeout_s = self.access.tries, self.access.timeout_s
        end_s = time.monotonic() + tries * (timeout_s + LONGEST_WAIT_S)
        words = ""
        for number in range(1, tries + 1):
            retry_after = ""
            try:
                exchange = self._exchange(method, self.url + path, content, min(timeout_s, end_s - time.monotonic()))
                response, body = asyncio.run_coroutine_threadsafe(exchange, self._loop).result()
                retry_after = response.headers.get("Retry-After", "")
                return self._read(response, body, read)
            except (StorageError, CaptureError) as error:
                wait_s = retry_wait_s(number, retry_after)
                if error.kind in (Kind.SERVER_FAILING, Kind.SERVER_ANSWER):
                    words = words or error.message
                elif words:
                    # A server that failed and then went away: its own words say why.
                    error.message = f"{words}, then {error.message}"
                if number == tries or time.monotonic() + wait_s >= end_s or self._closed.wait(wait_s):
                    error.message += f" ({number} tries)" if number > 1 else ""
                    raise
        raise AssertionError

    async def _exchange(
        self, method: str, url: str, content: bytes | None, timeout_s: float
    ) -> "tuple[Response, bytes]":
        """The answer and at most one piece more than ``MOST_BYTES`` of its body."""
        from httpx2 import HTTPError

        headers = {"Content-Type": "application/json"} if content is not None else {}
        task = asyncio.current_task()
        assert task is not None, "an exchange is a task of the loop"
        self._under_way.add(task)
        try:
            if self._closed.is_set():
                raise asyncio.CancelledError
            async with (
                asyncio.timeout(timeout_s),
                self._client.stream(method, url, content=content, headers=headers) as response,
            ):
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > MOST_BYTES:
                        break
                return response, bytes(body)
        except TimeoutError as error:
            message = f"no whole answer from {url} within {timeout_s:g} s"
            raise StorageError(message, kind=Kind.SERVER_TIMEOUT, hint=self.access.hint) from error
        except asyncio.CancelledError as error:
            message = f"no answer from {url}: another thread closed the client"
            raise StorageError(message, kind=Kind.SERVER_UNREACHABLE, hint=self.access.hint) from error
        # UnicodeError: no such name can be looked up.
        except (HTTPError, OSError, RuntimeError, UnicodeError) as error:
            message = f"no answer from {url}: {_innermost(error)}"
            raise StorageError(message, kind=Kind.SERVER_UNREACHABLE, hint=self.access.hint) from error
        finally:
            self._under_way.discard(task)

    def _read(self, response: "Response", body: bytes, read: Callable[[bytes], T]) -> T:
        status = response.status_code
        # 501: not implemented, now or later.
        if status in _TRANSIENT or (status >= 500 and status != 501):
            raise StorageError(self._quoted(response, body), kind=Kind.SERVER_FAILING, hint=self.access.hint)
        if not 200 <= status < 300:
            hint = f"{self.access.key_option} reads a key from the environment" if status in (401, 403) else None
            raise RefusedError(self._quoted(response, body), status, hint)
        try:
            if len(body) > MOST_BYTES:
                raise ValueError(f"more than {MOST_BYTES:,} bytes")
            return read(body)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            why = self._masked(f"{type(error).__name__} {error}")
            raise CaptureError(
                f"{self._quoted(response, body)} is no answer: {why}", kind=Kind.SERVER_ANSWER
            ) from error

    def _quoted(self, response: "Response", body: bytes) -> str:
        """The server's own words, and where they come from."""
        text = body[: 2 * _LONGEST_QUOTE].decode("utf-8", "replace")
        with suppress(ValueError, AttributeError, RecursionError):
            document = json.loads(body)
            error = document.get("error", document)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        return f"{self._masked(text)} (HTTP {response.status_code} from {response.url})".lstrip()

    def _masked(self, text: str) -> str:
        """In a line, short and without the key, which some servers repeat."""
        line = " ".join(text.replace(self._key or "\0", "…").split())
        return line if len(line) <= _LONGEST_QUOTE else f"{line[: _LONGEST_QUOTE - 1]}…"


def retry_wait_s(number: int, retry_after: str = "") -> float:
    """Seconds between try ``number`` (from 1) and the next: what the server asks for, else doubling with jitter."""
    try:
        if retry_after.isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0)


def _innermost(error: BaseException) -> str:
    """Why a connection failed: libraries wrap the system's reason several times."""
    cause: BaseException | None = error
    while cause is not None:
        error = cause
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__ or error.__context__
    return str(error) or type(error).__name__


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all clients of servers and of the hub, in a thread that ends with the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


def _close(client: "AsyncClient", under_way: set[asyncio.Task[Any]], loop: asyncio.AbstractEventLoop) -> Future[None]:
    return asyncio.run_coroutine_threadsafe(_shut(client, under_way), loop)


async def _shut(client: "AsyncClient", under_way: set[asyncio.Task[Any]]) -> None:
    """A request that ended after its client would leave a connection open that nobody closes."""
    tasks = list(under_way)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
    # A transport lets go of its socket in the turn after it was closed.
    await asyncio.sleep(0)


# A forked process has the loop without its thread.
os.register_at_fork(after_in_child=event_loop.cache_clear)


def server_root(url: str) -> str:
    """A server's address without ``/v1``; ``http://`` where no scheme is named. Raises ConfigError: ``server-url``,
    also when it holds a user, password, query or fragment."""
    # Before it is taken apart: what is no address may hold a password all the same.
    if any(mark in url for mark in "@?#"):
        message = "a server's address must hold no user, password, query or fragment: it would land in logs"
        raise ConfigError(message, kind=Kind.SERVER_URL, hint="--api-key-env NAME reads a key from the environment")
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(
            f"{url!r} is no http://HOST:PORT", kind=Kind.SERVER_URL, hint="--server http://localhost:8000"
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"


def key_from_environment(name: str | None) -> str | None:
    """The key in the environment variable ``name``; None where no variable is named. Raises ConfigError:
    ``api-key-missing``: the variable is not set, or holds nothing that fits into a header."""
    if name is None:
        return None
    key = os.environ.get(name, "")
    if not key or key != key.strip() or not key.isascii() or not key.isprintable():
        message = f"the environment variable {name} holds no key"
        raise ConfigError(message, kind=Kind.API_KEY_MISSING, hint=f"export {name}=…")
    return key
