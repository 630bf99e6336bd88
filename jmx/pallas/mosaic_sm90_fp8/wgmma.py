"""Products on the FP8 tensor cores for one thread: MXFP4 to e5m2, `wgmma`, and sums times scales (promotion).

`jmx.pallas.sm90.accumulator` describes what a thread holds.
"""

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8.config import ROW_BYTES
from jmx.pallas.mosaic_sm90_fp8.layout import EXACT_BELOW, magnitudes
from jmx.pallas.sm90.accumulator import accumulator, load_words, sums_of
from jmx.pallas.sm90.mlir import address_of, constant, f32, i32, i64, run, thread_index, utils
from jmx.pallas.sm90.operation import Fragment, Ref, operation, optional, result
from jmx.pallas.sm90.pipeline import Stage
from jmx.pallas.sm90.tiles import THREADS, TILE
from jmx.util.typing import Array, Float32

SWIZZLED: Any = (plgpu.TilingTransform((8, ROW_BYTES)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE_128_BYTES = 1 << 30  # of the upper half of a matrix descriptor
SLICES = 4  # of 32 columns in a unit
_SLICE_BYTES = 32
_SUMS_AND_OPERANDS = 192  # registers of a thread for these
_FAR = (  # sets the upper bit of each byte that is EXACT_BELOW or more
    f"{{ .reg .b32 t; and.b32 t, $1, 0x7f7f7f7f; add.u32 t, t, {(128 - EXACT_BELOW) * 0x01010101:#x}; "
    "or.b32 $0, t, $1; }"
)
_OF_BYTE = "prmt.b32 $0, $1, 0, {:#x};"
_TABLE = tuple(  # the magnitudes at a distance, four per word
    f"mad.lo.u32 $0, $1, {-int(step) & 0xFFFFFFFF:#x}, {int(largest):#x};"
    for largest, step in zip(*magnitudes(), strict=True)
)
_MAGNITUDES = "lop3.b32 $0, $1, 0x77777777, $2, 0x40;"  # a & b & ~c
_LOOK_UP = ("prmt.b32 $0, $1, $2, $3;", "{ .reg .b32 t; shr.u32 t, $3, 16; prmt.b32 $0, $1, $2, t; }")
_SIGNS = (
    "lop3.b32 $0, $1, 0x80808080, $2, 0xEA;",  # (a & b) | c
    "{ .reg .b32 t; shl.b32 t, $1, 4; lop3.b32 $0, t, 0x80808080, $2, 0xEA; }",
)


def _piece(values: ir.Value, nth: int) -> list[ir.Value]:
    mine = arith.addi(arith.muli(thread_index(), constant(4)), constant(nth * THREADS * 4))
    return load_words(values, mine, 4)


def _row_bytes(scales: ir.Value) -> list[ir.Value]:
    """Scale distances of the thread's two rows, a byte for each slice."""
    group = arith.shrui(thread_index(), constant(2))
    return load_words(scales, arith.muli(group, constant(2)), 2)


def _e2m1_slices(values: ir.Value, scales: ir.Value) -> list[list[ir.Value]]:
    """A unit's elements as e5m2; zeros in blocks whose scale is too far below the row's largest."""
    distances = _row_bytes(scales)
    far = [run(_FAR, word) for word in distances]
    words = [word for nth in range(SLICES // 2) for word in _piece(values, nth)]
    out = []
    for slice_ in range(SLICES):
        halves = []
        for row in range(2):
            word = words[2 * slice_ + row]
            distance = run(_OF_BYTE.format(0x4440 | slice_), distances[row])
            zeroed = run(_OF_BYTE.format(0x1111 * (8 | slice_)), far[row])  # all ones or all zeros
            table = [run(text, distance) for text in _TABLE]
            selectors = run(_MAGNITUDES, word, zeroed)
            found = [run(text, *table, selectors) for text in _LOOK_UP]
            halves.append([run(text, word, magnitude) for text, magnitude in zip(_SIGNS, found, strict=True)])
        out.append([halves[row][half] for half in range(2) for row in range(2)])
    return out


def _refs(unit: Stage) -> dict[str, Ref]:
    """The references of a unit, by name, without None."""
    named = {"values": unit.values, "scales": unit.scales, "x": unit.x, "x_scales": unit.x_scales}
    return {name: ref for name, ref in named.items() if ref is not None}


def add_units(
    totals: Sequence[Float32[Array, "64 n"]], units: Sequence[Stage], decoded: bool
) -> tuple[Float32[Array, "64 n"], ...]:
    """`totals` plus units times their rows, transposed: products in FP8 by `wgmma`, accumulated in float32.

    The tensor cores' sums keep some 14 bits. So they accumulate these units only, or each unit separately if it has its
    own scales, and are then added to the totals, times these scales. No product is in flight at the end.

    Args:
        totals: n a multiple of 8: of the units' first n rows, of the next n, and so on.
        units: references of one unit each: `values` uint8 (16, 256) of MXFP4 or (64, 128), `scales` (256,) uint8 of
            MXFP4 or (64,) floats, `x` (n, 128) e4m3, `x_scales` (n,).
        decoded: whether weights are MXFP4, not e4m3.
    """
    n = totals[0].shape[1]
    refs = [ref for unit in units for ref in _refs(unit).values()]
    of_wgmma = [ref for unit in units for ref in (unit.x, *([] if decoded else [unit.values]))]
    kinds = [plgpu.RefType(SWIZZLED) if any(ref is one for one in of_wgmma) else plgpu.RefType() for ref in refs]
    names = [*_refs(units[0])]

    @operation(
        arg_types=(*[plgpu.Layout.WGMMA] * len(totals), *kinds),
        return_type=(result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),) * len(totals),
    )
    def body(_: Any, *given: Any) -> tuple[Fragment, ...]:
        old, of_units = given[: len(totals)], itertools.batched(given[len(totals) :], len(names))
        mine = [Stage(**dict(zip(names, one, strict=True))) for one in of_units]
        parts, new = range(len(old)), [sums_of(total) for total in old]
        apart = mine[0].x_scales is not None or (mine[0].scales is not None and not decoded)
        order = [(u, p) for u in mine for p in parts] if apart else [(u, p) for p in parts for u in mine]
        beside = len(old) * n // 2 + n + 4 * SLICES * decoded * len(mine) <= _SUMS_AND_OPERANDS
        sums, done, operand = None, None, _operand(mine[0], decoded)

        def add(done: tuple[list[ir.Value], Stage, int], pending: int) -> None:
            products, unit, part = done
            row_scales = None if decoded else _row_scales(unit)
            new[part] = _added(new[part], wait(products, pending), row_scales, unit.x_scales, part * n)

        for (unit, part), (following, _) in zip(order, [*order[1:], (None, 0)], strict=True):
            sums = start_product(sums, operand, descriptor(unit.x, part * n), n)
            if done is not None:
                add(done, 1)  # while the tensor cores run, like what follows
                done = None
            if following is not None and following is not unit:
                operand = _operand(following, decoded)
            if apart or unit is mine[-1]:
                done, sums = (sums, unit, part), None
            if done is not None and (following is None or not beside):
                add(done, 0)
                done = None
        return tuple(accumulator(total, values) for total, values in zip(old, new, strict=True))

    return body(*totals, *refs)


def zeros(n: int) -> Fragment:
    """Zero sums (64, n)."""
    return Fragment.splat(utils.c(0.0, f32()), (TILE, n), mgpu.WGMMA_LAYOUT)


def _operand(unit: Stage, decoded: bool) -> Any:
    """Operand A: four registers of e5m2 for each slice of 32 columns, or a descriptor of e4m3 in shared memory."""
    return _e2m1_slices(unit.values, unit.scales) if decoded else descriptor(unit.values)


def start(sums: Float32[Array, "64 n"] | None, unit: Stage, decoded: bool) -> Float32[Array, "64 n"]:
    """Starts `sums`, or zeros, plus a unit times its rows, transposed, which is complete after `finish`.

    A unit of MXFP4 is decoded first, while the product that `sums` come from is still in flight.
    """
    n = unit.x.shape[0]
    scales = unit.scales if decoded else None
    values_type = plgpu.RefType() if decoded else plgpu.RefType(SWIZZLED)

    @operation(
        arg_types=(
            optional(sums, plgpu.Layout.WGMMA),
            values_type,
            optional(scales, plgpu.RefType()),
            plgpu.RefType(SWIZZLED),
        ),
        return_type=result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, sums: Fragment | None, values: ir.Value, scales: ir.Value | None, x: ir.Value) -> Fragment:
        operand = _operand(Stage(x, values, scales), decoded)
        like = zeros(n) if sums is None else sums
        return accumulator(like, start_product(None if sums is None else sums_of(sums), operand, descriptor(x), n))

    return body(sums, unit.values, scales, unit.x)


def finish(total: Float32[Array, "64 n"] | None, sums: Float32[Array, "64 n"]) -> Float32[Array, "64 n"]:
    """Waits for `sums`, and adds them to `total`, in float32, if there is one."""

    @operation(
        arg_types=(optional(total, plgpu.Layout.WGMMA), plgpu.Layout.WGMMA),
        return_type=result(sums.shape, jnp.float32, plgpu.Layout.WGMMA),
    )
    def body(_: Any, total: Fragment | None, sums: Fragment) -> Fragment:
        found = wait(sums_of(sums), 0)
        if total is not None:
            found = [arith.addf(a, b) for a, b in zip(sums_of(total), found, strict=True)]
        return accumulator(sums, found)

    return body(total, sums)


def descriptor(ref: ir.Value, row: int | ir.Value = 0) -> ir.Value:
    """The matrix descriptor of an operand: `ref` (..., rows, 128), with transforms `SWIZZLED`, from `row` on.

    `row` must be a multiple of 8.
    """
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    eight_stride = strides[-4]  # of tiles of 8 rows
    upper = _SWIZZLE_128_BYTES | eight_stride >> 4
    lower = arith.shrui(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), constant(4))
    row = row if isinstance(row, ir.Value) else constant(row)
    lower = arith.addi(lower, arith.muli(row, constant(eight_stride // 8 >> 4)))
    return utils.inline_ptx(f"mov.b64 $0, {{$1, {upper:#x}}};", lower, result_types=i64())


def start_product(sums: list[ir.Value] | None, operand: Any, x: ir.Value, n: int) -> list[ir.Value]:
    """Starts `sums`, or zeros, plus the four slices' products; these are the thread's n / 2 sums, not complete yet."""
    size = n // 2
    out = llvm.StructType.get_literal([f32()] * size)
    names = ", ".join(f"${i}" for i in range(size))
    utils.inline_ptx("wgmma.fence.sync.aligned;", has_side_effects=True)
    values = [] if sums is None else sums
    for nth in range(SLICES):
        first = size + len(values)  # the operands after the sums
        offset = nth * _SLICE_BYTES >> 4
        if isinstance(operand, ir.Value):
            a, kind, name, makes = [operand], "e4m3", "c", f".reg .b64 c; add.s64 c, ${first + 2}, {offset};"
        else:
            a, kind, makes = operand[nth], "e5m2", ""
            name = f"{{{', '.join(f'${first + 2 + i}' for i in range(4))}}}"
        text = (
            f"{{ .reg .b64 d; .reg .pred p; {makes} add.s64 d, ${first}, {offset}; "
            f"setp.ne.b32 p, ${first + 1}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{kind}.e4m3 {{{names}}}, {name}, d, p, 1, 1; }}"
        )
        tied = [str(i) for i in range(len(values))]
        kinds = ["l"] if len(a) == 1 else ["r"] * 4
        constraints = ",".join([*["=f"] * size, *tied, "l", "r", *kinds])
        arguments = [*values, x, constant(int(bool(values))), *a]
        made = llvm.inline_asm(out, arguments, text, constraints, has_side_effects=True, asm_dialect=0)
        values = [llvm.extractvalue(f32(), made, [i]) for i in range(size)]
    utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
    return values


def wait(sums: list[ir.Value], pending: int) -> list[ir.Value]:
    """`sums`, once all products but the last `pending` groups are complete."""
    size = len(sums)
    tied = ",".join([*["=f"] * size, *(str(i) for i in range(size))])
    text = f"wgmma.wait_group.sync.aligned {pending};"
    out = llvm.StructType.get_literal([f32()] * size)
    made = llvm.inline_asm(out, sums, text, tied, has_side_effects=True, asm_dialect=0)
    return [llvm.extractvalue(f32(), made, [i]) for i in range(size)]


def _row_scales(unit: Stage) -> list[ir.Value] | None:
    """Float32 scales of the thread's two rows, if the unit has them."""
    scales = unit.scales
    if scales is None:
        return None
    group = arith.muli(arith.shrui(thread_index(), constant(2)), constant(2))
    return [load_float(scales, arith.addi(group, constant(i))) for i in range(2)]


def load_float(ref: ir.Value, index: ir.Value) -> ir.Value:
    """The `index`th number in a contiguous ref, as float32."""
    element = ir.MemRefType(ref.type).element_type
    value = llvm.load(element, address_of(ref, index, element))
    return value if element == f32() else arith.extf(f32(), value)


def _added(
    totals: list[ir.Value],
    products: list[ir.Value],
    row_scales: list[ir.Value] | None,
    x_scales: ir.Value | None,
    first: int,
) -> list[ir.Value]:
    """`totals` plus `products` times scales; both in `wgmma`'s order: for each 8 columns first row, then second row.

    `first`: the index in `x_scales` of the first column.
    """
    column = arith.muli(arith.remui(thread_index(), constant(4)), constant(2))
    out = []
    for eight in range(len(totals) // 4):
        token_scales = None
        if x_scales is not None:
            pair = llvm.load(
                ir.VectorType.get((2,), f32()),
                address_of(x_scales, arith.addi(column, constant(first + 8 * eight)), f32()),
                alignment=8,
            )
            token_scales = [llvm.extractelement(pair, constant(i)) for i in range(2)]
        for row in range(2):
            for i in range(2):
                nth = 4 * eight + 2 * row + i
                factors = [] if row_scales is None else [row_scales[row]]
                factors += [] if token_scales is None else [token_scales[i]]
                out.append(plus(totals[nth], products[nth], factors))
    return out


def plus(total: ir.Value, product: ir.Value, factors: list[ir.Value]) -> ir.Value:
    """`total` plus `product` times the factors' product, rounded the same whichever operand the tokens are."""
    if not factors:
        return arith.addf(total, product)
    factor = reduce(arith.mulf, factors)
    return utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", product, factor, total, result_types=f32())
