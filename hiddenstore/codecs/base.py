"""What a codec is: bf16 states of one unit to plain arrays and back. Codecs know nothing of files.

Shapes: L layers, T tokens of the unit, n tokens of a part of it, D target width, C columns of a code array, N rows kept
raw.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.memory import fresh

FIXED_CHUNK_TOKENS = 64
RAW_INDEX = "raw_index"
RAW_ROWS = "raw_rows"


@dataclass(frozen=True)
class SmallField:
    """One small array beside the codes: numpy dtype, axis letters (L, T, D, N or a number), bf16 bits or not.

    ``values``: what the format allows; a ``positive`` one with a T axis may be 0 in rows kept raw.
    """

    dtype: str
    axes: tuple[str, ...]
    bf16: bool = False
    values: Literal["any", "finite", "positive"] = "any"

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Lengths of the axes, given those of the letters."""
        return tuple(sizes[axis] if axis in sizes else int(axis) for axis in self.axes)


@dataclass(frozen=True, eq=False)
class Encoded:
    """States of some layers and rows in encoded form.

    codes: per layer a tensor [T, C] of the codec's ``code_dtype``, on the device it was made on; small: numpy arrays
    stacked over layers, named and shaped by the codec's ``small``.
    """

    codes: list[Tensor]
    small: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class EncodedLayers:
    """Layers of a whole unit in encoded form, on their way to a container.

    codes: per layer tensors [t, C] whose rows lie end to end; small: as in ``Encoded``.
    """

    codes: list[list[Tensor]]
    small: dict[str, np.ndarray] = field(default_factory=dict)

    def joined(self) -> Encoded:
        """The same with each layer in one tensor."""
        return Encoded([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self.codes], self.small)


@dataclass(frozen=True)
class RowPart:
    """A run of values inside each row of a code array whose rows are bytes: name, little-endian numpy dtype, count."""

    name: str
    dtype: str
    count: int

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return np.dtype(self.dtype).itemsize * self.count


class CodeLayout(Protocol):
    """What the arrays of a codec look like."""

    @property
    def name(self) -> str:
        """What recipes and ``store.json`` call it."""

    @property
    def exact(self) -> bool:
        """Whether decoding gives back every bit."""

    @property
    def code_dtype(self) -> str:
        """numpy name of the type of the code arrays."""

    @property
    def compressed(self) -> bool:
        """Whether the container compresses the code arrays."""

    @property
    def small(self) -> Mapping[str, SmallField]:
        """The small arrays beside the codes; empty when the codes are the values."""

    @property
    def formula(self) -> str:
        """How to decode, for whoever opens the arrays without us."""

    def chunk_tokens(self, width: int) -> int:
        """Tokens per chunk of the code arrays at target width ``width``."""

    def code_columns(self, width: int) -> int:
        """C: columns of the code arrays at target width ``width``."""

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        """What lies in a row of a code array, left to right; empty where a row is C values of ``code_dtype``."""

    def row_bits(self, width: int) -> float:
        """Bits one row takes, about, its place in the arrays along T included."""

    @property
    def nominal_bits(self) -> float:
        """Bits of a value that units are cut by: it never changes, or equal inputs would be cut into other units."""


class Codec(CodeLayout, Protocol):
    """A way to write bf16 states. ``encode`` sees one unit whole; ``decode`` any rows of it."""

    @property
    def reach(self) -> float | None:
        """Largest |h - channel_offset| / channel_scale / token_scale that a code can hold; None where nothing is ever
        clipped. Small arrays that the codec does not have count as 0, 1 and 1."""

    @property
    def same_layer(self) -> float:
        """Largest distance of decoded rows to the profile of their own layer (``hiddenstore.verify.profile``) that
        rounding alone explains: 3e-4 for what is nearly exact, 4e-3 for four bits."""

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        """bfloat16 [L, T, D] of one unit, or its layers [T, D] one after the other, on any device."""

    def encode_layers(
        self, layers: Iterable[Sequence[Tensor]], shared: Mapping[str, np.ndarray] | None = None
    ) -> EncodedLayers:
        """Layers one after the other, each as bfloat16 parts [t, D] end to end: the same codes, which may be views.

        ``shared``: small arrays of the unit that these rows join, to be encoded by in place of statistics of their own;
        it is given to codecs that have small arrays without a T or N axis.
        """

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        """bfloat16 [L, n, D] on the device of the codes, written into ``out`` when given."""

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        """Codes [m, C], which are rows start … start+m of a part, into ``out`` bf16 [m, D]; raw rows are left alone.

        ``small`` is the part's, ``layer`` counts its layers.
        """


class FittedCodec(CodeLayout, Protocol):
    """What codecs of one kind share, each fitted to the states of a store: what their arrays look like."""

    def fit(self, layers: Iterable[Tensor]) -> bytes:
        """What a codec knows, from rows bfloat16 [n, D] of each stored layer, ascending. ConfigError ``codec-unfit``:
        nothing fits them."""

    def of(self, name: str, read: Callable[[], bytes]) -> Codec:
        """The codec that knows what ``read`` gives, when it is first needed."""

    def fit_tokens(self, width: int) -> int:
        """Rows of states of a width that it wants to be fitted to."""

    def fit_bytes(self, width: int) -> int:
        """What the file of a codec takes for each layer of states of a width, about."""

    def layers_of(self, codec: Codec) -> int:
        """How many layers a codec of this kind was fitted to: it encodes as many and no other number."""


class MaskedCodec(ABC):
    """A codec of aux rows of two classes: fine where the loss mask or the start of a sample wants it, else coarse.

    Codes of both are [n, C] in memory; containers store them as pieces of as many bytes, more of a fine row than of a
    coarse one, row after row: uint8 [P, piece bytes]. Classes are bool [n], True for fine.
    """

    everywhere: str
    """The codec that stores all rows as this one stores fine ones."""
    follows_mask: bool
    """Whether coarse rows are those that the loss mask leaves out, so that no loss may be taken there."""
    chunk_pieces: int
    """Pieces of a chunk of a code array."""

    @abstractmethod
    def fine_rows(self, mask: np.ndarray, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """The classes of samples of these lengths that lie end to end, from their loss mask uint8 [n]."""

    @abstractmethod
    def pieces(self, fine: np.ndarray) -> np.ndarray:
        """Pieces of each row, int64 [n]."""

    @abstractmethod
    def piece_bytes(self, width: int) -> int:
        """Bytes of a piece at target width ``width``."""

    @abstractmethod
    def to_pieces(self, codes: np.ndarray, fine: np.ndarray) -> np.ndarray:
        """Codes [n, C] as they are stored; ValueError where a coarse row is coded as a fine one."""

    @abstractmethod
    def from_pieces(self, pieces: np.ndarray, fine: np.ndarray, out: np.ndarray) -> None:
        """The inverse, into ``out`` [n, C]."""

    @abstractmethod
    def encode_layers(
        self,
        layers: Iterable[Sequence[Tensor]],
        shared: Mapping[str, np.ndarray] | None = None,
        fine: np.ndarray | None = None,
    ) -> EncodedLayers:
        """As ``Codec`` has it, of rows of these classes; None: all fine."""

    @abstractmethod
    def mean_row_bits(self, width: int, tokens: int, supervised: int, samples: int) -> float:
        """``row_bits``, about, over the rows of samples of one answer each."""


def mean_row_bits(layout: CodeLayout, width: int, tokens: int, supervised: int, samples: int) -> float:
    """Bits a row of aux states takes, about, in samples of so many tokens, supervised tokens and answers together."""
    if isinstance(layout, MaskedCodec):
        return layout.mean_row_bits(width, tokens, supervised, samples)
    return layout.row_bits(width)


def select_small(
    fields: Mapping[str, SmallField], small: Mapping[str, np.ndarray], layers: Sequence[int], rows: range
) -> dict[str, np.ndarray]:
    """The small arrays of some layers and rows, not to be written to: what is asked for whole is not copied.

    N axes are left out, they are picked by ``raw_places``.
    """
    part = {}
    for name, spec in fields.items():
        if "N" in spec.axes:
            continue
        array = small[name]
        if "T" in spec.axes:
            axis = spec.axes.index("T")
            array = array[(slice(None),) * axis + (slice(rows.start, rows.stop),)]
        if "L" in spec.axes:
            axis = spec.axes.index("L")
            if list(layers) != list(range(array.shape[axis])):
                array = np.take(array, list(layers), axis=axis)
        part[name] = array
    return part


def small_of_rows(
    fields: Mapping[str, SmallField], small: Mapping[str, np.ndarray], layers: int, rows: range
) -> dict[str, np.ndarray]:
    """What some rows have of the small arrays of a part; raw rows are counted inside ``rows``."""
    part = select_small(fields, small, range(layers), rows)
    if RAW_INDEX in small:
        spans = [raw_places(small[RAW_INDEX], layer, rows) for layer in range(layers)]
        index = np.concatenate([small[RAW_INDEX][span.start : span.stop] for span in spans])
        part[RAW_INDEX] = index - np.array([0, rows.start], dtype=index.dtype)
        part[RAW_ROWS] = np.concatenate([small[RAW_ROWS][span.start : span.stop] for span in spans])
    return part


def rows_at(fields: Mapping[str, SmallField], part: Encoded, rows: np.ndarray) -> Encoded:
    """Rows int64 [n] of a part on the CPU, in any order."""
    small = {
        name: np.take(values, rows, fields[name].axes.index("T")) if "T" in fields[name].axes else values
        for name, values in part.small.items()
    }
    if RAW_INDEX in small:
        layer, row = small[RAW_INDEX].T
        order = np.argsort(rows, kind="stable")
        first, last = (np.searchsorted(rows, row, side, sorter=order) for side in ("left", "right"))
        # A row that is picked more than once is as often raw.
        raw = np.repeat(np.arange(len(row)), last - first)
        position = order[np.arange(len(raw)) - np.repeat(np.cumsum(last - first) - last, last - first)]
        by_layer = np.lexsort((position, layer[raw]))
        small[RAW_INDEX] = np.stack([layer[raw], position], axis=1)[by_layer].astype(np.int32)
        small[RAW_ROWS] = small[RAW_ROWS][raw[by_layer]]
    return Encoded([torch.from_numpy(codes.numpy()[rows]) for codes in part.codes], small)


def joined_small(
    fields: Mapping[str, SmallField], parts: Sequence[Mapping[str, np.ndarray]], ends: Sequence[int]
) -> dict[str, np.ndarray]:
    """The small arrays of parts of one unit that lie end to end, at rows ``ends`` [n + 1] of all; raw rows of a
    part are counted in it, and in the result in all, sorted by (layer, row)."""
    small = dict(parts[0])
    if len(parts) == 1:
        return small
    for name, spec in fields.items():
        if name in small and "T" in spec.axes:
            small[name] = np.concatenate([arrays[name] for arrays in parts], axis=spec.axes.index("T"))
    if RAW_INDEX in small:
        moved = [arrays[RAW_INDEX] + np.array([0, start]) for arrays, start in zip(parts, ends, strict=False)]
        index = np.concatenate(moved).astype(np.int32)
        order = np.lexsort((index[:, 1], index[:, 0]))
        small[RAW_INDEX] = index[order]
        small[RAW_ROWS] = np.concatenate([arrays[RAW_ROWS] for arrays in parts])[order]
    return small


def raw_places(raw_index: np.ndarray, layer: int, rows: range) -> range:
    """Where in ``raw_rows`` lie the raw rows of a layer within ``rows``; the index int32 [N, 2] is sorted."""
    first, last = np.searchsorted(raw_index[:, 0], [layer, layer + 1])
    low, high = np.searchsorted(raw_index[first:last, 1], [rows.start, rows.stop])
    return range(int(first + low), int(first + high))


def bits_to_numpy(states: Tensor) -> np.ndarray:
    """bfloat16 of any shape as uint16 bits on the CPU."""
    return states.detach().contiguous().view(torch.uint16).cpu().numpy()


def bits_to_tensor(bits: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """uint16 bits, or a tensor of them, as bfloat16 on a device."""
    if isinstance(bits, Tensor):
        return bits.view(torch.bfloat16).to(device)
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.bfloat16).to(device)


def output(part: Encoded, out: Tensor | None, width: int) -> Tensor:
    """``out`` after a check of its shape and type, or a new bfloat16 [L, n, D]; ``width`` is D."""
    shape = (len(part.codes), part.codes[0].shape[0], width) if part.codes else (0, 0, 0)
    if out is None:
        device = part.codes[0].device if part.codes else torch.device("cpu")
        return fresh(shape, torch.bfloat16, device)
    if tuple(out.shape) != shape or out.dtype != torch.bfloat16:
        raise ValueError(f"out must be bfloat16 {list(shape)}, found {out.dtype} {list(out.shape)}")
    return out
