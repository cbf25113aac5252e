"""HTTP to a running server with the standard library alone, and what its refusals mean."""

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from hiddenstore.errors import CaptureError, ConfigError, StorageError

_LONGEST_REASON = 300
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


class Client:
    """One server. ``url`` is its root, with or without ``/v1``; answers may take ``timeout_s``. ``api_key`` goes into a
    header, to this server alone."""

    def __init__(self, url: str, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"{url!r} is no server: expected http://HOST:PORT", kind="server-url", hint="http://127.0.0.1:8000"
            )
        if parts.username or parts.password:
            raise ConfigError("the server's URL holds credentials; put a proxy in front instead", kind="server-url")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self._api_key = api_key
        # A proxy of the environment would look for this machine's own servers on its own machine.
        proxies = [urllib.request.ProxyHandler({})] if parts.hostname in _THIS_MACHINE else []
        self._opener = urllib.request.build_opener(*proxies)

    def text(self, path: str) -> str | None:
        """What GET of ``path`` answers; None where the server has no such page.

        Raises:
            StorageError: ``server-unreachable``.
        """
        return self._send(urllib.request.Request(self.url + path))

    def json(self, path: str) -> Any:
        """The document at ``path``; None where the server has no such page or it is no JSON."""
        text = self.text(path)
        try:
            return None if text is None else json.loads(text)
        except json.JSONDecodeError:
            return None

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What the server answers to a JSON body.

        Raises:
            StorageError: ``server-unreachable``.
            CaptureError: ``server-refused``, with the server's own words.
        """
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        text = self._send(request)
        if text is None:
            raise CaptureError(f"{self.url} has no {path}", kind="server-refused")
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise CaptureError(f"{self.url}{path} answered no JSON: {text[:80]!r}", kind="server-refused") from error
        if not isinstance(found, dict):
            raise CaptureError(f"{self.url}{path} answered no JSON object", kind="server-refused")
        return found

    def _send(self, request: urllib.request.Request) -> str | None:
        if self._api_key is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._api_key}")
        try:
            with self._opener.open(request, timeout=self.timeout_s) as answer:
                return str(answer.read().decode("utf-8", errors="replace"))
        except urllib.error.HTTPError as error:
            reason = error.read().decode("utf-8", errors="replace")
            if self._api_key is not None:
                reason = reason.replace(self._api_key, "…")
            if error.code in (404, 405) and request.data is None:
                return None
            raise CaptureError(
                f"{request.full_url} answered {error.code}: {_words(reason) or error.reason}",
                kind="server-refused",
                hint="--api-key-env NAME reads a key from the environment" if error.code in (401, 403) else None,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            raise StorageError(
                f"no answer from {self.url}: {reason}",
                kind="server-unreachable",
                hint=f"start it, or look whether it is up: curl {self.url}/v1/models",
            ) from error


def _words(body: str) -> str:
    """The message in an error answer of an OpenAI-like server, else its first words."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        message = error.get("message", body) if isinstance(error, dict) else error
    except (json.JSONDecodeError, AttributeError):
        message = body
    return str(message)[:_LONGEST_REASON].strip()
