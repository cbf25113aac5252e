"""Rows on a CPU in one passage each, by kernels that numba compiles: measured, encoded and decoded with the bits of
torch's arithmetic in ``AffineCodec`` and ``RowStats``, which takes ten passages. (On other processors than x86 torch
adds squares in another order, so that the last bit of a norm may differ there.)

Importing this imports numba; a kernel is compiled when it is first called, which takes about a second. The interpreter
lock is free while one runs.

Shapes: m rows of a block, D width, C columns of a code array, G groups of ``q4``.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

# A child that is forked while a thread compiles would wait for that thread for ever.
os.register_at_fork(
    before=global_compiler_lock.acquire,
    after_in_parent=global_compiler_lock.release,
    after_in_child=global_compiler_lock.release,
)

# A difference of the last bit is one: nothing may be fused or put in another order.
_jit = njit(nogil=True, fastmath=False, error_model="numpy", boundscheck=False)

_LANES = 8
"""Sums that torch's norm of float32 keeps side by side on every x86."""
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
# Added to a float32 below 2**22, this leaves the nearest integer, ties to even, in the low bits.
_ROUNDING = np.float32(1.5 * 2.0**23)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_HALF_BF16 = np.uint32(0x7FFF)
_BF16_BITS = np.uint32(0xFFFF0000)
_BELOW_BF16 = np.uint32(0xFFFF)
_16 = np.uint32(16)
# The bits of 2**23, of whose float32 the lowest four count single units.
_TWO_23, _TWO_23_AND_8 = np.uint32(0x4B000000), np.float32(2.0**23 + 8.0)

_Q8_LARGEST, _Q8_SMALLEST_SCALE = np.float32(127.0), np.float32(2.0**-126)
_GROUP = 32
_Q4_SMALLEST_SCALE = np.float32(2.0**-100)
_E4M3_LARGEST, _E4M3_SMALLEST = np.float32(448.0), np.float32(2.0**-6)
_E4M3_SHIFT, _E4M3_ROUND, _E4M3_BIAS = np.uint32(20), np.uint32((1 << 20) - 1), np.uint32((127 - 7) << 3)
_FAR_SIDE, _COARSE_FAR_SIDE = np.float32(8.5), np.float32(4.5)


@intrinsic
def _squares(_context: Any, rows: Any) -> Any:
    """Sums of squares float32 of the values d, d + 8, d + 16 … of two rows of bf16 bits [D], for d = 0 … 7, of the
    first and then of the other. In vectors: a compiler that may not reorder sums adds them one by one; of two rows at
    once, as each sum waits for the one before. Without the last D mod 8 values."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[0], cgutils.unpack_tuple(builder, arguments[0]), strict=True)
        ]
        halves, words, floats = (
            ir.VectorType(kind, _LANES) for kind in (ir.IntType(16), ir.IntType(32), ir.FloatType())
        )
        lanes = context.get_constant(types.intp, _LANES)
        sums = [cgutils.alloca_once_value(builder, ir.Constant(floats, [0.0] * _LANES)) for _ in arrays]
        steps = builder.udiv(builder.extract_value(arrays[0].shape, 0), lanes)
        with cgutils.for_range(builder, steps) as loop:
            for array, total in zip(arrays, sums, strict=True):
                place = builder.gep(array.data, [builder.mul(loop.index, lanes)])
                bits = builder.load(builder.bitcast(place, halves.as_pointer()), align=2)
                values = builder.bitcast(
                    builder.shl(builder.zext(bits, words), ir.Constant(words, [16] * _LANES)), floats
                )
                builder.store(builder.fadd(builder.load(total), builder.fmul(values, values)), total)
        totals = [builder.load(total) for total in sums]
        places = [ir.Constant(ir.IntType(32), lane) for lane in range(_LANES)]
        numbers = [builder.extract_element(total, place) for total in totals for place in places]
        return context.make_tuple(builder, signature.return_type, numbers)

    return types.UniTuple(types.float32, 2 * _LANES)(rows), emit


@intrinsic
def number(_context: Any, bits: Any) -> Any:
    """The float32 of these bits uint32."""
    return types.float32(types.uint32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.FloatType())


@intrinsic
def bits_of(_context: Any, value: Any) -> Any:
    """The bits uint32 of a float32."""
    return types.uint32(types.float32), lambda _c, builder, _s, arguments: builder.bitcast(arguments[0], ir.IntType(32))


@_jit
def _norm(row, sums):
    """sqrt of the sum of squares, float32, of bf16 bits [D], by the sums of its lanes; of a single one its magnitude,
    as in torch."""
    if len(row) == 1:
        return abs(number(np.uint32(row[0]) << _16))
    total = sums[0]
    for lane in range(1, _LANES):
        total += sums[lane]
    for d in range(len(row) // _LANES * _LANES, len(row)):
        value = number(np.uint32(row[d]) << _16)
        total += value * value
    return np.sqrt(total)


@_jit
def _largest(row):
    """The bits of the largest magnitude among bf16 bits [D]."""
    largest = np.uint16(0)
    for d in range(len(row)):
        largest = max(largest, np.uint16(row[d] & np.uint16(0x7FFF)))
    return largest


@_jit
def _measure_two(bits, i, norms):
    """The norms float32 of row ``i`` and of the next one, if any, of bf16 bits [m, D]; the bits of the largest
    magnitude of both. That first: it waits for no sum, and so brings rows from memory twice as fast."""
    last = min(i + 1, len(bits) - 1)
    largest = max(_largest(bits[i]), _largest(bits[last]))
    sums = _squares((bits[i], bits[last]))
    norms[i] = _norm(bits[i], sums[:_LANES])
    norms[last] = _norm(bits[last], sums[_LANES:])
    return largest


@_jit
def measure(bits, norms):
    """The norm float32 [m] of each row of bf16 bits uint16 [m, D]; the bits of the largest magnitude among them."""
    largest = np.uint16(0)
    for i in range(0, len(bits), 2):
        largest = max(largest, _measure_two(bits, i, norms))
    return largest


@_jit
def _scaled(row, offset, inverse, values):
    """values float32 [D] = (h - offset) * inverse of bf16 bits [D]; the bits of the largest magnitude, NaN first."""
    largest = np.uint32(0)
    for d in range(len(row)):
        value = (number(np.uint32(row[d]) << _16) - offset[d]) * inverse[d]
        values[d] = value
        largest = max(largest, np.uint32(bits_of(value) & _MAGNITUDE))
    return largest


@_jit
def _begin(bits, i, offset, inverse, values, peak, norms):
    """What any encoder starts row ``i`` with: its values and the largest |y|; of every second row also its norm and
    that of the next one. The bits of the largest |h| of these two, 0 for the other rows."""
    largest = _measure_two(bits, i, norms) if i % 2 == 0 else np.uint16(0)
    peak[i] = number(_scaled(bits[i], offset, inverse, values))
    return largest


@_jit
def _round_up(value, smallest):
    """The smallest bf16 number that is not below ``value``, and ``smallest`` at least."""
    value = number(np.uint32(np.uint32(bits_of(value) + _BELOW_BF16) & _BF16_BITS))
    return value if value > smallest else smallest


@_jit
def encode_q8(bits, offset, inverse, coarse, codes, token_scale, peak, norms):
    """Codes int8 [m, D] of ``Q8Codec`` and per row, float32 [m], its scale, the largest |y| and the norm of h; the bits
    of the largest |h|. bits uint16 [m, D]; offset and inverse of the channels' scale float32 [D]; ``coarse`` is for the
    other encoder."""
    width = bits.shape[1]
    values = np.empty(width, np.float32)
    largest = np.uint16(0)
    for i in range(len(bits)):
        largest = max(largest, _begin(bits, i, offset, inverse, values, peak, norms))
        token_scale[i] = _round_up(peak[i] / _Q8_LARGEST, _Q8_SMALLEST_SCALE)
        factor, row = _ONE / token_scale[i], codes[i]
        for d in range(width):
            row[d] = np.int8(bits_of(values[d] * factor + _ROUNDING))
    return largest


@_jit
def _repeat(values, count):
    """Fill an array with what its first ``count`` values are, again and again."""
    while count < len(values):
        more = values[count:]
        for d in range(min(count, len(more))):
            more[d] = values[d]
        count *= 2


@_jit
def _extremes(values, above, below):
    """The largest of each group and the smallest, first of float32 [16 G]; values float32 [32 G]."""
    half = len(above)
    others = values[half:]
    for d in range(half):
        one, other = values[d], others[d]
        above[d] = one if one > other else other
        below[d] = one if one < other else other
    while half > len(values) // _GROUP:
        half //= 2
        above_others, below_others = above[half:], below[half:]
        for d in range(half):
            one, other = above[d], above_others[d]
            above[d] = one if one > other else other
            one, other = below[d], below_others[d]
            below[d] = one if one < other else other


@_jit
def _reach(above, below, far_side, wanted):
    """What scale each group needs, float32 [G], so that the side which reaches further takes ``far_side`` codes; the
    largest of them."""
    most = np.float32(0.0)
    for g in range(len(wanted)):
        up, down = above[g], -below[g]
        far, near = (up, down) if up > down else (down, up)
        by_far, by_near = far / far_side, near / (far_side - _ONE)
        wanted[g] = by_far if by_far > by_near else by_near
        most = wanted[g] if wanted[g] > most else most
    return most


@_jit
def _group_scales(above, below, scale, factors, stored):
    """E4M3 bits uint8 [G] of the groups' scales, and their reciprocals in place of what was wanted, float32 [G]."""
    for g in range(len(factors)):
        # Plus zero: the difference of a group of zeros would be -0.0, whose sign is written.
        sign = np.uint32(bits_of((-below[g] - above[g]) + _ZERO) & _SIGN)
        size = factors[g] / scale
        size = size if size > _E4M3_SMALLEST else _E4M3_SMALLEST
        size = size if size < _E4M3_LARGEST else _E4M3_LARGEST
        rounded = np.uint32(np.uint32(bits_of(size) + _E4M3_ROUND) >> _E4M3_SHIFT)
        stored[g] = np.uint8(np.uint32(rounded - _E4M3_BIAS) | np.uint32(sign >> np.uint32(24)))
        factors[g] = _ONE / (number(np.uint32(np.uint32(rounded << _E4M3_SHIFT) | sign)) * scale)


@_jit
def _nibbles(values, factors, far_side, pairs):
    """Bytes uint8 [16 G] of the codes of values float32 [32 G], by factors [16 G]."""
    least, most = _ROUNDING + (np.float32(0.5) - far_side), _ROUNDING + (far_side - np.float32(1.5))
    others = values[len(pairs) :]
    for d in range(len(pairs)):
        one, other = values[d] * factors[d] + _ROUNDING, others[d] * factors[d] + _ROUNDING
        one = one if one > least else least
        one = one if one < most else most
        other = other if other > least else least
        other = other if other < most else most
        low, high = np.uint32(bits_of(one) & np.uint32(15)), np.uint32(bits_of(other) << np.uint32(4))
        pairs[d] = np.uint8(low | high)


@_jit
def encode_q4(bits, offset, inverse, coarse, codes, token_scale, peak, norms):
    """The same for codes uint8 [m, 17 G] of ``Q4Codec``; ``coarse`` uint8 [m]: rows of codes -4 … 3."""
    groups = codes.shape[1] // (_GROUP // 2 + 1)
    half = _GROUP // 2 * groups
    values, scratch = np.zeros(2 * half, np.float32), np.empty((3, half), np.float32)
    above, below, factors = scratch[0], scratch[1], scratch[2]
    largest = np.uint16(0)
    for i in range(len(bits)):
        largest = max(largest, _begin(bits, i, offset, inverse, values, peak, norms))
        far_side = _COARSE_FAR_SIDE if coarse[i] else _FAR_SIDE
        _extremes(values, above, below)
        most = _reach(above, below, far_side, factors[:groups])
        token_scale[i] = _round_up(most / _E4M3_LARGEST, _Q4_SMALLEST_SCALE)
        _group_scales(above, below, token_scale[i], factors[:groups], codes[i, half:])
        _repeat(factors, groups)
        _nibbles(values, factors, far_side, codes[i, :half])
    return largest


@_jit
def bf16(value):
    """The bits of the nearest bf16 number, ties to even, of a float32 that is not NaN."""
    bits = bits_of(value)
    return np.uint16((bits + _HALF_BF16 + ((bits >> _16) & np.uint32(1))) >> _16)


@_jit
def _wide(bits):
    """The numbers float32 [n] of bf16 bits."""
    values = np.empty(len(bits), np.float32)
    for d in range(len(bits)):
        values[d] = number(np.uint32(bits[d]) << _16)
    return values


@_jit
def decode_q8(codes, token_scale, scale, offset, table, out):
    """Codes int8 [m, D] into bf16 bits uint16 [m, D]; bf16 bits of the scale of each row, and of the scale and offset
    of each channel; ``table`` is for the other decoder."""
    tokens, scales, offsets = _wide(token_scale), _wide(scale), _wide(offset)
    for i in range(len(codes)):
        token, row, into = tokens[i], codes[i], out[i]
        for d in range(len(row)):
            into[d] = bf16(offsets[d] + (np.float32(row[d]) * token) * scales[d])


@_jit
def _code(nibble):
    """The number float32 of four bits uint32 in two's complement."""
    return number(np.uint32((nibble ^ np.uint32(8)) | _TWO_23)) - _TWO_23_AND_8


@_jit
def _lower(row, factors, scales, offsets, out):
    """bf16 bits [n] of the codes in the lower four bits of bytes uint8 [n]."""
    for d in range(len(out)):
        code = _code(np.uint32(np.uint32(row[d]) & np.uint32(15)))
        out[d] = bf16(offsets[d] + (code * factors[d]) * scales[d])


@_jit
def _upper(row, factors, scales, offsets, out):
    """The same of the upper four."""
    for d in range(len(out)):
        code = _code(np.uint32(np.uint32(row[d]) >> np.uint32(4)))
        out[d] = bf16(offsets[d] + (code * factors[d]) * scales[d])


@_jit
def decode_q4(codes, token_scale, scale, offset, table, out):
    """The same of codes uint8 [m, 17 G]; table float32 [256]: the number of each E4M3 pattern."""
    width, groups = out.shape[1], codes.shape[1] // (_GROUP // 2 + 1)
    half = _GROUP // 2 * groups
    middle = min(half, width)
    tokens, scales, offsets = _wide(token_scale), _wide(scale), _wide(offset)
    factors = np.empty(half, np.float32)
    for i in range(len(codes)):
        row = codes[i]
        for g in range(groups):
            factors[g] = table[row[half + g]] * tokens[i]
        _repeat(factors, groups)
        _lower(row, factors, scales, offsets, out[i, :middle])
        _upper(row, factors, scales[middle:], offsets[middle:], out[i, middle:])


ENCODERS: Mapping[str, Any] = {"q8": encode_q8, "q4": encode_q4}
DECODERS: Mapping[str, Any] = {"q8": decode_q8, "q4": decode_q4}


def compile_all() -> None:
    """Compile every kernel now, a few seconds in all."""
    width = 8
    bits, sizes, channels = np.zeros((1, width), np.uint16), np.ones((4, 1), np.float32), np.ones(width, np.float32)
    measure(bits, sizes[0])
    for layout, codes in {"q8": np.zeros((1, width), np.int8), "q4": np.zeros((1, 17), np.uint8)}.items():
        ENCODERS[layout](bits, channels, channels, np.zeros(1, np.uint8), codes, *sizes[:3])
        DECODERS[layout](codes, bits[0, :1], bits[0], bits[0], np.zeros(256, np.float32), bits)
