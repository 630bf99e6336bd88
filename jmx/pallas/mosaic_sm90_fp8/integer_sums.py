"""Products of integers under scales of 128 columns: int32 sums that are float32 numbers by their bits.

Each sum must become a float before it is multiplied by its unit's scale and added to a total, and the instruction that
converts (I2FP) takes as long as two FMAs. So sums do not begin at 0 but at `_BIAS`, the bits of 1.5 * 2^23. An int32
that is `_BIAS` + s is, by its bits, the float32 number 1.5 * 2^23 + s, exactly, for |s| up to 2^22. That is a *run* of
units: 32 of INT4 weights, 2 of INT8, at most.

Within a run sums are not reset, but multiplied by the differences of scales. With S_g the sum up to unit g:

    sum over g of scale_g * (S_g - S_{g-1}) = sum over g of (scale_g - scale_{g+1}) * S_g, the last scale_{g+1} being 0

These differences add up to the first unit's scale, so that a run adds 1.5 * 2^23 times that to the total, which is
subtracted. Meanwhile totals are rounded to a whole step of the integers' products or so, where rounding inputs to 8
bits has moved them by tens of steps.

Sums of INT4 weights go on from step to step of the mainloop, for a run. Of INT8 weights each step is a run, and what
runs add is subtracted at the end: their sums are so much larger that totals bear it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.mosaic_sm90_fp8 import wgmma
from jmx.pallas.mosaic_sm90_fp8.elements import Elements
from jmx.pallas.sm90.accumulator import accumulator, of_registers, own_layout, row_array, sums_of, wait_for_products
from jmx.pallas.sm90.mlir import constant, f32, i32, pair, utils
from jmx.pallas.sm90.operation import Fragment, operation, result
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Int32

_BIAS = 0x4B400000
_OFFSET = 1.5 * 2**23
_MOST = 2**22
_INPUTS = 2**7  # the largest magnitude of int8
_WGMMA = plgpu.Layout.WGMMA
_PAIR = 2 * 128  # a number for each of every thread's two rows


def longest_run(bits: int, columns: int) -> int:
    """The units of `columns` columns that a run may have, of weights of `bits` bits."""
    return _MOST // (columns * (1 << bits - 1) * _INPUTS)


class Run(NamedTuple):
    """What is carried from step to step.

    Args:
        total: the units before the last one, times their scales.
        sums: of the run so far; None where each step is a run.
        rows: of the thread's two rows, the scales of the last unit; where each step is a run, what they have added to
            the total.
    """

    total: Float32[Array, "64 n"]
    sums: Int32[Array, "64 n"] | None
    rows: Float32[Array, " pairs"]


def start(n: int, *, goes_on: bool) -> Run:
    """That of no unit. `goes_on`: whether a run goes on from step to step, until `restart`."""
    return _begun(plgpu.layout_cast(jnp.zeros((TILE, n), jnp.float32), _WGMMA), goes_on)


def restart(run: Run) -> Run:
    """A new run, which goes on from step to step, after one that did."""
    return _begun(finish(run), goes_on=True)


def _begun(total: Float32[Array, "64 n"], goes_on: bool) -> Run:
    n = total.shape[1]
    sums = plgpu.layout_cast(jnp.full((TILE, n), _BIAS, jnp.int32), _WGMMA) if goes_on else None
    return Run(total, sums, plgpu.layout_cast(jnp.zeros((_PAIR,), jnp.float32), own_layout(_PAIR)))


def add(run: Run, units: Sequence[wgmma.Unit], elements: Elements) -> Run:
    """`run` plus units times their rows, transposed. No product is in flight at the end.

    Args:
        run: its arrays' n is a multiple of 8.
        units: references as those of `wgmma.add_units`, with scales; their rows have no scales of columns.
        elements: what is multiplied.
    """
    n, values_type = run.total.shape[1], plgpu.RefType()
    if not elements.decoded:
        values_type = plgpu.RefType(wgmma.SWIZZLED)
    of_unit = (values_type, plgpu.RefType(), plgpu.RefType(wgmma.SWIZZLED))
    refs = [ref for unit in units for ref in (unit.values, unit.scales, unit.x)]
    float_sums, int_sums, rows = result((TILE, n), jnp.float32, _WGMMA), result((TILE, n), jnp.int32, _WGMMA), _PAIR
    goes_on = run.sums is not None

    @operation(
        arg_types=(_WGMMA, *[_WGMMA] * goes_on, own_layout(rows), *of_unit * len(units)),
        return_type=(float_sums, *[int_sums] * goes_on, row_array(rows)),
    )
    def body(_: Any, total: Fragment, *given: Any) -> tuple[Fragment, ...]:
        like, given = (given[0], given[1:]) if goes_on else (None, given)
        rows, stages = given[0], [wgmma.Unit(x, values, scales) for values, scales, x in _threes(given[1:])]
        before = _both(rows)
        totals = sums_of(total)
        sums = _biased(n) if like is None else sums_of(like)
        operand, last = wgmma.operand_of(stages[0], elements), None
        for stage, following in zip(stages, [*stages[1:], None], strict=True):
            scales = wgmma.row_scales(stage)
            assert scales is not None
            if goes_on or last is not None:
                totals = _plus(totals, sums, _differences(before if last is None else last, scales))
            else:
                before = [
                    arith.addf(one, arith.mulf(scale, utils.c(_OFFSET, f32())))
                    for one, scale in zip(before, scales, strict=True)
                ]
            sums = wgmma.start_product(sums, operand, wgmma.descriptor(stage.x), n, elements)
            if following is not None:
                operand = wgmma.operand_of(following, elements)
            sums, last = wait_for_products(sums, 0), scales
        assert last is not None
        if goes_on:
            assert like is not None
            return accumulator(total, totals), accumulator(like, sums), of_registers([pair(*last)], _PAIR)
        return accumulator(total, _plus(totals, sums, last)), of_registers([pair(*before)], _PAIR)

    found = body(run.total, *([run.sums] if goes_on else []), run.rows, *refs)
    return Run(*found) if goes_on else Run(found[0], None, found[1])


def finish(run: Run) -> Float32[Array, "64 n"]:
    """The total of all units."""
    n, goes_on = run.total.shape[1], run.sums is not None

    @operation(
        arg_types=(_WGMMA, *[_WGMMA] * goes_on, own_layout(_PAIR)),
        return_type=result((TILE, n), jnp.float32, _WGMMA),
    )
    def body(_: Any, total: Fragment, *given: Fragment) -> Fragment:
        rows = _both(given[-1])
        if goes_on:
            return accumulator(total, _plus(sums_of(total), sums_of(given[0]), rows))
        totals = [arith.subf(one, rows[_row(nth)]) for nth, one in enumerate(sums_of(total))]
        return accumulator(total, totals)

    return body(run.total, *([run.sums] if goes_on else []), run.rows)


def _threes(refs: Sequence[ir.Value]) -> list[Sequence[ir.Value]]:
    return [refs[i : i + 3] for i in range(0, len(refs), 3)]


def _row(nth: int) -> int:
    """Which of the thread's two rows a sum belongs to: of each 8 columns come two of the first, two of the second."""
    return nth // 2 % 2


def _both(rows: Fragment) -> list[ir.Value]:
    two = rows.registers.item()
    return [llvm.extractelement(two, constant(i)) for i in range(2)]


def _differences(ones: Sequence[ir.Value], others: Sequence[ir.Value]) -> list[ir.Value]:
    return [arith.subf(one, other) for one, other in zip(ones, others, strict=True)]


def _biased(n: int) -> list[ir.Value]:
    """Sums of no product. They are in registers when it starts, which ptxas would put off otherwise."""
    size = n // 2
    out = llvm.StructType.get_literal([i32()] * size)
    text = " ".join(f"mov.b32 ${i}, {_BIAS:#x};" for i in range(size))
    made = llvm.inline_asm(out, [], text, ",".join(["=r"] * size), has_side_effects=True, asm_dialect=0)
    return [llvm.extractvalue(i32(), made, [i]) for i in range(size)]


def _plus(totals: list[ir.Value], sums: list[ir.Value], scales: Sequence[ir.Value]) -> list[ir.Value]:
    """`totals` plus sums, which are floats by their bits, times scales of the thread's two rows."""
    read = partial(arith.bitcast, f32())
    return [
        wgmma.plus(total, read(s), [scales[_row(i)]]) for i, (total, s) in enumerate(zip(totals, sums, strict=True))
    ]
