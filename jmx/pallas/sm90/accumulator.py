"""Accumulators of `wgmma` as a thread holds them, and arrays of a thread's own elements.

Pallas Mosaic GPU moves arrays that a whole warpgroup holds, but cannot express which thread holds what. These functions
can: each is a Pallas operation whose body is written for one thread, in MLIR and PTX. `wgmma` leaves a thread of warp
`w` and lane `l`, of an accumulator (64, n), row `16 * w + l // 4` and the row 8 below it, of both the columns
`8 * i + 2 * (l % 4) + {0, 1}`. These two rows are the thread's *first* and *second*; of a gated weight they are a gate
and its up.

A thread's own elements of one row travel in arrays (32 * n,), whose order means nothing: they only go through
elementwise operations.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jmx.pallas.sm90.mlir import Fragment, address_of, constant, i32, operation, pair, result, utils
from jmx.pallas.sm90.tiles import TILE


def row_array(size: int) -> Any:
    return result((size,), jnp.float32, own_layout(size))


def own_layout(size: int) -> Any:
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


def sums_of(acc: Fragment) -> list[ir.Value]:
    """The thread's elements of an accumulator, in the order of the instructions that add to it."""
    return [llvm.extractelement(two, constant(i)) for two in acc.registers.flat for i in range(2)]


def accumulator(acc: Fragment, sums: Sequence[ir.Value]) -> Fragment:
    """`acc` with other elements, in the order of `sums_of`."""
    registers = np.empty(len(sums) // 2, dtype=object)
    for i in range(len(registers)):
        registers[i] = pair(sums[2 * i], sums[2 * i + 1])
    return Fragment(_registers=registers.reshape(acc.registers.shape), _layout=acc.layout, _is_signed=None)


def wait_for_earlier_products() -> None:
    """Until all but the last `multiply` is done, so that their `a` are free."""

    @operation()
    def body(_: Any) -> None:
        utils.inline_ptx("wgmma.wait_group.sync.aligned 1;", has_side_effects=True)

    body()


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
    return plgpu.load(ref, layout=own_layout(size), optimized=False)
