"""Scales and biases of rows or columns for one thread: loaded early, and converted after the products."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.decode import SLICES
from jmx.pallas.sm90 import mlir
from jmx.pallas.sm90.accumulator import of_registers, row_array, row_size
from jmx.pallas.sm90.epilogue import index_of_row
from jmx.pallas.sm90.gemm import Rows
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, fragment, operation, result
from jmx.pallas.sm90.tiles import THREADS
from jmx.util.typing import Array, Float32, Int32

_ONE_EACH = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
_WORDS: Any = result((THREADS,), jnp.int32, _ONE_EACH)  # one per thread


def load_row_words(
    array: Ref, rows: Rows, expert: Int32[Array, ""], tile: Int32[Array, ""]
) -> tuple[Int32[Array, "128"], Int32[Array, "128"]]:
    """array[expert, row], of a reference (E, N), for the thread's first and second row of a tile, as words of its bits.

    A warp waits for a load where it first computes with the result, so that is left to `values_of`, after the products.
    In the padding it is the value of some other row.
    """
    bits = 8 * jnp.dtype(array.dtype).itemsize

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=(_WORDS, _WORDS))
    def body(_: Any, array: ir.Value, expert: Fragment, tile: Fragment) -> tuple[Fragment, ...]:
        both = rows.weight(rows.output(tile.registers.item()))
        found = (index_of_row(rows.num_rows, expert.registers.item(), row) for row in both)
        return tuple(_word(array, at, bits) for at, _ in found)

    return body(array, expert, tile)


def values_of(
    words: tuple[Int32[Array, "128"], Int32[Array, "128"]], dtype: Any, n: int
) -> tuple[Float32[Array, " m"], ...]:
    """Words from `load_row_words` of a `dtype` as float32, repeated to per-thread elements of n columns."""

    def value(word: ir.Value) -> ir.Value:
        element = mlir.utils.dtype_to_ir_type(jnp.dtype(dtype))
        if element == mlir.f32():
            return llvm.bitcast(element, word)
        return arith.extf(mlir.f32(), llvm.bitcast(element, arith.trunci(ir.IntegerType.get_signless(16), word)))

    return _repeated(words, value, n)


def load_codes(
    scales: Ref, expert: Int32[Array, ""], tile: Int32[Array, ""]
) -> tuple[Int32[Array, "128"], Int32[Array, "128"]]:
    """MXFP4's largest scale codes of the thread's first and second row of a tile, as `load_row_words` loads values.

    `scales`: a reference to the layout's scales, uint8 (E, row tiles, units + 1, 256); the last chunk has these codes.
    """

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=(_WORDS, _WORDS))
    def body(_: Any, scales: ir.Value, expert: Fragment, tile: Fragment) -> tuple[Fragment, ...]:
        _, tiles, chunks, chunk_bytes = ir.MemRefType(scales.type).shape
        row = arith.addi(arith.muli(expert.registers.item(), mlir.constant(tiles)), tile.registers.item())
        last = arith.addi(
            arith.muli(mlir.wide(row), mlir.constant(chunks, mlir.i64())), mlir.constant(chunks - 1, mlir.i64())
        )
        chunk = arith.muli(last, mlir.constant(chunk_bytes, mlir.i64()))
        group = arith.muli(arith.shrui(mlir.thread_index(), mlir.constant(2)), mlir.constant(2 * SLICES))
        both = (arith.addi(group, mlir.constant(below * SLICES)) for below in range(2))
        return tuple(_word(scales, arith.addi(chunk, mlir.wide(mine)), 8) for mine in both)

    return body(scales, expert, tile)


def powers_of(codes: tuple[Int32[Array, "128"], Int32[Array, "128"]], n: int) -> tuple[Float32[Array, " m"], ...]:
    """Codes from `load_codes` as powers of two, repeated to per-thread elements of n columns."""

    def power(code: ir.Value) -> ir.Value:
        bits = arith.shli(code, mlir.constant(23))
        bits = arith.select(mlir.less(code, mlir.constant(1)), mlir.constant(1 << 22), bits)  # 2^-127 is subnormal
        return llvm.bitcast(
            mlir.f32(), arith.select(mlir.less(code, mlir.constant(255)), bits, mlir.constant(0x7FC00000))
        )

    return _repeated(codes, power, n)


def _repeated(words: Sequence[Array], convert: Callable[[ir.Value], ir.Value], n: int) -> tuple[Array, ...]:
    @operation(arg_types=(_ONE_EACH,), return_type=row_array(row_size(n)))
    def body(_: Any, word: Fragment) -> Fragment:
        value = convert(llvm.extractelement(word.registers.item(), mlir.constant(0)))
        return of_registers([mlir.pair(value, value)] * (n // 8), row_size(n))

    return tuple(body(word) for word in words)


def _word(array: ir.Value, index: ir.Value, bits: int) -> Fragment:
    """An element of so many bits, zero-extended: the thread's element of `_WORDS`."""
    element = ir.IntegerType.get_signless(bits)
    loaded = llvm.load(element, mlir.address_of(array, index, element))
    word = loaded if bits == 32 else arith.extui(mlir.i32(), loaded)
    one = ir.VectorType.get((1,), mlir.i32())
    registers = [llvm.insertelement(llvm.mlir_undef(one), word, mlir.constant(0))]
    return fragment(registers, (THREADS,), mgpu.WGStridedFragLayout((THREADS,), 1), is_signed=True)
