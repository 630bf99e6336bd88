"""How the Hopper kernels are launched: persistent, named after their configuration, and traced in 32 bits."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90 import layout_inference
from jmx.pallas.sm90.config import BaseConfig
from jmx.util.typing import Array, Int32

PRODUCER_REGISTERS = 40  # of a thread
ALIGNMENT = 256  # bytes, of the arrays that a Mosaic kernel takes

layout_inference.hasten()


def persistent_kernel(
    body: Callable[..., None], backend: str, config: BaseConfig, num_ctas: int, outputs: Sequence[Any], shared: Any
) -> Callable[..., Any]:
    """A kernel of one CTA per SM: `config.num_warpgroups` consumer warpgroups, then one of producer warps.

    Args:
        body: takes references to operands and outputs, and as `shared=` those to shared memory.
        backend: its name, with which the kernel's name begins.
        outputs: pytrees of shapes.
        shared: a NamedTuple of types in shared memory, which are allocated in this order.
    """
    return plgpu.kernel(
        body,
        out_type=[*outputs],
        grid=(num_ctas,),
        grid_names=("core",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name(backend, **dataclasses.asdict(cast(Any, config))),
        scratch_types={"shared": shared},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # the pipeline and the reduction have their own
        ),
    )


def kernel_name(kind: str, **sizes: int | bool | None) -> str:
    """The name in profiles, such as `mosaic_block_n8_warpgroups_m1_..._split_k3`; without what is False or None."""
    given = {name: value for name, value in sizes.items() if value is not None and value is not False}
    return "_".join([kind, *(name if value is True else f"{name}{value}" for name, value in given.items())])


def specialize(
    warpgroup: Int32[Array, ""], config: BaseConfig, consume: Callable[[], None], *produce: Callable[[], None]
) -> None:
    """Consumer warpgroups run `consume`; in the last warpgroup each warp runs one of `produce`."""

    @pl.when(warpgroup < config.num_warpgroups)
    @jax.named_scope("consumer")
    def _() -> None:
        plgpu.set_max_registers(config.registers, action="increase")
        consume()

    @pl.when(warpgroup == config.num_warpgroups)
    @jax.named_scope("producer")
    def _() -> None:
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Array) -> None:
            for nth, one in enumerate(produce):
                pl.when(warp == nth)(one)


def launch(kernel: Callable[..., Any], *operands: Any) -> Any:
    """Calls `kernel` with `operands`, pytrees of arrays or references, none of which may have 64-bit elements.

    The kernel is traced in 32 bits, as it is written for, whatever `jax_enable_x64` is.
    """
    assert all(array.dtype.itemsize <= 4 for array in jax.tree.leaves(operands))
    with jax.enable_x64(False):
        return kernel(*jax.tree.map(aligned, operands))


def aligned(array: Any) -> Any:
    """An operand that is at an address which Mosaic takes, if it is a part of a larger array.

    XLA gives a kernel such a part, as of `x[1:]`, where it lies in the larger array, and not a copy. Mosaic fails when
    it runs if that is no multiple of `ALIGNMENT`. Behind a barrier XLA makes a copy. Parts of arrays whose leading
    axis advances by such a multiple, as weights of a stack of layers do, stay where they are.
    """
    if not isinstance(array, jax.Array):  # a reference is a whole array
        return array
    row = array.size // array.shape[0] * array.dtype.itemsize if array.size else ALIGNMENT
    return array if row % ALIGNMENT == 0 else jax.lax.optimization_barrier(array)


def for_width(widths: tuple[int, ...], count: Int32[Array, ""], function: Callable[[int], None]) -> None:
    """Calls `function` with the smallest width that holds `count` rows, or the largest width: always exactly once."""
    *below, last = widths
    for lower, width in zip([-1, *below], below, strict=False):
        pl.when((count > lower) & (count <= width))(partial(function, width))
    pl.when(count > (below[-1] if below else -1))(partial(function, last))
