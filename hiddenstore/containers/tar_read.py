"""Members of a WebDataset tar by ranged reads: the index believed by its sha256, every member by its crc32c."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np

from hiddenstore.containers.base import CHUNK_CORRUPT, SegmentFiles
from hiddenstore.containers.tar_write import BLOCK_BYTES, HEADER_BYTES, INDEX, TAR, UNIT_PREFIX
from hiddenstore.documents import sha256_hex
from hiddenstore.fs import Filesystem
from hiddenstore.zarr_spec import crc32c
from schemas import CommitRecord

# A gap is read and dropped rather than jumped: a call costs more than this many bytes.
_GAP_BYTES = 1 << 14


@dataclass(frozen=True)
class _Member:
    name: str
    offset: int
    size: int
    crc: int
    kind: str
    body: np.ndarray | None

    @property
    def head_bytes(self) -> int:
        """Bytes read into memory of their own, those before ``body``."""
        return self.size if self.body is None else HEADER_BYTES


@dataclass(frozen=True)
class _Index:
    """``unit`` int64 [3] of offset, size and crc32c; ``fields`` the same per sample: int64 [3, S]."""

    unit: dict[str, np.ndarray]
    fields: dict[str, np.ndarray]


class TarMembers:
    """The members of one tar. Opening reads nothing; the index (24 bytes a member in memory) is read once."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord) -> None:
        self._fs, self._tar, self._record = fs, f"{path}/{TAR}", record
        self._files = SegmentFiles(fs, path, record)
        self._known: _Index | None = None

    def of_sample(self, index: int, wanted: Sequence[tuple[str, np.ndarray | None]]) -> list[np.ndarray]:
        """Members of the ``index``-th sample by field, each uint8 [size] of memory nobody else has.

        A field with a uint8 array beside it is read into that, but for its ``.npy`` header, which is returned.
        """
        sample, held = self._record.samples[index].id, self._index().fields
        found = []
        for name, body in wanted:
            if name not in held:
                raise self._files.misfit(INDEX, f"it names no member {name}")
            offset, size, crc = held[name][:, index].tolist()
            if body is not None and size != HEADER_BYTES + body.size:
                raise self._files.misfit(TAR, f"{name} has {size} bytes, expected {HEADER_BYTES + body.size}")
            found.append(_Member(f"{sample}.{name}", offset, size, crc, CHUNK_CORRUPT, body))
        return self._read(found)

    def of_unit(self, field: str) -> np.ndarray:
        """A member that all samples share, uint8 [size]."""
        place = self._index().unit.get(field)
        if place is None:
            raise self._files.misfit(INDEX, f"it names no member {UNIT_PREFIX}{field}")
        offset, size, crc = place.tolist()
        return self._read([_Member(f"{UNIT_PREFIX}{field}", offset, size, crc, "array-corrupt", None)])[0]

    def _read(self, members: Sequence[_Member]) -> list[np.ndarray]:
        """Neighbours are read in one call; nothing is given out before its crc32c fits."""
        heads = [np.empty(member.head_bytes, dtype=np.uint8) for member in members]
        skipped = np.empty(_GAP_BYTES, dtype=np.uint8)
        order = sorted(range(len(members)), key=lambda place: members[place].offset)
        first = 0
        while first < len(order):
            start = end = members[order[first]].offset
            buffers: list[memoryview] = []
            last = first
            while last < len(order) and 0 <= (gap := members[order[last]].offset - end) <= _GAP_BYTES:
                member, body = members[order[last]], members[order[last]].body
                buffers += [skipped[:gap].data, heads[order[last]].data, *([] if body is None else [body.data])]
                end = member.offset + member.size
                last += 1
            self._fs.read_scatter(self._tar, start, [buffer for buffer in buffers if len(buffer)])
            first = last
        for member, head in zip(members, heads, strict=True):
            found = crc32c(head) if member.body is None else google_crc32c.extend(crc32c(head), member.body)
            if found != member.crc:
                reason = f"member {member.name} has crc32c {found:08x}, expected {member.crc:08x}"
                raise self._files.damaged(TAR, member.kind, reason)
        return heads

    def _index(self) -> _Index:
        if self._known is None:
            entry = self._files.entry(INDEX)
            data = self._fs.read_range(f"{self._tar[: -len(TAR)]}{INDEX}", 0, entry.size)
            if sha256_hex(data) != entry.sha256:
                raise self._files.damaged(INDEX, "file-corrupt", "its sha256 is not the one the commit record names")
            size = self._files.entry(TAR).size
            try:
                self._known = _parse(json.loads(data), len(self._record.samples), size)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                raise self._files.misfit(INDEX, f"it is no index of {TAR} ({error})") from error
        return self._known


def _parse(document: dict[str, Any], samples: int, tar_bytes: int) -> _Index:
    unit = {name: _places([[value] for value in place], 1, tar_bytes)[:, 0] for name, place in document["unit"].items()}
    fields = {
        name: _places([column["offset"], column["size"], column["crc32c"]], samples, tar_bytes)
        for name, column in document["fields"].items()
    }
    return _Index(unit, fields)


def _places(rows: list[list[int]], count: int, tar_bytes: int) -> np.ndarray:
    """int64 [3, count]; ValueError for members that the tar cannot hold."""
    if [len(row) for row in rows] != [count] * 3 or not all(type(value) is int for row in rows for value in row):
        raise ValueError("a member has no whole offset, size and crc32c")
    places = np.array(rows, dtype=np.int64).reshape(3, count)
    offset, size, crc = places
    if (places < 0).any() or (offset % BLOCK_BYTES).any() or (offset > tar_bytes).any():
        raise ValueError("a member lies at an offset that is none")
    if (size > tar_bytes - offset).any() or (crc >> 32).any():
        raise ValueError("a member leaves the file")
    return places
