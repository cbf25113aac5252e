"""Decoding of a whole pack on a GPU by one Triton kernel, with the bits of `AffineCodec.decode`.

torch needs ten launches for each layer of each sample, which cost more than their work. Importing this imports triton,
which torch brings where it was built for CUDA.

Shapes: L layers, T tokens of the pack, t of one sample, S samples, C columns of a code array, D width, G groups of q4.
"""

from collections.abc import Mapping, Sequence
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


# Of ever new numbers of rows and samples none is worth a kernel of its own.
_jit = triton.jit(do_not_specialize=["rows", "samples"])


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


def decode(
    layout: str, codes: Tensor, rows: Sequence[slice], small: Sequence[Mapping[str, Any]], table: Tensor, out: Tensor
) -> None:
    """Codes of a layout, int8 [L, T, D] of q8 or uint8 [L, T, 17 G] of q4, into ``out`` bf16 [L, T, D], raw rows left
    out. rows and small: of each sample; its arrays of bf16 bits [L, t], [L, D], [L, D] are views of one memory on the
    device. table fp32 [256]: the number of each E4M3 pattern."""
    layers, tokens, width = out.shape
    if not tokens:
        return
    arrays = [[sample[name] for name in _PLACES] for sample in small]
    starts = np.array([[span.start, span.stop - span.start] for span in rows], dtype=np.int64)
    begins = np.array([[array.storage_offset() for array in of_sample] for of_sample in arrays], dtype=np.int64)
    places = np.concatenate([starts, begins], axis=1).T
    owner = np.repeat(np.arange(len(rows)), starts[:, 1])
    index = torch.from_numpy(np.concatenate([places.ravel(), owner]))
    if codes.is_cuda:
        index = index.pin_memory().to(codes.device, non_blocking=True)
    first = arrays[0][0]
    flat = first.as_strided((first.untyped_storage().nbytes() // 2,), (1,), 0).view(torch.bfloat16)
    columns = width if layout == "q8" else 16 * (-(-width // 32))
    block = min(_WIDEST_BLOCK, triton.next_power_of_2(columns))
    grid = layers * tokens, triton.cdiv(columns, block)
    places_there, owner_there = index[: places.size], index[places.size :]
    bits = out.view(torch.int16)
    # Triton launches on the current device.
    with torch.cuda.device_of(codes):
        _KERNELS[layout][grid](codes, bits, places_there, owner_there, len(rows), flat, table, tokens, width, block)
