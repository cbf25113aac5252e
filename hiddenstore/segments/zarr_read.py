"""Our own reader of the arrays of ``zarr_write``: rows [a, b) by ranged reads, every checksum verified.

Stock Zarr readers open the same files at two to eight times the CPU (docs/design/002). The interpreter lock is
free during reads, checksums, decompression and copies. Whatever disagrees with its checksum or with the metadata is a
CorruptionError that names the file.
"""

from collections.abc import Iterator
from itertools import pairwise

import google_crc32c
import numpy as np

from hiddenstore.codecs import blosc_chunks
from hiddenstore.codecs.blosc_chunks import Scratch
from hiddenstore.documents import sha256_hex
from hiddenstore.errors import FormatError, Kind
from hiddenstore.fs.seam import Filesystem
from hiddenstore.segments.files import CHUNK_CORRUPT, crc32c, damaged, require_size
from hiddenstore.segments.zarr_write import ALIGNMENT, CHUNK_CRCS, CRC_BYTES, ArraySpec

MAX_CHUNK_BYTES = 1 << 28
CHECK_CHUNKS = True
"""Off, this process reads chunks without their checksums: for benchmarks that measure what checking costs."""

# What a request brought is still in cache when it is checked and copied; smaller ones cost more calls.
_REQUEST_BYTES = 1 << 21
# Without a check nothing is looked at again; a call takes at most 1,024 pieces, two a chunk of 64 KiB or more.
_UNCHECKED_BYTES = 1 << 24
# Room for the checksum of a chunk and the gap behind it.
_TAIL_BYTES = 2 * ALIGNMENT


def read_small(fs: Filesystem, folder: str, spec: ArraySpec, sha256: str | None = None) -> np.ndarray:
    """The whole of a single-chunk array, its checksum and when given the sha256 of its file verified."""
    path = f"{folder}/{spec.file_path}"
    little = np.dtype(spec.dtype).newbyteorder("<")
    if spec.size == 0:
        return np.zeros(spec.shape, dtype=spec.dtype)
    expected = spec.size * little.itemsize + CRC_BYTES
    require_size(fs, path, expected)
    data = np.empty(expected, dtype=np.uint8)
    fs.read_into(path, 0, data.data)
    _check_crc(fs, path, data, "its only chunk", kind=Kind.ARRAY_CORRUPT)
    if sha256 is not None and sha256_hex(data.data) != sha256:
        raise damaged(fs, path, Kind.ARRAY_CORRUPT, "its sha256 is not the one the commit record names")
    array = data[:-CRC_BYTES].view(little).reshape(spec.shape)
    return array.astype(spec.dtype, copy=False)


class ShardReader:
    """One sharded array. Opening reads nothing; the index is read and checked before the first rows.

    Safe to use from many threads.
    """

    def __init__(self, fs: Filesystem, folder: str, spec: ArraySpec, file_size: int | None = None) -> None:
        if spec.chunk_bytes > MAX_CHUNK_BYTES:
            raise FormatError(f"{folder} has chunks of {spec.chunk_bytes:,} bytes", kind=Kind.ARRAY_INVALID)
        self.spec = spec
        self._fs = fs
        self._path = f"{folder}/{spec.file_path}"
        self._file_size = file_size
        self._dtype = np.dtype(spec.dtype).newbyteorder("<")
        self._rows = spec.chunk_rows or 1
        self._row_bytes, self._chunk_bytes, self._direct = spec.row_bytes, spec.chunk_bytes, spec.direct
        self._bounds: list[tuple[int, int]] | None = None
        named = spec.attributes.get(CHUNK_CRCS)
        self._crcs: list[int] = named if isinstance(named, list) else []
        ints = isinstance(named, list) and len(self._crcs) == spec.chunks and set(map(type, self._crcs)) <= {int}
        if not ints or not (min(self._crcs, default=0) >= 0 and max(self._crcs, default=0) < 1 << 32):
            raise FormatError(f"{folder} does not name the checksum of every chunk", kind=Kind.ARRAY_INVALID)

    def read_rows(self, start: int, stop: int, out: np.ndarray) -> None:
        """Rows [start, stop) into ``out`` [stop - start, width], C-contiguous and of the array's dtype."""
        rows, bounds = self._rows, self._index()
        if not 0 <= start <= stop <= self.spec.shape[0]:
            raise IndexError(f"rows {start}…{stop} of {self.spec.shape[0]}")
        if start == stop:
            return
        chunk, last = start // rows, -(-stop // rows)
        if self._direct:
            flat = out.reshape(-1).view(np.uint8)
            step = max(1, (_REQUEST_BYTES if CHECK_CHUNKS else _UNCHECKED_BYTES) // self._chunk_bytes)
            for first in range(chunk, last, step):
                self._read_direct(first, min(last, first + step), start, flat)
            return
        while chunk < last:
            end = chunk + 1
            while end < last and bounds[end][1] - bounds[chunk][0] <= _REQUEST_BYTES:
                end += 1
            self._read_copied(chunk, end, start, stop, out)
            chunk = end

    def blocks(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Rows [start, stop) piece by piece: (offset from ``start``, rows [n, width] valid until the next piece)."""
        rows, row_bytes = self._rows, self._row_bytes
        step = max(1, _REQUEST_BYTES // max(1, self._chunk_bytes)) * rows
        with Scratch(min(step + rows, stop - start) * row_bytes) as buffer:
            low = start
            while low < stop:
                high = min(stop, (low // rows) * rows + step)
                piece = buffer[: (high - low) * row_bytes].view(self._dtype).reshape(high - low, -1)
                self.read_rows(low, high, piece)
                yield low - start, piece
                low = high

    def _read_direct(self, chunk: int, end: int, start: int, out: np.ndarray) -> None:
        """Chunks [chunk, end) in one request, what ``out`` uint8 wants of them straight into place; then verify them.

        ``out`` holds the rows from ``start`` on. What the first and the last chunk have outside of it goes to memory of
        this thread, and so do the checksums.
        """
        bounds, size = self._index(), self._chunk_bytes
        begin = chunk * size - start * self._row_bytes
        stop = begin + (end - chunk) * size
        before = max(0, -begin)
        outside = before + max(0, stop - out.size)
        with Scratch(outside + (end - chunk) * _TAIL_BYTES, bounds[chunk][0]) as spare:
            room, at, target = spare.data, outside, out.data
            cuts = [slice(max(0, first), first + size) for first in range(begin, stop, size)]
            starts = [start for start, _ in bounds[chunk:end]]
            gaps = [after - before - size for before, after in pairwise(starts)]
            pieces: list[memoryview] = []
            for cut, gap in zip(cuts, [*gaps, CRC_BYTES], strict=True):
                pieces += (target[cut], room[at : at + gap])
                at += _TAIL_BYTES
            if before:
                pieces.insert(0, room[:before])
            if outside > before:
                pieces.insert(-1, room[before:outside])
            self._fs.read_scatter(self._path, bounds[chunk][0], pieces)
            if CHECK_CHUNKS:
                crcs = [google_crc32c.value(out[cut]) for cut in cuts]
                if before:
                    crcs[0] = google_crc32c.extend(crc32c(spare[:before]), out[cuts[0]])
                if outside > before:
                    crcs[-1] = google_crc32c.extend(crcs[-1], spare[before:outside])
                self._verify(chunk, crcs, spare[outside:].reshape(-1, _TAIL_BYTES)[:, :CRC_BYTES])

    def _read_copied(self, chunk: int, end: int, start: int, stop: int, out: np.ndarray) -> None:
        """Chunks [chunk, end) through memory of this thread: small ones and compressed ones."""
        bounds = self._index()
        first = bounds[chunk][0]
        with Scratch(bounds[end - 1][1] - first, first) as buffer:
            self._fs.read_into(self._path, first, buffer.data)
            stored = [buffer[low - first : high - first] for low, high in bounds[chunk:end]]
            if CHECK_CHUNKS:
                crcs = [crc32c(one[:-CRC_BYTES]) for one in stored]
                self._verify(chunk, crcs, np.stack([one[-CRC_BYTES:] for one in stored]))
            if not self.spec.compressed:
                self._copy_rows(chunk, buffer.reshape(end - chunk, -1), start, stop, out)
                return
            for index, one in enumerate(stored, start=chunk):
                self._copy_decompressed(index, one[:-CRC_BYTES], start, stop, out)

    def _copy_rows(self, chunk: int, stored: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """The rows of [start, stop) out of chunks uint8 [n, bytes] from number ``chunk`` on."""
        rows = self._rows
        values = stored[:, :-CRC_BYTES].view(self._dtype).reshape(len(stored), rows, -1)
        first = chunk * rows
        low, high = max(start, first) - first, min(stop, first + len(stored) * rows) - first
        target = out[first + low - start : first + high - start]
        head = min(-(-low // rows) * rows, high)
        tail = max(high // rows * rows, head)
        np.copyto(target[: head - low], values[0, low:head])
        middle = values[head // rows : tail // rows]
        np.copyto(target[head - low : tail - low].reshape(middle.shape), middle)
        if tail < high:
            np.copyto(target[tail - low :], values[tail // rows, : high - tail])

    def _copy_decompressed(self, index: int, body: np.ndarray, start: int, stop: int, out: np.ndarray) -> None:
        """The rows of [start, stop) out of one compressed chunk uint8 [bytes]."""
        rows = self._rows
        first = index * rows
        low, high = max(start, first), min(stop, first + rows)
        target = out[low - start : high - start]
        try:
            if high - low == rows:
                blosc_chunks.decompress(body, target.reshape(-1).view(np.uint8))
                return
            with Scratch(self._chunk_bytes) as buffer:
                blosc_chunks.decompress(body, buffer)
                np.copyto(target, buffer.view(self._dtype).reshape(rows, -1)[low - first : high - first])
        except ValueError as error:
            raise damaged(self._fs, self._path, CHUNK_CORRUPT, f"chunk {index} {error}") from error

    def _verify(self, chunk: int, crcs: list[int], tails: np.ndarray) -> None:
        """The crc32c of chunks from ``chunk`` on must be those in the metadata and those behind them, uint8 [n, 4]."""
        stored = np.ascontiguousarray(tails).view("<u4").ravel().tolist()
        named = self._crcs[chunk : chunk + len(crcs)]
        if crcs == stored == named:
            return
        for index, (actual, shard, metadata) in enumerate(zip(crcs, stored, named, strict=True), start=chunk):
            if not actual == shard == metadata:
                reason = f"chunk {index} has crc32c {actual:08x}, expected {shard:08x} by the shard"
                raise damaged(self._fs, self._path, CHUNK_CORRUPT, f"{reason} and {metadata:08x} by zarr.json")

    def _index(self) -> list[tuple[int, int]]:
        """First byte of each chunk and the byte behind its checksum; read once."""
        if self._bounds is None:
            self._bounds = self._read_index() if self.spec.size else []
        return self._bounds

    def _read_index(self) -> list[tuple[int, int]]:
        spec = self.spec
        size = self._fs.size(self._path) or 0 if self._file_size is None else self._file_size
        require_size(self._fs, self._path, max(size, spec.index_bytes))
        data = np.empty(spec.index_bytes, dtype=np.uint8)
        self._fs.read_into(self._path, size - spec.index_bytes, data.data)
        _check_crc(self._fs, self._path, data, "the shard index", kind=Kind.SHARD_INDEX)
        pairs = data[:-CRC_BYTES].view("<u8").reshape(spec.chunks, 2)
        if not self._lie_in_order(pairs, size - spec.index_bytes):
            raise damaged(self._fs, self._path, Kind.SHARD_INDEX, "its chunks do not lie end to end")
        return [(offset, offset + length) for offset, length in pairs.tolist()]

    def _lie_in_order(self, pairs: np.ndarray, stop: int) -> bool:
        """Whether chunks, offset and length uint64 [n, 2], fill the bytes up to ``stop``.

        Before aligned ones there are less than ``ALIGNMENT`` unused bytes, before others none.
        """
        spec = self.spec
        largest = spec.chunk_bytes + CRC_BYTES + (blosc_chunks.HEADER_BYTES if spec.compressed else 0)
        smallest = CRC_BYTES + blosc_chunks.HEADER_BYTES if spec.compressed else largest
        loosest = ALIGNMENT if spec.direct else 1
        if int(pairs.max()) > stop:
            return False
        offsets, lengths = pairs.astype(np.int64).T
        gaps = offsets - np.concatenate([[0], (offsets + lengths)[:-1]])
        fitting = (lengths >= smallest) & (lengths <= largest) & (gaps >= 0) & (gaps < loosest)
        return bool(fitting.all()) and int(offsets[-1] + lengths[-1]) == stop


def _check_crc(fs: Filesystem, path: str, data: np.ndarray, what: str, kind: Kind) -> None:
    """Bytes uint8 [n] whose last four are the crc32c of the others."""
    expected, actual = int.from_bytes(data[-CRC_BYTES:].tobytes(), "little"), crc32c(data[:-CRC_BYTES])
    if expected != actual:
        raise damaged(fs, path, kind, f"{what} has crc32c {actual:08x}, expected {expected:08x}")
