"""Gathers rows by expert, with their columns in the order of the expert's weight ("act-order").

Reading single elements of 2 bytes from global memory would transfer a cache line for each. So a warpgroup copies a few
whole rows to shared memory, where single elements cost only bank conflicts, and writes them in order, two columns per
thread.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.launch import launch
from jmx.pallas.sm90.mlir import address_of, constant, i32, i64, less, thread_index, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation
from jmx.pallas.sm90.tiles import THREADS
from jmx.util.typing import Array, Float, Int32

ROWS = 8  # consecutive rows that have the same expert
_WORDS = 4  # that a thread copies at a time
_BATCH = 16  # pairs of columns that a thread looks up at a time
_SHARED_BYTES = 48 << 10  # of a CTA of one warpgroup, so that an SM holds four
_FEW_ROWS = 256  # up to so many, one row per CTA takes less time


def ordered_rows(
    x: Float[Array, "T H"],
    tokens: Int32[Array | np.ndarray, " R"],
    order: Int32[Array, "E H"],
    experts: Int32[Array, " B"],
) -> Float[Array, "R H"]:
    """out[r, c] = x[tokens[r], order[experts[r // 8], c]].

    Args:
        x: of 2 or 4 bytes an element, H a multiple of 8.
        tokens: R a multiple of 8.
        order: the column of x for each column of the result.
        experts: of each 8 rows, B = R / 8.
    """
    columns, size = x.shape[1], x.dtype.itemsize
    rows = 1 if tokens.shape[0] <= _FEW_ROWS else ROWS
    while rows > 1 and rows * columns * size > _SHARED_BYTES:
        rows //= 2

    def body(x: Ref, tokens: Ref, order: Ref, experts: Ref, out: Ref, *, row_buffer: Ref) -> None:
        with jax.named_scope("order_rows"):
            _order_rows(lax.axis_index("rows"), x, tokens, order, experts, out, row_buffer)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens.shape[0], columns), x.dtype),
        grid=(tokens.shape[0] // rows,),
        grid_names=("rows",),
        kernel_name=f"act_order_rows{rows}",
        scratch_types={"row_buffer": plgpu.SMEM((rows, columns), x.dtype)},
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
    row_buffer: ir.Value,
) -> None:
    """Orders as many rows as `row_buffer` holds. Loads from global memory are issued early, many at a time."""
    (rows, columns), element = ir.MemRefType(row_buffer.type).shape, ir.MemRefType(row_buffer.type).element_type
    size = utils.bitwidth(element) // 8
    thread, first = thread_index(), arith.muli(group.registers.item(), constant(rows))

    def at(row: ir.Value, column: ir.Value, length: int) -> ir.Value:
        return arith.addi(arith.muli(wide(row), constant(length, i64())), wide(column))

    def or_first(inside: ir.Value, column: ir.Value) -> ir.Value:
        return arith.select(inside, column, constant(0))

    expert = llvm.load(i32(), address_of(experts, arith.divui(first, constant(ROWS)), i32()))
    two, pair = (ir.VectorType.get((2,), type_) for type_ in (i32(), element))

    def look_up(some: tuple[ir.Value, ...]) -> list[tuple[ir.Value, ir.Value, ir.Value]]:
        """Columns, whether they exist, and the pair of columns of x for each."""
        inside = [less(column, constant(columns)) for column in some]
        at_order = [at(expert, or_first(*one), columns) for one in zip(inside, some, strict=True)]
        orders = [llvm.load(two, address_of(order, one, i32()), alignment=8) for one in at_order]
        return [*zip(some, inside, orders, strict=True)]

    steps = [arith.addi(arith.muli(thread, constant(2)), constant(step)) for step in range(0, columns, 2 * THREADS)]
    batches = [*itertools.batched(steps, _BATCH)]
    first_batch = look_up(batches[0])  # in flight together with the rows
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
                llvm.store(one, address_of(row_buffer, arith.addi(word, constant(row * words)), i32()), alignment=16)
    utils.warpgroup_barrier()

    for nth, some in enumerate(batches):
        for column, there, pair_of_columns in look_up(some) if nth else first_batch:
            with utils.when(there):
                for row, number in enumerate(numbers):
                    taken = llvm.mlir_undef(pair)
                    for i in range(2):
                        source = arith.addi(llvm.extractelement(pair_of_columns, constant(i)), constant(row * columns))
                        value = llvm.load(element, address_of(row_buffer, source, element))
                        taken = llvm.insertelement(taken, value, constant(i))
                    llvm.store(taken, address_of(out, at(number, column, columns), element), alignment=2 * size)
