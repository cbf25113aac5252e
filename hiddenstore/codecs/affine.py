"""``q8`` and ``q4``: states brought to unit scale per channel and token, then to codes; odd rows are kept raw.

    y = (h - mu_d) / c_d            mu_d, c_d: robust centre and size of channel d over the unit's own tokens
    h = bf16( code_value * c_d + mu_d )          every operation rounded to float32, then to bf16

A codec turns y into codes with a scale per token and back; the rest is shared. A row is kept raw, bit-exact, when it
has non-finite values, when its largest |y| is far above the unit's median (attention sinks, or one element that would
take all the codes), or when its numbers could overflow. The limit is on max |y| and not on the norm: a row whose norm
is large but even loses nothing by its own scale. Measurements: docs/design/003.

Shapes: L layers, T tokens of the unit, m rows of a block, D width, C columns of a code array, S sampled tokens, N raw
rows, G groups of ``q4``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise, starmap
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hiddenstore.codecs.base import (
    FIXED_CHUNK_TOKENS,
    RAW_INDEX,
    RAW_ROWS,
    Encoded,
    EncodedLayers,
    RowPart,
    SmallField,
    bits_to_numpy,
    bits_to_tensor,
    output,
)
from hiddenstore.codecs.channels import channel_statistics, raw_rows, rows_of_parts
from hiddenstore.codecs.compiled import cpu_kernels, gpu_kernels, in_blocks
from hiddenstore.codecs.memory import fresh

# float32 blocks small enough for a CPU's cache and large enough for the cost of a call; on a GPU, enough to fill it.
_BLOCK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
# From as many rows of a unit on, a call a unit is cheaper than a scale and an offset a row.
_ROWS_OF_THEIR_OWN = 256

SMALL = {
    "token_scale": SmallField("uint16", ("L", "T"), bf16=True, values="positive"),
    "channel_scale": SmallField("uint16", ("L", "D"), bf16=True, values="positive"),
    "channel_offset": SmallField("uint16", ("L", "D"), bf16=True, values="finite"),
    RAW_INDEX: SmallField("int32", ("N", "2")),
    RAW_ROWS: SmallField("uint16", ("N", "D"), bf16=True),
}


class Seen(Protocol):
    """Who is shown the rows of a layer while they are encoded, block by block."""

    def add(self, values: Tensor) -> None:
        """Rows of bfloat16 as float32 [m, D], which is spent afterwards."""

    def add_norms(self, rows: Tensor, norms: np.ndarray, largest: int) -> None:
        """Rows bfloat16 [t, D], the norm float32 [t] of each, and the bits of the largest magnitude among them."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """What a layer's codes are made from: parts bf16 [t, D] end to end, scale and offset float32 [D] of its channels,
    the classes of its rows, bool [T], and who is shown them."""

    parts: Sequence[Tensor]
    scale: Tensor
    offset: Tensor
    fine: np.ndarray | None
    seen: Seen | None

    @property
    def suits_kernels(self) -> bool:
        """Whether kernels, which check nothing, can take it."""
        width, tokens = len(self.scale), sum(map(len, self.parts))
        alike = all(part.dtype == torch.bfloat16 and part.shape[1:] == (width,) for part in self.parts)
        return self.scale.device.type == "cpu" and alike and (self.fine is None or len(self.fine) == tokens)


@dataclass(frozen=True)
class AffineCodec(ABC):
    """Base of the codecs that store y in codes. A subclass gives the three methods at the end, and what they make."""

    name: str
    code_dtype: str
    formula: str
    nominal_bits: float
    reach: float | None
    same_layer: float
    exact: bool = False
    compressed: bool = False
    small: Mapping[str, SmallField] = field(default_factory=lambda: dict(SMALL))

    def chunk_tokens(self, width: int) -> int:
        return FIXED_CHUNK_TOKENS

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        return ()

    def row_bits(self, width: int) -> float:
        return 8.0 * self.code_columns(width) + 16.0

    def encode(self, states: Tensor | Iterable[Tensor]) -> Encoded:
        return self.encode_layers([layer] for layer in states).joined()

    def encode_layers(
        self,
        layers: Iterable[Sequence[Tensor]],
        shared: Mapping[str, np.ndarray] | None = None,
        fine: np.ndarray | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> EncodedLayers:
        """Elementwise work in float32 blocks that stay in cache; statistics from at most 256 evenly spaced tokens.

        ``fine``: the classes of the rows, of a ``MaskedCodec``; ``seen`` has one for each layer once that has been
        asked for.
        """
        codes, scales, channel_scales, offsets, places, rows = [], [], [], [], [], []
        for index, parts in enumerate(layers):
            scale, offset = channel_statistics(*parts) if shared is None else _stored(shared, index, parts[0].device)
            of_layer = self.of_layer(index, shared)
            layer = _Layer(parts, scale, offset, fine, None if seen is None else seen[index])
            layer_codes, token_scale, where = of_layer._quantise(layer)
            codes.append([layer_codes])
            scales.append(bits_to_numpy(token_scale.bfloat16()))
            channel_scales.append(bits_to_numpy(scale.bfloat16()))
            offsets.append(bits_to_numpy(offset.bfloat16()))
            rows.append(bits_to_numpy(rows_of_parts(parts, where)))
            place = where.cpu().numpy().astype(np.int32)
            places.append(np.stack([np.full_like(place, index), place], axis=1))
        if not codes:
            return EncodedLayers([])
        small = {
            "token_scale": np.stack(scales),
            "channel_scale": np.stack(channel_scales),
            "channel_offset": np.stack(offsets),
            RAW_INDEX: np.concatenate(places),
            RAW_ROWS: np.concatenate(rows),
        }
        return EncodedLayers(codes, small)

    def decode(self, part: Encoded, out: Tensor | None = None) -> Tensor:
        out = output(part, out, part.small["channel_scale"].shape[1] if part.codes else 0)
        for layer, codes in enumerate(part.codes):
            self.decode_rows(codes, part.small, layer, 0, out[layer])
        if part.codes:
            _put_raw(part.small[RAW_INDEX], part.small[RAW_ROWS], out)
        return out

    def decode_pack(
        self, codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], out: Tensor
    ) -> None:
        """``decode`` of samples end to end: codes [L, T, C] into ``out`` bf16 [L, T, D]; rows and small arrays of each
        sample, those on a device as `small_on` brings them there."""
        if not len(codes):
            return
        kernels = gpu_kernels(codes.device)
        if kernels is not None and self._decoded_by(kernels, codes, rows, small, out):
            for span, arrays in zip(rows, small, strict=True):
                _put_raw(arrays[RAW_INDEX], arrays[RAW_ROWS], out[:, span])
            return
        for span, arrays in zip(rows, small, strict=True):
            if span.stop > span.start:
                self.decode(Encoded([layer[span] for layer in codes], dict(arrays)), out[:, span])

    def _decoded_by(
        self, kernels: Any, codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], out: Tensor
    ) -> bool:
        """``decode_pack`` by the module of kernels, raw rows left out; False, and nothing written: they do not know
        this codec."""
        # Another formula, as a subclass may bring, has no kernel.
        layout = _kernel_layout(type(self), _DECODING)
        if layout is not None:
            kernels.decode(layout, codes, rows, small, _e4m3_values(codes.device), out)
        return layout is not None

    def decode_mixed(self, part: Encoded, rows: Sequence[int], out: Tensor) -> None:
        """``decode`` of rows of several units, so many of each; channel scales and offsets are uint16 [U, L, D]."""
        owner, ends = torch.from_numpy(np.repeat(np.arange(len(rows)), rows)), [0, *accumulate(rows)]
        for layer, codes in enumerate(part.codes):
            own, tokens = self.of_layer(layer, part.small), part.small["token_scale"][layer]
            scale, offset = (part.small[name][:, layer] for name in ("channel_scale", "channel_offset"))
            if len(codes) < len(rows) * _ROWS_OF_THEIR_OWN:
                factor, shift = (bits_to_tensor(bits, codes.device).float()[owner] for bits in (scale, offset))
                own._scaled(codes, bits_to_tensor(tokens, codes.device).float(), factor, shift, out[layer])
                continue
            for unit, span in enumerate(starmap(slice, pairwise(ends))):
                own._decode_run(codes[span], (tokens[span], scale[unit], offset[unit]), out[layer, span])
        _put_raw(part.small[RAW_INDEX], part.small[RAW_ROWS], out)

    def decode_rows(self, codes: Tensor, small: Mapping[str, np.ndarray], layer: int, start: int, out: Tensor) -> None:
        tokens = small["token_scale"][layer, start : start + codes.shape[0]]
        channels = small["channel_scale"][layer], small["channel_offset"][layer]
        self.of_layer(layer, small)._decode_run(codes, (tokens, *channels), out)

    def _decode_run(self, codes: Tensor, scales: Sequence[Any], out: Tensor) -> None:
        """Codes [m, C] into ``out`` bf16 [m, D]; bf16 bits uint16 of the scale of each row [m], and of the scale and
        the offset of each channel [D], as arrays, or as tensors where the codes are."""
        layout = _kernel_layout(type(self), _DECODING)
        if layout is not None and self._suits_kernels(codes, scales, out):
            kernels = cpu_kernels(out.numel())
            if kernels is not None:
                bits = [one if one.flags.writeable and one.flags.c_contiguous else one.copy() for one in scales]
                table, into = _e4m3_values(codes.device).numpy(), out.view(torch.uint16).numpy()
                kernels.DECODERS[layout](codes.numpy(), *bits, table, into)
                return
        tokens, scale, offset = (bits_to_tensor(bits, codes.device).float() for bits in scales)
        self._scaled(codes, tokens, scale, offset, out)

    def _suits_kernels(self, codes: Tensor, scales: Sequence[Any], out: Tensor) -> bool:
        """Whether kernels, which check nothing, can take the arguments of ``_decode_run`` as they are."""
        rows, width = out.shape
        shapes = [(rows,), (width,), (width,)]
        arrays = all(isinstance(one, np.ndarray) and one.dtype == np.uint16 for one in scales)
        return (
            codes.device.type == out.device.type == "cpu"
            and (codes.dtype, out.dtype) == (getattr(torch, self.code_dtype), torch.bfloat16)
            and codes.shape == (rows, self.code_columns(width))
            and arrays
            and [one.shape for one in scales] == shapes
            and codes.is_contiguous()
            and out.is_contiguous()
        )

    def _scaled(self, codes: Tensor, token_scale: Tensor, scale: Tensor, offset: Tensor, out: Tensor) -> None:
        """Codes [m, C] into ``out`` bf16 [m, D]; token_scale fp32 [m]; scale and offset fp32 [D], or [m, D]."""
        width, step = out.shape[1], _block_rows(codes.device, out.shape[1])
        size = min(step, len(codes)), self.columns(width)
        scratch = torch.empty(size, dtype=torch.float32, device=codes.device)
        for low in range(0, len(codes), step):
            rows = slice(low, low + step)
            values = scratch[: len(codes[rows])]
            self.values_of(codes[rows], token_scale[rows], values)
            values = values[:, :width]
            factor, shift = (part[rows] if part.ndim == 2 else part for part in (scale, offset))
            # Codes and scales are so short that their product is exact: fused or not, only the sum is rounded.
            if codes.is_cuda:
                torch.addcmul(shift, values, factor, out=out[rows])
            else:
                out[rows].copy_(torch.addcmul(shift, values, factor, out=values))

    def _quantise(self, layer: "_Layer") -> tuple[Tensor, Tensor, Tensor]:
        """Codes [T, C], token scales float32 [T] exact in bf16, raw rows int64 [N] (their codes and scales are 0)."""
        tokens, width, device = sum(map(len, layer.parts)), len(layer.scale), layer.scale.device
        codes = fresh((tokens, self.code_columns(width)), getattr(torch, self.code_dtype), device)
        peak, token_scale = torch.empty((2, tokens), dtype=torch.float32, device=device)
        layout = _kernel_layout(type(self), _ENCODING) if layer.suits_kernels else None
        kernels = None if layout is None else cpu_kernels(tokens * width)
        if kernels is None:
            self._encode_by_torch(layer, codes, token_scale, peak)
        else:
            _encode_by(kernels.ENCODERS[layout], layer, [part.numpy() for part in (codes, token_scale, peak)])
        where = torch.nonzero(raw_rows(peak, layer.scale)).flatten()
        codes[where] = 0
        token_scale[where] = 0.0
        return codes, token_scale, where

    def _encode_by_torch(self, layer: "_Layer", codes: Tensor, token_scale: Tensor, peak: Tensor) -> None:
        width, device = len(layer.scale), layer.scale.device
        step = _block_rows(device, width)
        inverse = layer.scale.reciprocal()
        classes = None if layer.fine is None else torch.from_numpy(layer.fine).to(device)
        scratch = torch.empty((min(step, len(codes)), self.columns(width)), dtype=torch.float32, device=device)
        start = 0
        for pieces in _blocks(layer.parts, step):
            lengths = [len(piece) for piece in pieces]
            rows = slice(start, start + sum(lengths))
            y = scratch[: rows.stop - start]
            values = y[:, :width]
            # Columns that only fill up a group; a row that is not finite leaves NaN there.
            y[:, width:] = 0.0
            for piece, into in zip(pieces, values.split(lengths), strict=True):
                into.copy_(piece)
            if layer.seen is not None:
                layer.seen.add(values)
            values.sub_(layer.offset).mul_(inverse)
            is_fine = None if classes is None else classes[rows, None]
            self.codes_of(y, codes[rows], token_scale[rows], peak[rows], is_fine)
            start = rows.stop

    def of_layer(self, layer: int, small: Mapping[str, np.ndarray] | None) -> "AffineCodec":
        """What codes the rows of a layer, by its place in a part with small arrays; None: in what is encoded."""
        return self

    def columns(self, width: int) -> int:
        """Values of a row as the codec groups them: ``width``, filled up with zeros where it must be."""
        return width

    @abstractmethod
    def code_columns(self, width: int) -> int:
        """Columns of the codes of a row of ``width`` values."""

    @abstractmethod
    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor, fine: Tensor | None = None) -> None:
        """Fill codes [m, C], token_scale and peak = max |y| fp32 [m] from y fp32 [m, columns], which may be spent.

        ``fine`` bool [m, 1]: rows of all codes, where a codec has others; None: all are.
        """

    @abstractmethod
    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        """Fill values fp32 [m, columns], what codes [m, C] say of y."""


def _encode_by(encode: Any, layer: _Layer, results: Sequence[np.ndarray]) -> None:
    """Codes [T, C], token scales and peaks float32 [T] of a layer on the CPU, by a kernel."""
    offset, inverse = layer.offset.numpy(), layer.scale.reciprocal().numpy()
    norms = np.empty(len(results[0]), dtype=np.float32)
    coarse = np.zeros(len(norms), np.uint8) if layer.fine is None else (~layer.fine).astype(np.uint8)
    lengths = list(map(len, layer.parts))
    ends, bits = [0, *accumulate(lengths)], list(map(bits_to_numpy, layer.parts))

    def encode_rows(part: int, rows: slice) -> int:
        of_unit = slice(ends[part] + rows.start, ends[part] + rows.stop)
        return int(encode(bits[part][rows], offset, inverse, *(array[of_unit] for array in (coarse, *results, norms))))

    for part, rows, largest in in_blocks(lengths, len(offset), encode_rows):
        if layer.seen is not None:
            of_unit = slice(ends[part] + rows.start, ends[part] + rows.stop)
            layer.seen.add_norms(layer.parts[part][rows], norms[of_unit], largest)


@cache
def _kernel_layout(codec: type[AffineCodec], methods: tuple[str, ...]) -> str | None:
    """Which kernels compute as a codec does; a subclass that does otherwise in any of these methods has none."""
    for layout, own in (("q8", Q8Codec), ("q4", Q4Codec)):
        if all(getattr(codec, name) is getattr(own, name) for name in methods):
            return layout
    return None


def _stored(shared: Mapping[str, np.ndarray], layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Channel scale and offset float32 [D] of a layer of a stored unit."""
    scale, offset = (bits_to_tensor(shared[name][layer], device) for name in ("channel_scale", "channel_offset"))
    return scale.float(), offset.float()


def _put_raw(index: np.ndarray, rows: np.ndarray, out: Tensor) -> None:
    """Rows kept raw into ``out`` bf16 [L, T, D]; index int [N, 2], rows uint16 [N, D]."""
    if len(index):
        where = torch.from_numpy(index.astype(np.int64)).to(out.device)
        out[where[:, 0], where[:, 1]] = bits_to_tensor(rows, out.device)


def round_up_(values: Tensor) -> Tensor:
    """In place the smallest bf16 number that is not below each non-negative float32."""
    values.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return values


def _blocks(parts: Sequence[Tensor], rows: int) -> Iterator[list[Tensor]]:
    """Pieces of parts [t, D] that lie end to end, in blocks of so many rows together, the last one of fewer."""
    pieces, room = list[Tensor](), rows
    for part in parts:
        start = 0
        while start < len(part):
            pieces.append(part[start : start + room])
            start += len(pieces[-1])
            room -= len(pieces[-1])
            if not room:
                yield pieces
                pieces, room = [], rows
    if pieces:
        yield pieces


def _block_rows(device: torch.device, width: int) -> int:
    elements = _BLOCK_ELEMENTS.get(device.type, _BLOCK_ELEMENTS["cuda"])
    return max(1, elements // max(1, width))


_LARGEST_CODE = 127.0
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class Q8Codec(AffineCodec):
    """int8 codes and one bf16 scale s_t per token; 8.02 bits a value.

    h = bf16( (q * s_t) * c_d + mu_d ); per element |error| <= s_t * c_d / 2 + 1 bf16 ulp of the larger of the two.
    """

    name: str = "q8"
    code_dtype: str = "int8"
    formula: str = "bf16((code * token_scale) * channel_scale + channel_offset) in float32; rows in raw_index verbatim"
    nominal_bits: float = 8.5
    # Half a step beyond the last code is within the bound.
    reach: float = _LARGEST_CODE + 0.5
    same_layer: float = 3e-4

    def code_columns(self, width: int) -> int:
        return width

    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor, fine: Tensor | None = None) -> None:
        torch.maximum(y.amax(dim=1), y.amin(dim=1).neg_(), out=peak)
        round_up_(torch.div(peak, _LARGEST_CODE, out=token_scale)).clamp_(min=_SMALLEST_SCALE)
        codes.copy_(y.mul_(token_scale.reciprocal()[:, None]).round_())

    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        if codes.is_cuda:
            torch.mul(codes, token_scale[:, None], out=values)
        else:
            # A CPU converts mixed operands through a temporary.
            values.copy_(codes).mul_(token_scale[:, None])


Q8 = Q8Codec()


GROUP = 32

# Values up to half a step beyond the last code are within the bound; the near side reaches one step less.
FAR_SIDE, COARSE_FAR_SIDE = 8.5, 4.5
_E4M3_LARGEST, _E4M3_SMALLEST_NORMAL = 448.0, 2.0**-6
_SMALLEST_TOKEN_SCALE = 2.0**-100
# torch takes the largest of strided values by vectors only where so many groups lie side by side.
_FEWEST_GROUPS = 64
# float32 bits of a normal E4M3 number, shifted to its 4 + 3 bits, less the difference of the exponent biases.
_E4M3_SHIFT, _E4M3_BIAS = 20, (127 - 7) << 3


@dataclass(frozen=True)
class Q4Codec(AffineCodec):
    """Packed int4 codes and an E4M3 scale g per 32 channels; 4.26 bits a value.

    h = bf16( (q * (g * s_t)) * c_d + mu_d ). With G = ceil(D / 32), a row of the code array is 16 G bytes of codes,
    then G bytes of group scales. Channel d is in group d mod G; its code q, -8 … 7 in two's complement, is the low half
    of byte d if d < 16 G, else the high half of byte d - 16 G. Channels D … 32 G - 1 only fill the groups up. Groups of
    strided channels are as good as neighbours once the channels are scaled, and let whole vectors share a scale.

    g is signed so that the side of the group that reaches further from zero takes code -8: that uses all 16 codes. Its
    size is rounded up to E4M3, so that per element |error| <= |g| * s_t * c_d / 2 + 1 bf16 ulp of the larger of the two
    values. Relative error of a Gaussian 8.6 %; with codes -7 … 7 and g to nearest it is 9.7 %.
    """

    name: str = "q4"
    code_dtype: str = "uint8"
    formula: str = (
        "bf16((code * (group_scale * token_scale)) * channel_scale + channel_offset) in float32; rows in raw_index "
        "verbatim; with G group scales (E4M3 bits) in a row, channel d is in group d mod G, its signed 4-bit code the "
        "low half of byte d if d < 16 G, else the high half of byte d - 16 G"
    )
    nominal_bits: float = 4.5
    reach: float = FAR_SIDE * _E4M3_LARGEST
    same_layer: float = 4e-3

    def columns(self, width: int) -> int:
        return GROUP * _groups(width)

    def code_columns(self, width: int) -> int:
        return (GROUP // 2 + 1) * _groups(width)

    def row_parts(self, width: int) -> tuple[RowPart, ...]:
        groups = _groups(width)
        return RowPart("codes", "|u1", GROUP // 2 * groups), RowPart("group_scale", "|u1", groups)

    def codes_of(self, y: Tensor, codes: Tensor, token_scale: Tensor, peak: Tensor, fine: Tensor | None = None) -> None:
        # Any: two numbers are clamped to, or two tensors.
        far_side: Any = FAR_SIDE if fine is None else torch.where(fine, FAR_SIDE, COARSE_FAR_SIDE)
        least, most = 0.5 - far_side, far_side - 1.5
        rows, columns = y.shape
        half = columns // 2
        grouped = y.view(rows, GROUP, columns // GROUP)
        above, below = _extremes(grouped)
        below.neg_()
        far, near = torch.maximum(above, below), torch.minimum(above, below)
        torch.amax(far, dim=1, out=peak)
        wanted = torch.maximum(far / far_side, near / (far_side - 1))
        largest = torch.amax(wanted, dim=1, out=token_scale)
        round_up_(largest.div_(_E4M3_LARGEST)).clamp_(min=_SMALLEST_TOKEN_SCALE)
        # Plus zero: the difference of a group of zeros would be -0.0, whose sign is written.
        group_scale, bits = _round_up_e4m3(wanted.div_(token_scale[:, None]), below.sub_(above).add_(0.0))
        codes[:, half:].view(torch.int8).copy_(bits)
        grouped.mul_(group_scale.mul_(token_scale[:, None]).reciprocal_()[:, None])
        # Clamped as bytes: a row that is not kept raw is at most a code beyond.
        packed = y.round_().to(torch.int8)
        if fine is None:
            packed.clamp_(int(least), int(most))
        else:
            packed.clamp_(least.to(torch.int8), most.to(torch.int8))
        low, high = packed[:, :half], packed[:, half:]
        torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=codes[:, :half].view(torch.int8))

    def values_of(self, codes: Tensor, token_scale: Tensor, values: Tensor) -> None:
        rows, columns = values.shape
        half = columns // 2
        packed = codes[:, :half].view(torch.int8)
        values[:, :half].copy_((packed << 4) >> 4)
        values[:, half:].copy_(packed >> 4)
        group_scale = _e4m3_values(codes.device)[codes[:, half:].int()].mul_(token_scale[:, None])
        values.view(rows, GROUP, columns // GROUP).mul_(group_scale[:, None])


def _extremes(grouped: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest of each group: [m, G] of [m, GROUP, G], whose rows are contiguous."""
    rows, members, groups = grouped.shape
    if grouped.is_cuda or groups >= _FEWEST_GROUPS:
        return grouped.amax(dim=1), grouped.amin(dim=1)
    largest = smallest = grouped.view(rows, members * groups)
    while largest.shape[1] > groups:
        half = largest.shape[1] // 2
        largest = torch.maximum(largest[:, :half], largest[:, half:])
        smallest = torch.minimum(smallest[:, :half], smallest[:, half:])
    return largest, smallest


def _groups(width: int) -> int:
    return -(-width // GROUP)


def _round_up_e4m3(sizes: Tensor, signed: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes fp32 in 0 … 448 as normal E4M3 numbers not below them, with the signs of ``signed`` fp32, which is spent:
    their values and bits int32, of which the lowest eight count."""
    rounded = sizes.clamp_(_E4M3_SMALLEST_NORMAL, _E4M3_LARGEST).view(torch.int32)
    rounded = rounded.add_((1 << _E4M3_SHIFT) - 1).bitwise_right_shift_(_E4M3_SHIFT)
    # Comparing and choosing takes a CPU five times as long as arithmetic on the bits.
    signs = signed.view(torch.int32).bitwise_and_(-(1 << 31))
    values = (rounded << _E4M3_SHIFT).bitwise_or_(signs).view(torch.float32)
    return values, rounded.sub_(_E4M3_BIAS).bitwise_or_(signs.bitwise_right_shift_(24))


@cache
def _e4m3_values(device: torch.device) -> Tensor:
    """fp32 [256]: the number of each E4M3 bit pattern."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


Q4 = Q4Codec()
_LAYOUT = ("columns", "code_columns")
_ENCODING = (*_LAYOUT, "codes_of", "_quantise", "_encode_by_torch")
_DECODING = (*_LAYOUT, "values_of", "decode", "decode_rows", "_decode_run", "_scaled")
