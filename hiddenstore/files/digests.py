"""What a record names of a file: the sha256 of its bytes, or its ``tree``, the sha256 of what the crc32c of its pieces
are, which costs a thirtieth where those are known anyway. Whoever reads believes either."""

import hashlib
import struct
from typing import Protocol

from awscrt.checksums import combine_crc32c, crc32c

from schemas.manifest import FileEntry

PIECE_BYTES = 1 << 20
_PIECE = struct.Struct("<QQI")

Bytes = bytes | memoryview


class Digest(Protocol):
    """A digest that is told the bytes of a file one after the other."""

    def update(self, data: Bytes, /) -> object:
        """The next bytes."""

    def hexdigest(self) -> str:
        """Of all bytes so far."""


class TreeDigest:
    """sha256 over (offset uint64, length uint64, crc32c uint32) of every ``PIECE_BYTES`` of a file, all little-endian.

    It guards against accident, not against somebody who makes another file of the same crc32c.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._offset = self._length = self._crc = 0

    def update(self, data: Bytes, /) -> int:
        """The next bytes, of contiguous memory; their own crc32c."""
        view = data if isinstance(data, memoryview) and data.format == "B" else memoryview(data).cast("B")
        done = whole = 0
        while done < len(view):
            part = view[done : done + PIECE_BYTES - self._length]
            crc, size = crc32c(part), len(part)
            whole = combine_crc32c(whole, crc, size) if done else crc
            self._crc = combine_crc32c(self._crc, crc, size) if self._length else crc
            self._length += size
            done += size
            if self._length == PIECE_BYTES:
                self._sha256.update(self._piece())
                self._offset += PIECE_BYTES
                self._length = 0
        return whole

    def extend(self, data: bytes) -> None:
        """The next bytes, a few, whose own crc32c nobody asks for."""
        if self._length + len(data) >= PIECE_BYTES:
            self.update(data)
            return
        self._crc = crc32c(data, self._crc if self._length else 0)
        self._length += len(data)

    def hexdigest(self) -> str:
        digest = self._sha256.copy()
        if self._length:
            digest.update(self._piece())
        return digest.hexdigest()

    def _piece(self) -> bytes:
        return _PIECE.pack(self._offset, self._length, self._crc)


def digest_for(entry: FileEntry) -> Digest:
    """A new digest of the kind that an entry names."""
    return hashlib.sha256() if entry.tree is None else TreeDigest()


def mismatch(entry: FileEntry, digest: Digest) -> str | None:
    """What is wrong with bytes of this digest, None where they are those that the entry names."""
    actual = digest.hexdigest()
    if actual == entry.digest:
        return None
    return f"expected {'sha256' if entry.tree is None else 'tree'} {entry.digest[:16]}…, found {actual[:16]}…"


def content_mismatch(entry: FileEntry, data: Bytes) -> str | None:
    """The same of all bytes of a file."""
    digest = digest_for(entry)
    digest.update(data)
    return mismatch(entry, digest)
