"""The bytes of the images that a conversation names: files beside it, data URIs, or bytes in a table."""

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit
from urllib.request import url2pathname

from collectors.conversations.parse import Conversation
from collectors.conversations.rows import Problem

MAX_IMAGE_BYTES = 64 << 20
_SHOWN = 80


def read_images(conversation: Conversation, folder: Path | None) -> list[bytes] | Problem:
    """The file of every image in order, or why the conversation cannot be used; paths begin at ``folder``."""
    files: list[bytes] = []
    for number, named in enumerate(conversation.images, start=1):
        try:
            files.append(named if isinstance(named, bytes) else _read(named, folder))
        except _UnusableError as error:
            reason, detail = error.args
            return Problem(conversation.location, reason, f"image {number}: {detail}")
    return files


class _UnusableError(Exception):
    """Its arguments are the reason and the detail of a ``Problem``."""


def _read(named: str, folder: Path | None) -> bytes:
    scheme = urlsplit(named).scheme if "://" in named[:16] or named.startswith("data:") else ""
    if scheme in ("http", "https"):
        raise _UnusableError("image-remote", f"{_short(named)} is not fetched; download it, and name the file")
    if scheme == "data":
        return _data_uri(named)
    path = Path(url2pathname(urlsplit(named).path) if scheme == "file" else named)
    if not path.is_absolute():
        if folder is None:
            raise _UnusableError("image-missing", f"{_short(named)} begins at no folder; name an absolute path")
        path = folder / path
    try:
        if not path.is_file():
            raise _UnusableError("image-missing", f"there is no file {_short(named)}")
        if path.stat().st_size > MAX_IMAGE_BYTES:
            raise _UnusableError("image-unreadable", f"{_short(named)} has more than {MAX_IMAGE_BYTES >> 20} MiB")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise _UnusableError("image-unreadable", f"{_short(named)}: {error}") from error


def _data_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    try:
        if not comma:
            raise ValueError("it has no comma")
        return base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _UnusableError("image-unreadable", f"{_short(uri)} is no data URI: {error}") from error


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…")
