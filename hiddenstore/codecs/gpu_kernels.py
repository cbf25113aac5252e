"""Decoding of a whole pack on a GPU by Triton kernels, with the bits of `AffineCodec.decode`.

torch needs ten launches for each layer of each sample, which cost more than their work. Importing this imports triton,
which torch brings where it was built for CUDA.

Shapes: L layers, T tokens of the pack, t of one sample, S samples, C columns of a code array, D width, G groups of q4
or of klt, K = 8 G components of klt, m rows of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDEST_BLOCK = 1024
"""Bytes of codes that one program reads."""
_PLACES = ("token_scale", "channel_scale", "channel_offset")
_PLANES = 7
"""Bits that a component of klt has at most."""
_KLT_BLOCK_ELEMENTS = 1 << 26
"""Values of a block of rows, whose sums take four bytes each, twice."""


# Of ever new numbers of rows and samples none is worth a kernel of its own.
_jit = triton.jit(do_not_specialize=["rows", "samples", "start"])


@triton.jit
def _scales(places, owner, samples, flat, row, layer, width, columns, mask):
    """Token scale, channel scales and channel offsets fp32 of a row of the pack. places int64 [5, S]: first row, rows,
    and where in ``flat`` bf16 the sample's three arrays begin."""
    sample = places + tl.load(owner + row)
    tokens = tl.load(sample + samples)
    at = tl.load(sample + 2 * samples) + layer * tokens + row - tl.load(sample)
    channels = layer * width + columns
    scale = tl.load(flat + tl.load(sample + 3 * samples) + channels, mask=mask, other=0.0)
    offset = tl.load(flat + tl.load(sample + 4 * samples) + channels, mask=mask, other=0.0)
    return tl.load(flat + at).to(tl.float32), scale.to(tl.float32), offset.to(tl.float32)


@triton.jit
def _bf16_bits(value):
    """int16: the nearest bf16 of finite fp32, ties to even; written out because triton's interpreter cuts."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)


@_jit
def _q8(codes, out, places, owner, samples, flat, table, rows, width, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    row, layer = at % rows, at // rows
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    token, scale, offset = _scales(places, owner, samples, flat, row, layer, width, columns, mask)
    code = tl.load(codes + at * width + columns, mask=mask, other=0).to(tl.float32)
    tl.store(out + at * width + columns, _bf16_bits(offset + code * token * scale), mask=mask)


@_jit
def _q4(codes, out, places, owner, samples, flat, table, rows, width, BLOCK: tl.constexpr):
    """Each byte holds channels j and j + 16 G, which are of one group."""
    at = tl.program_id(0).to(tl.int64)
    row, layer = at % rows, at // rows
    groups = (width + 31) // 32
    half = 16 * groups
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    line = codes + at * (17 * groups)
    pair = tl.load(line + columns, mask=columns < half, other=0).to(tl.int32)
    bits = tl.load(line + half + columns % groups, mask=columns < half, other=0).to(tl.int32)
    group = tl.load(table + bits)
    for part in tl.static_range(2):
        code = (pair >> (4 * part)) & 15
        code = tl.where(code > 7, code - 16, code).to(tl.float32)
        channel = columns + part * half
        mask = (columns < half) & (channel < width)
        token, scale, offset = _scales(places, owner, samples, flat, row, layer, width, channel, mask)
        value = offset + code * (group * token) * scale
        tl.store(out + at * width + channel, _bf16_bits(value), mask=mask)


@_jit
def _klt_levels(codes, out, planes, rows, columns, groups, BLOCK: tl.constexpr, MOST: tl.constexpr):
    """The odd levels of bit planes as bf16 bits. planes int32 [2, MOST]: groups of a plane, and where it begins."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.arange(0, 8)[None, :]
    code = tl.zeros((BLOCK, 8), tl.int32)
    largest = tl.full((BLOCK,), 1, tl.int32)
    for plane in tl.static_range(MOST):
        mask = group < tl.load(planes + plane)
        line = codes + row * columns + tl.load(planes + MOST + plane)
        byte = tl.load(line + group, mask=mask, other=0).to(tl.int32)
        code += ((byte[:, None] >> place) & 1) << plane
        largest = tl.where(mask, largest * 2, largest)
    level = (2 * code + 1 - largest[:, None]).to(tl.float32)
    channel = group[:, None] * 8 + place
    bits = (level.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
    tl.store(out + row * (8 * groups) + channel, bits, mask=group[:, None] < groups)


@_jit
def _klt_values(high, low, out, places, owner, samples, flat, layer, start, unit, rows, width, BLOCK: tl.constexpr):
    """Sums of either half of the weights, fp32 [m, D], of rows from ``start`` on of a layer."""
    at = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    token, scale, offset = _scales(places, owner, samples, flat, start + at, layer, width, columns, mask)
    upper = tl.load(high + at * width + columns, mask=mask, other=0.0)
    value = (upper * 128.0 + tl.load(low + at * width + columns, mask=mask, other=0.0)) * (token * unit)
    bits = value.to(tl.int32, bitcast=True)
    value = ((bits + 0x80) & -0x100).to(tl.float32, bitcast=True)
    tl.store(out + at * width + columns, _bf16_bits(offset + value * scale), mask=mask)


def failure_on(device: torch.device) -> str | None:
    """Why the kernels do not run there, each tried once; None where they do. Triton builds a launcher with a C compiler
    and Python's headers, which not every machine has. Raises what says nothing of the kernels: a GPU that is full, or
    in whose context something else has failed."""
    small = {name: torch.zeros(1, 1, dtype=torch.uint16, device=device) for name in _PLACES}
    table, out = torch.zeros(256, device=device), torch.empty(1, 1, 1, device=device).bfloat16()
    codes = {"q8": torch.zeros(1, 1, 1, dtype=torch.int8), "q4": torch.zeros(1, 1, 17, dtype=torch.uint8)}
    try:
        for layout, zeros in codes.items():
            decode(layout, zeros.to(device), [slice(0, 1)], [small], table, out)
        one = KltLayer([1], 1.0, lambda levels: (levels[:, :1].float(), levels[:, 1:2].float()))
        decode_klt([one], codes["q4"][:, :, :1].to(device), [slice(0, 1)], [small], out)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (OSError, RuntimeError, SubprocessError, triton.TritonError) as error:
        # The driver's own words: Triton has no class for them.
        if "out of memory" in str(error):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        needs = "; it needs a C compiler and Python's headers (Debian: apt-get install gcc python3-dev)"
        return reason + (needs if isinstance(error, SubprocessError) or "compiler" in reason else "")
    return None


_KERNELS: Mapping[str, Any] = {"q8": _q8, "q4": _q4}


@dataclass(frozen=True, eq=False)
class _Places:
    """Where each row of a pack finds its scales: int64 [5, S] as `_scales` reads them, int64 [T] the sample of each
    row, and the bf16 memory on the device that all arrays are views of."""

    places: Tensor
    owner: Tensor
    samples: int
    flat: Tensor

    @classmethod
    def of(cls, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], device: torch.device) -> "_Places":
        arrays = [[sample[name] for name in _PLACES] for sample in small]
        starts = np.array([[span.start, span.stop - span.start] for span in rows], dtype=np.int64)
        begins = np.array([[array.storage_offset() for array in of_sample] for of_sample in arrays], dtype=np.int64)
        places = np.concatenate([starts, begins], axis=1).T
        owner = np.repeat(np.arange(len(rows)), starts[:, 1])
        index = torch.from_numpy(np.concatenate([places.ravel(), owner]))
        if device.type == "cuda":
            index = index.pin_memory().to(device, non_blocking=True)
        first = arrays[0][0]
        flat = first.as_strided((first.untyped_storage().nbytes() // 2,), (1,), 0).view(torch.bfloat16)
        return cls(index[: places.size], index[places.size :], len(rows), flat)


def decode(
    layout: str, codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], table: Tensor, out: Tensor
) -> None:
    """Codes of a layout, int8 [L, T, D] of q8 or uint8 [L, T, 17 G] of q4, into ``out`` bf16 [L, T, D], raw rows left
    out. rows and small: of each sample; its arrays of bf16 bits [L, t], [L, D], [L, D] are views of one memory on the
    device. table fp32 [256]: the number of each E4M3 pattern."""
    layers, tokens, width = out.shape
    if not tokens:
        return
    at = _Places.of(rows, small, codes.device)
    columns = width if layout == "q8" else 16 * (-(-width // 32))
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(columns))
    grid = layers * tokens, triton.cdiv(columns, block)
    bits = out.view(torch.int16)
    # Triton launches on the current device.
    with torch.cuda.device_of(codes):
        _KERNELS[layout][grid](codes, bits, at.places, at.owner, at.samples, at.flat, table, tokens, width, block)


@dataclass(frozen=True, eq=False)
class KltLayer:
    """What a layer's rows are decoded with: groups of each plane of bits; what the weights count in; and the sums of
    either half of the weights, fp32 [m, D] each, for levels bf16 [m, K]."""

    planes: Sequence[int]
    scale: float
    sums: Callable[[Tensor], tuple[Tensor, Tensor]]


def decode_klt(
    layers: Sequence[KltLayer], codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], out: Tensor
) -> None:
    """Codes uint8 [L, T, C] into ``out`` bf16 [L, T, D]; the rest as in `decode`."""
    tokens, width = out.shape[1:]
    if not tokens:
        return
    at, groups, columns = _Places.of(rows, small, codes.device), -(-width // 8), codes.shape[2]
    block = min(_WIDEST_BLOCK // 8, triton.next_power_of_2(groups))
    wide = min(_WIDEST_BLOCK, triton.next_power_of_2(width))
    step = max(1, _KLT_BLOCK_ELEMENTS // width)
    with torch.cuda.device_of(codes):
        for number, layer in enumerate(layers):
            planes = _planes_on(tuple(layer.planes), codes.device)
            for start in range(0, tokens, step):
                part, into = codes[number, start : start + step], out[number, start : start + step]
                levels = torch.empty((len(part), 8 * groups), dtype=torch.bfloat16, device=codes.device)
                grid = len(part), triton.cdiv(groups, block)
                _klt_levels[grid](part, levels.view(torch.int16), planes, len(part), columns, groups, block, _PLANES)
                high, low = layer.sums(levels)
                where = at.places, at.owner, at.samples, at.flat, number, start, layer.scale
                grid = len(part), triton.cdiv(width, wide)
                _klt_values[grid](high, low, into.view(torch.int16), *where, len(part), width, wide)


@cache
def _planes_on(planes: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [2, ``_PLANES``]: groups of each plane, and the first byte of a row that is its."""
    filled = torch.tensor((*planes, *[0] * (_PLANES - len(planes))), dtype=torch.int32)
    return torch.stack([filled, filled.cumsum(0, dtype=torch.int32) - filled]).to(device)
