"""The tile of a warpgroup, 64 rows by n columns: the order of its elements in registers, and how it is stored.

Of each 8 columns a thread holds two of a row, so that a store of what it holds would write 8 or 16 bytes a thread in
pieces of 16 or 32. Threads that have the same row first exchange columns: each then has 16 bytes in a row, and four of
them 64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.float_sm90.config import BUFFERS, ROW_BYTES, Config
from jmx.pallas.sm90 import mlir
from jmx.pallas.sm90.mlir import constant, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation
from jmx.pallas.sm90.tiles import THREADS, TILE
from jmx.util.typing import Array, Float32, Int32

SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_CHUNK = 16  # bytes of a store
_CHUNKS = ROW_BYTES // _CHUNK
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


def buffers(config: Config, dtype: Any) -> Any:
    """The type of the buffers of results of all warpgroups, which `send` writes; None if results are not staged."""
    if not config.staged:
        return None
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    transforms: Any = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(ROW_BYTES)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM((config.num_warpgroups, BUFFERS, TILE, columns), dtype, transforms=transforms)


def send(results: Ref, acc: Float32[Array, "64 n"], copy: Callable[[Ref, int], None]) -> None:
    """Writes a tile to shared memory, some columns at a time, from where `copy` copies these to global memory.

    Copies are in flight when this returns: `plgpu.wait_smem_to_gmem` waits for them.

    Args:
        results: the buffers of a warpgroup.
        copy: takes a buffer, and the first of its columns in the tile; it commits no group.
    """
    number, _, width = results.shape
    for nth, column in enumerate(range(0, acc.shape[1], width)):
        buffer = results.at[nth % number]
        plgpu.wait_smem_to_gmem(number - 1, wait_read_only=True)
        buffer[...] = acc[:, column : column + width].astype(buffer.dtype)
        plgpu.commit_smem()
        copy(buffer, column)
        plgpu.commit_smem_to_gmem_group()


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
    a, b, c, d = (_packed(pair, element) for pair in pairs)
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
        at_once = THREADS * _CHUNK // ROW_BYTES  # rows that a warpgroup writes at a time
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
                in_eight = arith.addi(_times(arith.remui(here, constant(8)), ROW_BYTES), _times(chunk, _CHUNK))
                for tile in range(tiles):
                    text = f"@$2 st.shared.v4.b32 [$0 + {2 * tile * tile_stride}], {{$1, $1, $1, $1}};"
                    address = arith.addi(base, in_eight)
                    utils.inline_ptx(text, address, constant(0), outside, has_side_effects=True)
        utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        utils.warpgroup_barrier()

    body([*buffers], start, end)


def transpose(buffer: Ref, sums: Float32[Array, "m n"], column: int, row: int, count: int) -> None:
    """Writes a part of sums, whose rows are columns of the result, to the first rows of a buffer (rows, 64).

    Args:
        buffer: in shared memory, of 16-bit floats, with transforms `SWIZZLED`.
        column, row: of the result, the first ones of the part, which has 64 columns.
        count: of its rows, a multiple of 8.
    """

    @operation(arg_types=(plgpu.RefType(SWIZZLED), plgpu.Layout.WGMMA))
    def body(_: Any, buffer: ir.Value, sums: Fragment) -> None:
        element = ir.MemRefType(buffer.type).element_type
        held = sums.registers.reshape(sums.shape[0] // TILE, -1, 2)[column // TILE, row // 8 : (row + count) // 8]
        base = llvm.ptrtoint(mlir.i32(), utils.memref_ptr(buffer))
        thread = mlir.thread_index()
        lane = arith.remui(thread, constant(32))
        # A thread gives the address of a row of 8 columns: of the lower or upper 8 of its warp's 16, and of one of two
        # groups of 8 rows.
        inside = arith.remui(lane, constant(8))
        upper = arith.remui(arith.divui(lane, constant(8)), constant(2))
        second = arith.divui(lane, constant(16))
        chunk = arith.addi(_times(arith.divui(thread, constant(32)), 2), upper)
        chunk = arith.xori(chunk, inside)
        at = arith.addi(_times(arith.addi(_times(second, 8), inside), ROW_BYTES), _times(chunk, _CHUNK))
        at = arith.addi(base, at)
        for eight in range(0, count // 8, 2):
            two = held[eight : eight + 2]
            kind = "bf16" if element == ir.BF16Type.get() else "f16"
            halves = [llvm.extractelement(pair, constant(i)) for pair in two.flat for i in range(2)]
            names = [f"w{i}" for i in range(two.size)]
            packed = " ".join(
                f"cvt.rn.{kind}x2.f32 {name}, ${2 + 2 * i}, ${1 + 2 * i};" for i, name in enumerate(names)
            )
            joined = ", ".join(names)
            text = (
                f"{{ .reg .b32 {joined}; {packed} stmatrix.sync.aligned.m8n8.x{len(names)}.trans.shared.b16 "
                f"[$0 + {eight * 8 * ROW_BYTES}], {{{joined}}}; }}"
            )
            utils.inline_ptx(text, at, *halves, has_side_effects=True)

    body(buffer, sums)
