"""Bytes of a file, plain or gzipped, and the elements of a JSON array in it, in bounded memory."""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, NoReturn

from hiddenstore.errors import ConfigError, StorageError

MAX_ROW_BYTES = 64 << 20

_CHUNK = 1 << 20


class ByteStream:
    """A file read as bytes, unpacked when it is gzip.

    Raises:
        ConfigError: ``input-unreadable``, damaged gzip.
        StorageError: ``input-unreadable``, the disk refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._raw = BufferedReader(FileIO(path), _CHUNK)
        self._zipped = self._raw.peek(2)[:2] == b"\x1f\x8b"
        self._file: BufferedReader[FileIO] | gzip.GzipFile = (
            gzip.GzipFile(fileobj=self._raw) if self._zipped else self._raw
        )
        self._position = 0

    def __enter__(self) -> "ByteStream":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._raw.close()

    def line(self, limit: int) -> bytes:
        """The next line with its end, at most ``limit`` bytes of it; empty at the end of the file."""
        return self._guarded(self._file.readline, limit)

    def chunk(self, size: int) -> bytes:
        """Up to ``size`` more bytes; empty at the end of the file."""
        return self._guarded(self._file.read, size)

    def taken(self, length: int) -> int:
        """Bytes of the file itself that ``length`` unpacked bytes took, counted since the last call when packed."""
        if not self._zipped:
            return length
        before, self._position = self._position, self._raw.tell()
        return self._position - before

    def _guarded(self, read: Callable[[int], bytes], size: int) -> bytes:
        try:
            return read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            unreadable(self.path, error)
        except OSError as error:
            raise StorageError(f"{self.path}: {error}", kind="input-unreadable") from error


def unreadable(path: Path, error: Exception) -> NoReturn:
    """Raise ConfigError ``input-unreadable`` with the first line of what a reader said."""
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise ConfigError(f"{path} cannot be read: {reason}", kind="input-unreadable") from error


class ArrayScanner:
    """Decodes the elements of one JSON array as they arrive; ``consumed`` is the characters of the last one.

    Raises:
        ConfigError: ``input-unreadable``, naming the line: what follows a broken element cannot be found.
    """

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._line = 1
        self._carry = b""
        self.consumed = 0

    def elements(self) -> Iterator[tuple[int, Any]]:
        """(line it starts at, value) of every element."""
        self._fill()
        self._text = self._text.removeprefix("\ufeff")
        self._next_mark("[")
        if self._peek() == "]":
            return
        while True:
            self._peek()
            line, start = self._line, self._at
            value = self._value()
            self.consumed = self._at - start
            self._drop()
            yield line, value
            if self._next_mark(",]") == "]":
                break
        if self._peek():
            self._fail("something follows the array")

    def _value(self) -> Any:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                self._fail("it is nested too deeply")
            except ValueError as error:
                if len(self._text) - self._at > MAX_ROW_BYTES or not self._fill(len(self._text)):
                    self._line += self._text.count("\n", self._at, getattr(error, "pos", self._at))
                    self._fail(getattr(error, "msg", str(error)))
                continue
            # A number that ends where the buffer ends may go on in the next chunk.
            if end < len(self._text) or not self._fill():
                self._line += self._text.count("\n", self._at, end)
                self._at = end
                return value

    def _next_mark(self, marks: str) -> str:
        found = self._peek()
        if not found or found not in marks:
            self._fail(f"expected {' or '.join(marks)}, found {found or 'the end of the file'}")
        self._at += 1
        return found

    def _peek(self) -> str:
        while True:
            while self._at < len(self._text):
                character = self._text[self._at]
                if character not in " \t\r\n":
                    return character
                self._line += character == "\n"
                self._at += 1
            if not self._fill():
                return ""

    def _fill(self, size: int = 0) -> bool:
        data = self._stream.chunk(max(_CHUNK, size))
        whole = self._carry + data
        try:
            self._text += whole.decode("utf-8")
            self._carry = b""
        except UnicodeDecodeError as error:
            if not data or error.start < len(whole) - 3:
                self._fail(f"it is not UTF-8 ({error.reason})")
            self._text += whole[: error.start].decode("utf-8")
            self._carry = whole[error.start :]
        return bool(data)

    def _drop(self) -> None:
        if self._at > _CHUNK:
            self._text, self._at = self._text[self._at :], 0

    def _fail(self, reason: str) -> NoReturn:
        raise ConfigError(
            f"{self._stream.path} is not a valid JSON array: at line {self._line}: {reason}", kind="input-unreadable"
        )
