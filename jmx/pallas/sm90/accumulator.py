"""The elements of a `wgmma` accumulator that one thread holds, and arrays of them.

Pallas Mosaic GPU works on arrays that are distributed over a warpgroup, and cannot express which thread holds which
element. These functions can: each is a Pallas operation whose body is written for one thread, in MLIR and PTX. Of an
accumulator (64, n), the thread of warp `w` and lane `l` holds row `16 * w + l // 4` and the row 8 below it, and of both
the columns `8 * i + 2 * (l % 4) + {0, 1}`. These are the thread's *first* and *second* row; in a gated weight they are
a gate and its up.

Each thread's elements of one row are passed in arrays (32 * n,), *per-thread elements*. The order within such an array
has no meaning, so it may only go through elementwise operations.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.mlir import address_of, constant, f32, i32, pair, utils
from jmx.pallas.sm90.operation import Fragment, Ref, fragment, operation, result
from jmx.pallas.sm90.tiles import TILE
from jmx.util.typing import Array, Float32, Num


def row_array(size: int) -> Any:
    """The type of an array of per-thread elements of one row."""
    return result((size,), jnp.float32, own_layout(size))


def own_layout(size: int) -> Any:
    """The layout of such an array."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=2)


def of_registers(registers: Any, size: int) -> Fragment:
    """Such an array from a thread's registers, each a pair of columns."""
    return fragment(np.array(registers, dtype=object).flat, (size,), mgpu.WGStridedFragLayout((size,), 2))


def row_size(n: int) -> int:
    """The size of an array of per-thread elements of one row of an accumulator with n columns."""
    return TILE // 2 * n


def load_words(ref: ir.Value, index: ir.Value, count: int) -> list[ir.Value]:
    """`count` consecutive words of 32 bits in shared memory, from the `index`th on."""
    loaded = llvm.load(ir.VectorType.get((count,), i32()), address_of(ref, index, i32()), alignment=4 * count)
    return [llvm.extractelement(loaded, constant(i)) for i in range(count)]


def sums_of(acc: Fragment) -> list[ir.Value]:
    """The thread's elements of an accumulator, in the order of `wgmma`'s operands."""
    return [llvm.extractelement(two, constant(i)) for two in acc.registers.flat for i in range(2)]


def accumulator(acc: Fragment, sums: Sequence[ir.Value]) -> Fragment:
    """`acc` with its elements replaced, in the order of `sums_of`."""
    pairs = (pair(*sums[i : i + 2]) for i in range(0, len(sums), 2))
    return fragment(pairs, acc.shape, acc.layout, acc.is_signed)


def wait_for_earlier_products() -> None:
    """Waits until all products but the last one are complete, so that their operands in registers may be reused."""

    @operation()
    def body(_: Any) -> None:
        utils.inline_ptx("wgmma.wait_group.sync.aligned 1;", has_side_effects=True)

    body()


def wait_for_products(sums: list[ir.Value], pending: int) -> list[ir.Value]:
    """`sums`, which products in flight write, once all products but the last `pending` groups are complete."""
    size, kind = len(sums), sums[0].type
    letter = "f" if kind == f32() else "r"
    tied = ",".join([*[f"={letter}"] * size, *(str(i) for i in range(size))])
    text = f"wgmma.wait_group.sync.aligned {pending};"
    out = llvm.StructType.get_literal([kind] * size)
    made = llvm.inline_asm(out, sums, text, tied, has_side_effects=True, asm_dialect=0)
    return [llvm.extractvalue(kind, made, [i]) for i in range(size)]


def split_rows(acc: Num[Array, "64 n"]) -> tuple[Float32[Array, " m"], Float32[Array, " m"]]:
    """An accumulator, float32 or int32 -> per-thread elements of the first and of the second row."""
    size, integers = row_size(acc.shape[1]), acc.dtype == jnp.int32

    @operation(arg_types=(plgpu.Layout.WGMMA,), return_type=(row_array(size), row_array(size)))
    def body(_: Any, acc: Fragment) -> tuple[Fragment, ...]:
        registers = acc.registers.reshape(-1, 2)
        if integers:
            two = ir.VectorType.get((2,), f32())
            registers = np.vectorize(lambda pair: arith.sitofp(two, pair), otypes=[object])(registers)
        return tuple(of_registers(registers[:, row], size) for row in range(2))

    return body(acc)


def load_rows(ref: Ref, size: int) -> Float32[Array, " m"]:
    """The per-thread elements that were stored in a reference (size,) to shared memory."""
    return plgpu.load(ref, layout=own_layout(size), optimized=False)
