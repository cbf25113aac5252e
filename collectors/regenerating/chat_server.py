"""One OpenAI-compatible server: a chat completion for a list of messages, tried again while trying again can help.

Spoken here is ``POST /v1/chat/completions`` and ``GET /v1/models`` as vLLM, SGLang, TensorRT-LLM and OpenAI serve them,
with the reasoning of vLLM's and SGLang's reasoning parsers (``reasoning_content``, newer ``reasoning``).
"""

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from collectors.conversations import Message
from collectors.regenerating.rewrite import Reply
from hiddenstore.errors import ConfigError, StorageError
from hiddenstore.loops import LOOP_SHARE, repeated_share

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
LONGEST_ASKED_WAIT_S = 300.0
MOST_BYTES = 64 << 20
_TRANSIENT = frozenset({408, 409, 425, 429})
_OUR_FAULT = frozenset({401, 403, 404, 405})
_SHOWN = 300


@dataclass(frozen=True)
class ServerSettings:
    """Where and how to ask. ``api_key`` goes into a header and nowhere else; ``extra`` members join every request."""

    url: str
    model: str
    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    retries: int = 6
    extra: Mapping[str, Any] = field(default_factory=dict)


class GivenUpError(Exception):
    """A request failed ``retries`` + 1 times in ways that another try may mend."""


class _AgainError(Exception):
    """This try failed; ``wait_s`` is what the server asked for."""

    def __init__(self, what: str, wait_s: float | None = None) -> None:
        super().__init__(what)
        self.wait_s = wait_s


class ChatServer:
    """Used by many threads at once; each has a connection of its own that it keeps."""

    def __init__(self, settings: ServerSettings, wait: Callable[[float], object] = time.sleep) -> None:
        self.settings = settings
        self._wait = wait
        self._local = threading.local()
        self._host, self._port, self._is_tls, self._path = split_url(settings.url)
        self._tls = ssl.create_default_context() if self._is_tls else None

    def models(self) -> list[str]:
        """The names of what it serves.

        Raises:
            StorageError: ``server-unreachable``.
            ConfigError: ``server-refused``.
        """
        try:
            answer = self._asked("GET", "/models", None)
            return [str(model["id"]) for model in answer["data"]]
        except (GivenUpError, KeyError, TypeError) as error:
            raise self.unreachable(error) from error
        finally:
            self.close()

    def reply(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, seed: int) -> Reply:
        """The next answer of a conversation.

        Raises:
            GivenUpError: the server did not answer so often as was tried.
            ConfigError: ``server-refused``, the key, the model or the address is wrong.
        """
        chosen = self.settings
        asked: dict[str, Any] = {
            "model": chosen.model,
            "messages": [_sent(message) for message in messages],
            "temperature": chosen.temperature,
            "max_tokens": chosen.max_new_tokens,
            "seed": seed,
        }
        if chosen.top_p < 1:
            asked["top_p"] = chosen.top_p
        if tools:
            asked["tools"] = tools
        return self._asked("POST", "/chat/completions", asked | dict(chosen.extra), _read_reply)

    def close(self) -> None:
        """Close the connection of this thread; the next request opens another."""
        connection = getattr(self._local, "connection", None)
        self._local.connection = None
        if connection is not None:
            connection.close()

    def unreachable(self, error: BaseException | str) -> StorageError:
        """The error of a server that does not answer."""
        return StorageError(
            f"the server at {self.settings.url} does not answer as it should: {error}",
            kind="server-unreachable",
            hint="what was answered is kept; the same command goes on once the server is back",
        )

    def _asked(self, method: str, path: str, body: Any, read: Callable[[Any], Any] = lambda found: found) -> Any:
        for attempt in range(self.settings.retries + 1):
            try:
                return self._try(method, path, body, read)
            except _AgainError as error:
                if attempt == self.settings.retries:
                    raise GivenUpError(f"{error} ({attempt + 1} tries)") from error
                grown = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**attempt) * random.uniform(0.5, 1.0)
                self._wait(grown if error.wait_s is None else min(error.wait_s, LONGEST_ASKED_WAIT_S))
        raise AssertionError

    def _try(self, method: str, path: str, body: Any, read: Callable[[Any], Any]) -> Any:
        status, headers, data = self._exchange(method, path, body)
        if status in _TRANSIENT or status >= 500:
            raise _AgainError(f"HTTP {status} {self._said(data)}", _retry_after(headers))
        if status in _OUR_FAULT or 300 <= status < 400:
            raise ConfigError(
                f"{self.settings.url} refused: HTTP {status} {self._said(data)}",
                kind="server-refused",
                hint="check --server, --model and the variable that --api-key-env names",
            )
        if status >= 400:
            return Reply(drop="refused", detail=f"HTTP {status} {self._said(data)}")
        try:
            return read(json.loads(data))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _AgainError(f"an answer that is none: {self._said(data)} ({type(error).__name__})") from error

    def _exchange(self, method: str, path: str, body: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Status, headers and body; a kept connection that the server closed meanwhile is opened again at once."""
        is_kept = getattr(self._local, "connection", None) is not None
        try:
            return self._send(method, path, body)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            self.close()
            if not is_kept:
                raise _AgainError(f"connection lost ({type(error).__name__})") from error
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _AgainError(f"{type(error).__name__} {error}".strip()) from error
        try:
            return self._send(method, path, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _AgainError(f"{type(error).__name__} {error}".strip()) from error

    def _send(self, method: str, path: str, body: Any) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._connection()
        headers = {"Accept": "application/json", "User-Agent": "hiddenstore"}
        if self.settings.api_key is not None:
            headers["Authorization"] = f"Bearer {self.settings.api_key}"
        content = None
        if body is not None:
            content = json.dumps(body, ensure_ascii=False).encode()
            headers["Content-Type"] = "application/json"
        connection.request(method, self._path + path, content, headers)
        response = connection.getresponse()
        data = response.read(MOST_BYTES)
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, response.headers, data

    def _connection(self) -> http.client.HTTPConnection:
        timeout_s = self.settings.timeout_s
        if self._is_tls:
            return http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)

    def _said(self, data: bytes) -> str:
        """What an answer says, short, without the key: some servers repeat it."""
        text = data[:4096].decode("utf-8", "replace")
        try:
            found = json.loads(data)
            error = found.get("error", found)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
        except (ValueError, AttributeError):
            pass
        if self.settings.api_key:
            text = text.replace(self.settings.api_key, "…")
        text = " ".join(text.split())
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def split_url(url: str) -> tuple[str, int | None, bool, str]:
    """(host, port, whether TLS, path that ends in /v1) of a server's address.

    Raises:
        ConfigError: ``server-invalid``, also when it holds a user, password or query.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == -1:
        raise ConfigError(
            f"{url!r} is not a server's address", kind="server-invalid", hint="--server http://localhost:8000"
        )
    if parts.username or parts.password:
        raise ConfigError(
            "a server's address must hold no user or password: it would land in logs",
            kind="server-invalid",
            hint="--api-key-env NAME reads a key from the environment",
        )
    path = parts.path.rstrip("/").removesuffix("/chat/completions")
    return parts.hostname, port, parts.scheme == "https", path if path.endswith("/v1") else f"{path}/v1"


def _sent(message: Message) -> Message:
    """A message as servers take it. Earlier reasoning stays here: templates leave it out, some servers refuse it."""
    sent: Message = {key: message[key] for key in ("role", "content", "name", "tool_call_id") if key in message}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [_sent_call(call, number) for number, call in enumerate(calls)]
    return sent


def _sent_call(call: dict[str, Any], number: int) -> dict[str, Any]:
    function = dict(call.get("function") or {key: call[key] for key in ("name", "arguments") if key in call})
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": function}


def _read_reply(found: Any) -> Reply:
    choice = found["choices"][0]
    message, finish = choice["message"], choice.get("finish_reason")
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = "".join(part.get("text", "") for part in text)
    calls = tuple(message.get("tool_calls") or ())
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    tokens = int((found.get("usage") or {}).get("completion_tokens") or 0)
    # vLLM gives them when asked with return_token_ids; the last one of a finished answer is its end token.
    ids = choice.get("token_ids") or _word_ids(text)
    words = ids[:-1] if finish == "stop" and choice.get("token_ids") else ids
    drop = None
    if finish == "content_filter":
        drop = "content-filter"
    elif not text.strip() and not calls:
        drop = "empty"
    elif repeated_share(words) > LOOP_SHARE:
        drop = "looping"
    return Reply(text, reasoning, calls, tokens, finish == "length", drop)


def _word_ids(text: str) -> list[int]:
    """Words as numbers: without the server's token ids, loops show in them too."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(word, len(numbers)) for word in text.split()]


def _retry_after(headers: http.client.HTTPMessage) -> float | None:
    said = headers.get("Retry-After")
    if said is None:
        return None
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time.time())
    except (TypeError, ValueError):
        return None
