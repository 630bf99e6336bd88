"""Products on the 8-bit tensor cores for one thread: `wgmma`, and sums times scales (promotion).

`jmx.pallas.sm90.accumulator` describes what a thread holds.
"""

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8 import decode
from jmx.pallas.mosaic_sm90_fp8.config import ROW_BYTES
from jmx.pallas.mosaic_sm90_fp8.decode import SLICES
from jmx.pallas.mosaic_sm90_fp8.elements import Elements
from jmx.pallas.sm90.accumulator import accumulator, sums_of, wait_for_products
from jmx.pallas.sm90.mlir import address_of, constant, f32, i32, i64, thread_index, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation, optional, result
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Num

SWIZZLED: Any = (plgpu.TilingTransform((8, ROW_BYTES)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE_128_BYTES = 1 << 30  # of the upper half of a matrix descriptor
_HALF_UNIT = -(1 << 31) | 8 * 64 >> 4  # the upper half of the descriptor of a half: a swizzle of 64 bytes
_SLICE = 32 >> 4  # bytes of a slice, as descriptors count them
_HALF_BYTES = TILE * 64 >> 4  # the same of a half unit, after which TMA has written zeros
_SUMS_AND_OPERANDS = 192  # registers of a thread for these

Descriptor = tuple[ir.Value, int]  # a matrix descriptor, and what is added to it


class Unit(NamedTuple):
    """A unit of the weight and its rows: references to shared memory, or their MLIR values. None if it has none.

    Args:
        x: rows.
        values, scales: of the weight.
        x_scales: of the rows.
        halved: int32 (), or its value: not 0 if the unit of 8-bit elements is one of which half is stored.
    """

    x: Ref
    values: Ref
    scales: Ref = None
    x_scales: Ref = None
    halved: Any = None


def _named(unit: Unit) -> dict[str, Any]:
    """What a unit has, by name, without None."""
    return {name: one for name, one in unit._asdict().items() if one is not None}


def _type_of(name: str, decoded: bool) -> Any:
    """The type of what has that name in a unit."""
    if name == "halved":
        return SCALAR
    return plgpu.RefType(SWIZZLED) if name == "x" or (name == "values" and not decoded) else plgpu.RefType()


def add_units(
    totals: Sequence[Float32[Array, "64 n"]], units: Sequence[Unit], elements: Elements
) -> tuple[Float32[Array, "64 n"], ...]:
    """`totals` plus units times their rows, transposed: products of 8 bits by `wgmma`, accumulated in float32.

    The tensor cores' sums of FP8 keep some 14 bits. So they accumulate these units only, or each unit separately if it
    has its own scales, and are then added to the totals, times these scales. No product is in flight at the end.

    Args:
        totals: n a multiple of 8: of the units' first n rows, of the next n, and so on.
        units: references of one unit each: `values` uint8 (16, 256) of 4 bits or (64, 128), `scales` (256,) uint8 of
            MXFP4 or (64,) floats, `x` (n, 128), `x_scales` (n,).
        elements: what is multiplied.
    """
    n, decoded = totals[0].shape[1], elements.decoded
    names = [*_named(units[0])]
    refs = [ref for unit in units for ref in _named(unit).values()]
    kinds = [_type_of(name, decoded) for name in names] * len(units)

    @operation(
        arg_types=(*[plgpu.Layout.WGMMA] * len(totals), *kinds),
        return_type=(result((TILE, n), jnp.float32, plgpu.Layout.WGMMA),) * len(totals),
    )
    def body(_: Any, *given: Any) -> tuple[Fragment, ...]:
        old, of_units = given[: len(totals)], itertools.batched(given[len(totals) :], len(names))
        mine = [Unit(**dict(zip(names, one, strict=True))) for one in of_units]
        parts, new = range(len(old)), [sums_of(total) for total in old]
        apart = mine[0].x_scales is not None or elements.by_block
        order = [(u, p) for u in mine for p in parts] if apart else [(u, p) for p in parts for u in mine]
        beside = len(old) * n // 2 + n + 4 * SLICES * decoded * len(mine) <= _SUMS_AND_OPERANDS
        sums, done, operand = None, None, operand_of(mine[0], elements)

        def add(done: tuple[list[ir.Value], Unit, int], pending: int) -> None:
            products, unit, part = done
            of_rows = None if elements.coded else row_scales(unit)
            new[part] = _added(new[part], wait_for_products(products, pending), of_rows, unit.x_scales, part * n)

        for (unit, part), (following, _) in zip(order, [*order[1:], (None, 0)], strict=True):
            sums = start_product(sums, operand, descriptor(unit.x, part * n), n, elements)
            if done is not None:
                add(done, 1)  # while the tensor cores run, like what follows
                done = None
            if following is not None and following is not unit:
                operand = operand_of(following, elements)
            if apart or unit is mine[-1]:
                done, sums = (sums, unit, part), None
            if done is not None and (following is None or not beside):
                add(done, 0)
                done = None
        return tuple(accumulator(total, values) for total, values in zip(old, new, strict=True))

    return body(*totals, *refs)


def sums_dtype(elements: Elements) -> Any:
    """The dtype of the tensor cores' sums."""
    return jnp.int32 if elements.exact else jnp.float32


def zeros(n: int, elements: Elements) -> Fragment:
    """Zero sums (64, n)."""
    zero, signed = (utils.c(0, i32()), True) if elements.exact else (utils.c(0.0, f32()), None)
    return Fragment.splat(zero, (TILE, n), mgpu.WGMMA_LAYOUT, is_signed=signed)


def operand_of(unit: Unit, elements: Elements) -> Sequence[Sequence[ir.Value] | Descriptor]:
    """Operand A: for each slice of 32 columns four registers, or a descriptor of elements in shared memory."""
    if elements.decoded:
        return decode.decoded(elements, unit.values, unit.scales)
    if unit.halved is None:
        return slices(descriptor(unit.values))
    halved = arith.cmpi(arith.CmpIPredicate.ne, unit.halved.registers.item(), constant(0))
    upper = arith.select(halved, constant(_HALF_UNIT), constant(_upper_word(unit.values)))
    second = arith.select(halved, constant(_HALF_BYTES), constant(2 * _SLICE))
    first = _address(unit.values)
    halves = (_descriptor(lower, upper) for lower in (first, arith.addi(first, second)))
    return [(half, nth * _SLICE) for half in halves for nth in range(SLICES // 2)]


def slices(operand: ir.Value) -> list[Descriptor]:
    """Descriptors of the slices of an operand in shared memory."""
    return [(operand, nth * _SLICE) for nth in range(SLICES)]


def start(sums: Num[Array, "64 n"] | None, unit: Unit, elements: Elements) -> Num[Array, "64 n"]:
    """Starts `sums`, or zeros, plus a unit times its rows, transposed, which is complete after `finish`.

    A unit of 4 bits is decoded first, while the product that `sums` come from is still in flight. Sums are float32, or
    int32 of integers.
    """
    n, decoded = unit.x.shape[0], elements.decoded
    named = _named(unit._replace(scales=unit.scales if elements.coded else None, x_scales=None))

    @operation(
        arg_types=(optional(sums, plgpu.Layout.WGMMA), *(_type_of(name, decoded) for name in named)),
        return_type=result((TILE, n), sums_dtype(elements), plgpu.Layout.WGMMA),
    )
    def body(_: Any, sums: Fragment | None, *given: Any) -> Fragment:
        mine = Unit(**dict(zip(named, given, strict=True)))
        operand = operand_of(mine, elements)
        like, old = (zeros(n, elements), None) if sums is None else (sums, sums_of(sums))
        return accumulator(like, start_product(old, operand, descriptor(mine.x), n, elements))

    return body(sums, *named.values())


def finish(total: Float32[Array, "64 n"] | None, sums: Num[Array, "64 n"]) -> Num[Array, "64 n"]:
    """Waits for `sums`, and adds them to `total`, both float32, if there is one."""

    @operation(
        arg_types=(optional(total, plgpu.Layout.WGMMA), plgpu.Layout.WGMMA),
        return_type=result(sums.shape, sums.dtype, plgpu.Layout.WGMMA),
    )
    def body(_: Any, total: Fragment | None, sums: Fragment) -> Fragment:
        found = wait_for_products(sums_of(sums), 0)
        if total is not None:
            found = [arith.addf(a, b) for a, b in zip(sums_of(total), found, strict=True)]
        return accumulator(sums, found)

    return body(total, sums)


def descriptor(ref: ir.Value, row: int | ir.Value = 0) -> ir.Value:
    """The matrix descriptor of an operand: `ref` (..., rows, 128), with transforms `SWIZZLED`, from `row` on.

    `row` must be a multiple of 8.
    """
    row = row if isinstance(row, ir.Value) else constant(row)
    lower = arith.addi(_address(ref), arith.muli(row, constant(_eight_stride(ref) // 8 >> 4)))
    return _descriptor(lower, constant(_upper_word(ref)))


def _descriptor(lower: ir.Value, upper: ir.Value) -> ir.Value:
    return utils.inline_ptx("mov.b64 $0, {$1, $2};", lower, upper, result_types=i64())


def _address(ref: ir.Value) -> ir.Value:
    """The lower word of the descriptor of `ref`'s first row."""
    return arith.shrui(llvm.ptrtoint(i32(), utils.memref_ptr(ref)), constant(4))


def _upper_word(ref: ir.Value) -> int:
    return _SWIZZLE_128_BYTES | _eight_stride(ref) >> 4


def _eight_stride(ref: ir.Value) -> int:
    """Bytes from one tile of 8 rows to the next."""
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return strides[-4]


def start_product(
    sums: list[ir.Value] | None,
    operand: Sequence[Sequence[ir.Value] | Descriptor],
    x: ir.Value,
    n: int,
    elements: Elements,
) -> list[ir.Value]:
    """Starts `sums`, or zeros, plus the four slices' products; these are the thread's n / 2 sums, not complete yet.

    Args:
        operand: as `operand_of` or `slices` gives it.
        x: the descriptor of operand B.
    """
    size = n // 2
    of_sums, kind, letter, negate = ("s32", i32(), "r", "") if elements.exact else ("f32", f32(), "f", ", 1, 1")
    out = llvm.StructType.get_literal([kind] * size)
    names = ", ".join(f"${i}" for i in range(size))
    utils.inline_ptx("wgmma.fence.sync.aligned;", has_side_effects=True)
    values = [] if sums is None else sums
    for nth in range(SLICES):
        first = size + len(values)  # the operands after the sums
        if isinstance(operand[nth], tuple):
            a, name, makes = [operand[nth][0]], "c", f".reg .b64 c; add.s64 c, ${first + 2}, {operand[nth][1]};"
        else:
            a, makes = [*operand[nth]], ""
            name = f"{{{', '.join(f'${first + 2 + i}' for i in range(4))}}}"
        text = (
            f"{{ .reg .b64 d; .reg .pred p; {makes} add.s64 d, ${first}, {nth * _SLICE}; "
            f"setp.ne.b32 p, ${first + 1}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.{of_sums}.{elements.a}.{elements.b} "
            f"{{{names}}}, {name}, d, p{negate}; }}"
        )
        tied = [str(i) for i in range(len(values))]
        kinds = ["l"] if len(a) == 1 else ["r"] * 4
        constraints = ",".join([*[f"={letter}"] * size, *tied, "l", "r", *kinds])
        arguments = [*values, x, constant(int(bool(values))), *a]
        made = llvm.inline_asm(out, arguments, text, constraints, has_side_effects=True, asm_dialect=0)
        values = [llvm.extractvalue(kind, made, [i]) for i in range(size)]
    utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
    return values


def row_scales(unit: Unit) -> list[ir.Value] | None:
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
    of_rows: list[ir.Value] | None,
    x_scales: ir.Value | None,
    first: int,
) -> list[ir.Value]:
    """`totals` plus `products` times scales; both in `wgmma`'s order: for each 8 columns first row, then second row.

    `of_rows`: scales of the thread's two rows. `x_scales`: those of columns; `first`: the index of the first column.
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
                factors = [] if of_rows is None else [of_rows[row]]
                factors += [] if token_scales is None else [token_scales[i]]
                out.append(plus(totals[nth], products[nth], factors))
    return out


def plus(total: ir.Value, product: ir.Value, factors: list[ir.Value]) -> ir.Value:
    """`total` plus `product` times the factors' product, rounded the same whichever operand the tokens are."""
    if not factors:
        return arith.addf(total, product)
    factor = reduce(arith.mulf, factors)
    return utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", product, factor, total, result_types=f32())
