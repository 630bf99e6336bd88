"""Rows of inputs rounded to a format as bfloat16 (`rounded_inputs`), by one kernel, which writes each where it is read.

A warpgroup takes a row: it loads all of it, finds the largest magnitudes (of a block among neighboring lanes), divides,
rounds, and multiplies by the scale of the block, in registers. So a row is read once, and its elements are never
stored. The bits are those of `rounded_inputs.round_rows`, except that a NaN has any sign.

A quotient q is rounded to m bits of mantissa by adding and subtracting 1.5 * 2^(23 - m) times its power of two, or the
least one of a normal element: the sum has that power's 2^-m as its last bit, and rounds to nearest, ties to even.
Quotients by powers of two are exact products.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.numerics import input_formats
from jmx.numerics.input_formats import InputFormat
from jmx.pallas.mosaic_sm90.rounded_inputs import RoundedRows
from jmx.pallas.sm90 import row
from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.mlir import address_of, constant, i32, i64, less, run, thread_index, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation, optional
from jmx.pallas.sm90.tiles import VECTOR
from jmx.util.typing import Array, Float, Float32, Int32

_MIDDLE = 1.5 * 2.0**23
INTEGER = "{ .reg .f32 a; mov.b32 a, $1; add.rn.f32 a, a, 0f4B400000; sub.rn.f32 a, a, 0f4B400000; mov.b32 $0, a; }"
_MINIFLOAT = (  # to the nearest element: `least`, the least normal one, `factor` and `most` are bits of float32
    "{{ .reg .f32 a, c, m; .reg .b32 s; mov.b32 a, $1; and.b32 s, $1, 0x7F800000; max.u32 s, s, {least:#x}; "
    "mov.b32 c, s; mul.rn.f32 c, c, 0f{factor:08X}; add.rn.f32 a, a, c; sub.rn.f32 a, a, c; "
    "mov.b32 m, {most:#x}; min.NaN.f32 a, a, m; neg.f32 m, m; max.NaN.f32 a, a, m; "
    "mov.b32 s, a; lop3.b32 $0, $1, 0x80000000, s, 0xEA; }}"  # a zero keeps its sign
)
_PACK = (  # two numbers times a scale, in bfloat16
    "{ .reg .f32 a, b, c; mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; "
    "mul.rn.f32 a, a, c; mul.rn.f32 b, b, c; cvt.rn.bf16x2.f32 $0, b, a; }"
)
_ONE, _BEYOND = 0x3F800000, 0x44000000  # 1, and 512, which like all larger quotients becomes the largest e4m3
_LEAST_POWER = 1 << 22  # 2^-127, a subnormal
# Scales that are powers of two: what is added to the bits of the largest magnitude, and subtracted from its exponent.
_POWERS = {"mxfp4": (1 << 21, 2)}
_POWERS_OF_E4M3 = (1 << 21) - 1, 8


def round_rows(
    x: Float[Array, "T C"],
    format: InputFormat,
    static_scale: Float32[Array, ""] | None,
    *,
    columns: int,
    width: int,
    row_of: Int32[Array, "T k"] | None = None,
    num_rows: int | None = None,
) -> RoundedRows:
    """The rows, rounded: values (R, width), with zeros after K columns.

    Args:
        x: of 2 or 4 bytes an element, C a multiple of 8.
        columns: K, those of x that are read, a multiple of 8.
        width: a multiple of 8, K or more.
        row_of: the rows of the result that each row of x is written to; negative ones are skipped. None: its own.
        num_rows: R with `row_of`. Rows that are not written have undefined contents.
    """
    rows = x.shape[0] if num_rows is None else num_rows
    shapes = [jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)]
    shapes += [] if isinstance(format.block_size, int) else [jax.ShapeDtypeStruct((rows,), jnp.float32)]
    static = None if static_scale is None else static_scale.reshape(1)

    def body(x: Ref, row_of: Ref, static: Ref, values: Ref, *scales: Ref, warp_maxima: Ref) -> None:
        with jax.named_scope("round"):
            scale = scales[0] if scales else None
            round_row(lax.axis_index("row"), format, columns, x, row_of, static, values, scale, warp_maxima)

    kernel = plgpu.kernel(
        body,
        out_type=shapes,
        grid=(x.shape[0],),
        grid_names=("row",),
        kernel_name=f"round_{format.name}",
        scratch_types={"warp_maxima": plgpu.SMEM((row.WORDS,), jnp.int32)},
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    values, *scales = launch(kernel, x, row_of, static)
    if scales:
        return RoundedRows(values, scales[0])
    return RoundedRows(values, None if static_scale is None else jnp.broadcast_to(static_scale, (rows,)))


def round_row(
    number: Int32[Array, ""],
    format: InputFormat,
    columns: int,
    x: Ref,
    row_of: Ref,
    static: Ref,
    values: Ref,
    scales: Ref,
    warp_maxima: Ref,
) -> None:
    """Rounds row `number` of x, by one warpgroup. The other arguments are those of `round_rows`, as references.

    Args:
        static: of shape (1,), or None, as `row_of` and `scales` may be.
        values, scales: what is written.
        warp_maxima: int32 (`row.WORDS`,) of shared memory, which other warpgroups do not use.
    """
    refs, dtype = (x, row_of, static, values, scales, warp_maxima), np.dtype(x.dtype)

    @operation(arg_types=(SCALAR, *(optional(ref, plgpu.RefType()) for ref in refs)))
    def body(
        _: Any,
        number: Fragment,
        x: ir.Value,
        row_of: ir.Value | None,
        static: ir.Value | None,
        values: ir.Value,
        scales: ir.Value | None,
        warp_maxima: ir.Value,
    ) -> None:
        nth = number.registers.item()
        _, stride = ir.MemRefType(x.type).shape
        (_, width), element = ir.MemRefType(values.type).shape, ir.MemRefType(values.type).element_type
        places = [nth] if row_of is None else row.places_of(row_of, nth)
        # `mov` hides the bound from LLVM, which would drop the branches of whole pieces.
        first = run("mov.b32 $0, $1;", arith.muli(thread_index(), constant(VECTOR)))
        starts = [arith.addi(first, constant(piece)) for piece in range(0, width, row.PIECE)]
        line = arith.muli(wide(nth), constant(stride, i64()))
        given = None if static is None else row.in_range(static, format)
        loaded = [row.load(x, line, start, columns, dtype) for start in starts]
        if scales is None:
            of_pieces = [_of_block(words, format, given, dtype) for words in loaded]
        else:
            scale = _of_row(loaded, format, given, warp_maxima, dtype)
            of_pieces = [(scale, constant(_ONE))] * len(loaded)
            with utils.when(less(thread_index(), constant(1))):
                row.each_place(places, lambda place: llvm.store(scale, address_of(scales, place, i32())))
        for start, words, (divisor, factor) in zip(starts, loaded, of_pieces, strict=True):
            with utils.when(less(start, constant(width))):  # else ptxas rounds all pieces at once
                elements = elements_of_block(row.floats_of(words, dtype), divisor, format)
                halves = [run(_PACK, *elements[i : i + 2], factor) for i in range(0, VECTOR, 2)]
                four = llvm.mlir_undef(ir.VectorType.get((4,), i32()))
                for i, two in enumerate(halves):
                    four = llvm.insertelement(four, two, constant(i))

                def store(place: ir.Value, start: ir.Value = start, four: ir.Value = four) -> None:
                    at = arith.addi(arith.muli(place, constant(width, i64())), wide(start))
                    llvm.store(four, address_of(values, at, element), alignment=16)

                row.each_place(places, store)

    body(number, *refs)


def _of_row(
    loaded: list[list[ir.Value]],
    format: InputFormat,
    static: ir.Value | None,
    warp_maxima: ir.Value,
    dtype: np.dtype[Any],
) -> ir.Value:
    """Bits of a row's scale."""
    if static is not None:
        return static
    largest = row.largest_of([row.largest_of(words, dtype) for words in loaded], dtype)
    largest = row.across_warps(row.across_lanes(largest, row.LANES, dtype), warp_maxima, dtype)
    return row.scale_of_row(largest, format, dtype)[0]


def _of_block(
    words: list[ir.Value], format: InputFormat, static: ir.Value | None, dtype: np.dtype[Any]
) -> tuple[ir.Value, ir.Value]:
    """`scale_of_block` of the block of this thread's elements."""
    assert isinstance(format.block_size, int)
    largest = row.across_lanes(row.largest_of(words, dtype), format.block_size // VECTOR, dtype)
    return scale_of_block(largest, format, static, dtype)


def scale_of_block(
    largest: ir.Value, format: InputFormat, static: ir.Value | None, dtype: np.dtype[Any]
) -> tuple[ir.Value, ir.Value]:
    """Bits of what a block's elements are divided by, and of what they are multiplied by once they are rounded, for its
    largest magnitude.

    Of a scale that is a power of two the first is its reciprocal, which multiplies.
    """
    largest, finite = row.as_float(largest, dtype)
    if static is not None:
        limit = run(row.PRODUCT, constant(int(np.float32(6).view(np.int32))), static)
        quotient = arith.minui(run(row.QUOTIENT, largest, limit), constant(_BEYOND))
        scale = _minifloat(quotient, np.dtype(jnp.float8_e4m3fn))
        scale = arith.maxui(scale, constant(int(np.float32(2.0**-9).view(np.int32))))
        scale = arith.select(finite, scale, constant(row.NAN))
        return run(row.PRODUCT, scale, static), scale
    added, subtracted = _POWERS.get(format.name, _POWERS_OF_E4M3)
    code = arith.shrui(arith.addi(largest, constant(added)), constant(23))
    code = arith.maxsi(arith.subi(code, constant(subtracted)), constant(0))
    power = arith.maxui(arith.shli(code, constant(23)), constant(_LEAST_POWER))
    reciprocal = arith.shli(arith.subi(constant(254), code), constant(23))
    return reciprocal, arith.select(finite, power, constant(row.NAN))


def elements_of_block(floats: list[ir.Value], divisor: ir.Value, format: InputFormat) -> list[ir.Value]:
    """Bits of the elements nearest to quotients."""
    if not isinstance(format.block_size, int):
        found = (row.limited_quotients if format.static else row.quotients)(floats, divisor)
        if format.element_dtype == np.int8:
            return [run(INTEGER, one) for one in found]
    elif format == input_formats.NVFP4:
        found = row.limited_quotients(floats, divisor)
    else:
        found = [run(row.PRODUCT, one, divisor) for one in floats]
    return [_minifloat(one, format.element_dtype) for one in found]


def _minifloat(quotient: ir.Value, dtype: np.dtype[Any]) -> ir.Value:
    return run(minifloat_ptx(dtype), quotient)


def minifloat_ptx(dtype: Any) -> str:
    """PTX that rounds float32 bits to the nearest number of a narrower float, ties to even, saturating."""
    limits = jnp.finfo(dtype)

    def bits(number: float) -> int:
        return int(np.float32(number).view(np.int32))

    factor = bits(_MIDDLE * 2.0**-limits.nmant)
    return _MINIFLOAT.format(least=bits(2.0**limits.minexp), factor=factor, most=bits(float(limits.max)))
