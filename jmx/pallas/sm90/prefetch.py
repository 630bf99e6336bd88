"""Reading weights of the next kernel into the L2 cache, by threads of a kernel that leaves memory idle.

Requests are begun, and not waited for. The first `MOST` bytes of an array are read, in whole requests.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.mlir import constant, i64, less, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation
from jmx.pallas.sm90.tiles import THREADS
from jmx.util.typing import Array, Int32, Shaped

MOST = 12 << 20  # bytes: about what memory reads while attention or the end of the experts leaves it idle
COPY = 4096  # bytes of a request to an SM's copy engine
LINE = 128  # bytes
WARP = 32  # threads


def flat(array: Shaped[Array, "..."] | None) -> Shaped[Array, "1 n"] | None:
    """An array as kernels take it here: of one row, since rows must begin at multiples of 256 bytes."""
    return None if array is None else array.reshape(1, -1)


def by_copies(array: Ref, nth: Int32[Array, ""], shares: int) -> None:
    """A CTA of one warpgroup requests the `nth` of `shares` shares of a contiguous array in global memory.

    The CTA's own copies by TMA wait behind these requests, and its end does.
    """
    _begin(array, nth, shares, THREADS, COPY, f"cp.async.bulk.prefetch.L2.global [$0], {COPY}")


def by_lines(array: Ref, nth: Int32[Array, ""], shares: int) -> None:
    """As `by_copies`, by a warp, whose CTA's copies do not wait; these requests take more instructions."""
    _begin(array, nth, shares, WARP, LINE, "prefetch.global.L2 [$0]")


def _begin(array: Ref, nth: Int32[Array, ""], shares: int, num_threads: int, size: int, request: str) -> None:
    """`request`: PTX that reads `size` bytes from the address $0 on."""
    number = min(_bytes(array), MOST) // size

    @operation(arg_types=(plgpu.RefType(), SCALAR))
    def body(_: Any, array: ir.Value, nth: Fragment) -> None:
        base = llvm.ptrtoint(i64(), utils.memref_ptr(array))
        thread = arith.remui(utils.thread_idx(), constant(num_threads))
        first = arith.addi(arith.muli(nth.registers.item(), constant(num_threads)), thread)
        for step in range(0, number, shares * num_threads):
            here = arith.addi(first, constant(step))
            address = arith.addi(base, arith.muli(wide(here), constant(size, i64())))
            utils.inline_ptx(f"@$1 {request};", address, less(here, constant(number)), has_side_effects=True)

    body(array, nth)


def _bytes(array: Ref) -> int:
    count = 1
    for axis in array.shape:
        count *= axis
    return count * jnp.dtype(array.dtype).itemsize
