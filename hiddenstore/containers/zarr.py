"""The Zarr container: a Zarr v3 group with one code array per captured field and the small arrays beside them.

Samples lie end to end along the token axis. The reader believes the commit record and nothing else: every file must
have the size it names, metadata and small arrays its sha256, chunks of large arrays the crc32c that their metadata
names, so that even a file in another's place is seen. Reads touch only the rows and layers asked for.

Shapes: L layers asked for, T tokens of the unit, t rows of one sample, D width, N raw rows.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import CodeLayout, Encoded
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, fresh, select_small
from hiddenstore.containers.base import (
    AUX,
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    Group,
    Overhead,
    SegmentFiles,
    UnitReader,
    aux_group,
    final_group,
    unit_attributes,
)
from hiddenstore.documents import sha256_hex
from hiddenstore.fs import Filesystem
from hiddenstore.zarr_read import ShardReader, read_small
from hiddenstore.zarr_spec import METADATA, ArraySpec, parse_metadata
from hiddenstore.zarr_write import write_array, write_group, write_parts
from schemas import FINAL, CaptureSpec, CommitRecord, FileEntry

_PLAIN_ARRAYS = 4
_RAW_CHUNK_BYTES = 1 << 14
_AXES = {"L": "layer", "T": "token", "D": "channel", "N": "raw_row", "2": "layer_and_row"}


class ZarrContainer:
    """Arrays of a unit as files of a Zarr v3 group."""

    name = "zarr"
    samples_apart = False

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        files, width = [write_group(fs, path, unit_attributes(unit.unit, capture))], capture.target.hidden_size
        plain = [
            (INPUT_IDS, ("token",), unit.input_ids),
            (LOSS_MASK, ("token",), unit.loss_mask),
            (SPANS, ("span", "sample_role_start_end"), unit.spans),
        ]
        if capture.final != "none":
            plain.append((FINAL_ROWS, ("final_row",), unit.final_rows))
        for name, dimensions, values in plain:
            files += write_array(fs, path, name, ArraySpec(values.shape, str(values.dtype), dimensions), values)
        for group in (aux_group(capture), final_group(capture)):
            part = unit.encoded(group)
            for name, codes in zip(group.fields, part.codes, strict=True):
                shape = (sum(map(len, codes)), group.codec.code_columns(width))
                spec = _code_spec(group.codec, shape, name, width)
                files += write_parts(fs, path, name, spec, (rows.cpu().numpy() for rows in codes))
            for name, values in part.small.items():
                spec = _small_spec(group.codec, name, values.shape)
                files += write_array(fs, path, f"{group.name}_{name}", spec, values)
        return files

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> UnitReader:
        return ZarrUnit(fs, path, record, capture)

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """Each array is a file of numbers and one of metadata, whose bytes do not count beside them."""
        groups = [group for group in (aux_group(capture), final_group(capture)) if group.fields]
        arrays = _PLAIN_ARRAYS + sum(len(group.fields) + len(group.codec.small) for group in groups)
        return Overhead(0, segments * (2 * arrays + 1))


class ZarrUnit:
    """One group. Keeps the small arrays and shard indexes it read: about (4 L + 11) bytes a token, 4 D a layer."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self._fs, self._path, self._record = fs, path, record
        self._width = capture.target.hidden_size
        self._tokens, self._final_rows = record.tokens, record.final_rows
        self._files = SegmentFiles(fs, path, record)
        self._arrays: dict[str, np.ndarray] = {}
        self._shards: dict[str, ShardReader] = {}
        self._shared: dict[str, _Shared] = {}
        # Threads that meet at an unopened array would all open it.
        self._opening = threading.Lock()

    def plain(self, name: str, index: int) -> np.ndarray:
        entry = self._record.samples[index]
        if name == SPANS:
            spans = self._small(SPANS, "int32", (None, 4))
            return spans[spans[:, 0] == index, 1:].copy()
        if name == FINAL_ROWS:
            held = self._small(FINAL_ROWS, "int32", (self._final_rows,))
            return held[entry.final_start : entry.final_start + entry.final_rows].copy()
        whole = self._small(name, "uint8" if name == LOSS_MASK else "int32", (self._tokens,))
        return whole[entry.start : entry.start + entry.tokens].copy()

    def encoded(self, group: Group, index: int, layers: Sequence[int], out: Sequence[Tensor] | None = None) -> Encoded:
        rows, columns = group.rows_of(self._record.samples[index]), group.codec.code_columns(self._width)
        dtype = getattr(torch, group.codec.code_dtype)
        codes = [fresh((len(rows), columns), dtype) for _ in layers] if out is None else list(out)
        for target, layer in zip(codes, layers, strict=True):
            self._codes(group, layer).read_rows(rows.start, rows.stop, target.numpy())
        return Encoded(codes, self._part(group, layers, rows) if group.codec.small and layers else {})

    def decode(self, group: Group, index: int, layers: Sequence[int], out: Tensor) -> None:
        rows = group.rows_of(self._record.samples[index])
        if not rows or not layers:
            return
        if not group.codec.small:
            for target, layer in zip(out.view(torch.uint16).numpy(), layers, strict=True):
                self._codes(group, layer).read_rows(rows.start, rows.stop, target)
            return
        small = self._part(group, layers, rows)
        for place, layer in enumerate(layers):
            for start, block in self._codes(group, layer).blocks(rows.start, rows.stop):
                target = out[place, start : start + len(block)]
                group.states.decode_rows(torch.from_numpy(block), small, place, start, target)
        if len(small[RAW_INDEX]):
            where = torch.from_numpy(small[RAW_INDEX].astype(np.int64))
            out[where[:, 0], where[:, 1]] = torch.from_numpy(small[RAW_ROWS]).view(torch.bfloat16)

    def _part(self, group: Group, layers: Sequence[int], rows: range) -> dict[str, np.ndarray]:
        """The small arrays of some layers and rows, raw rows renumbered to count inside the part."""
        shared = self._shared_arrays(group)
        part = select_small(group.codec.small, shared.arrays, layers, rows)
        held = self._rows_in(group)
        borders = [layer * held + row for layer in layers for row in (rows.start, rows.stop)]
        places = np.searchsorted(shared.raw_places, borders).reshape(-1, 2).tolist()
        count = sum(stop - start for start, stop in places)
        index = np.empty((count, 2), dtype=np.int32)
        raw = np.empty((count, self._width), dtype=np.uint16)
        first = 0
        for position, (layer, (start, stop)) in enumerate(zip(layers, places, strict=True)):
            if start == stop:
                continue
            last = first + stop - start
            shared.raw_rows.read_rows(start, stop, raw[first:last])
            index[first:last, 0] = position
            index[first:last, 1] = shared.raw_places[start:stop] - (layer * held + rows.start)
            first = last
        return {**part, RAW_INDEX: index, RAW_ROWS: raw}

    def _shared_arrays(self, group: Group) -> "_Shared":
        """What all samples of the unit share of a group's small arrays; read once."""
        if group.name not in self._shared:
            fields, held = group.codec.small, self._rows_in(group)
            sizes = {"L": len(group.fields), "T": held, "D": self._width}
            arrays = {
                name: self._small(f"{group.name}_{name}", spec.dtype, spec.shape(sizes))
                for name, spec in fields.items()
                if "N" not in spec.axes
            }
            index = self._small(f"{group.name}_{RAW_INDEX}", "int32", (None, 2)).astype(np.int64)
            places = index[:, 0] * held + index[:, 1]
            inside = ((index >= 0) & (index < [len(group.fields), held])).all()
            if not inside or (np.diff(places) <= 0).any():
                raise self._files.misfit(f"{group.name}_{RAW_INDEX}", "its rows are not ascending")
            raw_rows = self._shard(f"{group.name}_{RAW_ROWS}", "uint16", (len(index), self._width), False)
            self._shared[group.name] = _Shared(arrays, places, raw_rows)
        return self._shared[group.name]

    def _rows_in(self, group: Group) -> int:
        return self._tokens if group.name == AUX else self._final_rows

    def _codes(self, group: Group, layer: int) -> ShardReader:
        shape = (self._rows_in(group), group.codec.code_columns(self._width))
        return self._shard(group.fields[layer], group.codec.code_dtype, shape, group.codec.compressed)

    def _shard(self, name: str, dtype: str, shape: tuple[int, ...], compressed: bool) -> ShardReader:
        if name not in self._shards:
            with self._opening:
                if name not in self._shards:
                    self._shards[name] = self._open_shard(name, dtype, shape, compressed)
        return self._shards[name]

    def _open_shard(self, name: str, dtype: str, shape: tuple[int, ...], compressed: bool) -> ShardReader:
        spec = self._spec(name, dtype, shape)
        if spec.chunk_rows is None or spec.compressed != compressed:
            raise self._files.misfit(name, "it is not chunked and compressed as its codec says")
        size = self._files.entry(f"{name}/{spec.file_path}").size if spec.size else None
        return ShardReader(self._fs, f"{self._path}/{name}", spec, size)

    def _small(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        if name not in self._arrays:
            with self._opening:
                if name not in self._arrays:
                    self._arrays[name] = self._read_small(name, dtype, shape)
        return self._arrays[name]

    def _read_small(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        spec = self._spec(name, dtype, shape)
        if spec.chunk_rows is not None or spec.compressed:
            raise self._files.misfit(name, "it is not a single plain chunk")
        sha256 = self._files.entry(f"{name}/{spec.file_path}").sha256 if spec.size else None
        return read_small(self._fs, f"{self._path}/{name}", spec, sha256)

    def _spec(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> ArraySpec:
        path = f"{name}/{METADATA}"
        entry = self._files.entry(path)
        data = self._fs.read(f"{self._path}/{path}")
        if sha256_hex(data) != entry.sha256:
            raise self._files.damaged(path, "file-corrupt", "its sha256 is not the one the commit record names")
        spec = parse_metadata(data, f"{self._fs.root}/{self._path}/{path}")
        fits = len(shape) == len(spec.shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, spec.shape, strict=True)
        )
        if spec.dtype != dtype or not fits:
            raise self._files.misfit(name, f"expected {dtype} {list(shape)}, found {spec.dtype} {list(spec.shape)}")
        return spec


@dataclass(frozen=True)
class _Shared:
    """Whole small arrays of a group by name; raw row i is row ``raw_places[i]`` % rows of layer // rows, ascending."""

    arrays: dict[str, np.ndarray]
    raw_places: np.ndarray
    raw_rows: ShardReader


def _code_spec(codec: CodeLayout, shape: tuple[int, ...], name: str, width: int) -> ArraySpec:
    attributes: dict[str, object] = {"codec": codec.name, "formula": codec.formula}
    parts = codec.row_parts(width)
    if codec.exact:
        attributes["hs_dtype"] = "bfloat16"
    if parts:
        # What numpy.dtype takes, once the inner lists are tuples.
        attributes["row"] = [[part.name, part.dtype, [part.count]] for part in parts]
    chunk_rows = min(codec.chunk_tokens(width), max(1, shape[0]))
    dimensions = ("final_row" if name == FINAL else "token", "byte" if parts else "channel")
    return ArraySpec(shape, codec.code_dtype, dimensions, chunk_rows, codec.compressed, attributes)


def _small_spec(codec: CodeLayout, name: str, shape: tuple[int, ...]) -> ArraySpec:
    field = codec.small[name]
    chunk_rows = None
    if name == RAW_ROWS:
        chunk_rows = max(1, min(_RAW_CHUNK_BYTES // (2 * shape[1]), shape[0]))
    dimensions = tuple(_AXES[axis] for axis in field.axes)
    attributes = {"hs_dtype": "bfloat16"} if field.bf16 else {}
    return ArraySpec(shape, field.dtype, dimensions, chunk_rows, False, attributes)
