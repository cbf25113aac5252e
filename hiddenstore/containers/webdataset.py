"""The WebDataset container: one tar of ``<sample>.<field>`` members that stock ``webdataset`` iterates, and its index.

The reader never scans the tar. The index, whose sha256 the commit record names, tells where each member lies and its
crc32c; reads touch only the members of the sample and the layers asked for, neighbours in one go. The headers between
them are read by others only; the sha256 of the whole tar guards those.

Shapes: t rows of one sample, D target width, C columns of the codes, N raw rows.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hiddenstore import blosc_chunks
from hiddenstore.codecs import Encoded
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, fresh, raw_places, select_small
from hiddenstore.containers.base import (
    CHUNK_CORRUPT,
    FINAL_ROWS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    Group,
    Overhead,
    SegmentFiles,
    UnitReader,
    aux_group,
    final_group,
)
from hiddenstore.containers.tar_read import TarMembers
from hiddenstore.containers.tar_write import (
    BLOCK_BYTES,
    HEADER_BYTES,
    TAR,
    code_name,
    npy_header,
    of_samples,
    of_unit,
    small_name,
    write_tar,
)
from hiddenstore.fs import Filesystem
from schemas import CaptureSpec, CommitRecord, FileEntry

Shape = tuple[int, ...]

_PLAIN_MEMBERS = 4
_INDEX_BYTES = 30
# The padding to whole blocks is half a block on average.
_MEMBER_BYTES = BLOCK_BYTES + HEADER_BYTES + BLOCK_BYTES // 2 + _INDEX_BYTES


class WebDatasetContainer:
    """Samples of a unit as members of a tar."""

    name = "webdataset"
    samples_apart = True

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        return write_tar(fs, path, unit, capture)

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> UnitReader:
        return TarUnit(fs, path, record, capture)

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """Headers, padding and index of every member: about 930 bytes, much beside the states of a narrow target."""
        groups = [group for group in (aux_group(capture), final_group(capture)) if group.fields]
        members = _PLAIN_MEMBERS + sum(len(group.fields) + len(of_samples(group)) for group in groups)
        return Overhead(samples * members * _MEMBER_BYTES, 2 * segments)


class TarUnit:
    """One tar. Keeps its index and the arrays that all samples share."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self._record, self._width = record, capture.target.hidden_size
        self._files = SegmentFiles(fs, path, record)
        self._members = TarMembers(fs, path, record)
        self._shared: dict[str, np.ndarray] = {}

    def plain(self, name: str, index: int) -> np.ndarray:
        entry, field = self._record.samples[index], f"{name}.npy"
        lengths: dict[str, Shape] = {SPANS: (-1, 3), FINAL_ROWS: (entry.final_rows,)}
        dtype = "uint8" if name == LOSS_MASK else "int32"
        (stored,) = self._members.of_sample(index, [(field, None)])
        return self._values(field, stored, dtype, lengths.get(name, (entry.tokens,))).copy()

    def encoded(self, group: Group, index: int, layers: Sequence[int], out: Sequence[Tensor] | None = None) -> Encoded:
        if not layers:
            return Encoded([])
        rows, codec = len(group.rows_of(self._record.samples[index])), group.codec
        shape, dtype = (rows, codec.code_columns(self._width)), codec.code_dtype
        codes = [fresh(shape, getattr(torch, dtype)) for _ in layers] if out is None else list(out)
        targets = [_memory(layer) for layer in codes]
        names = [code_name(group, layer) for layer in layers]
        wanted: list[tuple[str, np.ndarray | None]] = list(zip(names, targets, strict=True))
        if codec.compressed:
            wanted = [(name, None) for name in names]
        fields = [small_name(group, name) for name in of_samples(group)]
        stored = self._members.of_sample(index, [*wanted, *((field, None) for field in fields)])
        for name, member, target in zip(names, stored, targets, strict=False):
            if codec.compressed:
                self._unsqueeze(name, member, target)
            elif member.tobytes() != npy_header(dtype, shape):
                raise self._files.misfit(TAR, f"{name} is not {dtype} {list(shape)}")
        return Encoded(codes, self._small(group, layers, rows, dict(zip(fields, stored[len(names) :], strict=True))))

    def decode(self, group: Group, index: int, layers: Sequence[int], out: Tensor) -> None:
        if not layers or not out.shape[1]:
            return
        if group.codec.small:
            group.states.decode(self.encoded(group, index, layers), out)
        else:
            self.encoded(group, index, layers, list(out.view(torch.uint16)))

    def _small(
        self, group: Group, layers: Sequence[int], rows: int, stored: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The small arrays of some layers; raw rows are picked and renumbered."""
        fields = group.codec.small
        sizes = {"L": len(group.fields), "T": rows, "D": self._width}
        whole = {name: self._shared_array(group, name, sizes) for name in of_unit(group)}
        for name in of_samples(group):
            spec = fields[name]
            shape = spec.shape({**sizes, "N": -1})
            field = small_name(group, name)
            whole[name] = self._values(field, stored[field], spec.dtype, shape)
        part = select_small(fields, whole, layers, range(rows))
        if RAW_INDEX not in fields:
            return part
        index, raw = whole[RAW_INDEX], whole[RAW_ROWS]
        if len(index) != len(raw) or (len(index) and not 0 <= index[:, 1].min() <= index[:, 1].max() < rows):
            raise self._files.misfit(TAR, f"raw rows of {group.name} do not lie in their sample")
        places = [raw_places(index, layer, range(rows)) for layer in layers]
        picked = np.array([number for place in places for number in place], dtype=np.int64)
        slots = np.repeat(np.arange(len(layers), dtype=np.int32), [len(place) for place in places])
        return {**part, RAW_INDEX: np.stack([slots, index[picked, 1]], axis=1), RAW_ROWS: raw[picked]}

    def _shared_array(self, group: Group, name: str, sizes: Mapping[str, int]) -> np.ndarray:
        field, spec = small_name(group, name), group.codec.small[name]
        if field not in self._shared:
            self._shared[field] = self._values(field, self._members.of_unit(field), spec.dtype, spec.shape(sizes))
        return self._shared[field]

    def _values(self, field: str, member: np.ndarray, dtype: str, shape: Shape) -> np.ndarray:
        """The array in a ``.npy`` member; a first length of -1 follows from the member's size."""
        little = np.dtype(dtype).newbyteorder("<")
        row_bytes = little.itemsize * math.prod(shape[1:])
        if shape[0] < 0:
            shape = (max(0, len(member) - HEADER_BYTES) // row_bytes, *shape[1:])
        whole = len(member) == HEADER_BYTES + shape[0] * row_bytes
        if not whole or member[:HEADER_BYTES].tobytes() != npy_header(dtype, shape):
            raise self._files.misfit(TAR, f"{field} is not {dtype} {list(shape)}")
        return member[HEADER_BYTES:].view(little).reshape(shape).astype(dtype, copy=False)

    def _unsqueeze(self, field: str, member: np.ndarray, target: np.ndarray) -> None:
        """Decode a ``.blosc`` member, buffers end to end, into uint8 ``target``."""
        start = done = 0
        try:
            while done < target.size:
                size, decoded = blosc_chunks.sizes(member[start:])
                blosc_chunks.decompress(member[start : start + size], target[done : done + decoded])
                start, done = start + size, done + decoded
        except ValueError as error:
            raise self._files.damaged(TAR, CHUNK_CORRUPT, f"{field} {error}") from error
        if start != len(member):
            raise self._files.misfit(TAR, f"{field} has more than {target.size} bytes")


def _memory(codes: Tensor) -> np.ndarray:
    """uint8 over the memory of contiguous codes."""
    return codes.numpy().reshape(-1).view(np.uint8)
