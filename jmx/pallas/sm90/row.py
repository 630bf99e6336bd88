"""A row of inputs in the registers of a warpgroup, for one thread: loads, largest magnitudes, scales, quotients.

Rows are rounded to the bits of `jmx.numerics.input_formats.quantize`. A quotient is computed from the correctly rounded
reciprocal of the scale by two corrections. By a theorem of Markstein (IBM Journal of Research and Development 34, 1990,
p. 111) the second one gives the correctly rounded quotient, unless a remainder underflows. So small scales and their
dividends are multiplied by 2^64, which is exact; what underflows then rounds to zero. `div.rn` takes twice as many
instructions, and a branch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.numerics.input_formats import InputFormat, static_limits
from jmx.pallas.sm90.accumulator import load_words
from jmx.pallas.sm90.mlir import address_of, constant, i32, i64, less, run, thread_index, utils, wide
from jmx.pallas.sm90.tiles import THREADS, VECTOR

WORDS = 4  # for the largest magnitude in each warp
LANES = 32
PIECE = THREADS * VECTOR  # columns that a warpgroup loads at a time
NAN = 0x7FC00000
QUOTIENT = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; div.rn.f32 a, a, b; mov.b32 $0, a; }"
PRODUCT = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; mul.rn.f32 a, a, b; mov.b32 $0, a; }"
_INFINITY = {2: 0x7F80, 4: 0x7F800000}  # bits; of float16 0x7C00
_LEAST_SCALE = 0x00800000  # 2^-126
_AS_FLOAT = {
    "bfloat16": ("shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xFFFF0000;"),
    "float16": tuple(
        f"{{ .reg .b16 l, h; .reg .f32 f; mov.b32 {{l, h}}, $1; cvt.f32.f16 f, {half}; mov.b32 $0, f; }}"
        for half in "lh"
    ),
}
_LARGER = {2: "max.u16x2 $0, $1, $2;", 4: "max.u32 $0, $1, $2;"}
_MAGNITUDE = {2: "and.b32 $0, $1, 0x7FFF7FFF;", 4: "and.b32 $0, $1, 0x7FFFFFFF;"}
_LARGER_HALF = "{ .reg .b32 h; shr.u32 h, $1, 16; and.b32 $0, $1, 0xFFFF; max.u32 $0, $0, h; }"
_ACROSS = "shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
_SMALL, _RAISE, _ONE = 0x1F800000, 0x5F800000, 0x3F800000  # 2^-64, 2^64, 1
_CORRECTED = (  # of a value, a scale, its reciprocal, and the power of two that both are multiplied by; keeps -0
    "{ .reg .f32 a, b, r, k, q, e; .reg .b32 s; mov.b32 a, $1; mov.b32 b, $2; mov.b32 r, $3; mov.b32 k, $4; "
    "mul.rn.f32 a, a, k; mul.rn.f32 q, a, r; neg.f32 b, b; "
    "fma.rn.f32 e, q, b, a; fma.rn.f32 q, e, r, q; fma.rn.f32 e, q, b, a; fma.rn.f32 q, e, r, q; "
    "mov.b32 s, q; lop3.b32 $0, $1, 0x80000000, s, 0xEA; }"  # (value & sign) | quotient
)
_BEYOND = 0x44000000  # 512, which like all larger quotients becomes the largest element
_LIMITED = (  # `min` and `max` drop NaN, which `_SPOIL` restores
    "{ .reg .f32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; neg.f32 c, b; "
    "min.f32 a, a, b; max.f32 a, a, c; mov.b32 $0, a; }"
)
_SPOIL = "{ .reg .f32 a, b; mov.b32 a, $1; mov.b32 b, $2; fma.rn.f32 b, a, 0f00000000, b; mov.b32 $0, b; }"


def places_of(row_of: ir.Value, number: ir.Value) -> list[ir.Value]:
    """The rows of a result for row `number`, of `row_of` int32 (rows, k)."""
    _, count = ir.MemRefType(row_of.type).shape
    first = arith.muli(wide(number), constant(count, i64()))
    at = (arith.addi(first, constant(nth, i64())) for nth in range(count))
    return [llvm.load(i32(), address_of(row_of, one, i32())) for one in at]


def each_place(places: list[ir.Value], store: Callable[[ir.Value], Any]) -> None:
    """Calls `store` with each of `places`, in 64 bits; it skips negative ones, which are no rows."""
    for place in places:
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, place, constant(0))):
            store(wide(place))


def in_range(static: ir.Value, format: InputFormat) -> ir.Value:
    """Bits of the static scale; NaN if it is not a valid one."""
    given = llvm.load(i32(), address_of(static, constant(0), i32()))
    least, most = (constant(int(limit.view(np.int32))) for limit in static_limits(format))
    fits = arith.andi(
        arith.cmpi(arith.CmpIPredicate.sge, given, least), arith.cmpi(arith.CmpIPredicate.sle, given, most)
    )
    return arith.select(fits, given, constant(NAN))


def load(x: ir.Value, line: ir.Value, column: ir.Value, columns: int, dtype: np.dtype[Any]) -> list[ir.Value]:
    """The thread's 8 elements, in 4 or 8 words; zeros past the last column."""
    element = ir.MemRefType(x.type).element_type
    inside = less(column, constant(columns))
    at = arith.addi(line, wide(arith.select(inside, column, constant(0))))
    words = []
    for part in range(dtype.itemsize // 2):
        address = address_of(x, arith.addi(at, constant(4 * part, i64())), element)
        loaded = llvm.load(ir.VectorType.get((4,), i32()), address, alignment=16)
        words += [llvm.extractelement(loaded, constant(i)) for i in range(4)]
    return [arith.select(inside, word, constant(0)) for word in words]


def largest_of(words: list[ir.Value], dtype: np.dtype[Any]) -> ir.Value:
    """The largest magnitude in words, or in each half of them."""
    magnitudes = [run(_MAGNITUDE[dtype.itemsize], word) for word in words]
    while len(magnitudes) > 1:
        pairs = zip(magnitudes[::2], magnitudes[1::2], strict=False)
        rest = magnitudes[len(magnitudes) // 2 * 2 :]
        magnitudes = [run(_LARGER[dtype.itemsize], one, other) for one, other in pairs] + rest
    return magnitudes[0]


def across_lanes(largest: ir.Value, lanes: int, dtype: np.dtype[Any], *, least: int = 1) -> ir.Value:
    """The largest, in words or in each half of them, over groups of so many lanes, of those `least` apart."""
    distance = lanes // 2
    while distance >= least:
        other = utils.inline_ptx(_ACROSS.format(distance=distance), largest, result_types=i32(), has_side_effects=True)
        largest = run(_LARGER[dtype.itemsize], largest, other)
        distance //= 2
    return largest


def across_warps(largest: ir.Value, warp_maxima: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    """The same over warps, in each of which all lanes have the same value."""
    warp = arith.divui(thread_index(), constant(LANES))
    utils.warpgroup_barrier()  # all have read the words of the row before
    llvm.store(largest, address_of(warp_maxima, warp, i32()))  # all lanes store the same
    utils.warpgroup_barrier()
    return largest_of(load_words(warp_maxima, constant(0), WORDS), dtype)


def as_float(largest: ir.Value, dtype: np.dtype[Any]) -> tuple[ir.Value, ir.Value]:
    """Float32 bits of a largest magnitude, and whether that is finite."""
    if dtype.itemsize == 2:
        largest = run(_LARGER_HALF, largest)
    infinity = 0x7C00 if dtype == np.float16 else _INFINITY[dtype.itemsize]
    finite = less(largest, constant(infinity))
    return largest if dtype.itemsize == 4 else run(_AS_FLOAT[dtype.name][0], largest), finite


def floats_of(words: list[ir.Value], dtype: np.dtype[Any]) -> list[ir.Value]:
    """Float32 bits of the elements in words."""
    return words if dtype.itemsize == 4 else [run(text, word) for word in words for text in _AS_FLOAT[dtype.name]]


def scale_of_row(largest: ir.Value, format: InputFormat, dtype: np.dtype[Any]) -> tuple[ir.Value, ir.Value]:
    """Float32 bits of the scale for a largest magnitude, and whether that is finite."""
    largest, finite = as_float(largest, dtype)
    scale = run(QUOTIENT, largest, constant(int(np.float32(format.largest).view(np.int32))))
    scale = arith.maxui(scale, constant(_LEAST_SCALE))
    return arith.select(finite, scale, constant(NAN)), finite


def quotients(values: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Quotients of values of at most 512 times the scale, so that the multiplication does not overflow."""
    power = arith.select(less(scale, constant(_SMALL)), constant(_RAISE), constant(_ONE))
    scaled = run(PRODUCT, scale, power)
    reciprocal = run(QUOTIENT, constant(_ONE), scaled)
    return [run(_CORRECTED, value, scaled, reciprocal, power) for value in values]


def limited_quotients(values: list[ir.Value], scale: ir.Value) -> list[ir.Value]:
    """Quotients of any values: beyond 512, that, and NaN for NaN and infinity."""
    beyond = run(PRODUCT, scale, constant(_BEYOND))
    found = quotients([run(_LIMITED, value, beyond) for value in values], scale)
    return [run(_SPOIL, value, quotient) for value, quotient in zip(values, found, strict=True)]
