"""A proxy before an object store that answers what networks and busy servers answer."""

import http.client
import re
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal[
    "503",
    "429",
    "403",
    "501",
    "refused",
    "cut",
    "slow",
    "lost",
    "late",
    "unconditional",
    "short",
    "range",
    "other",
    "tag",
]
"""``refused`` closes before the request is passed on, ``lost`` after it was done; ``cut`` ends in the middle of the
body; ``late`` leaves the last names out of a listing; ``unconditional`` forgets If-None-Match, as some servers do.
Lies: ``short`` is half of a body said to be whole, ``range`` the bytes one further on, ``other`` those of the object
asked for before, ``tag`` the right ones under another ETag."""


@dataclass(frozen=True)
class Request:
    """One request; ``number`` counts from 0 since the plan was set."""

    number: int
    method: str
    key: str
    is_listing: bool

    @property
    def is_write(self) -> bool:
        return self.method in ("PUT", "POST", "DELETE")


Plan = Callable[[Request], Fault | None]


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that was killed in the middle of a request."""


class FaultProxy:
    """Passes requests of a scheme on to ``upstream``; ``plan`` says which of them go wrong, ``requests`` lists what
    came."""

    def __init__(self, upstream: str, scheme: str = "s3") -> None:
        self.scheme = scheme
        self._upstream = urllib.parse.urlsplit(upstream).netloc
        self._lock = threading.Lock()
        self._server = _QuietServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.set_plan(None)

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def set_plan(self, plan: Plan | None) -> None:
        """Begin to count anew."""
        with self._lock:
            self._plan, self.requests, self.faults = plan, list[Request](), 0
            self.body_before = b""

    def fault_of(self, method: str, path: str) -> Fault | None:
        parts = urllib.parse.urlsplit(path)
        with self._lock:
            # Google's client escapes what the others write as it is.
            request = Request(len(self.requests), method, urllib.parse.unquote(parts.path), "list-type" in parts.query)
            self.requests.append(request)
            fault = self._plan(request) if self._plan is not None else None
            self.faults += fault is not None
        return fault

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


class GoogleProxy(FaultProxy):
    """Google's XML interface before a server of S3: the same requests but for the condition, the credentials and the
    answer to DELETE of what is not there, 404. No emulator has that interface, which is the one that obstore speaks."""

    _SIGNED = "AWS4-HMAC-SHA256 Credential=AKIACANARYCANARY/20260101/us-east-1/s3/aws4_request, SignedHeaders=host"

    def forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        kept = {**headers, "authorization": f"{self._SIGNED}, Signature=0"}
        if method == "DELETE":
            status, _, _ = super().forward("HEAD", path, kept, b"")
            if status == 404:
                return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if kept.pop("x-goog-if-generation-match", None) == "0":
            kept["if-none-match"] = "*"
        return super().forward(method, path, kept, body)


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            fault = proxy.fault_of(self.command, self.path)
            if fault in ("503", "429", "403", "501"):
                self._answer(int(fault), {}, _refusal(int(fault), self.headers.get("Authorization", "")))
                return
            if fault == "refused":
                self.close_connection = True
                return
            headers = dict(self.headers.items())
            if fault == "unconditional":
                headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
            status, answer_headers, answer = proxy.forward(self.command, self.path, headers, body)
            if fault == "lost":
                self.close_connection = True
                return
            if fault == "late":
                answer = _without_last(answer)
            true = answer
            if fault in ("short", "range", "other"):
                answer_headers, answer = _lie(fault, answer_headers, answer, proxy.body_before)
            if fault == "tag":
                answer_headers = {**answer_headers, "ETag": '"0123456789abcdef0123456789abcdef"'}
            if self.command == "GET":
                proxy.body_before = true
            self._answer(status, answer_headers, answer, fault)

        def _answer(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
            is_head = self.command == "HEAD"
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "date", "server"):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers.items()}.get("content-length")
            self.send_header("Content-Length", length or "0" if is_head else str(len(body)))
            self.end_headers()
            if fault == "cut" and not is_head:
                self.wfile.write(body[: len(body) // 2])
                self.wfile.flush()
                self.close_connection = True
            elif fault == "slow":
                for start in range(0, len(body), max(1, len(body) // 4)):
                    time.sleep(0.02)
                    self.wfile.write(body[start : start + max(1, len(body) // 4)])
            elif not is_head:
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return Handler


def _lie(fault: Fault, headers: dict[str, str], body: bytes, before: bytes) -> tuple[dict[str, str], bytes]:
    """Another body, in headers that fit it or, where it has the length of the true one, in the true ones."""
    other = {"short": body[: len(body) // 2], "range": body[1:] + body[:1], "other": before}[fault]
    if len(other) == len(body):
        return headers, other
    return {name: value for name, value in headers.items() if name.lower() != "content-range"}, other


def _refusal(status: int, authorization: str) -> bytes:
    """What S3 says: it quotes the key and the text that was to be signed."""
    code = {503: "SlowDown", 429: "TooManyRequests", 403: "SignatureDoesNotMatch", 501: "NotImplemented"}[status]
    return f"<Error><Code>{code}</Code><StringToSign>{authorization}</StringToSign></Error>".encode()


def _without_last(listing: bytes) -> bytes:
    entries = list(re.finditer(rb"<(Contents|CommonPrefixes)>.*?</\1>", listing, re.DOTALL))
    return listing if not entries else listing[: entries[-1].start()] + listing[entries[-1].end() :]
