"""The members of one tar, by its index: where each lies and its crc32c. The tar itself is never scanned.

Shapes: S samples.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from awscrt.checksums import crc32c

from hiddenstore.errors import Kind
from hiddenstore.segments.files import CHUNK_CORRUPT, SegmentFiles
from hiddenstore.segments.many import NotTogetherError
from schemas import CommitRecord

TAR = "samples.tar"
INDEX = "index.json"
UNIT_PREFIX = "__unit__/"
HEADER_BYTES = 128
"""Of the ``.npy`` header of a member."""
BLOCK_BYTES = 512

# A gap is read and dropped rather than jumped: a call costs more than this many bytes.
_GAP_BYTES = 1 << 14


class _Member(NamedTuple):
    """Bytes of the tar and the kind of the error when they are damaged; ``body`` takes what follows a header."""

    name: str
    offset: int
    size: int
    crc: int
    kind: Kind
    body: np.ndarray | None


class _Index(NamedTuple):
    """``unit`` int64 [3] of offset, size, crc32c; ``table`` int64 [fields, 3, S] the same per sample, its ``rows`` by
    field."""

    unit: dict[str, np.ndarray]
    rows: dict[str, int]
    table: np.ndarray


_Places = tuple[list[memoryview], np.ndarray]
"""A run of bytes for each of S samples; of their members int64 [fields, 3, S] the place in it, size and crc32c."""


class TarMembers:
    """The members of one tar. Opening reads nothing; the index (24 bytes a member in memory) is read once."""

    def __init__(self, files: SegmentFiles, record: CommitRecord) -> None:
        self._files, self._record = files, record
        self._index: _Index | None = None

    def of_sample(self, index: int, fields: Sequence[tuple[str, np.ndarray | None]]) -> list[np.ndarray]:
        """Members of the ``index``-th sample by field, each uint8 [size] of memory nobody else has.

        A field with a uint8 array beside it is read into that, but for its ``.npy`` header, which is returned.
        """
        sample, stored = self._record.samples[index].id, self._read_index()
        members = []
        for name, body in fields:
            if name not in stored.rows:
                raise self._files.misfit(INDEX, f"it names no member {name}")
            offset, size, crc = stored.table[stored.rows[name], :, index].tolist()
            if body is not None and size != HEADER_BYTES + body.size:
                raise self._files.misfit(TAR, f"{name} has {size} bytes, expected {HEADER_BYTES + body.size}")
            members.append(_Member(f"{sample}.{name}", offset, size, crc, CHUNK_CORRUPT, body))
        return self._read(members)

    def of_samples(self, indices: np.ndarray, fields: Sequence[str]) -> "_Places":
        """The bytes in which members of samples at ascending int64 [S] lie; nothing of them is checked."""
        index = self._read_index()
        if any(name not in index.rows for name in fields):
            raise NotTogetherError
        columns = index.table[[index.rows[name] for name in fields]][:, :, indices]
        offsets = columns[:, 0]
        starts, stops = offsets.min(axis=0), (offsets + columns[:, 1]).max(axis=0)
        if (starts[1:] < stops[:-1]).any():
            raise NotTogetherError
        # Near neighbours share a run.
        cuts = [0, *(np.flatnonzero(starts[1:] - stops[:-1] > _GAP_BYTES) + 1).tolist(), len(starts)]
        runs: list[memoryview] = []
        for low, high in pairwise(cuts):
            first = int(starts[low])
            data = np.empty(int(stops[high - 1]) - first, dtype=np.uint8).data
            self._read_into(first, [data])
            runs += [data] * (high - low)
            offsets[:, low:high] -= first
        return runs, columns

    def of_unit(self, field: str) -> np.ndarray:
        """A member that all samples share, uint8 [size]."""
        unit = self._read_index().unit
        if field not in unit:
            raise self._files.misfit(INDEX, f"it names no member {UNIT_PREFIX}{field}")
        offset, size, crc = unit[field].tolist()
        return self._read([_Member(f"{UNIT_PREFIX}{field}", offset, size, crc, Kind.ARRAY_CORRUPT, None)])[0]

    def _read(self, members: Sequence[_Member]) -> list[np.ndarray]:
        """Neighbours are read in one call; nothing is given out before its crc32c fits."""
        heads = [np.empty(member.size if member.body is None else HEADER_BYTES, np.uint8) for member in members]
        skipped = np.empty(_GAP_BYTES, dtype=np.uint8)
        ordered = sorted(zip(members, heads, strict=True), key=lambda pair: pair[0].offset)
        start = end = ordered[0][0].offset
        buffers: list[memoryview] = []
        for member, head in ordered:
            if not 0 <= member.offset - end <= _GAP_BYTES:
                self._read_into(start, buffers)
                start = end = member.offset
                buffers = []
            buffers += [skipped[: member.offset - end].data, head.data]
            if member.body is not None:
                buffers.append(member.body.data)
            end = member.offset + member.size
        self._read_into(start, buffers)
        for member, head in ordered:
            crc = crc32c(head) if member.body is None else crc32c(member.body, crc32c(head))
            if crc != member.crc:
                reason = f"member {member.name} has crc32c {crc:08x}, expected {member.crc:08x}"
                raise self._files.damaged(TAR, member.kind, reason)
        return heads

    def _read_into(self, start: int, buffers: list[memoryview]) -> None:
        self._files.fs.read_scatter(f"{self._files.path}/{TAR}", start, [buffer for buffer in buffers if len(buffer)])

    def _read_index(self) -> _Index:
        if self._index is None:
            data, size = self._files.read(INDEX), self._files.entry(TAR).size
            try:
                self._index = _parse(json.loads(data), len(self._record.samples), size)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
                raise self._files.misfit(INDEX, f"it is no index of {TAR} ({error})") from error
        return self._index


def _parse(document: dict[str, Any], samples: int, tar_bytes: int) -> _Index:
    unit, fields = document["unit"], document["fields"]
    if any(len(row) != 3 for row in unit.values()):
        raise ValueError("a member has no whole offset, size and crc32c")
    of_unit = _table([[value] for row in unit.values() for value in row], 1, tar_bytes)[:, :, 0]
    rows = [one[name] for one in fields.values() for name in ("offset", "size", "crc32c")]
    numbers = {name: number for number, name in enumerate(fields)}
    return _Index(dict(zip(unit, of_unit, strict=True)), numbers, _table(rows, samples, tar_bytes))


def _table(rows: list[list[int]], count: int, tar_bytes: int) -> np.ndarray:
    """Offset, size and crc32c int64 [members, 3, count]; ValueError for members that the tar cannot hold."""
    if any(len(row) != count or set(map(type, row)) - {int} for row in rows):
        raise ValueError("a member has no whole offset, size and crc32c")
    table = np.array(rows, dtype=np.int64).reshape(len(rows) // 3, 3, count)
    offset, size, crc = table.transpose(1, 0, 2)
    if (table < 0).any() or (offset % BLOCK_BYTES).any() or (offset > tar_bytes).any():
        raise ValueError("a member lies at an offset that is none")
    if (size > tar_bytes - offset).any() or (crc >> 32).any():
        raise ValueError("a member leaves the file")
    return table
