"""The HTTP client against raw sockets: deadlines, tries, keys, limits, and the one error of each failure."""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import pytest

from hiddenstore.errors import CaptureError, ConfigError, HiddenstoreError, StorageError
from hiddenstore.servers import http
from hiddenstore.servers.http import HttpClient, RefusedError, ServerAccess, retry_wait_s, server_root
from tests.hiddenstore.socket_server import SocketServer, answer, reset, socket_server

KEY = "sk-1234567890"
# Several times what a deadline of a tenth of a second needs, for a machine that is busy.
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.001)


def as_is(value: Any) -> Any:
    return value


def failure(server: SocketServer, read: Callable[[Any], Any] = as_is, **access: Any) -> HiddenstoreError:
    client = HttpClient(ServerAccess(server.url, **{"tries": 1, "timeout_s": PATIENCE_S, **access}))
    try:
        with pytest.raises(HiddenstoreError) as caught:
            client.post("/x", {}, read)
    finally:
        client.close()
    return caught.value


def drip_body(connection: socket.socket, _number: int) -> None:
    connection.sendall(answer(b"", length=10_000))
    while True:
        connection.sendall(b" ")
        time.sleep(0.02)


def drip_header(connection: socket.socket, _number: int) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def endless_1xx(connection: socket.socket, _number: int) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n" * 50)


def slow_1xx(connection: socket.socket, _number: int) -> None:
    while True:
        connection.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
        time.sleep(0.02)


def endless_chunks(connection: socket.socket, _number: int) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"1\r\n \r\n")
        time.sleep(0.02)


def silence(connection: socket.socket, _number: int) -> None:
    connection.recv(1)


@pytest.mark.parametrize("behave", [drip_body, drip_header, endless_1xx, slow_1xx, endless_chunks, silence])
def test_a9_no_server_outlives_the_deadline_of_the_whole_request(behave: Callable[[socket.socket, int], None]) -> None:
    with socket_server(behave) as server:
        began = time.monotonic()
        error = failure(server, timeout_s=0.3, hint="look at it")
        took_s = time.monotonic() - began
    assert (type(error), error.kind, error.hint) == (StorageError, "server-timeout", "look at it")
    assert 0.25 < took_s < PATIENCE_S / 4


def test_a_server_that_accepts_nothing_is_given_up_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        error = failure(SocketServer(url), timeout_s=0.2)
    assert error.kind == "server-timeout"


@pytest.mark.parametrize(
    "behave",
    [
        lambda connection, _number: reset(connection),
        lambda connection, _number: connection.close(),
        lambda connection, _number: (connection.sendall(answer(b"{", length=99)), reset(connection)),
        lambda connection, _number: (connection.sendall(answer(b"{", length=99)), connection.close()),
        lambda connection, _number: (connection.sendall(b"SSH-2.0-OpenSSH_9\r\n"), connection.close()),
        lambda connection, _number: connection.sendall(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 300_000),
    ],
    ids=["reset", "closed", "reset in the body", "truncated", "no HTTP", "endless header"],
)
def test_a_connection_that_breaks_is_an_unreachable_server(behave: Any) -> None:
    with socket_server(behave) as server:
        error = failure(server, tries=2)
        assert len(server.requests) == 2
    assert (type(error), error.kind) == (StorageError, "server-unreachable")
    assert error.message.endswith("(2 tries)")


def test_a_server_that_is_not_there_is_unreachable_and_the_system_s_reason_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    error = failure(SocketServer(url))
    assert error.kind == "server-unreachable"
    assert f"[Errno {errno.ECONNREFUSED}]" in error.message
    assert error.message.startswith(f"no answer from {url}/x: ")
    for name in ("no-such-host.invalid", f"{'x' * 70}.invalid"):
        assert failure(SocketServer(f"http://{name}")).kind == "server-unreachable"


def test_tls_to_a_server_without_it_is_unreachable() -> None:
    def speak_first(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer())
            connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=speak_first, args=(listener,))
        thread.start()
        error = failure(SocketServer(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join()
    assert error.kind == "server-unreachable"
    assert "SSL" in error.message


def test_500_and_429_are_tried_again_and_the_answer_comes() -> None:
    script = {1: answer(b"", "500 Oops"), 2: answer(b"", "429 Slow", "Retry-After: 0\r\n"), 3: answer(b"[7]")}
    with socket_server(lambda connection, number: connection.sendall(script[number])) as server:
        client = HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S))
        assert client.get("/x", lambda items: items[0]) == 7
        client.close()
        assert (len(server.requests), server.connections) == (3, 1), "one connection is kept for all tries"


def test_what_retry_after_asks_for_is_waited() -> None:
    script = {1: answer(b"", "429 Slow", "Retry-After: 1\r\n"), 2: answer()}
    with socket_server(lambda connection, number: connection.sendall(script[number])) as server:
        client = HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S))
        began = time.monotonic()
        assert client.get("/x", as_is) == {}
        client.close()
    assert time.monotonic() - began >= 1.0


def test_a_wait_past_the_bound_of_all_tries_is_not_begun() -> None:
    busy = answer(b'{"error": {"message": "come back tomorrow"}}', "503 Busy", "Retry-After: 86400\r\n")
    with socket_server(lambda connection, _number: connection.sendall(busy)) as server:
        error = failure(server, tries=5)
        assert len(server.requests) == 1
    assert (type(error), error.kind) == (StorageError, "server-failing")
    assert error.message == f"come back tomorrow (HTTP 503 from {server.url}/x)"


def test_waits_double_with_jitter_up_to_a_limit_unless_the_server_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "FIRST_WAIT_S", 0.5)
    for number in range(1, 12):
        grown = min(0.5 * 2 ** (number - 1), http.LONGEST_WAIT_S)
        assert all(grown / 2 <= retry_wait_s(number) <= grown for _ in range(20))
    assert len({retry_wait_s(3) for _ in range(20)}) > 1
    assert retry_wait_s(1, "17") == 17.0
    assert 50 < retry_wait_s(1, formatdate(time.time() + 60, usegmt=True)) <= 60
    assert retry_wait_s(1, formatdate(0, usegmt=True)) == 0.0
    for nonsense in ("soon", "-5", "nan", "inf", "1e9", "", "Fri, 99 Foo 2026"):
        assert retry_wait_s(1, nonsense) <= 0.5


@pytest.mark.parametrize("status", [301, 302, 307, 400, 401, 403, 404, 413, 422])
def test_a_refusal_is_said_at_once_in_the_server_s_own_words(status: int) -> None:
    words = answer(b'{"error": {"message": "the prompt\\n is too long"}}', f"{status} No", "Location: /y\r\n")
    with socket_server(lambda connection, _number: connection.sendall(words)) as server:
        error = failure(server, tries=4)
        assert len(server.requests) == 1
    assert isinstance(error, RefusedError)
    assert (error.kind, error.status, error.exit_code) == ("server-refused", status, ConfigError.exit_code)
    assert error.message == f"the prompt is too long (HTTP {status} from {server.url}/x)"
    assert ("--api-key-env" in str(error.hint)) == (status in (401, 403))


@pytest.mark.parametrize(
    "body", [b"", b"Bad gateway", b'{"error": "x"}', b'{"detail": [1]}', b"[1]", b"[" * 100_000, b"\xff\xfe"]
)
def test_whatever_a_refusal_holds_it_is_a_refusal(body: bytes) -> None:
    with socket_server(lambda connection, _number: connection.sendall(answer(body, "400 No"))) as server:
        error = failure(server)
    assert error.kind == "server-refused"
    assert len(error.message) < 500


def test_the_key_goes_to_the_server_alone_and_into_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", KEY)
    echo = f'{{"error": {{"message": "bad key {KEY}"}}}}'.encode()
    with socket_server(lambda connection, _number: connection.sendall(answer(b"{}"))) as other:
        away = answer(echo, "307 Elsewhere", f"Location: {other.url}/y\r\n")
        with socket_server(lambda connection, _number: connection.sendall(away)) as server:
            error = failure(server, api_key_env="TEST_KEY")
            assert f"Authorization: Bearer {KEY}".encode() in server.requests[0]
        assert other.requests == []
    assert error.message.startswith("bad key … (HTTP 307")
    with socket_server(lambda connection, _number: connection.sendall(answer(f'"{KEY}"'.encode()))) as server:
        misread = failure(server, int, api_key_env="TEST_KEY")
    assert "…" in misread.message
    assert KEY not in misread.message
    assert KEY not in f"{error!r}{error.__cause__!r}{ServerAccess(server.url, api_key_env='TEST_KEY')!r}"


@pytest.mark.parametrize("value", [None, "", " sk-1", "sk-1\n", "s\nk-1", "schlüssel"])
def test_a_variable_without_a_key_is_said_first(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEST_KEY", value)
    with pytest.raises(ConfigError, match="TEST_KEY holds no key") as caught:
        HttpClient(ServerAccess("http://127.0.0.1:1", api_key_env="TEST_KEY"))
    assert caught.value.kind == "api-key-missing"
    assert value is None or not value.strip() or value not in str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>busy</html>",
        b"",
        b"\xff\xff",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": null}',
        b'{"b": 1}',
        b"[1]",
        b"null",
    ],
    ids=["html", "empty", "no text", "deep", "infinite", "long number", "null member", "no member", "array", "null"],
)
def test_an_answer_of_another_shape_is_one_error_after_all_tries(body: bytes) -> None:
    with socket_server(lambda connection, _number: connection.sendall(answer(body))) as server:
        error = failure(server, lambda members: int(members["a"]), tries=2)
        assert len(server.requests) == 2
    assert (type(error), error.kind) == (CaptureError, "server-answer")
    assert f"(HTTP 200 from {server.url}/x)" in error.message
    assert len(error.message) < 1000


def test_a_body_without_end_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_BYTES", 1 << 20)
    sent = []

    def behave(connection: socket.socket, _number: int) -> None:
        connection.sendall(answer(b"", length=1 << 40))
        while True:
            connection.sendall(b" " * 65536)
            sent.append(65536)

    with socket_server(behave) as server:
        error = failure(server)
    assert (error.kind, "more than 1,048,576 bytes" in error.message) == ("server-answer", True)
    assert sum(sent) < 32 << 20


def test_requests_of_many_threads_run_at_once_and_share_kept_connections() -> None:
    together = threading.Barrier(8)

    def behave(connection: socket.socket, _number: int) -> None:
        # Passes only while eight requests are here at once.
        together.wait(PATIENCE_S)
        connection.sendall(answer())

    with socket_server(behave) as server:
        client = HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S, tries=1))

        def ask() -> None:
            for _ in range(5):
                client.get("/x", as_is)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        assert len(server.requests) == 40
        assert server.connections <= 16


def test_closing_ends_what_waits_in_other_threads() -> None:
    arrived = threading.Event()
    errors: list[HiddenstoreError] = []

    def behave(connection: socket.socket, _number: int) -> None:
        arrived.set()
        connection.recv(1)

    with socket_server(behave) as server:
        client = HttpClient(ServerAccess(server.url, timeout_s=600.0))

        def ask() -> None:
            with pytest.raises(StorageError) as caught:
                client.get("/x", as_is)
            errors.append(caught.value)

        thread = threading.Thread(target=ask)
        thread.start()
        assert arrived.wait(PATIENCE_S)
        client.close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        with pytest.raises(StorageError, match="no answer from"):
            client.get("/x", as_is)
        client.close()
    assert errors[0].kind == "server-unreachable"


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine_s_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_server(lambda connection, _number: connection.sendall(answer(b'"proxy"'))) as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        with socket_server(lambda connection, _number: connection.sendall(answer(b'"server"'))) as server:
            near = HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S))
            far = HttpClient(ServerAccess("http://server.invalid", timeout_s=PATIENCE_S))
            assert (near.get("/x", as_is), far.get("/x", as_is)) == ("server", "proxy")
            near.close()
            far.close()
        monkeypatch.setenv("ALL_PROXY", "nonsense://x")
        monkeypatch.setenv("all_proxy", "nonsense://x")
        with pytest.raises(ConfigError, match="no way to") as caught:
            HttpClient(ServerAccess("http://server.invalid"))
    assert caught.value.kind == "server-url"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_requests_of_its_own() -> None:
    with socket_server(lambda connection, _number: connection.sendall(answer())) as server:
        client = HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S, tries=1))
        client.get("/x", as_is)
        child = os.fork()
        if child == 0:
            try:
                HttpClient(ServerAccess(server.url, timeout_s=PATIENCE_S, tries=1)).get("/x", as_is)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        client.close()


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://h:1/v1/", "http://h:1"),
        ("https://h/api/v1/chat/completions", "https://h/api"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses_are_read_as_people_write_them(url: str, root: str) -> None:
    assert server_root(url) == root


@pytest.mark.parametrize("url", ["ftp://h", "http://h:port", "http://", "http://[::1", ""])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no http://HOST:PORT") as caught:
        server_root(url)
    assert caught.value.kind == "server-url"


@pytest.mark.parametrize(
    "url",
    [
        *("http://u:SECRET@h", "http://SECRET@h", "ftp://u:SECRET@h", "http://u:SECRET@h:port", "http://u:SECRET@[::1"),
        *("http://h/v1?api_key=SECRET", "h:port?api_key=SECRET", "http://h#SECRET", "https//u:SECRET@h", "u:SEC/RET@h"),
    ],
)
def test_of_an_address_that_may_hold_a_secret_nothing_is_quoted(url: str) -> None:
    with pytest.raises(ConfigError, match="must hold no user, password, query or fragment") as caught:
        server_root(url)
    assert (caught.value.kind, caught.value.hint) == (
        "server-url",
        "--api-key-env NAME reads a key from the environment",
    )
    assert "SEC" not in str(caught.value)
