"""Members of a WebDataset tar: which a sample and a unit have, their bytes, their order, and the index that finds them.

Everything a header could tell of the writer (times, users, modes) is constant, so equal units give equal bytes.

Shapes: T rows of a group in the unit, t of one sample, L layers of the group, C columns of the codes, N raw rows.
"""

import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import google_crc32c
import numpy as np
from torch import Tensor

from hiddenstore import blosc_chunks
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, raw_places, select_small
from hiddenstore.containers.base import (
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    Group,
    aux_group,
    final_group,
    unit_attributes,
)
from hiddenstore.documents import canonical
from hiddenstore.errors import ConfigError
from hiddenstore.fs import Filesystem
from hiddenstore.zarr_write import HashedFile, write_bytes
from schemas import CaptureSpec, FileEntry, SampleEntry

TAR = "samples.tar"
INDEX = "index.json"
UNIT_PREFIX = "__unit__/"
UNIT_JSON = "unit.json"
HEADER_BYTES = 128
BLOCK_BYTES = 512
MAX_MEMBER_BYTES = (1 << 33) - 1
"""The largest size that a ustar header can state."""

_END = bytes(2 * BLOCK_BYTES)

Pieces = list[bytes | np.ndarray]


def npy_header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The 128 bytes before the values of a version 1.0 ``.npy`` file, little-endian, row-major."""
    descr = np.dtype(dtype).newbyteorder("<").str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little") + f"{text:<117}\n".encode()


def code_name(group: Group, place: int) -> str:
    """The field under which a layer of a group stands."""
    return f"{group.fields[place]}.{'blosc' if group.codec.compressed else 'npy'}"


def small_name(group: Group, name: str) -> str:
    """The field under which a small array of a group stands, in a sample or in the unit."""
    return f"{group.name}_{name}.npy"


def of_samples(group: Group) -> list[str]:
    """Small arrays of a group that each sample has its part of."""
    return [name for name, spec in group.codec.small.items() if {"T", "N"} & set(spec.axes)]


def of_unit(group: Group) -> list[str]:
    """Small arrays of a group that all samples share."""
    return [name for name in group.codec.small if name not in of_samples(group)]


def write_tar(fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
    """The tar of a unit and its index, under the folder ``path``."""
    tar = _Tar(fs, path)
    try:
        for name, pieces in _unit_members(unit, capture):
            tar.add_unit(name, pieces)
        groups = [group for group in (aux_group(capture), final_group(capture)) if unit.encoded(group).codes]
        codes = {group.name: [_Rows(layer) for layer in unit.encoded(group).codes] for group in groups}
        for number, entry in enumerate(unit.samples):
            for name, pieces in _sample_members(unit, capture, groups, codes, number, entry):
                tar.add(entry.id, name, pieces)
        written = tar.close()
    except BaseException:
        tar.abort()
        raise
    return [written, write_bytes(fs, path, INDEX, canonical(tar.index()))]


def _unit_members(unit: EncodedUnit, capture: CaptureSpec) -> Iterator[tuple[str, Pieces]]:
    yield UNIT_JSON, [canonical(unit_attributes(unit.unit, capture))]
    for group in (aux_group(capture), final_group(capture)):
        small = unit.encoded(group).small
        for name in of_unit(group):
            if name in small:
                yield small_name(group, name), _npy(small[name])


def _sample_members(
    unit: EncodedUnit,
    capture: CaptureSpec,
    groups: list[Group],
    codes: "dict[str, list[_Rows]]",
    number: int,
    entry: SampleEntry,
) -> Iterator[tuple[str, Pieces]]:
    """Small members first: the layers of one drafter are then one read with them."""
    tokens = slice(entry.start, entry.start + entry.tokens)
    yield f"{INPUT_IDS}.npy", _npy(unit.input_ids[tokens])
    yield f"{LOSS_MASK}.npy", _npy(unit.loss_mask[tokens])
    yield f"{SPANS}.npy", _npy(unit.spans[unit.spans[:, 0] == number, 1:])
    if capture.final != "none":
        yield f"{FINAL_ROWS}.npy", _npy(unit.final_rows[entry.final_start : entry.final_start + entry.final_rows])
    for group in groups:
        part = _small_of_sample(unit.encoded(group).small, group, group.rows_of(entry))
        for name in of_samples(group):
            yield small_name(group, name), _npy(part[name])
    for group in groups:
        rows = group.rows_of(entry)
        width = capture.target.hidden_size
        shape, dtype = (len(rows), group.codec.code_columns(width)), group.codec.code_dtype
        for place, layer in enumerate(codes[group.name]):
            parts = layer.cut(rows.start, rows.stop)
            squeezed = group.codec.compressed
            pieces = _squeezed(parts, group.codec.chunk_tokens(width)) if squeezed else _npy_of(dtype, shape, parts)
            yield code_name(group, place), pieces


def _small_of_sample(small: dict[str, np.ndarray], group: Group, rows: range) -> dict[str, np.ndarray]:
    layers = range(len(group.fields))
    part = select_small(group.codec.small, small, layers, rows)
    if RAW_INDEX in small:
        places = [raw_places(small[RAW_INDEX], layer, rows) for layer in layers]
        index = np.concatenate([small[RAW_INDEX][place.start : place.stop] for place in places])
        part[RAW_INDEX] = index - np.array([0, rows.start], dtype=index.dtype)
        part[RAW_ROWS] = np.concatenate([small[RAW_ROWS][place.start : place.stop] for place in places])
    return part


class _Rows:
    """Parts [t, C] of one layer whose rows lie end to end."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = [part.cpu().numpy() for part in parts if len(part)]
        self._starts = list(accumulate(map(len, self._parts), initial=0))

    def cut(self, start: int, stop: int) -> list[np.ndarray]:
        """Rows [start, stop) as views."""
        found = []
        place = bisect_right(self._starts, start) - 1
        while start < stop:
            first, last = self._starts[place], min(self._starts[place + 1], stop)
            found.append(self._parts[place][start - first : last - first])
            start, place = last, place + 1
        return found


def _npy(values: np.ndarray) -> Pieces:
    return _npy_of(str(values.dtype), values.shape, [values])


def _npy_of(dtype: str, shape: tuple[int, ...], parts: Sequence[np.ndarray]) -> Pieces:
    return [npy_header(dtype, shape), *(_little(part).reshape(-1).view(np.uint8) for part in parts)]


def _squeezed(parts: Sequence[np.ndarray], step: int) -> Pieces:
    """Rows in blosc buffers of ``step`` rows end to end."""
    if not parts:
        return []
    little = _little(parts[0] if len(parts) == 1 else np.concatenate(parts))
    return [blosc_chunks.compress(little[start : start + step]) for start in range(0, len(little), step)]


def _little(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))


@dataclass
class _Column:
    offset: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    crc32c: list[int] = field(default_factory=list)


class _Tar:
    """A ustar archive written front to back, and where each member lies in it."""

    def __init__(self, fs: Filesystem, path: str) -> None:
        self._file = HashedFile(fs, path, TAR)
        self._unit: dict[str, list[int]] = {}
        self._columns: dict[str, _Column] = {}
        self._offset = 0

    def add_unit(self, name: str, pieces: Pieces) -> None:
        self._unit[name] = list(self._member(f"{UNIT_PREFIX}{name}", pieces))

    def add(self, sample_id: str, name: str, pieces: Pieces) -> None:
        column = self._columns.setdefault(name, _Column())
        offset, size, crc = self._member(f"{sample_id}.{name}", pieces)
        column.offset.append(offset)
        column.size.append(size)
        column.crc32c.append(crc)

    def index(self) -> dict[str, object]:
        return {"unit": self._unit, "fields": {name: vars(column) for name, column in self._columns.items()}}

    def close(self) -> FileEntry:
        self._file.write(_END)
        return self._file.close()

    def abort(self) -> None:
        self._file.abort()

    def _member(self, name: str, pieces: Pieces) -> tuple[int, int, int]:
        size, crc = sum(len(piece) for piece in pieces), 0
        for piece in pieces:
            crc = google_crc32c.extend(crc, piece)
        head, padding = _tar_header(name, size), bytes(-size % BLOCK_BYTES)
        offset = self._offset + len(head)
        self._offset = offset + size + len(padding)
        self._file.write(head, *(piece if isinstance(piece, bytes) else piece.data for piece in pieces), padding)
        return offset, size, crc


def _tar_header(name: str, size: int) -> bytes:
    if size > MAX_MEMBER_BYTES:
        raise ConfigError(
            f"{name} has {size:,} bytes, but a member of a tar holds at most {MAX_MEMBER_BYTES:,}",
            kind="member-too-large",
            hint="--container zarr has no such limit; or prepare with a smaller --max-tokens",
        )
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
