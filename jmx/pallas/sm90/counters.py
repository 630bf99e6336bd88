"""Counters in global memory by which CTAs of a persistent kernel signal each other that rows are written."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jmx.pallas.sm90.mlir import SCALAR, Fragment, address_of, i32, operation, utils

_ORDER_COPIES = "fence.proxy.async.global;"


def signal(counters: Any, index: jax.Array) -> None:
    """Adds 1 to counters[index], int32 in global memory, once all that the warpgroup has written there is seen by all.

    By copies by TMA, too, for which such writes are of another kind (PTX: the generic and the asynchronous proxy).
    """

    @operation(arg_types=(plgpu.RefType(), SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment) -> None:
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)
        utils.warpgroup_barrier()
        address = address_of(counters, index.registers.item(), i32())
        utils.SemaphoreRef(address).signal(1, memory_scope="gpu")

    body(counters, index)


def wait(counters: Any, index: jax.Array, value: jax.Array, *, warpgroup: bool = False) -> None:
    """A warp waits until counters[index] is `value` or more; then its copies by TMA see what was signalled.

    `warpgroup`: all of it waits, and sees that by loads, too.
    """
    threads = utils.ThreadSubset.WARPGROUP if warpgroup else utils.ThreadSubset.WARP

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment, value: Fragment) -> None:
        semaphore = utils.SemaphoreRef(address_of(counters, index.registers.item(), i32()))
        scope: Any = {"scope": threads, "memory_scope": "gpu"}
        semaphore.wait(value.registers.item(), decrement=False, **scope)
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)

    body(counters, index, value)
