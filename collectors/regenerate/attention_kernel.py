"""The attention of one new token a row over its past on a CPU, by a kernel that numba compiles for one target's heads.

Importing this imports numba; a kernel is compiled when it is first called, which takes two seconds. The interpreter
lock is free while one runs. Keys and values are widened from bf16 once for all the heads that share them, everything is
added in float32, and the result is rounded to bf16 once.

Shapes: B rows, H query heads, G heads of keys and values, S = H / G that share one, C columns of a room, E width of a
head, P = E / 16 vectors of it.
"""

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from hiddenstore.codecs.cpu_kernels import bf16, bits_of, number

LANES = 16
"""Numbers of a vector, and columns that are scored at once."""

_jit = njit(nogil=True, fastmath=False, error_model="numpy", boundscheck=False)
_summing = njit(nogil=True, fastmath={"reassoc"}, error_model="numpy", boundscheck=False)

# Sums of one head that stay in registers while the past is read: 32 vectors of a CPU with AVX-512, less a few.
_MOST_SUMS = 28

_16, _23 = np.uint32(16), np.uint32(23)
_MAGNITUDE = np.int32(0x7FFFFFFF)
# Added to a float32 below 2**22, this leaves the nearest integer in the low bits.
_ROUNDING = np.float32(1.5 * 2.0**23)
# Below it a power is no longer a normal number; beside the largest, which is 1, it is nothing.
_LEAST = np.float32(-120.0)
# 2**f for f in -0.5 … 0.5 to 8e-8 of it, the least largest error of this degree, before rounding.
_POWERS = tuple(np.float32(c) for c in (1.00000007, 0.69314697, 0.2402212, 0.05550713, 0.00967554, 0.00132765))

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_HALVES, _WORDS, _FLOATS = (ir.VectorType(kind, LANES) for kind in (_I16, _I32, _F32))


def _place(builder: Any, array: Any, offset: Any, more: int = 0) -> Any:
    return builder.gep(array.data, [builder.add(offset, ir.Constant(offset.type, more))])


def _load(builder: Any, array: Any, offset: Any, more: int = 0) -> Any:
    """A vector of float32 from an array of them."""
    return builder.load(builder.bitcast(_place(builder, array, offset, more), _FLOATS.as_pointer()), align=4)


def _store(builder: Any, vector: Any, array: Any, offset: Any, more: int = 0) -> None:
    builder.store(vector, builder.bitcast(_place(builder, array, offset, more), _FLOATS.as_pointer()), align=4)


def _widened(builder: Any, array: Any, offset: Any, more: int = 0) -> Any:
    """A vector of float32 from an array of bf16 bits."""
    bits = builder.load(builder.bitcast(_place(builder, array, offset, more), _HALVES.as_pointer()), align=2)
    return builder.bitcast(builder.shl(builder.zext(bits, _WORDS), ir.Constant(_WORDS, [16] * LANES)), _FLOATS)


def _add_product(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """In one instruction where the CPU has it."""
    return builder.fadd(total, builder.fmul(one, other, flags=("contract",)), flags=("contract",))


def _sums_of(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of 16 vectors, as one vector."""
    even, odd = (ir.Constant(_WORDS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
    while len(vectors) > 1:
        vectors = [
            builder.fadd(builder.shuffle_vector(one, other, even), builder.shuffle_vector(one, other, odd))
            for one, other in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    return vectors[0]


def _splat(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_WORDS, [0] * LANES))


def _arrays(context: Any, builder: Any, signature: Any, arguments: Any, count: int) -> list[Any]:
    return [
        context.make_array(kind)(context, builder, value)
        for kind, value in zip(signature.args[:count], arguments[:count], strict=True)
    ]


@cache
def _scores(width: int, shared: int) -> Any:
    """Products of S queries with the keys of 16 columns."""

    @intrinsic
    def scores(_context, queries, keys, block, out, key, column, stride):
        """out float32 [S, stride] from ``column`` on = queries float32 [S E] times keys, bf16 bits from element ``key``
        on; block float32 [16 E] is for them widened."""

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            query, bits, wide, into = _arrays(context, builder, signature, arguments, 4)
            key, column, stride = arguments[4:]
            zero = ir.Constant(key.type, 0)
            for place in range(0, LANES * width, LANES):
                _store(builder, _widened(builder, bits, key, place), wide, zero, place)
            with cgutils.for_range(builder, ir.Constant(key.type, shared)) as loop:
                start = builder.mul(loop.index, ir.Constant(key.type, width))
                parts = [_load(builder, query, start, place) for place in range(0, width, LANES)]
                products = []
                for n in range(LANES):
                    total = ir.Constant(_FLOATS, [0.0] * LANES)
                    for p, part in enumerate(parts):
                        total = _add_product(builder, total, part, _load(builder, wide, zero, n * width + p * LANES))
                    products.append(total)
                place = builder.add(builder.mul(loop.index, stride), column)
                _store(builder, _sums_of(builder, products), into, place)
            return context.get_dummy_value()

        return types.void(queries, keys, block, out, key, column, stride), emit

    return scores


@cache
def _mixed(width: int, shared: int) -> Any:
    """Sums of values by the weights of S heads."""

    @intrinsic
    def mixed(
        _context: Any, weights: Any, values: Any, out: Any, value: Any, first: Any, last: Any, stride: Any
    ) -> Any:
        """out float32 [S E] = the sum over columns first … last - 1 of weights float32 [S, stride] times values, bf16
        bits of which column 0 is from element ``value`` on."""
        parts = width // LANES
        most = max(1, _MOST_SUMS // parts)
        passes = -(-shared // most)
        groups = [range(shared * n // passes, shared * (n + 1) // passes) for n in range(passes)]

        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weight, bits, into = _arrays(context, builder, signature, arguments, 3)
            value, first, last, stride = arguments[3:]
            zero = ir.Constant(value.type, 0)
            for heads in groups:
                sums = [
                    [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * LANES)) for _ in range(parts)]
                    for _ in heads
                ]
                with cgutils.for_range_slice(builder, first, last, ir.Constant(first.type, 1)) as (column, _):
                    start = builder.add(value, builder.mul(column, ir.Constant(value.type, width)))
                    row = [_widened(builder, bits, start, p * LANES) for p in range(parts)]
                    for head, totals in zip(heads, sums, strict=True):
                        at = builder.add(builder.mul(ir.Constant(stride.type, head), stride), column)
                        share = _splat(builder, builder.load(_place(builder, weight, at)))
                        for part, total in zip(row, totals, strict=True):
                            builder.store(_add_product(builder, builder.load(total), part, share), total)
                for head, totals in zip(heads, sums, strict=True):
                    for p, total in enumerate(totals):
                        _store(builder, builder.load(total), into, zero, head * width + p * LANES)
            return context.get_dummy_value()

        return types.void(weights, values, out, value, first, last, stride), emit

    return mixed


@_jit
def largest(values):
    """The largest of float32 [n], a NaN before all: compared as integers of the same order, which goes in vectors."""
    most = np.int32(-0x80000000)
    for t in range(len(values)):
        bits = np.int32(bits_of(values[t]))
        most = max(most, np.int32(bits ^ ((bits >> np.int32(31)) & _MAGNITUDE)))
    return number(np.uint32(most ^ ((most >> np.int32(31)) & _MAGNITUDE)))


@_jit
def powers(values, most):
    """2**(v - most) in place of values float32 [n], to 3e-7 of it where that is above 2**-120, which is the least."""
    for t in range(len(values)):
        exponent = values[t] - most
        exponent = _LEAST if exponent < _LEAST else exponent
        whole = exponent + _ROUNDING
        f = exponent - (whole - _ROUNDING)
        power = _POWERS[5]
        power = power * f + _POWERS[4]
        power = power * f + _POWERS[3]
        power = power * f + _POWERS[2]
        power = power * f + _POWERS[1]
        power = power * f + _POWERS[0]
        values[t] = number(np.uint32(bits_of(power) + np.uint32(bits_of(whole) << _23)))


@_summing
def _sum(values):
    total = np.float32(0.0)
    for t in range(len(values)):
        total += values[t]
    return total


@cache
def attend_of(width: int, shared: int) -> Any:
    """``attend`` for heads of one width E and S of them to a head of keys and values."""
    scores, mixed = _scores(width, shared), _mixed(width, shared)

    @_jit
    def attend(queries, keys, values, first, last, scale, start, stop, out):
        """out [B, H, E] = softmax(scale / log2(e) * q k) v of rows start … stop - 1, over the columns first[b] …
        last - 1 of each; queries [B, H, E], keys and values [B, G, C, E], all bf16 bits uint16; first int64 [B]; last
        is 16 at least."""
        groups, columns = keys.shape[1], keys.shape[2]
        query, block = np.empty(shared * width, np.float32), np.empty(LANES * width, np.float32)
        weights, sums = np.empty((shared, last), np.float32), np.empty(shared * width, np.float32)
        for b in range(start, stop):
            for g in range(groups):
                room = (b * groups + g) * columns * width
                for s in range(shared):
                    for e in range(width):
                        query[s * width + e] = number(np.uint32(queries[b, g * shared + s, e]) << _16) * scale
                for start_column in range(first[b], last, LANES):
                    # The last block may overlap the one before, or reach into the padding, whose scores nobody reads.
                    column = min(start_column, last - LANES)
                    scores(query, keys, block, weights, room + column * width, column, last)
                for s in range(shared):
                    own = weights[s, first[b] :]
                    powers(own, largest(own))
                mixed(weights, values, sums, room, first[b], last, last)
                for s in range(shared):
                    share = np.float32(1.0) / _sum(weights[s, first[b] :])
                    into = out[b, g * shared + s]
                    for e in range(width):
                        into[e] = bf16(sums[s * width + e] * share)

    return attend
