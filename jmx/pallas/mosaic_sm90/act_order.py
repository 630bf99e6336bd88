"""Rows gathered by expert, their columns in the order that the expert's weight has ("act-order").

Elements of 2 bytes out of global memory, one by one, would take a line of the cache each. So a warpgroup copies a few
rows whole to shared memory, where one by one costs what conflicts of banks do, and writes them in order, two columns a
thread.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.mlir import (
    SCALAR,
    Fragment,
    address_of,
    constant,
    i32,
    i64,
    less,
    operation,
    thread_index,
    utils,
    wide,
)
from jmx.pallas.sm90.tiles import THREADS

Array = Any
ROWS = 8  # that follow each other and have one expert
_WORDS = 4  # that a thread copies at a time
_AT_ONCE = 16  # pairs of columns that a thread looks up at a time
_SHARED_BYTES = 48 << 10  # of a warpgroup, so that a multiprocessor has four
_FEW_ROWS = 256  # which take less time one by one, a warpgroup each


def ordered_rows(x: Array, tokens: Array, order: Array, experts: Array) -> jax.Array:
    """out[r, c] = x[tokens[r], order[experts[r // 8], c]].

    Args:
        x: (T, H) of 2 or 4 bytes, H a multiple of 8.
        tokens: int32 (R,), R a multiple of 8.
        order: int32 (E, H).
        experts: int32 (R / 8,).

    Returns:
        (R, H) of x's dtype.
    """
    columns, size = x.shape[1], x.dtype.itemsize
    rows = 1 if tokens.shape[0] <= _FEW_ROWS else ROWS
    while rows > 1 and rows * columns * size > _SHARED_BYTES:
        rows //= 2

    def body(x: Any, tokens: Any, order: Any, experts: Any, out: Any, held: Any) -> None:
        _order_rows(lax.axis_index("rows"), x, tokens, order, experts, out, held)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens.shape[0], columns), x.dtype),
        grid=(tokens.shape[0] // rows,),
        grid_names=("rows",),
        scratch_types=[plgpu.SMEM((rows, columns), x.dtype)],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return launch(kernel, x, jnp.asarray(tokens, jnp.int32), order, experts)


@operation(arg_types=(SCALAR, *[plgpu.RefType()] * 6))
def _order_rows(
    _: Any,
    group: Fragment,
    x: ir.Value,
    tokens: ir.Value,
    order: ir.Value,
    experts: ir.Value,
    out: ir.Value,
    held: ir.Value,
) -> None:
    """What a warpgroup does for as many rows as it holds: loads first, many at a time, where each has far to go."""
    (rows, columns), element = ir.MemRefType(held.type).shape, ir.MemRefType(held.type).element_type
    size = utils.bitwidth(element) // 8
    thread, first = thread_index(), arith.muli(group.registers.item(), constant(rows))

    def at(row: ir.Value, column: ir.Value, length: int) -> ir.Value:
        return arith.addi(arith.muli(wide(row), constant(length, i64())), wide(column))

    def or_first(inside: ir.Value, column: ir.Value) -> ir.Value:
        return arith.select(inside, column, constant(0))

    expert = llvm.load(i32(), address_of(experts, arith.divui(first, constant(ROWS)), i32()))
    two, pair = (ir.VectorType.get((2,), type_) for type_ in (i32(), element))

    def look_up(some: tuple[ir.Value, ...]) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
        """Columns, whether they exist, and the two that are to be there."""
        inside = [less(column, constant(columns)) for column in some]
        at_order = [at(expert, or_first(*one), columns) for one in zip(inside, some, strict=True)]
        orders = [llvm.load(two, address_of(order, one, i32()), alignment=8) for one in at_order]
        return [*zip(some, inside, orders, strict=True)]

    steps = [arith.addi(arith.muli(thread, constant(2)), constant(step)) for step in range(0, columns, 2 * THREADS)]
    at_once = [*itertools.batched(steps, _AT_ONCE)]
    early = look_up(at_once[0])  # on their way while rows are
    numbers = [arith.addi(first, constant(row)) for row in range(rows)]
    sources = [llvm.load(i32(), address_of(tokens, number, i32())) for number in numbers]
    words, four = columns * size // 4, ir.VectorType.get((_WORDS,), i32())
    for step in range(0, words, THREADS * _WORDS):
        word = arith.addi(arith.muli(thread, constant(_WORDS)), constant(step))
        inside = less(word, constant(words))
        places = [address_of(x, at(source, or_first(inside, word), words), i32()) for source in sources]
        loaded = [llvm.load(four, place, alignment=16) for place in places]
        with utils.when(inside):
            for row, one in enumerate(loaded):
                llvm.store(one, address_of(held, arith.addi(word, constant(row * words)), i32()), alignment=16)
    utils.warpgroup_barrier()

    for nth, some in enumerate(at_once):
        for column, there, pair_of_columns in look_up(some) if nth else early:
            with utils.when(there):
                for row, number in enumerate(numbers):
                    taken = llvm.mlir_undef(pair)
                    for i in range(2):
                        source = arith.addi(llvm.extractelement(pair_of_columns, constant(i)), constant(row * columns))
                        value = llvm.load(element, address_of(held, source, element))
                        taken = llvm.insertelement(taken, value, constant(i))
                    llvm.store(taken, address_of(out, at(number, column, columns), element), alignment=2 * size)
