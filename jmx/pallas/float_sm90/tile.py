"""The tile of a warpgroup, 64 rows by n columns: the order of its elements in registers, and how it is stored.

Of each 8 columns a thread holds two of a row, so that a store of what it holds would write 8 or 16 bytes a thread in
pieces of 16 or 32. Threads that have the same row first exchange columns: each then has 16 bytes in a row, and four of
them 64.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90 import mlir
from jmx.pallas.sm90.mlir import constant, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, fragment, operation, result
from jmx.pallas.sm90.tiles import THREADS, TILE
from jmx.util.typing import Array, Float32, Int32

SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_ROW_BYTES = 2 * TILE  # of a row of a swizzled tile
_CHUNK = 16  # bytes of a store
_CHUNKS = _ROW_BYTES // _CHUNK
Accumulator: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
Scalar = Int32[Array, ""]


def store(
    out: Ref, acc: Float32[Array, "64 n"], first: Scalar, bounds: tuple[Scalar, Scalar], column: Scalar, columns: int
) -> None:
    """Writes those rows of a tile that are inside `bounds`, and its columns up to `columns`, to global memory.

    Args:
        out: of float32 or 16-bit floats, `columns` (a multiple of 8) next to each other in each row.
        acc: n is a multiple of 32.
        first, column: the row and the column of `out` of the tile's first element.
        bounds: the first row of `out` that is written, and the one after the last.
    """

    @operation(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *(SCALAR,) * 4))
    def body(_: Any, out: ir.Value, acc: Fragment, *scalars: Fragment) -> None:
        first, start, end, column = (scalar.registers.item() for scalar in scalars)
        element = ir.MemRefType(out.type).element_type
        thread = mlir.thread_index()
        lane = arith.remui(thread, constant(4))
        row = arith.addi(first, arith.addi(_times(arith.divui(thread, constant(32)), 16), _row_of_eight(thread)))
        held = acc.registers.reshape(-1, 2)
        wide = element == mlir.f32()
        step = 2 if wide else 4  # groups of 8 columns that four threads exchange
        mine = _columns_of_two(lane) if wide else _times(lane, 8)
        at = arith.addi(column, mine)
        for second in range(2):
            here = arith.addi(row, constant(8 * second))
            inside = arith.andi(
                arith.cmpi(arith.CmpIPredicate.sge, here, start), arith.cmpi(arith.CmpIPredicate.slt, here, end)
            )
            left = arith.select(inside, arith.subi(constant(columns), at), constant(0))
            line = arith.muli(mlir.wide(here), constant(columns, mlir.i64()))
            address = mlir.address_of(out, arith.addi(line, mlir.wide(at)), element)
            for eight in range(0, len(held), step):
                pairs = [*held[eight : eight + step, second]]
                words = _exchange_two(pairs, lane) if wide else _exchange_four(pairs, element, lane)
                there = arith.cmpi(arith.CmpIPredicate.sgt, left, constant(8 * eight))
                offset = 8 * eight * utils.bitwidth(element) // 8
                text = f"@$5 st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
                utils.inline_ptx(text, address, *words, there, has_side_effects=True)

    body(out, acc, first, *bounds, column)


def add_rows(
    acc: Float32[Array, "64 n"], rows: Ref, first: Scalar, bounds: tuple[Scalar, Scalar], column: Scalar
) -> Float32[Array, "64 n"]:
    """The tile plus those of `rows` (R, columns), bfloat16 in global memory, at its place.

    What is outside `bounds` or the columns gets any numbers. Arguments are those of `store`.
    """
    shape, columns = acc.shape, rows.shape[1]

    @operation(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, *(SCALAR,) * 4),
        return_type=result(shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, rows: ir.Value, acc: Fragment, *scalars: Fragment) -> Fragment:
        first, start, end, column = (scalar.registers.item() for scalar in scalars)
        thread = mlir.thread_index()
        lane = arith.remui(thread, constant(4))
        row = arith.addi(first, arith.addi(_times(arith.divui(thread, constant(32)), 16), _row_of_eight(thread)))
        held, words = acc.registers.reshape(-1, 2), ir.VectorType.get((4,), mlir.i32())
        sums: list[list[Any]] = [[None, None] for _ in held]
        for second in range(2):
            here = arith.minsi(arith.addi(row, constant(8 * second)), arith.subi(end, constant(1)))
            line = arith.muli(mlir.wide(arith.maxsi(here, start)), constant(columns, mlir.i64()))
            for eight in range(0, len(held), 4):
                at = arith.addi(column, arith.addi(_times(lane, 8), constant(8 * eight)))
                at = arith.minsi(at, constant(columns - 8))
                address = mlir.address_of(rows, arith.addi(line, mlir.wide(at)), ir.BF16Type.get())
                loaded = llvm.load(words, address, alignment=_CHUNK)
                found = _transposed([llvm.extractelement(loaded, constant(i)) for i in range(4)], lane)
                for i, word in enumerate(found):
                    sums[eight + i][second] = arith.addf(held[eight + i, second], _unpacked(word))
        return fragment((one for pair in sums for one in pair), shape, acc.layout)

    return body(rows, acc, first, *bounds, column)


def add_columns(acc: Float32[Array, "64 n"], values: Ref, group: Scalar, column: Scalar) -> Float32[Array, "64 n"]:
    """Each row of the tile plus values[group] (columns,), float32 in global memory, from `column` on; past the end any
    numbers."""
    shape, columns = acc.shape, values.shape[1]

    @operation(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, SCALAR, SCALAR),
        return_type=result(shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, values: ir.Value, acc: Fragment, group: Fragment, column: Fragment) -> Fragment:
        lane = arith.remui(mlir.thread_index(), constant(4))
        held, two = acc.registers.reshape(-1, 2), ir.VectorType.get((2,), mlir.f32())
        line = arith.muli(mlir.wide(group.registers.item()), constant(columns, mlir.i64()))
        sums = []
        for eight in range(len(held)):
            at = arith.addi(column.registers.item(), arith.addi(_times(lane, 2), constant(8 * eight)))
            at = arith.minsi(at, constant(columns - 2))
            found = llvm.load(two, mlir.address_of(values, arith.addi(line, mlir.wide(at)), mlir.f32()), alignment=8)
            sums += [arith.addf(held[eight, second], found) for second in range(2)]
        return fragment(sums, shape, acc.layout)

    return body(values, acc, group, column)


def every_other_eight(acc: Float32[Array, "64 n"], which: int) -> Float32[Array, "64 half"]:
    """Of each 16 columns of a tile the first 8, or, if `which` is 1, the last 8."""
    shape = (acc.shape[0], acc.shape[1] // 2)

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=result(shape, jnp.float32, plgpu.Layout.WGMMA))
    def body(_: Any, acc: Fragment) -> Fragment:
        return fragment(acc.registers.reshape(-1, 2)[which::2].reshape(-1), shape, acc.layout)

    return body(acc)


def _unpacked(word: ir.Value) -> ir.Value:
    """A word of two bfloat16 as a pair of float32."""
    low, high = arith.shli(word, constant(16)), arith.andi(word, constant(-65536))
    return mlir.pair(*(utils.bitcast(half, mlir.f32()) for half in (low, high)))


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, constant(factor))


def _row_of_eight(thread: ir.Value) -> ir.Value:
    """The row, of 8, that a thread has elements of."""
    return arith.divui(arith.remui(thread, constant(32)), constant(4))


def _columns_of_two(lane: ir.Value) -> ir.Value:
    """The first of the four columns, of 16, that a thread has after `_exchange_two`."""
    return arith.addi(_times(arith.andi(lane, constant(1)), 8), _times(arith.shrui(lane, constant(1)), 4))


def _bit(lane: ir.Value, bit: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, constant(bit)), constant(0))


def _swapped(a: ir.Value, b: ir.Value, set_: ir.Value, distance: int) -> tuple[ir.Value, ir.Value]:
    """Threads that differ in one bit of their lane exchange: that without it gets both `a`, the other both `b`."""
    got = utils.shfl_bfly(arith.select(set_, a, b), distance)
    return arith.select(set_, got, a), arith.select(set_, b, got)


def _packed(two: ir.Value, element: ir.Type) -> ir.Value:
    """A pair of float32 as 16-bit floats in one word."""
    kind = "bf16" if element == ir.BF16Type.get() else "f16"
    low, high = (llvm.extractelement(two, constant(i)) for i in range(2))
    return mlir.run(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", low, high)


def _exchange_four(pairs: Sequence[ir.Value], element: ir.Type, lane: ir.Value) -> list[ir.Value]:
    """Each of four threads has a pair of float32 of four groups of columns -> all words of the group of its lane."""
    return _transposed([_packed(pair, element) for pair in pairs], lane)


def _transposed(words: Sequence[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """Each of four threads has four words -> those that all have at the place of its lane; twice is the identity."""
    a, b, c, d = words
    odd, upper = _bit(lane, 1), _bit(lane, 2)
    (a, b), (c, d) = _swapped(a, b, odd, 1), _swapped(c, d, odd, 1)
    (a, c), (b, d) = _swapped(a, c, upper, 2), _swapped(b, d, upper, 2)
    return [a, b, c, d]


def _exchange_two(pairs: Sequence[ir.Value], lane: ir.Value) -> list[ir.Value]:
    """Each of two threads has a pair of float32 of two groups of columns -> both pairs of one group."""
    odd = _bit(lane, 1)
    halves = [[utils.bitcast(llvm.extractelement(pair, constant(i)), mlir.i32()) for i in range(2)] for pair in pairs]
    exchanged = [_swapped(a, b, odd, 1) for a, b in zip(*halves, strict=True)]
    return [exchanged[i][pair] for pair in range(2) for i in range(2)]


def keep_rows(buffers: Sequence[Ref], start: Scalar, end: Scalar) -> None:
    """Sets to zero all rows of buffers (64, n) but those from `start` to `end`; wgmma then sees the zeros.

    `buffers`: in shared memory, of 16-bit elements, with transforms `SWIZZLED`.
    """

    @operation(arg_types=([plgpu.RefType(SWIZZLED)] * len(buffers), SCALAR, SCALAR))
    def body(_: Any, buffers: list[ir.Value], start: Fragment, end: Fragment) -> None:
        at_once = THREADS * _CHUNK // _ROW_BYTES  # rows that a warpgroup writes at a time
        thread = mlir.thread_index()
        row, chunk = arith.divui(thread, constant(_CHUNKS)), arith.remui(thread, constant(_CHUNKS))
        for first in range(0, TILE, at_once):
            here = arith.addi(row, constant(first))
            outside = arith.ori(
                arith.cmpi(arith.CmpIPredicate.slt, here, start.registers.item()),
                arith.cmpi(arith.CmpIPredicate.sge, here, end.registers.item()),
            )
            for buffer in buffers:
                _, tiles, *_ = ir.MemRefType(buffer.type).shape
                (eight_stride, tile_stride, *_), _ = ir.MemRefType(buffer.type).get_strides_and_offset()
                base = llvm.ptrtoint(mlir.i32(), utils.memref_ptr(buffer))
                base = arith.addi(base, _times(arith.divui(here, constant(8)), 2 * eight_stride))
                in_eight = arith.addi(_times(arith.remui(here, constant(8)), _ROW_BYTES), _times(chunk, _CHUNK))
                for tile in range(tiles):
                    text = f"@$2 st.shared.v4.b32 [$0 + {2 * tile * tile_stride}], {{$1, $1, $1, $1}};"
                    address = arith.addi(base, in_eight)
                    utils.inline_ptx(text, address, constant(0), outside, has_side_effects=True)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        utils.warpgroup_barrier()

    body([*buffers], start, end)
