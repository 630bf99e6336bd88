"""Products of tiles with rows for one thread: weights are dequantized to bfloat16 in registers, then multiplied.

`jmx.pallas.sm90.accumulator` describes what a thread holds.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90.dequantize import Decoder
from jmx.pallas.mosaic_sm90.elements import Elements
from jmx.pallas.sm90.accumulator import accumulator, load_words, sums_of, wait_for_products
from jmx.pallas.sm90.mlir import address_of, constant, f32, i8, i32, i64, less, run, thread_index, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, fragment, operation, optional, result
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import THREADS, TILE
from jmx.util.typing import Array, Float32, Int32, Shaped

_SHIFT_BYTES = 2 * TILE  # bytes of a chunk of scales in blocks of 32 columns, one byte each


def _pairs_of_tile(decoder: Decoder, stage: Stage, exponent: Fragment | None, tile: int) -> np.ndarray:
    """`Decoder.pairs` of a tile in shared memory."""
    thread, bits = thread_index(), decoder.tile.elements.bits
    mine = arith.muli(thread, constant(4))
    words = [
        word
        for first in range(0, bits, 4)  # four words a load
        for word in load_words(stage.values, arith.addi(mine, constant((tile * bits + first) * THREADS)), 4)
    ]
    group = arith.shrui(thread, constant(2))

    def of_group(ref: ir.Value, count: int) -> list[ir.Value]:
        if not count:
            return []
        mine = arith.addi(arith.muli(group, constant(count)), constant(tile * THREADS // 4 * count))
        return load_words(ref, mine, count)

    scales = of_group(stage.scales, decoder.scale_words)
    zero_points = of_group(stage.zero_points, decoder.zero_point_words)
    return decoder.pairs(words, scales, zero_points, None if exponent is None else exponent.registers.item(), run)


def half_of_tile(pairs: Iterable[ir.Value]) -> Fragment:
    """A thread's pairs of bfloat16, in 32 bits each, as half a tile (64, 32) in the registers of operand A of wgmma."""
    two = ir.VectorType.get((2,), ir.BF16Type.get())
    return fragment((utils.bitcast(pair, two) for pair in pairs), (TILE, TILE // 2), mgpu.WGMMA_LAYOUT)


def weight_types(stage: Stage) -> Stage:
    """The types of a stage's weights as arguments of an operation."""
    types = (optional(ref, plgpu.RefType()) for ref in (stage.values, stage.scales, stage.zero_points))
    return Stage(None, *types)


def dequantize(
    decoder: Decoder, stage: Stage, exponent: Int32[Array, ""] | None, tile: int
) -> tuple[Shaped[Array, "64 32"], Shaped[Array, "64 32"]]:
    """A tile's bytes in shared memory -> its two halves as bfloat16, in the registers that wgmma takes A from.

    Args:
        exponent: from `tile_scalars`, of formats with a shift (see `layout`); else None.
        tile: the index of the tile in `stage`. It is static, and so a part of the instructions, here and below.
    """
    half = result((TILE, TILE // 2), jnp.bfloat16, plgpu.Layout.WGMMA)

    @operation(arg_types=(weight_types(stage), optional(exponent, SCALAR)), return_type=(half, half))
    def body(_: Any, stage: Stage, exponent: Fragment | None) -> tuple[Fragment, ...]:
        halves = np.split(_pairs_of_tile(decoder, stage, exponent, tile), 2)
        return tuple(half_of_tile(pairs.flat) for pairs in halves)

    return body(stage._replace(x=None), exponent)


# Rows in shared memory: swizzled tiles of 8 rows by 64 columns, which wgmma and ldmatrix read without bank conflicts.
SWIZZLED: Any = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE_128_BYTES = 1 << 30  # of the upper half of a matrix descriptor


def multiply(
    acc: Float32[Array, "64 n"], a: Shaped[Array, "64 32"], x: Ref, tile: int, half: int
) -> Float32[Array, "64 n"]:
    """`acc` plus `a` times 32 columns of x, transposed, by `wgmma`. The result needs `wait_for_product` before its use.

    `plgpu.wgmma` does the same with 5 more instructions per tile: it computes a descriptor of x in 64 bits for each
    instruction, where here all of a stage's descriptors are one plus a constant.

    Args:
        acc: n a multiple of 8.
        a: bfloat16, from `dequantize`.
        x: a reference (n, columns) to shared memory, with transforms `SWIZZLED`.
        tile, half: which columns.
    """
    n = acc.shape[1]
    size = n // 2
    operands = [f"${i}" for i in range(2 * size, 2 * size + 5)]  # after the sums, which are outputs and inputs
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


def wait_for_product(acc: Float32[Array, "64 n"]) -> Float32[Array, "64 n"]:
    """The result of `multiply`, once it is complete."""

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=result(acc.shape, jnp.float32, plgpu.Layout.WGMMA))
    def body(_: Any, acc: Fragment) -> Fragment:
        return accumulator(acc, wait_for_products(sums_of(acc), 0))

    return body(acc)


_LOAD_MATRICES = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
MULTIPLY = (
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)


def multiply_few(
    acc: Float32[Array, "64 n"], decoder: Decoder, stage: Stage, exponent: Int32[Array, ""] | None, tile: int
) -> Float32[Array, "64 n"]:
    """`acc` plus a tile times 64 columns of x, transposed, by `mma.sync`: each warp has 16 of the rows.

    wgmma keeps four warps in step, can only be waited for as a whole, and takes twice as long at 8 columns.

    Args:
        acc: n a multiple of 8.
        decoder, stage, exponent, tile: as for `dequantize`; `stage.x` as `x` for `multiply`.
    """
    n = acc.shape[1]

    @operation(
        arg_types=(
            plgpu.Layout.WGMMA,
            weight_types(stage)._replace(x=plgpu.RefType(SWIZZLED)),
            optional(exponent, SCALAR),
        ),
        return_type=result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, acc: Fragment, stage: Stage, exponent: Fragment | None) -> Fragment:
        a = _pairs_of_tile(decoder, stage, exponent, tile)
        sums, out = sums_of(acc), []
        (eight_stride, tile_stride, *_), _ = ir.MemRefType(stage.x.type).get_strides_and_offset()
        base = llvm.ptrtoint(i32(), utils.memref_ptr(stage.x))
        lane = arith.remui(thread_index(), constant(32))
        row, chunk = arith.remui(lane, constant(8)), arith.divui(lane, constant(8))
        for eight in range(n // 8):
            b = []
            for half in range(2):  # ldmatrix reads 32 of the 64 columns: 4 swizzled chunks of 16 bytes
                at = arith.xori(arith.addi(chunk, constant(4 * half)), row)
                at = arith.addi(arith.muli(row, constant(2 * TILE)), arith.muli(at, constant(16)))
                at = arith.addi(base, arith.addi(at, constant(2 * (eight * eight_stride + tile * tile_stride))))
                b += utils.inline_ptx(_LOAD_MATRICES, at, result_types=[i32()] * 4, has_side_effects=True)
            c = sums[4 * eight : 4 * eight + 4]
            for piece in range(TILE // 16):
                mine = [a[2 * piece + eights, r] for eights in range(2) for r in range(2)]
                c = utils.inline_ptx(MULTIPLY, *mine, *b[2 * piece : 2 * piece + 2], *c, result_types=[f32()] * 4)
            out += c
        return accumulator(acc, out)

    return body(acc, stage, exponent)


_MULTIPLIERS = tuple(result((), dtype, SCALAR) for dtype in (jnp.int32, jnp.float32))


def _multipliers(shift: ir.Value, elements: Elements) -> tuple[Fragment, ...]:
    """The results of `tile_scalars`."""
    exponent = arith.muli(arith.subi(constant(elements.unit), shift), constant(0x00800080))
    rescale = llvm.bitcast(f32(), arith.shli(arith.addi(shift, constant(127)), constant(23)))
    rescale = arith.select(less(shift, constant(elements.unit + 1)), rescale, utils.c(float("nan"), f32()))
    splat = partial(Fragment.splat, shape=())
    return splat(exponent, is_signed=True), splat(rescale)


def block_scalars(shift: Int32[Array, ""], elements: Elements) -> tuple[Int32[Array, ""], Float32[Array, ""]]:
    """The same as `tile_scalars` of a known shift."""

    @operation(arg_types=(SCALAR,), return_type=_MULTIPLIERS)
    def body(_: Any, shift: Fragment) -> tuple[Fragment, ...]:
        return _multipliers(shift.registers.item(), elements)

    return body(shift)


def tile_scalars(
    scales: Ref, expert: Int32[Array, ""], tile: Int32[Array, ""], elements: Elements
) -> tuple[Int32[Array, ""], Float32[Array, ""]]:
    """For one row of tiles with a shift: the `exponent` for `dequantize`, and the factor that rescales results.

    A scale code s becomes a multiplier whose bfloat16 exponent is s + unit - shift, from 0 to 254: of MXFP4, whose unit
    is 126, 2^(s - 1 - shift). A shift above the unit means a code 255, NaN, which is no multiplier: then the factor is
    NaN.
    """

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=_MULTIPLIERS)
    def body(_: Any, scales: ir.Value, expert: Fragment, tile: Fragment) -> tuple[Fragment, ...]:
        _, tiles, chunks, _ = ir.MemRefType(scales.type).shape
        row = arith.addi(arith.muli(expert.registers.item(), constant(tiles)), tile.registers.item())
        last = arith.addi(arith.muli(wide(row), constant(chunks, i64())), constant(chunks - 1, i64()))
        at = address_of(scales, arith.muli(last, constant(_SHIFT_BYTES, i64())), i8())
        shift = arith.extui(i32(), llvm.load(i8(), at))
        return _multipliers(shift, elements)

    return body(scales, expert, tile)
