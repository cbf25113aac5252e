"""One unit on disk: ``write_segment`` makes it, ``SegmentReader`` gives back any sample of it.

The reader believes the commit record and nothing else: every file must have the size the record names, metadata and
small arrays its sha256, chunks of large arrays the crc32c that their metadata names, so that even a file in another's
place is seen. Reads touch only the rows and layers asked for.

Shapes: L layers asked for, T tokens of the unit, t tokens of one sample, r final rows of one sample, D width.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs import Codec, Encoded, get_codec
from hiddenstore.codecs.base import RAW_INDEX, RAW_ROWS, raw_places, select_small
from hiddenstore.documents import sha256_hex
from hiddenstore.errors import ConfigError, CorruptionError, FormatError, NotFoundError
from hiddenstore.fs import Filesystem
from hiddenstore.records import Record, Sample
from hiddenstore.segment_write import (
    AUX,
    FINAL_ROWS,
    INPUT_IDS,
    LOSS_MASK,
    SPANS,
    EncodedUnit,
    SegmentWritten,
    encode_records,
    write_encoded,
    write_segment,
)
from hiddenstore.zarr_read import ShardReader, parse_metadata, read_small
from hiddenstore.zarr_write import METADATA, ArraySpec
from schemas import FINAL, CaptureSpec, CommitRecord, SampleEntry

_OF_ONE_SAMPLE = "chunk-corrupt"


@dataclass(frozen=True)
class _Group:
    """Fields that share small arrays: the aux layers, or the final hidden."""

    name: str
    fields: list[str]
    codec: Codec
    rows: int


class SegmentReader:
    """Random access to the samples of one committed unit. Opening reads nothing; safe to use from many threads.

    Keeps what it read of the small arrays and shard indexes: about (4 L + 11) bytes per token and (4 D) per layer.

    Raises from every read:
        CorruptionError: a file is missing, has another size or fails a checksum; it names the file and the samples.
        FormatError: an array is whole but not what the capture says.
    """

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> None:
        self.fs, self.path, self.record, self.capture = fs, path, record, capture
        self._entries = {file.path: file for file in record.files}
        self._aux = _Group(AUX, capture.aux_fields, get_codec(capture.codecs.aux), record.tokens)
        finals = [FINAL] if capture.final != "none" else []
        self._final = _Group(FINAL, finals, get_codec(capture.codecs.final), record.final_rows)
        self._tokens, self._held_rows = record.tokens, record.final_rows
        self._arrays: dict[str, np.ndarray] = {}
        self._shards: dict[str, ShardReader] = {}

    def __len__(self) -> int:
        return len(self.record.samples)

    def sample(self, index: int) -> Sample:
        """Tokens, mask and spans of the ``index``-th sample."""
        entry = self.record.samples[index]
        rows = slice(entry.start, entry.start + entry.tokens)
        with self._named(entry):
            spans = self._small(SPANS, "int32", (None, 4))
            return Sample(
                id=entry.id,
                input_ids=self._small(INPUT_IDS, "int32", (self._tokens,))[rows].copy(),
                loss_mask=self._small(LOSS_MASK, "uint8", (self._tokens,))[rows].copy(),
                spans=spans[spans[:, 0] == index, 1:].copy(),
                split=entry.split,
            )

    def read(self, index: int, layers: Sequence[int] | None = None, final: bool = True) -> Record:
        """One sample with its states decoded: aux bf16 [L, t, D] in the order of ``layers`` (default: all held).

        With ``final`` False, or in a store without it, final is [0, D] and final_rows [0].
        """
        entry = self.record.samples[index]
        sample = self.sample(index)
        with self._named(entry):
            aux = self._decoded(self._aux, self._positions(layers), range(entry.start, entry.start + entry.tokens))
            rows = self._final_range(entry, final)
            last = self._decoded(self._final, list(range(len(self._final.fields))), rows)
            width = self.capture.target.hidden_size
            return Record(
                sample=sample,
                aux=aux,
                final=last[0] if len(last) else torch.empty((0, width), dtype=torch.bfloat16),
                final_rows=self._final_rows(rows),
            )

    def read_encoded(
        self, index: int, layers: Sequence[int] | None = None, final: bool = True
    ) -> tuple[Encoded, Encoded, np.ndarray]:
        """The same still encoded, to be moved and decoded on another device: aux, final and final_rows int32 [r].

        ``get_codec(capture.codecs.aux).decode(aux)`` gives bf16 [L, t, D], the final codec's [1, r, D].
        """
        entry = self.record.samples[index]
        with self._named(entry):
            rows = self._final_range(entry, final)
            held = list(range(len(self._final.fields)))
            return (
                self._encoded(self._aux, self._positions(layers), range(entry.start, entry.start + entry.tokens)),
                self._encoded(self._final, held, rows),
                self._final_rows(rows),
            )

    def _positions(self, layers: Sequence[int] | None) -> list[int]:
        held = self.capture.aux_layers
        missing = [layer for layer in layers or () if layer not in held]
        if missing:
            raise ConfigError(f"layers {missing} are not held, only {list(held)}", kind="layer-not-held")
        return list(range(len(held))) if layers is None else [held.index(layer) for layer in layers]

    def _final_range(self, entry: SampleEntry, wanted: bool) -> range:
        return range(entry.final_start, entry.final_start + (entry.final_rows if wanted else 0))

    def _final_rows(self, rows: range) -> np.ndarray:
        if not rows:
            return np.zeros(0, dtype=np.int32)
        return self._small(FINAL_ROWS, "int32", (self._held_rows,))[rows.start : rows.stop].copy()

    def _decoded(self, group: _Group, layers: list[int], rows: range) -> Tensor:
        out = torch.empty((len(layers), len(rows), self.capture.target.hidden_size), dtype=torch.bfloat16)
        if not rows or not layers:
            return out
        if not group.codec.small:
            for target, layer in zip(out, layers, strict=True):
                shard = self._codes(group, group.fields[layer])
                shard.read_rows(rows.start, rows.stop, target.view(torch.uint16).numpy())
            return out
        small = self._part(group, layers, rows)
        for index, layer in enumerate(layers):
            for start, block in self._codes(group, group.fields[layer]).blocks(rows.start, rows.stop):
                target = out[index, start : start + len(block)]
                group.codec.decode_rows(torch.from_numpy(block), small, index, start, target)
        where = torch.from_numpy(small[RAW_INDEX].astype(np.int64))
        out[where[:, 0], where[:, 1]] = torch.from_numpy(small[RAW_ROWS]).view(torch.bfloat16)
        return out

    def _encoded(self, group: _Group, layers: list[int], rows: range) -> Encoded:
        codes = []
        for layer in layers:
            target = np.empty((len(rows), self.capture.target.hidden_size), dtype=group.codec.code_dtype)
            self._codes(group, group.fields[layer]).read_rows(rows.start, rows.stop, target)
            codes.append(torch.from_numpy(target))
        return Encoded(codes, self._part(group, layers, rows) if group.codec.small and layers else {})

    def _part(self, group: _Group, layers: list[int], rows: range) -> dict[str, np.ndarray]:
        """The small arrays of some layers and rows, raw rows renumbered to count inside the part."""
        fields = group.codec.small
        width = self.capture.target.hidden_size
        sizes = {"L": len(group.fields), "T": group.rows, "D": width}
        whole = {
            name: self._small(f"{group.name}_{name}", spec.dtype, spec.shape(sizes))
            for name, spec in fields.items()
            if "N" not in spec.axes
        }
        part = select_small(fields, whole, layers, rows)
        raw_index = self._small(f"{group.name}_{RAW_INDEX}", "int32", (None, 2))
        shard = self._shard(f"{group.name}_{RAW_ROWS}", "uint16", (len(raw_index), width), False)
        places = [raw_places(raw_index, layer, rows) for layer in layers]
        index = np.empty((sum(map(len, places)), 2), dtype=np.int32)
        raw = np.empty((len(index), width), dtype=np.uint16)
        first = 0
        for position, place in enumerate(places):
            last = first + len(place)
            shard.read_rows(place.start, place.stop, raw[first:last])
            index[first:last, 0] = position
            index[first:last, 1] = raw_index[place.start : place.stop, 1] - rows.start
            first = last
        if len(index) and not (index[:, 1].min() >= 0 and index[:, 1].max() < len(rows)):
            raise self._misfit(f"{group.name}_{RAW_INDEX}", "its rows are not ascending")
        return {**part, RAW_INDEX: index, RAW_ROWS: raw}

    def _codes(self, group: _Group, name: str) -> ShardReader:
        shape = (group.rows, self.capture.target.hidden_size)
        return self._shard(name, group.codec.code_dtype, shape, group.codec.compressed)

    def _shard(self, name: str, dtype: str, shape: tuple[int, ...], compressed: bool) -> ShardReader:
        if name not in self._shards:
            spec = self._spec(name, dtype, shape)
            if spec.chunk_rows is None or spec.compressed != compressed:
                raise self._misfit(name, "it is not chunked and compressed as its codec says")
            size = self._entry(f"{name}/{spec.file_path}") if spec.size else None
            self._shards[name] = ShardReader(self.fs, f"{self.path}/{name}", spec, size)
        return self._shards[name]

    def _small(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> np.ndarray:
        if name not in self._arrays:
            spec = self._spec(name, dtype, shape)
            if spec.chunk_rows is not None or spec.compressed:
                raise self._misfit(name, "it is not a single plain chunk")
            path, sha256 = f"{name}/{spec.file_path}", None
            if spec.size:
                self._entry(path)
                sha256 = self._entries[path].sha256
            self._arrays[name] = read_small(self.fs, f"{self.path}/{name}", spec, sha256)
        return self._arrays[name]

    def _spec(self, name: str, dtype: str, shape: tuple[int | None, ...]) -> ArraySpec:
        path = f"{name}/{METADATA}"
        self._entry(path)
        data = self.fs.read(f"{self.path}/{path}")
        if sha256_hex(data) != self._entries[path].sha256:
            raise self._damaged(path, "file-corrupt", "its sha256 is not the one the commit record names")
        spec = parse_metadata(data, f"{self.fs.root}/{self.path}/{path}")
        fits = len(shape) == len(spec.shape) and all(
            wanted in (None, found) for wanted, found in zip(shape, spec.shape, strict=True)
        )
        if spec.dtype != dtype or not fits:
            raise self._misfit(name, f"expected {dtype} {list(shape)}, found {spec.dtype} {list(spec.shape)}")
        return spec

    def _entry(self, path: str) -> int:
        """Size of a file, after a check that the record names it and that it is there in that size."""
        entry = self._entries.get(path)
        if entry is None:
            raise self._damaged(path, "file-unnamed", f"the commit record of unit {self.record.unit} does not name it")
        found = self.fs.size(f"{self.path}/{path}")
        if found is None:
            raise self._damaged(path, "file-missing", "it does not exist")
        if found != entry.size:
            raise self._damaged(path, "file-size", f"expected {entry.size} bytes, found {found}")
        return entry.size

    def _damaged(self, path: str, kind: str, reason: str) -> CorruptionError:
        full = f"{self.path}/{path}"
        return CorruptionError(f"{self.fs.root}/{full} is damaged: {reason}", kind=kind, path=full)

    def _misfit(self, name: str, reason: str) -> FormatError:
        where = f"{self.fs.root}/{self.path}/{name}"
        return FormatError(f"{where} is not the array this store holds: {reason}", kind="array-invalid")

    @contextmanager
    def _named(self, entry: SampleEntry) -> Iterator[None]:
        """Errors leave with the samples that cannot be read: this one for a chunk, all of the unit for the rest."""
        try:
            yield
        except CorruptionError as error:
            raise self._with_samples(error, entry) from error
        except NotFoundError as error:
            missing = CorruptionError(f"{error.message}, but unit {self.record.unit} needs it", kind="file-missing")
            raise self._with_samples(missing, entry) from error

    def _with_samples(self, error: CorruptionError, entry: SampleEntry) -> CorruptionError:
        if error.samples:
            return error
        alone = error.kind == _OF_ONE_SAMPLE
        samples = (entry.id,) if alone else tuple(sample.id for sample in self.record.samples)
        what = f"sample {entry.id}" if alone else f"all {len(samples)} samples"
        return CorruptionError(
            f"{error.message} ({what} of unit {self.record.unit})",
            kind=error.kind,
            hint=shlex.join(["hiddenstore", "repair", self.fs.root]),
            path=error.path,
            samples=samples,
        )


__all__ = [
    "EncodedUnit",
    "SegmentReader",
    "SegmentWritten",
    "encode_records",
    "write_encoded",
    "write_segment",
]
