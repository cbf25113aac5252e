"""What a container is: the files of one encoded unit, and random access to its samples. It names no codec.

A codec's arrays are told apart by their axes alone: the codes and whatever has a T axis belong to samples, N counts raw
rows, the rest belongs to the unit.

Shapes: L aux layers, T tokens of the unit, t tokens of one sample, R final rows of the unit, r of one sample, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from hiddenstore.codecs import Codec, CodeLayout, Encoded, get_codec, get_layout
from hiddenstore.codecs.base import EncodedLayers
from hiddenstore.errors import CorruptionError, FormatError
from hiddenstore.fs import Filesystem
from schemas import FINAL, FORMAT_VERSION, CaptureSpec, CommitRecord, FileEntry, LayerStats, SampleEntry

AUX = "aux"
INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
SPANS = "spans"
FINAL_ROWS = "final_rows"
CHUNK_CORRUPT = "chunk-corrupt"
"""Kind of the errors that cost one sample; every other damage of a segment costs its whole unit."""


@dataclass(frozen=True, eq=False)
class EncodedUnit:
    """A unit ready to be written.

    input_ids int32 [T]; loss_mask uint8 [T]; spans int32 [n, 4] of (sample, role, start, end), start and end counted in
    the sample; final_rows int32 [R], token positions counted in the sample.
    """

    unit: str
    samples: tuple[SampleEntry, ...]
    input_ids: np.ndarray
    loss_mask: np.ndarray
    spans: np.ndarray
    final_rows: np.ndarray
    aux: EncodedLayers
    final: EncodedLayers
    stats: dict[str, LayerStats]

    def encoded(self, group: "Group") -> EncodedLayers:
        """The states of a group."""
        return self.aux if group.name == AUX else self.final


@dataclass(frozen=True)
class Group:
    """Fields that share a codec and its small arrays: the aux layers, or what stands at the final rows."""

    name: str
    fields: tuple[str, ...]
    codec: CodeLayout

    @property
    def states(self) -> Codec:
        """The codec of a group that holds states; ConfigError for ``topk``, which gives none back."""
        return get_codec(self.codec.name)

    def rows_of(self, entry: SampleEntry) -> range:
        """Rows of a sample in the code arrays of its unit."""
        if self.name == AUX:
            return range(entry.start, entry.start + entry.tokens)
        return range(entry.final_start, entry.final_start + entry.final_rows)

    def rows_in(self, record: CommitRecord) -> int:
        """Rows of the whole unit."""
        return record.tokens if self.name == AUX else record.final_rows


def aux_group(capture: CaptureSpec) -> Group:
    """The aux layers, ascending."""
    return Group(AUX, tuple(capture.aux_fields), get_layout(capture.codecs.aux))


def final_group(capture: CaptureSpec) -> Group:
    """The final hidden or the top tokens in its place; without fields where the store holds neither."""
    return Group(FINAL, (FINAL,) if capture.final != "none" else (), get_layout(capture.codecs.final))


class UnitReader(Protocol):
    """One committed unit in its container. Opening reads nothing; safe to use from many threads.

    Raises from every read CorruptionError (of kind ``CHUNK_CORRUPT`` when only the sample asked for is lost) or
    FormatError ``array-invalid``; both name the file.
    """

    def plain(self, name: str, index: int) -> np.ndarray:
        """What the ``index``-th sample has in ``input_ids``, ``loss_mask``, ``spans`` or ``final_rows``.

        int32 [t], uint8 [t], int32 [n, 3] of (role, start, end) and int32 [r]; the caller's own.
        """

    def encoded(self, group: Group, index: int, layers: Sequence[int], out: Sequence[Tensor] | None = None) -> Encoded:
        """The sample's states in some layers of the group, still encoded; raw rows are counted in the sample.

        ``out``: contiguous tensors [rows of the sample, C], one a layer, that the codes are read into.
        """

    def decode(self, group: Group, index: int, layers: Sequence[int], out: Tensor) -> None:
        """The same decoded into ``out`` bfloat16 [layers, rows of the sample, D] on the CPU."""


@dataclass(frozen=True)
class Overhead:
    """What a container adds to the values: bytes beside them, and files in all."""

    size_bytes: int
    files: int


class Container(Protocol):
    """How segments lie on disk."""

    @property
    def name(self) -> str:
        """What ``store.json`` and ``--container`` call it."""

    @property
    def samples_apart(self) -> bool:
        """Whether every sample has its own bytes, so that no compressed chunk spans two."""

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        """Write a unit as new files under the folder ``path``; each is durable, their names not yet."""

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> UnitReader:
        """Access to the unit that ``record`` describes; reads nothing."""

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """An estimate for so many samples in so many segments."""


def unit_attributes(unit: str, capture: CaptureSpec) -> dict[str, object]:
    """What a segment says about itself to people and stock tools; our reader believes store and commit record."""
    return {
        "format": FORMAT_VERSION,
        "unit": unit,
        "layers": list(capture.aux_layers),
        "final": capture.final,
        "final_norm": capture.final_norm,
        "hs_dtype": capture.state_dtype,
        "codecs": {"aux": capture.codecs.aux, "final": capture.codecs.final},
        "formulas": {
            "aux": get_layout(capture.codecs.aux).formula,
            "final": get_layout(capture.codecs.final).formula,
        },
    }


class SegmentFiles:
    """The files of one segment as its commit record names them."""

    def __init__(self, fs: Filesystem, path: str, record: CommitRecord) -> None:
        self.fs, self.path, self.unit = fs, path, record.unit
        self._entries = {file.path: file for file in record.files}

    def entry(self, path: str) -> FileEntry:
        """A file's entry, after a check that the record names it and that it is there in that size."""
        entry = self._entries.get(path)
        if entry is None:
            raise self.damaged(path, "file-unnamed", f"the commit record of unit {self.unit} does not name it")
        found = self.fs.size(f"{self.path}/{path}")
        if found is None:
            raise self.damaged(path, "file-missing", "it does not exist")
        if found != entry.size:
            raise self.damaged(path, "file-size", f"expected {entry.size} bytes, found {found}")
        return entry

    def damaged(self, path: str, kind: str, reason: str) -> CorruptionError:
        """A file that is not what the record names."""
        full = f"{self.path}/{path}"
        return CorruptionError(f"{self.fs.root}/{full} is damaged: {reason}", kind=kind, path=full)

    def misfit(self, name: str, reason: str) -> FormatError:
        """An array that is whole but not what the capture says."""
        where = f"{self.fs.root}/{self.path}/{name}"
        return FormatError(f"{where} is not the array this store holds: {reason}", kind="array-invalid")
