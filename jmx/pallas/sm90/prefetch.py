"""Reading weights of the next kernel into the L2 cache, by threads of a kernel that leaves memory idle."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jmx.pallas.sm90.mlir import constant, i64, less, utils, wide
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation
from jmx.util.typing import Array, Int32, Shaped

PIECE = 128  # bytes of one request
MOST_BULK = 12 << 20
MOST = 12 << 20  # bytes of an array that are read: more would displace each other in an L2 cache of 50 MB


def flat(array: Shaped[Array, "..."] | None) -> Shaped[Array, "1 n"] | None:
    """An array as `begin` takes it: of one row, as kernels want rows that begin at multiples of 256 bytes."""
    return None if array is None else array.reshape(1, -1)


def begin(array: Ref, nth: Int32[Array, ""], shares: int, num_threads: int) -> None:
    """Requests the `nth` of `shares` shares of a contiguous array from global memory, and waits for nothing.

    `num_threads`: those that call it, a warpgroup or a warp. What is after the first `MOST` bytes, and a rest of less
    than `PIECE`, is left out.
    """
    bulk = num_threads > 32
    piece_size = 4096 if bulk else PIECE
    request = "cp.async.bulk.prefetch.L2.global [$0], 4096" if bulk else "prefetch.global.L2 [$0]"
    pieces = min(_size(array), MOST_BULK if bulk else MOST) // piece_size

    @operation(arg_types=(plgpu.RefType(), SCALAR))
    def body(_: Any, array: ir.Value, nth: Fragment) -> None:
        base = llvm.ptrtoint(i64(), utils.memref_ptr(array))
        thread = arith.remui(utils.thread_idx(), constant(num_threads))
        first = arith.addi(arith.muli(nth.registers.item(), constant(num_threads)), thread)
        for step in range(0, pieces, shares * num_threads):
            piece = arith.addi(first, constant(step))
            at = arith.addi(base, arith.muli(wide(piece), constant(piece_size, i64())))
            utils.inline_ptx(
                f"@$1 {request};",
                at,
                less(piece, constant(pieces)),
                has_side_effects=True,
            )

    body(array, nth)


REQUEST = "prefetch.global.L2 [$0]"


def _size(array: Ref) -> int:
    """Bytes of an array."""
    count = 1
    for axis in array.shape:
        count *= axis
    return count * jnp.dtype(array.dtype).itemsize
