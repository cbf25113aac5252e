"""What a container is: the files of one encoded unit, and random access to its samples; and what its numbers may be:
whatever its bytes, a reader gives out nothing that the format forbids. It names no codec.

A codec's arrays are told apart by their axes alone: the codes and whatever has a T axis belong to samples, N counts raw
rows, the rest belongs to the unit.

Shapes: L aux layers, T tokens of the unit, t tokens of one sample, R final rows of the unit, r of one sample, D width.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from hiddenstore import inputs
from hiddenstore.codecs import get_codec, get_layout
from hiddenstore.codecs.base import RAW_INDEX, Codec, CodeLayout, Encoded, EncodedLayers, MaskedCodec, SmallField
from hiddenstore.fs.seam import Filesystem
from hiddenstore.records import TopK
from schemas import FINAL, FORMAT_VERSION, CaptureSpec, CommitRecord, FileEntry, LayerStats, SampleEntry, field_name

AUX = "aux"
INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
SPANS = "spans"
FINAL_ROWS = "final_rows"


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

    def encoded(self, group: "FieldGroup") -> EncodedLayers:
        """The states of a group."""
        return self.aux if group.name == AUX else self.final


@dataclass(frozen=True)
class FieldGroup:
    """Fields that share a codec and its small arrays: the aux layers, or what stands at the final rows."""

    name: str
    fields: tuple[str, ...]
    codec: CodeLayout

    @property
    def states(self) -> Codec:
        """The codec of a group that holds states; ConfigError for ``topk``, which gives none back."""
        return get_codec(self.codec.name)

    @property
    def masked(self) -> MaskedCodec | None:
        """The codec of aux layers whose rows are stored by the loss mask; None: all rows alike."""
        return self.codec if self.name == AUX and isinstance(self.codec, MaskedCodec) else None

    def fine_rows(self, mask: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray | None:
        """The classes of samples end to end by their loss mask uint8 [n]: bool [n], where rows are ``masked``."""
        return None if self.masked is None else self.masked.fine_rows(mask, lengths)

    def stored_shape(self, rows: int, fine: np.ndarray | None, width: int) -> tuple[int, int]:
        """Of the stored array of so many rows of these classes."""
        if self.masked is None or fine is None:
            return rows, self.codec.code_columns(width)
        return int(self.masked.pieces(fine).sum()), self.masked.piece_bytes(width)

    def stored(self, blocks: Iterable[np.ndarray], fine: np.ndarray | None) -> Iterator[np.ndarray]:
        """Codes [n, C] end to end as they are stored; ``fine``: the classes of all of them."""
        start = 0
        for block in blocks:
            if self.masked is None or fine is None:
                yield block
            else:
                yield self.masked.to_pieces(block, fine[start : start + len(block)])
            start += len(block)

    def rows_of(self, entry: SampleEntry) -> range:
        """Rows of a sample in the code arrays of its unit."""
        if self.name == AUX:
            return range(entry.start, entry.start + entry.tokens)
        return range(entry.final_start, entry.final_start + entry.final_rows)


def groups_of(capture: CaptureSpec) -> tuple[FieldGroup, FieldGroup]:
    """The stored aux layers, ascending; then the final hidden or the top tokens in its place, or no field."""
    finals = (FINAL,) if capture.stores_final or capture.holds_topk else ()
    return (
        FieldGroup(AUX, tuple(map(field_name, capture.stored_layers)), get_layout(capture.codecs.aux)),
        FieldGroup(FINAL, finals, get_layout(capture.codecs.final)),
    )


def unit_tokens(capture: CaptureSpec) -> int:
    """Token budget of a unit: 32,768, less where their encoded states would exceed 512 MB."""
    width = capture.target.hidden_size
    bits = len(capture.stored_layers) * get_layout(capture.codecs.aux).nominal_bits
    if capture.final != "none":
        bits += get_layout(capture.codecs.final).nominal_bits
    return max(1, min(inputs.UNIT_TOKENS, int(inputs.UNIT_BYTES * 8 / (bits * width))))


class ContainerReader(Protocol):
    """One committed unit in its container. Opening reads nothing; safe to use from many threads.

    Raises from every read CorruptionError (of kind ``files.CHUNK_CORRUPT`` when only the sample is lost) or
    FormatError ``array-invalid``; both name the file.
    """

    def plain(self, names: Sequence[str], index: int) -> list[np.ndarray]:
        """What the ``index``-th sample has in some of ``input_ids``, ``loss_mask``, ``spans`` and ``final_rows``.

        int32 [t], uint8 [t], int32 [n, 3] of (role, start, end) and int32 [r]; the caller's own.
        """

    def encoded(
        self, group: FieldGroup, index: int, layers: Sequence[int], out: Collection[np.ndarray] | None = None
    ) -> Encoded:
        """The sample's states in some layers of the group, still encoded; raw rows are counted in the sample.

        ``out``: contiguous arrays [rows of the sample, C], one a layer, that the codes are read into.
        """

    def decode(self, group: FieldGroup, index: int, layers: Sequence[int], out: Tensor) -> None:
        """The same decoded into ``out`` bfloat16 [layers, rows of the sample, D] on the CPU."""


@dataclass(frozen=True)
class Overhead:
    """What a container adds to the values: bytes beside them, and files in all."""

    size_bytes: int
    files: int


class Container(Protocol):
    """How segments lie on disk."""

    name: str
    """What ``store.json`` and ``--container`` call it."""
    samples_apart: bool
    """Whether every sample has its own bytes, so that no compressed chunk spans two."""
    shares_rows: bool
    """Whether rows of the aux layers stand once that samples of a unit begin alike with."""

    def write(self, fs: Filesystem, path: str, unit: EncodedUnit, capture: CaptureSpec) -> list[FileEntry]:
        """Write a unit as new files under the folder ``path``; each is durable, their names not yet."""

    def open(self, fs: Filesystem, path: str, record: CommitRecord, capture: CaptureSpec) -> ContainerReader:
        """Access to the unit that ``record`` describes; reads nothing."""

    def token_runs(self, fs: Filesystem, path: str) -> list[int]:
        """Tokens of each run that can be read without knowing the samples: of a whole unit, or of each sample.

        CorruptionError, FormatError or NotFoundError where the segment does not say.
        """

    def overhead(self, capture: CaptureSpec, samples: int, segments: int) -> Overhead:
        """An estimate for so many samples in so many segments."""


def unit_attributes(unit: str, capture: CaptureSpec) -> dict[str, object]:
    """What a segment says about itself to people and stock tools; our reader believes store and commit record."""
    return {
        "format": FORMAT_VERSION,
        "unit": unit,
        "layers": list(capture.stored_layers),
        "final": capture.final,
        "final_norm": capture.final_norm,
        "hs_dtype": capture.state_dtype,
        "codecs": capture.codecs.model_dump(),
        "formulas": {name: get_layout(codec).formula for name, codec in capture.codecs.model_dump().items()},
    }


_GROUP_SCALE = "group_scale"
_E4M3_NAN = 0x7F


def rows_fault(final_rows: np.ndarray, tokens: int) -> str | None:
    """Positions int32 [r] ascend inside their sample."""
    if not len(final_rows):
        return None
    ascending = final_rows[0] >= 0 and final_rows[-1] < tokens and (final_rows[1:] > final_rows[:-1]).all()
    return None if ascending else f"they are not ascending positions of {tokens:,} tokens"


def top_tokens_fault(topk: TopK) -> str | None:
    """Log-probs and their normaliser are finite."""
    is_finite = bool(topk.log_probs.isfinite().all() and topk.lse.isfinite().all())
    return None if is_finite else "log-probabilities are not finite"


def small_fault(fields: Mapping[str, SmallField], small: Mapping[str, np.ndarray]) -> str | None:
    """Scales are finite and above 0, a token's 0 in rows that are kept raw alone; offsets are finite.

    ``small`` are arrays of a group; raw_index int [N, 2] holds (layer, row) as the arrays [L, T] count them.
    """
    for name, spec in fields.items():
        if spec.values == "any" or name not in small:
            continue
        values = small[name]
        if spec.bf16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        bad = ~np.isfinite(values)
        if spec.values == "positive":
            bad |= values <= 0
            if "T" in spec.axes and RAW_INDEX in small and len(small[RAW_INDEX]):
                layers, rows = small[RAW_INDEX].T
                bad[layers, rows] &= values[layers, rows] != 0
        if bad.any():
            return f"{name} holds {values[bad][0]}, expected {_EXPECTED[spec.values]}"
    return None


def codes_fault(parts: Mapping[str, slice], codes: np.ndarray, raw: np.ndarray) -> str | None:
    """Group scales of rows uint8 [t, C] are numbers other than 0, but in the rows kept raw, int [N]."""
    if _GROUP_SCALE not in parts:
        return None
    bits = codes[:, parts[_GROUP_SCALE]] & _E4M3_NAN
    bad = (bits == _E4M3_NAN) | (bits == 0)
    bad[raw] = False
    return "a group scale is 0 or no number" if bad.any() else None


_EXPECTED = {"finite": "a finite number", "positive": "a finite number above 0"}
