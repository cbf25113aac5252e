"""JSON documents that carry their own digest, so that a flipped bit is an error naming the file.

A sealed document is one line of canonical JSON (sorted keys, no spaces, UTF-8) whose last member is ``sha256``, the
digest of the same line without that member, then one newline. A reader needs no canonical encoder: it cuts the last
member off the bytes and hashes what is left.
"""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from pydantic import ValidationError

from hiddenstore.errors import ConfigError, CorruptionError, FormatError, Kind
from hiddenstore.files.layout import ADVICE_DIR, CALIBRATION_DIR, COMMITS_DIR, DATA_JSON, SNAPSHOTS_DIR, STORE_JSON
from hiddenstore.fs.seam import Filesystem
from schemas.base import Document

MAX_DOCUMENT_BYTES = 256 << 20
MAX_DEPTH = 64
UPGRADE = "pip install --upgrade hiddenstore"

_SEAL = re.compile(rb',?"sha256":"([0-9a-f]{64})"\}\n')
_LOOSE_COLON = re.compile(rb'"[ \t\r\n]+:')
_NESTED = {dict, list}
_SEAL_BYTES = len(b',"sha256":"') + 64 + len(b'"}\n')

M = TypeVar("M", bound=Document)


def sha256_hex(data: bytes | memoryview) -> str:
    """sha256 of bytes as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def canonical(value: object) -> bytes:
    """Canonical JSON of plain values: equal values have equal bytes. Raises ConfigError: ``document-unwritable`` for
    NaN, infinities and text that is not Unicode."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode("utf-8")
    except ValueError as error:
        raise ConfigError(f"this document cannot be written: {error}", kind=Kind.DOCUMENT_UNWRITABLE) from error


def seal(document: Document) -> bytes:
    """The bytes a document is stored as; raises as ``canonical``."""
    # Mode "json" makes null of a NaN in what a model serialises by itself, as a ``Sparse`` one does.
    body = canonical(document.model_dump())
    comma = b"," if len(body) > 2 else b""
    return b'%s%s"sha256":"%s"}\n' % (body[:-1], comma, sha256_hex(body).encode())


def foreign_json(data: bytes | str) -> Any:
    """What JSON of somebody else's says. Raises ValueError, for brackets too many to follow too."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def unseal(data: bytes, model: type[M], where: str) -> M:
    """The document in ``data``; ``where`` names the file in errors. Raises CorruptionError: ``document-corrupt``, any
    byte is not as it was written, or it is a document of another kind; FormatError: ``format-future`` for a later
    format, ``document-invalid`` for whole bytes of another shape."""
    return parsed(checked_body(data, where), model, where)


def parsed(body: bytes, model: type[M], where: str) -> M:
    """The document in canonical bytes without their seal; raises as ``unseal``."""
    _check_format(_parse(body, where), model, where)
    try:
        # Strict: a number in quotes is another document, and a format in quotes would pass the look above.
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        faults = error.errors()
        # A later version may add members, never leave one out without another format: this is another document.
        lacking = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing" and len(fault["loc"]) == 1]
        if lacking:
            raise _corrupt(where, f"it is no {model.__name__}: it lacks {', '.join(lacking)}") from error
        first = faults[0]
        member = ".".join(map(str, first["loc"])) or "document"
        message = f"{where} is not a {model.__name__}: {member}: {first['msg']}"
        raise FormatError(message, kind=Kind.DOCUMENT_INVALID, hint=UPGRADE) from error


def _check_format(content: dict[str, Any], model: type[Document], where: str) -> None:
    """Raises as ``unseal``, also where pydantic would take a default for no format, and 1.0 or true for 1."""
    field = model.model_fields.get("format")
    if field is None:
        return
    if "format" not in content:
        raise _corrupt(where, f"it is no {model.__name__}: it lacks format")
    version, highest = content["format"], max(get_args(field.annotation))
    if type(version) is not int:
        problem = f"{where} is not a {model.__name__}: format: expected a whole number, found {version!r:.40}"
        raise FormatError(problem, kind=Kind.DOCUMENT_INVALID, hint=UPGRADE)
    if version > highest:
        problem = f"{where} has format {version}; this version of hiddenstore reads a {model.__name__} up to {highest}"
        raise FormatError(problem, kind=Kind.FORMAT_FUTURE, hint=UPGRADE)


def load(fs: Filesystem, path: str, model: type[M]) -> M:
    """Read and unseal one document; an oversized file is refused before it is read."""
    return unseal(read_bounded(fs, path), model, f"{fs.root}/{path}")


def read_bounded(fs: Filesystem, path: str) -> bytes:
    """The bytes of a document, at most ``MAX_DOCUMENT_BYTES``."""
    size = fs.size(path)
    if size is not None and size > MAX_DOCUMENT_BYTES:
        raise _corrupt(f"{fs.root}/{path}", f"it has {size:,} bytes, a document at most {MAX_DOCUMENT_BYTES:,}")
    return fs.read(path)


def checked_body(data: bytes, where: str) -> bytes:
    """Sealed bytes without their seal; CorruptionError ``document-corrupt``."""
    return opened(data, where)[0]


def opened(data: bytes, where: str) -> tuple[bytes, str]:
    """Sealed bytes without their seal, and the sha256 of all of them; raises as ``checked_body``."""
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _corrupt(where, f"it has {len(data):,} bytes, a document at most {MAX_DOCUMENT_BYTES:,}")
    match = _SEAL.fullmatch(data[-_SEAL_BYTES:]) or _SEAL.fullmatch(data[1 - _SEAL_BYTES :])
    if match is None:
        raise _corrupt(where, "it does not end with its sha256")
    body = data[: -len(match[0])] + b"}"
    digest = hashlib.sha256(memoryview(body)[:-1])
    of_all = digest.copy()
    digest.update(b"}")
    of_all.update(match[0])
    expected, sha256 = match[1].decode(), digest.hexdigest()
    if sha256 != expected:
        raise _corrupt(where, f"expected sha256 {expected}, found {sha256}")
    return body, of_all.hexdigest()


def _parse(body: bytes, where: str) -> dict[str, Any]:
    try:
        text = body.decode("utf-8")
        content = _DECODER.decode(text)
        members = _members(content)
        # Without escapes and loose colons, keys can be counted in the bytes: far cheaper than a hook per object.
        if b"\\" in body or _LOOSE_COLON.search(body) or body.count(b'":') != members:
            json.loads(text, object_pairs_hook=_distinct)
    except RecursionError as error:
        raise _corrupt(where, f"it is nested deeper than {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise _corrupt(where, str(error)) from error
    if not isinstance(content, dict):
        raise _corrupt(where, "it is not a JSON object")
    return content


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return members


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def _members(content: object) -> int:
    """How many members the objects in ``content`` have in all; ValueError when they nest too deep."""
    count = 0
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [item for item in level if type(item) in _NESTED]
        if not level:
            return count
        count += sum(len(item) for item in level if type(item) is dict)
        level = [child for item in level for child in (item.values() if type(item) is dict else item)]
    raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")


def _corrupt(where: str, reason: str) -> CorruptionError:
    hint, (folder, _, name) = None, where.rpartition("/")
    root, _, room = folder.rpartition("/")
    if room == COMMITS_DIR:
        hint = shlex.join(["hiddenstore", "verify", root])
    if room in (SNAPSHOTS_DIR, CALIBRATION_DIR, ADVICE_DIR):
        hint = shlex.join(["hiddenstore", "repair", root])
    if name == DATA_JSON:
        hint = "hiddenstore prepare INPUT -o DATA --target T"
    if f"/{STORE_JSON}" in where:
        new_name = f"{where.rpartition('/')[0]}/.damaged-{STORE_JSON}"
        hint = f"{shlex.join(['mv', where, new_name])}; then the same collect writes it again"
    return CorruptionError(f"{where} is damaged: {reason}", kind=Kind.DOCUMENT_CORRUPT, path=where, hint=hint)


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by their dotted names."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from flat(item, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value
