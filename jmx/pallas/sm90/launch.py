"""How the Hopper kernels are called: persistent, with a name that says their configuration, and traced in 32 bits."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jmx.pallas.sm90.config import BaseConfig

PRODUCER_REGISTERS = 40  # of a thread


def persistent_kernel(
    body: Callable[..., None], backend: str, config: BaseConfig, num_ctas: int, outputs: Sequence[Any], shared: Any
) -> Callable[..., Any]:
    """A kernel of one CTA an SM: `config.num_warpgroups` consumer warpgroups, and behind them one of producers.

    Args:
        body: takes refs of operands and outputs, and `shared=`, those of shared memory.
        backend: whose kernel it is, for its name.
        outputs: shapes.
        shared: a NamedTuple of types in shared memory, which are allocated in its order.
    """
    return plgpu.kernel(
        body,
        out_type=[*outputs],
        grid=(num_ctas,),
        grid_names=("core",),
        num_threads=config.num_warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=kernel_name(backend, config),
        scratch_types={"shared": shared},
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=True,
            unsafe_no_auto_barriers=True,  # every hand-over of shared memory has a barrier of its own
        ),
    )


def kernel_name(backend: str, config: Any) -> str:
    """What a profile shows, such as `mosaic_block_n8_warpgroups_m1_..._split_k3`."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    shown = (name if value is True else f"{name}{value}" for name, value in values.items() if value is not False)
    return "_".join([backend, *shown])


def specialize(
    warpgroup: jax.Array, config: BaseConfig, consume: Callable[[], None], *produce: Callable[[], None]
) -> None:
    """Consumer warpgroups run `consume`; of the warpgroup behind them each warp runs one of `produce`."""

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
        def _(warp: jax.Array) -> None:
            for nth, one in enumerate(produce):
                pl.when(warp == nth)(one)


def launch(kernel: Callable[..., Any], *operands: Any) -> Any:
    """What `kernel` gives of `operands`, pytrees of arrays none of which has 64 bits.

    It is traced in 32 bits, as it is written, whatever `jax_enable_x64` is.
    """
    assert all(array.dtype.itemsize <= 4 for array in jax.tree.leaves(operands))
    with jax.enable_x64(False):
        return kernel(*operands)


def for_width(widths: tuple[int, ...], count: jax.Array, function: Callable[[int], None]) -> None:
    """Calls `function` with the width that holds `count` rows: once, whatever `count` is."""
    *below, last = widths
    for lower, width in zip([-1, *below], below, strict=False):
        pl.when((count > lower) & (count <= width))(partial(function, width))
    pl.when(count > (below[-1] if below else -1))(partial(function, last))
