"""The requests that the hub's own client makes, ours or another library's, each with an end.

That client waits for ever, or bounds each wait for a byte. Here requests run as tasks of the one event loop, which a
deadline cancels whatever the server does: ``START_S`` from the first packet on, and a second more for each
``LEAST_RATE`` bytes that went or came. What goes by the hub's Xet storage has a client, and limits, of its own.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar
from urllib.request import getproxies, proxy_bypass

from httpx2 import (
    AsyncByteStream,
    AsyncHTTPTransport,
    BaseTransport,
    Client,
    ReadTimeout,
    Request,
    Response,
    SyncByteStream,
)

from hiddenstore.servers.http import event_loop

T = TypeVar("T")
START_S, LEAST_RATE = 120.0, 256 << 10
_CLOSE_S = 2.0


def bound_hub_requests() -> None:
    """From here on every request of ``huggingface_hub`` in this process ends. Its hooks stay; a client that somebody
    else set is replaced. Releases of it on another HTTP library (before 2.0: httpx, requests) are left as they are."""
    import huggingface_hub

    if not hasattr(huggingface_hub, "set_client_factory"):
        return
    session = huggingface_hub.get_session()
    if isinstance(session, _HubClient) or not isinstance(session, Client):
        return
    hooks, redirects, timeout = session.event_hooks, session.follow_redirects, session.timeout
    huggingface_hub.set_client_factory(
        lambda: _HubClient(event_hooks=hooks, follow_redirects=redirects, timeout=timeout, transport=_Transport())
    )


def http_errors(*others: type[Exception], name: str = "HTTPError") -> tuple[type[Exception], ...]:
    """``others``, and the errors of this name that the hub's client may raise, by its HTTP library; those of requests
    are OSErrors."""
    return (*others, *(getattr(sys.modules[at], name) for at in ("httpx2", "httpx") if at in sys.modules))


class _HubClient(Client):
    pass


class _Deadline:
    """The end of one request, put off by what it carries."""

    def __init__(self, request: Request) -> None:
        self.request, self._begun_s = request, time.monotonic()
        self._end_s = self._begun_s + START_S
        self._scope: asyncio.Timeout | None = None

    def carried(self, count: int) -> None:
        self._end_s += count / LEAST_RATE
        if self._scope is not None:
            self._scope.reschedule(self._end_s)

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            async with asyncio.timeout_at(self._end_s) as self._scope:
                return await work
        except TimeoutError as error:
            message = f"no whole answer within {time.monotonic() - self._begun_s:.0f} s"
            raise ReadTimeout(message, request=self.request) from error
        finally:
            self._scope = None


class _Upload(AsyncByteStream):
    def __init__(self, stream: SyncByteStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._stream:
            yield piece
            self._deadline.carried(len(piece))


class _Download(SyncByteStream):
    def __init__(self, stream: AsyncByteStream, deadline: _Deadline) -> None:
        self._stream, self._deadline = stream, deadline

    def __iter__(self) -> Iterator[bytes]:
        pieces = aiter(self._stream)
        while (piece := _wait(self._deadline.keep(_following(pieces)))) is not None:
            self._deadline.carried(len(piece))
            yield piece

    def close(self) -> None:
        _wait(_closing(self._stream))


class _Transport(BaseTransport):
    """Connections by proxy (none: straight), as the environment names them."""

    def __init__(self) -> None:
        self._connections: dict[str | None, AsyncHTTPTransport] = {}
        self._process = os.getpid()

    def handle_request(self, request: Request) -> Response:
        proxies = {} if proxy_bypass(request.url.host) else getproxies()
        proxy = proxies.get(request.url.scheme) or proxies.get("all")
        if proxy not in self._connections:
            self._connections[proxy] = AsyncHTTPTransport(proxy=proxy)
        deadline = _Deadline(request)
        assert isinstance(request.stream, SyncByteStream)
        bounded = Request(
            request.method,
            request.url,
            headers=request.headers,
            stream=_Upload(request.stream, deadline),
            extensions=request.extensions,
        )
        response = _wait(deadline.keep(self._connections[proxy].handle_async_request(bounded)))
        assert isinstance(response.stream, AsyncByteStream)
        body = _Download(response.stream, deadline)
        return Response(response.status_code, headers=response.headers, stream=body, extensions=response.extensions)

    def close(self) -> None:
        # A forked process has the sockets and not the loop that they belong to.
        if self._process != os.getpid():
            return
        for connections in self._connections.values():
            _wait(_closing(connections))


async def _following(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


async def _closing(what: AsyncByteStream | AsyncHTTPTransport) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_S):
            await what.aclose()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(work, event_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
