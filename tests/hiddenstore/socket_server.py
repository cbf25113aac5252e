"""A server of raw sockets on this machine, for what no well-behaved HTTP library would send."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Behaviour = Callable[[socket.socket, int], None]
"""Answers one request: its connection, and the number of the request, from 1."""


@dataclass
class SocketServer:
    """``requests`` holds the bytes of each; ``connections`` counts those accepted; ``ended`` is set at the end."""

    url: str
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


@contextmanager
def socket_server(behave: Behaviour) -> Iterator[SocketServer]:
    """A running server; each connection has a thread and serves requests until one side closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = SocketServer(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while request := read_request(connection):
                server.requests.append(request)
                behave(connection, len(server.requests))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                server.connections += 1
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def read_request(connection: socket.socket) -> bytes:
    """Header and body; empty when the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return b""
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def answer(body: bytes = b"{}", status: str = "200 OK", header: str = "", length: int | None = None) -> bytes:
    """A response, whose ``Content-Length`` may lie."""
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n{header}\r\n".encode() + body


def reset(connection: socket.socket) -> None:
    """Close with RST in place of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
