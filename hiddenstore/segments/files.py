"""The files of one segment: written with their digest, read after a check against the commit record."""

from awscrt.checksums import combine_crc32c

from hiddenstore.errors import CorruptionError, FormatError, Kind
from hiddenstore.files.digests import Bytes, TreeDigest, content_mismatch
from hiddenstore.files.documents import sha256_hex
from hiddenstore.fs.seam import Filesystem
from schemas import CommitRecord, FileEntry

CHUNK_CORRUPT = Kind.CHUNK_CORRUPT
"""Kind of the errors that cost one sample; every other damage of a segment costs its whole unit."""


class HashedFile:
    """A new file whose size and tree are known when it closes; removed when the block ends before that."""

    def __init__(self, fs: Filesystem, folder: str, path: str) -> None:
        self._file = fs.create(f"{folder}/{path}")
        self._path = path
        self._size = 0
        self._digest = TreeDigest()
        self._is_closed = False

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_closed:
            self._file.abort()

    def write(self, *pieces: Bytes, lead: bytes = b"") -> int:
        """Append ``lead``, a few bytes, and the pieces; the crc32c of the pieces."""
        whole = 0
        if lead:
            self._digest.extend(lead)
            self._append(lead)
        for piece in pieces:
            crc = self._digest.update(piece)
            whole = combine_crc32c(whole, crc, len(piece)) if whole else crc
            self._append(piece)
        return whole

    def close(self) -> FileEntry:
        self._file.close()
        self._is_closed = True
        return FileEntry(path=self._path, size=self._size, tree=self._digest.hexdigest())

    def _append(self, piece: Bytes) -> None:
        # While its bytes are in the CPU's cache.
        self._file.append(piece)
        self._size += len(piece)


def write_bytes(fs: Filesystem, folder: str, path: str, data: bytes) -> FileEntry:
    """One whole new file, fsynced, with its sha256."""
    file = fs.create(f"{folder}/{path}")
    try:
        file.write(data)
        file.close()
    except BaseException:
        file.abort()
        raise
    return FileEntry(path=path, size=len(data), sha256=sha256_hex(data))


class SegmentFiles:
    """The files of one segment as its commit record names them."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord) -> None:
        self.fs, self.path, self.unit = fs, path, record.unit
        self._entries = {file.path: file for file in record.files}

    def entry(self, path: str) -> FileEntry:
        """A file's entry, after a check that the record names it and that it is there in that size."""
        entry = self._entries.get(path)
        if entry is None:
            raise self.damaged(path, Kind.FILE_UNNAMED, f"the commit record of unit {self.unit} does not name it")
        require_size(self.fs, f"{self.path}/{path}", entry.size)
        return entry

    def read(self, path: str) -> bytes:
        """A whole file, after a check of its digest."""
        entry = self.entry(path)
        data = self.fs.read(f"{self.path}/{path}")
        if fault := content_mismatch(entry, data):
            raise self.damaged(path, Kind.FILE_CORRUPT, f"{fault}, by its commit record")
        return data

    def damaged(self, path: str, kind: Kind, reason: str) -> CorruptionError:
        """A file that is not what the record names."""
        return damaged(self.fs, f"{self.path}/{path}", kind, reason)

    def misfit(self, name: str, reason: str) -> FormatError:
        """An array that is whole but not what the capture says."""
        return FormatError(
            f"{self.fs.root}/{self.path}/{name} is not the array this store holds: {reason}", kind=Kind.ARRAY_INVALID
        )


def require_size(fs: Filesystem, path: str, expected: int) -> None:
    """CorruptionError ``file-missing`` or ``file-size`` unless the file is there in that size."""
    size = fs.size(path)
    if size is None:
        raise damaged(fs, path, Kind.FILE_MISSING, "it does not exist")
    if size != expected:
        raise damaged(fs, path, Kind.FILE_SIZE, f"expected {expected} bytes, found {size}")


def damaged(fs: Filesystem, path: str, kind: Kind, reason: str) -> CorruptionError:
    """What to raise over a file whose bytes are not those that were written."""
    return CorruptionError(f"{fs.root}/{path} is damaged: {reason}", kind=kind, path=path)
