"""An OpenAI-compatible server on this machine that answers by rule and misbehaves on purpose.

An answer names the last message and how many came before it, so that a request with other earlier turns shows.
"""

import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from collectors.regenerate.options import RegenerateOptions

Asked = dict[str, Any]


def plain_answer(asked: Asked) -> Asked:
    """The choice of a well-behaved server."""
    if "prompt" in asked:
        return {"text": f" goes on after {len(asked['prompt'])}", "finish_reason": "length"}
    said = asked["messages"][-1]["content"]
    text = f"reply {len(asked['messages'])} to {said}"
    return {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}


@dataclass
class ChatDouble:
    """``fault(asked, tries)`` names what goes wrong with the ``tries``-th try of a request, or is what is answered in
    place of an answer; None for nothing."""

    url: str
    models: tuple[str, ...] = ("bundled",)
    answer: Callable[[Asked], Asked] = plain_answer
    fault: Callable[[Asked, int], str | bytes | None] = lambda _asked, _tries: None
    asked: list[Asked] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    tries: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def chat_double(**given: Any) -> Iterator[ChatDouble]:
    """A running server; its port is free again afterwards."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: Any) -> None:
            pass

        def do_GET(self) -> None:
            _send(self, 200, {"data": [{"id": model} for model in double.models]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = json.dumps(asked.get("messages", asked.get("prompt")))
            with double.lock:
                double.asked.append(asked)
                double.headers.append(dict(self.headers))
                double.tries[key] += 1
                fault = double.fault(asked, double.tries[key])
            if fault is not None:
                _misbehave(self, fault, double)
                return
            choice = double.answer(asked)
            with double.lock:
                double.answered[key] += 1
            _send(self, 200, {"choices": [choice], "usage": {"completion_tokens": 7}})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    double = ChatDouble(f"http://127.0.0.1:{server.server_address[1]}", **given)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield double
    finally:
        double.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


FAULTS = ("500", "429", "503", "not-json", "no-choices", "an-array", "reset", "closed", "truncated", "silent")


def _misbehave(handler: BaseHTTPRequestHandler, fault: str | bytes, double: ChatDouble) -> None:
    if isinstance(fault, bytes):
        _send(handler, 200, fault)
    elif fault.isdigit():
        more = {"Retry-After": "0"} if fault == "429" else {}
        _send(handler, int(fault), {"error": {"message": f"fault {fault}"}}, more)
    elif fault == "not-json":
        _send(handler, 200, b"<html>busy</html>")
    elif fault == "no-choices":
        _send(handler, 200, {"choices": []})
    elif fault == "an-array":
        _send(handler, 200, [1, 2])
    elif fault == "truncated":
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"choices": [')
        handler.close_connection = True
    elif fault == "silent":
        double.released.wait(60)
        handler.close_connection = True
    else:
        if fault == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.close_connection = True
        handler.connection.close()


def _send(handler: BaseHTTPRequestHandler, status: int, body: Any, more: dict[str, str] | None = None) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in (more or {}).items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def write(path: Path, conversations: list[list[tuple[str, str]]]) -> str:
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]} for turns in conversations]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def options(tmp_path: Path, server: ChatDouble, conversations: Any = None, **more: Any) -> RegenerateOptions:
    """Of a run over ``conversations``, or twelve of two turns, into ``out``."""
    chats = write(tmp_path / "chats.jsonl", two_turns(12) if conversations is None else conversations)
    out = tmp_path / more.pop("out", "out.jsonl")
    chosen = {"model": "bundled", "concurrency": 4, "timeout_s": 30.0, "retries": 3, **more}
    return RegenerateOptions((chats,), out, server=server.url, **chosen)


def two_turns(count: int) -> list[list[tuple[str, str]]]:
    return [
        [("user", f"first {i}"), ("assistant", "old"), ("user", f"second {i}"), ("assistant", "old")]
        for i in range(count)
    ]


def expected(count: int) -> list[list[str]]:
    """What every turn says once each earlier answer is the new one."""
    return [[f"first {i}", f"reply 1 to first {i}", f"second {i}", f"reply 3 to second {i}"] for i in range(count)]


def texts(path: str | Path) -> list[list[str]]:
    """What every message of the written rows says."""
    rows = [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]
    return [[message["content"] for message in row] for row in rows]
