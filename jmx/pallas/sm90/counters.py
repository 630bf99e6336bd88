"""Counters in global memory by which CTAs of a persistent kernel signal each other that rows are written."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jmx.pallas.sm90.mlir import address_of, i32, utils
from jmx.pallas.sm90.operation import SCALAR, Fragment, Ref, operation
from jmx.util.typing import Array, Int32

_ORDER_COPIES = "fence.proxy.async.global;"


def signal(counters: Ref, index: Int32[Array, ""]) -> None:
    """Adds 1 to counters[index] in global memory, once all CTAs see what the warpgroup has written there.

    TMA copies see it, too: a fence orders them after ordinary writes (PTX: the asynchronous and the generic proxy).
    """

    @operation(arg_types=(plgpu.RefType(), SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment) -> None:
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)
        utils.warpgroup_barrier()
        address = address_of(counters, index.registers.item(), i32())
        utils.SemaphoreRef(address).signal(1, memory_scope="gpu")

    body(counters, index)


def wait(counters: Ref, index: Int32[Array, ""], value: Int32[Array, ""], *, warpgroup: bool = False) -> None:
    """A warp waits until counters[index] is at least `value`; then its TMA copies see what was written before.

    `warpgroup`: a whole warpgroup waits, whose loads then see it, too.
    """
    threads = utils.ThreadSubset.WARPGROUP if warpgroup else utils.ThreadSubset.WARP

    @operation(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def body(_: Any, counters: ir.Value, index: Fragment, value: Fragment) -> None:
        semaphore = utils.SemaphoreRef(address_of(counters, index.registers.item(), i32()))
        scope: Any = {"scope": threads, "memory_scope": "gpu"}
        semaphore.wait(value.registers.item(), decrement=False, **scope)
        utils.inline_ptx(_ORDER_COPIES, has_side_effects=True)

    body(counters, index, value)
