"""What one thread of a warpgroup does in the kernel of `kernel`: pieces of code below Pallas' arrays.

Pallas Mosaic GPU moves arrays that a whole warpgroup holds, but cannot say which thread holds what, nor convert e2m1
and e8m0 on Hopper. These functions can: each is a Pallas operation whose body is written for one thread, in MLIR and
PTX. `wgmma` leaves a thread of warp `w` and lane `l`, of an accumulator (64, n), row `16 * w + l // 4` and the row 8
below it, of both the columns `8 * i + 2 * (l % 4) + {0, 1}`. Here these two rows are the thread's *first* and *second*;
of a gated weight in the layout `mosaic_sm90` they are a gate and its up.

A thread's own elements of one row travel in arrays (32 * n,), whose order means nothing: they only go through
elementwise operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90.dequantize import Decoder
from jmx.pallas.mosaic_sm90.layout import GATED_ROWS, THREADS, TILE
from jmx.pallas.mosaic_sm90.mlir import (
    SCALAR,
    Fragment,
    address_of,
    constant,
    f32,
    i8,
    i32,
    i64,
    less,
    operation,
    pair,
    result,
    run,
    thread_index,
    utils,
    wide,
)

_ORDER_COPIES = "fence.proxy.async.global;"
_SHIFT_BYTES = 2 * TILE  # of a chunk of MXFP4's scales


class Weights(NamedTuple):
    """What has come of a weight by the tile: refs of tiles along the columns, None where the format lacks it."""

    values: Any
    scales: Any
    zero_points: Any


def row_array(size: int) -> Any:
    return result((size,), jnp.float32, _own(size))


def _own(size: int) -> Any:
    return plgpu.Layout.WG_STRIDED((size,), vec_size=2)


def of_registers(registers: Any, size: int) -> Fragment:
    layout = mgpu.WGStridedFragLayout((size,), 2)
    registers = np.array(registers, dtype=object).reshape(layout.registers_shape((size,)))
    return Fragment(_registers=registers, _layout=layout, _is_signed=None)


def row_size(n: int) -> int:
    """Size of the array of a thread's own elements of one row, where the accumulator has n columns."""
    return TILE // 2 * n


def load_words(ref: ir.Value, index: ir.Value, count: int) -> list[ir.Value]:
    """`count` words of 32 bits that follow each other in shared memory, the first the `index`th."""
    loaded = llvm.load(ir.VectorType.get((count,), i32()), address_of(ref, index, i32()), alignment=4 * count)
    return [llvm.extractelement(loaded, constant(i)) for i in range(count)]


def _pairs_of_tile(decoder: Decoder, weights: Sequence[ir.Value], exponent: ir.Value | None, tile: int) -> np.ndarray:
    """`Decoder.pairs` of a tile in shared memory; `weights`: those of `Weights` that there are."""
    thread, rest = thread_index(), [*weights]
    bits, values = decoder.tile.elements.bits, rest.pop(0)
    mine = arith.muli(thread, constant(4))
    words = [
        word
        for first in range(0, bits, 4)  # four words a load
        for word in load_words(values, arith.addi(mine, constant((tile * bits + first) * THREADS)), 4)
    ]
    group = arith.shrui(thread, constant(2))

    def of_group(count: int) -> list[ir.Value]:
        if not count:
            return []
        mine = arith.addi(arith.muli(group, constant(count)), constant(tile * THREADS // 4 * count))
        return load_words(rest.pop(0), mine, count)

    scales, zero_points = of_group(decoder.scale_words), of_group(decoder.zero_point_words)
    return decoder.pairs(words, scales, zero_points, exponent, run)


def _given(weights: Weights, exponent: jax.Array | None) -> tuple[list[Any], list[Any]]:
    """What there is of `weights`, and then `exponent`: arguments of an operation, and their types."""
    refs = [ref for ref in weights if ref is not None]
    scalars = [] if exponent is None else [exponent]
    return [*refs, *scalars], [*[plgpu.RefType()] * len(refs), *[SCALAR] * len(scalars)]


def _taken(given: Sequence[Any]) -> tuple[Sequence[ir.Value], ir.Value | None]:
    """`_given` as an operation's body sees it."""
    if isinstance(given[-1], Fragment):
        return given[:-1], given[-1].registers.item()
    return given, None


def dequantize(
    decoder: Decoder, weights: Weights, exponent: jax.Array | None, tile: int
) -> tuple[jax.Array, jax.Array]:
    """A tile's bytes in shared memory -> its two halves, bfloat16 (64, 32), as wgmma takes A.

    Args:
        exponent: int32, from `tile_scalars`; None but for MXFP4.
        tile: which of those in `weights`. That it is static makes it a part of the instructions, here and below.
    """
    half = result((TILE, TILE // 2), jnp.bfloat16, plgpu.Layout.WGMMA)
    arguments, types = _given(weights, exponent)

    @operation(arg_types=types, return_type=(half, half))
    def body(_: Any, *given: Any) -> tuple[Fragment, ...]:
        two = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = mgpu.WGMMA_LAYOUT
        halves = np.split(_pairs_of_tile(decoder, *_taken(given), tile), 2)
        return tuple(
            Fragment(
                _registers=np.array([utils.bitcast(pair, two) for pair in registers.flat], dtype=object).reshape(
                    layout.registers_shape((TILE, TILE // 2))
                ),
                _layout=layout,
                _is_signed=None,
            )
            for registers in halves
        )

    return body(*arguments)


def sums_of(acc: Fragment) -> list[ir.Value]:
    """The thread's elements of an accumulator, in the order of the instructions that add to it."""
    return [llvm.extractelement(two, constant(i)) for two in acc.registers.flat for i in range(2)]


def accumulator(acc: Fragment, sums: Sequence[ir.Value]) -> Fragment:
    """`acc` with other elements, in the order of `sums_of`."""
    registers = np.empty(len(sums) // 2, dtype=object)
    for i in range(len(registers)):
        registers[i] = pair(sums[2 * i], sums[2 * i + 1])
    return Fragment(_registers=registers.reshape(acc.registers.shape), _layout=acc.layout, _is_signed=None)


# How rows lie in shared memory: tiles of 8 rows by 64 columns, as wgmma and ldmatrix read them without conflicts.
SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE_128_BYTES = 1 << 30  # in the upper half of a descriptor


def multiply(acc: jax.Array, a: jax.Array, x: Any, tile: int, half: int) -> jax.Array:
    """acc (64, n) plus a (64, 32) times 32 columns of x, transposed, by `wgmma`; `wait_for_product` before it is used.

    `plgpu.wgmma` does the same with 5 instructions more a tile: its descriptors of x are sums of 64 bits each, where
    here all of a stage are one and a constant.

    Args:
        acc: float32, n a multiple of 8.
        a: bfloat16, from `dequantize`.
        x: ref (n, columns) in shared memory, in tiles of 8 rows by 64 columns swizzled by 128 bytes.
        tile, half: which columns.
    """
    n = acc.shape[1]
    size = n // 2
    operands = [f"${i}" for i in range(2 * size, 2 * size + 5)]  # behind the sums, which are outputs and inputs
    sums = ", ".join(f"${i}" for i in range(size))
    constraints = ",".join(["=f"] * size + [str(i) for i in range(size)] + ["r"] * 4 + ["l"])

    @operation(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, plgpu.RefType(SWIZZLED)),
        return_type=result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, acc: Fragment, a: Fragment, x: ir.Value) -> Fragment:
        (eight_stride, tile_stride, *_), _ = ir.MemRefType(x.type).get_strides_and_offset()
        upper = _SWIZZLE_128_BYTES | 2 * eight_stride >> 4
        lower = arith.shrui(llvm.ptrtoint(i32(), utils.memref_ptr(x)), constant(4))
        descriptor = utils.inline_ptx(f"mov.b64 $0, {{$1, {upper:#x}}};", lower, result_types=i64())
        pieces = np.array([utils.bitcast(two, i32()) for two in a.registers.flat], dtype=object).reshape(-1, 4)
        values = sums_of(acc)
        out = llvm.StructType.get_literal([f32()] * size)
        utils.inline_ptx("wgmma.fence.sync.aligned;", has_side_effects=True)
        for piece, mine in enumerate(pieces):
            offset = 2 * (tile * tile_stride + half * TILE // 2 + piece * 16) >> 4
            text = (
                f"{{ .reg .b64 d; add.s64 d, {operands[4]}, {offset}; "
                f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}}}, "
                f"{{{', '.join(operands[:4])}}}, d, 1, 1, 1, 0; }}"
            )
            made = llvm.inline_asm(
                out, [*values, *mine, descriptor], text, constraints, has_side_effects=True, asm_dialect=0
            )
            values = [llvm.extractvalue(f32(), made, [i]) for i in range(size)]
        utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
        return accumulator(acc, values)

    return body(acc, a, x)


def wait_for_product(acc: jax.Array) -> jax.Array:
    """What `multiply` returned, once it is there."""

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=result(acc.shape, jnp.float32, plgpu.Layout.WGMMA))
    def body(_: Any, acc: Fragment) -> Fragment:
        values = sums_of(acc)
        tied = ",".join(["=f"] * len(values) + [str(i) for i in range(len(values))])
        out = llvm.StructType.get_literal([f32()] * len(values))
        text = "wgmma.wait_group.sync.aligned 0;"
        made = llvm.inline_asm(out, values, text, tied, has_side_effects=True, asm_dialect=0)
        return accumulator(acc, [llvm.extractvalue(f32(), made, [i]) for i in range(len(values))])

    return body(acc)


def wait_for_earlier_products() -> None:
    """Until all but the last `multiply` is done, so that their `a` are free."""

    @operation()
    def body(_: Any) -> None:
        utils.inline_ptx("wgmma.wait_group.sync.aligned 1;", has_side_effects=True)

    body()


_LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def multiply_few(
    acc: jax.Array, decoder: Decoder, weights: Weights, exponent: jax.Array | None, x: Any, tile: int
) -> jax.Array:
    """acc (64, n) plus a tile times 64 columns of x, transposed, by `mma.sync`, each warp 16 of the rows.

    wgmma keeps four warps in step, cannot be awaited but as a whole, and at 8 columns takes twice as long.

    Args:
        acc: float32, n a multiple of 8.
        decoder, weights, exponent, tile: as for `dequantize`.
        x: as for `multiply`.
    """
    n = acc.shape[1]
    arguments, types = _given(weights, exponent)

    @operation(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(SWIZZLED), *types),
        return_type=result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, acc: Fragment, x: ir.Value, *given: Any) -> Fragment:
        a = _pairs_of_tile(decoder, *_taken(given), tile)
        sums, out = sums_of(acc), []
        (eight_stride, tile_stride, *_), _ = ir.MemRefType(x.type).get_strides_and_offset()
        base = llvm.ptrtoint(i32(), utils.memref_ptr(x))
        lane = arith.remui(thread_index(), constant(32))
        row, chunk = arith.remui(lane, constant(8)), arith.divui(lane, constant(8))
        for eight in range(n // 8):
            b = []
            for half in range(2):  # ldmatrix takes 32 of the 64 columns: 4 chunks of 16 bytes, where swizzling has them
                at = arith.xori(arith.addi(chunk, constant(4 * half)), row)
                at = arith.addi(arith.muli(row, constant(2 * TILE)), arith.muli(at, constant(16)))
                at = arith.addi(base, arith.addi(at, constant(2 * (eight * eight_stride + tile * tile_stride))))
                b += utils.inline_ptx(_LOAD_MATRICES, at, result_types=[i32()] * 4, has_side_effects=True)
            c = sums[4 * eight : 4 * eight + 4]
            for piece in range(TILE // 16):
                mine = [a[2 * piece + eights, r] for eights in range(2) for r in range(2)]
                c = utils.inline_ptx(_MULTIPLY, *mine, *b[2 * piece : 2 * piece + 2], *c, result_types=[f32()] * 4)
            out += c
        return accumulator(acc, out)

    return body(acc, x, *arguments)


def signal(counters: Any, index: jax.Array) -> None:
    """Adds 1 to counters[index], int32 in global memory, once all that the warpgroup has written there is seen by all.

    By copies by TMA, too, for which such writes are of another kind (PTX: the generic and the asynchronous proxy).
    """

    @operation(arg_types=(plgpu.RefType(), SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment) -> None:
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)
        utils.warpgroup_barrier()
        address = address_of(counters, index.registers.item(), i32())
        utils.SemaphoreRef(address).signal(1, memory_scope="gpu")

    body(counters, index)


def wait(counters: Any, index: jax.Array, value: jax.Array, *, warpgroup: bool = False) -> None:
    """A warp waits until counters[index] is `value` or more; then its copies by TMA see what was signalled.

    `warpgroup`: all of it waits, and sees that by loads, too.
    """
    threads = utils.ThreadSubset.WARPGROUP if warpgroup else utils.ThreadSubset.WARP

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment, value: Fragment) -> None:
        semaphore = utils.SemaphoreRef(address_of(counters, index.registers.item(), i32()))
        scope: Any = {"scope": threads, "memory_scope": "gpu"}
        semaphore.wait(value.registers.item(), decrement=False, **scope)
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)

    body(counters, index, value)


def split_rows(acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An accumulator (64, n) -> each thread's own elements of its first and its second row."""
    size = row_size(acc.shape[1])

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=(row_array(size), row_array(size)))
    def body(_: Any, acc: Fragment) -> tuple[Fragment, ...]:
        registers = acc.registers.reshape(-1, 2)
        return tuple(of_registers(registers[:, row], size) for row in range(2))

    return body(acc)


def load_rows(ref: Any, size: int) -> jax.Array:
    """What was stored in a ref (size,) of shared memory as an array of a thread's own elements."""
    return plgpu.load(ref, layout=_own(size), optimized=False)


def tile_scalars(scales: Any, expert: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of one row of tiles of MXFP4: what `dequantize` wants as `exponent`, and the float32 by which results are raised.

    A scale code s becomes the multiplier 2^(s - 1 - shift), whose bfloat16 exponent is s + 126 - shift. A shift of 127
    tells of a code 255, NaN, which no multiplier is: results are then raised by NaN.
    """
    returns = tuple(result((), dtype, SCALAR) for dtype in (jnp.int32, jnp.float32))

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=returns)
    def body(_: Any, scales: ir.Value, expert: Fragment, tile: Fragment) -> tuple[Fragment, ...]:
        _, tiles, chunks, _ = ir.MemRefType(scales.type).shape
        row = arith.addi(arith.muli(expert.registers.item(), constant(tiles)), tile.registers.item())
        last = arith.addi(arith.muli(wide(row), constant(chunks, i64())), constant(chunks - 1, i64()))
        at = address_of(scales, arith.muli(last, constant(_SHIFT_BYTES, i64())), i8())
        shift = arith.extui(i32(), llvm.load(i8(), at))
        exponent = arith.muli(arith.subi(constant(126), shift), constant(0x00800080))
        raised = llvm.bitcast(f32(), arith.shli(arith.addi(shift, constant(127)), constant(23)))
        raised = arith.select(less(shift, constant(127)), raised, utils.c(float("nan"), f32()))
        splat = partial(Fragment.splat, shape=())
        return splat(exponent, is_signed=True), splat(raised)

    return body(scales, expert, tile)


@dataclass(frozen=True)
class Rows:
    """Which rows of a weight a thread's two rows of a tile are.

    Args:
        num_rows: rows of the weight, without padding.
        gate_up_order: "interleaved" or "concatenated" where a tile holds gate and up; None where it does not.
    """

    num_rows: int
    gate_up_order: str | None

    @property
    def num_outputs(self) -> int:
        """Rows of what comes out of the epilogue, with padding to whole tiles."""
        return -(-self.outputs // TILE) * TILE

    @property
    def outputs(self) -> int:
        return self.num_rows if self.gate_up_order is None else self.num_rows // 2

    def output(self, tile: ir.Value) -> ir.Value:
        """The thread's first row of the output; where there is no gate, its second is 8 below."""
        warp, lane = arith.divui(thread_index(), constant(32)), arith.remui(thread_index(), constant(32))
        return self.output_of(tile, warp, arith.divui(lane, constant(4)))

    def output_of(self, tile: ir.Value, sixteen: ir.Value, eighth: ir.Value) -> ir.Value:
        """The row of the output for one of the first eight of some 16 rows of a tile."""
        tile_rows, rows = (TILE, 16) if self.gate_up_order is None else (GATED_ROWS, 8)
        row = arith.addi(arith.muli(tile, constant(tile_rows)), arith.muli(sixteen, constant(rows)))
        return arith.addi(row, eighth)

    def weight(
        self, row: ir.Value, of_output: Callable[[ir.Value], ir.Value] = lambda row: row
    ) -> tuple[ir.Value, ir.Value]:
        """The weight's rows of `output_of`, and 8 below in the tile; past the end where the tile is padding.

        `of_output`: the output in whose place each one stands.
        """
        if self.gate_up_order is None:
            return of_output(row), of_output(arith.addi(row, constant(8)))
        row = of_output(row)
        if self.gate_up_order == "interleaved":
            return arith.muli(row, constant(2)), arith.addi(arith.muli(row, constant(2)), constant(1))
        padding = arith.select(less(row, constant(self.outputs)), constant(0), constant(self.num_rows))
        return arith.addi(row, padding), arith.addi(row, constant(self.outputs))


def load_row(
    array: Any, rows: Rows, expert: jax.Array, tile: jax.Array, order: Any = None
) -> tuple[jax.Array, jax.Array]:
    """What `array` (E, N) has for the thread's first and second row of a tile, float32 (256,); 0 in the padding.

    `order`: a ref int32 (E, outputs) of the output in whose place, in `array`, each one stands; None: in its own.
    """
    size = row_size(8)
    orders = [] if order is None else [order]
    types = [plgpu.RefType(), SCALAR, SCALAR, *[plgpu.RefType()] * len(orders)]

    @operation(arg_types=types, return_type=(row_array(size), row_array(size)))
    def body(_: Any, array: ir.Value, expert: Fragment, tile: Fragment, *orders: ir.Value) -> tuple[Fragment, ...]:
        number = expert.registers.item()

        def of_output(row: ir.Value) -> ir.Value:
            for order in orders:
                at, inside = index_of_row(rows.outputs, number, row)
                row = arith.select(inside, llvm.load(i32(), address_of(order, at, i32())), row)
            return row

        mine = rows.weight(rows.output(tile.registers.item()), of_output)
        values = (load_of_row(array, rows.num_rows, number, row) for row in mine)
        return tuple(of_registers([pair(value, value)], size) for value in values)

    return body(array, expert, tile, *orders)


def load_of_row(array: ir.Value, num_rows: int, expert: ir.Value, row: ir.Value) -> ir.Value:
    """What `array` (E, num_rows) has for a row, float32; 0 past the end."""
    element = ir.MemRefType(array.type).element_type
    at, inside = index_of_row(num_rows, expert, row)
    value = llvm.load(element, address_of(array, at, element))
    value = value if element == f32() else arith.extf(f32(), value)
    return arith.select(inside, value, utils.c(0.0, f32()))


def index_of_row(num_rows: int, expert: ir.Value, row: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Where an array (E, num_rows) has a row, and whether it has it: of a row past the end, where the first one is."""
    inside = less(row, constant(num_rows))
    return wide(arith.addi(arith.muli(expert, constant(num_rows)), arith.select(inside, row, constant(0)))), inside


def repeat(row: jax.Array, n: int) -> jax.Array:
    """One value a row, as `load_row` has it, for each of the thread's n / 4 own elements."""

    @operation(arg_types=(_own(row_size(8)),), return_type=row_array(row_size(n)))
    def body(_: Any, row: Fragment) -> Fragment:
        return of_registers([row.registers.item()] * (n // 8), row_size(n))

    return body(row)


def store(
    out: Any,
    arrays: Sequence[jax.Array],
    rows: Rows,
    tile: jax.Array,
    first: jax.Array,
    count: jax.Array,
) -> None:
    """Writes a tile's outputs, transposed, to out (R, num_outputs) in global memory.

    Args:
        arrays: own elements of the thread's first row, and of its second where there is no gate; out's dtype.
        first: the row of `out` that takes the accumulator's first column.
        count: columns that there are; others are not written.
    """
    num_outputs = rows.num_outputs
    own = [_own(array.shape[0]) for array in arrays]

    @operation(arg_types=(plgpu.RefType(), *own, *[SCALAR] * 3))
    def body(_: Any, out: ir.Value, *args: Any) -> None:
        args, (tile, first, count) = args[: len(own)], args[len(own) :]
        tile, first, count = (scalar.registers.item() for scalar in (tile, first, count))
        element = ir.MemRefType(out.type).element_type
        bits = utils.bitwidth(element)
        row = rows.output(tile)
        column = arith.muli(arith.remui(thread_index(), constant(4)), constant(2))
        line = arith.muli(wide(arith.addi(first, column)), constant(num_outputs, i64()))

        for second, array in enumerate(args):
            output = arith.addi(row, constant(8 * second))
            inside = less(output, constant(num_outputs))
            address = address_of(out, arith.addi(line, wide(output)), element)
            left = arith.select(inside, arith.subi(count, column), constant(0))  # columns from the thread's first on
            for eight, two in enumerate(array.registers.flat):
                for i in range(2):
                    there = arith.cmpi(arith.CmpIPredicate.slt, constant(8 * eight + i), left)
                    value = llvm.extractelement(two, constant(i))
                    value = utils.bitcast(value, ir.IntegerType.get_signless(bits))
                    offset = (8 * eight + i) * num_outputs * bits // 8
                    text = f"@$2 st.global.b{bits} [$0 + {offset}], $1;"
                    utils.inline_ptx(text, address, value, there, has_side_effects=True)

    body(out, *arrays, tile, first, count)
