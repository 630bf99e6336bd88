"""`all_gather`, `reduce_scatter` and `all_reduce` between the GPUs of one process, which write each other's memory.

The order of the GPUs is known when a program is lowered for a mesh of concrete devices. Where it is not, as in
`jax.export`, and on other platforms, XLA's own collectives are lowered instead. None has a derivative.

`lines`: whether rows of few bytes are sent as lines, see jmx/ffi/peer/src/lines.h. Many bytes go from the arrays of one
rank to those of another, others through memory that the process keeps for them. Results are the same.
"""

import enum
import os
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jmx.ffi.peer.library import GATHER, SCATTER, SUM
from jmx.util.typing import Array, Shaped

Names = tuple[str, ...]


# As jmx/ffi/peer/src/lines.h has them: bytes of all arrays of one rank, and of which each is a multiple.
MOST_LINE_BYTES = 256 << 10
LINE_BYTES = 4
# Bytes of all arrays of one rank from which the addresses of arrays are exchanged first. On two H100s a gather and a
# sum took 10 us more so than by slots with 1.6 MB, and 6 more with 6.4; but slots are memory that the process keeps.
LEAST_ARRAY_BYTES = 8 << 20
# jax's allocators of memory that all GPUs of the process access, by XLA_PYTHON_CLIENT_ALLOCATOR.
_ALLOCATORS = ("", "default", "bfc", "platform")


class Way(enum.IntEnum):
    """How rows get to another rank, as jmx/ffi/peer/src/region.h has it."""

    SLOT = 0
    LINES = 1
    ARRAYS = 2


def arrays_fault() -> str | None:
    """Why GPUs do not access each other's arrays, and the remedy; None if they do."""
    allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    if allocator.lower() in _ALLOCATORS:
        return None
    return f"XLA_PYTHON_CLIENT_ALLOCATOR (={allocator}) must be unset, as GPUs do not access each other's arrays"


def way_of(sizes: Sequence[int], lines: bool) -> Way:
    """How arrays of so many bytes, those of one rank, are sent."""
    if lines and can_be_lines(sizes):
        return Way.LINES
    return Way.ARRAYS if sum(sizes) >= LEAST_ARRAY_BYTES and arrays_fault() is None else Way.SLOT


@partial(jax.jit, static_argnums=(1, 2))
def all_gather(
    arrays: tuple[Shaped[Array, "..."], ...], axes: Names, lines: bool = False
) -> list[Shaped[Array, "..."]]:
    """Arrays (T, ...) of all ranks along mesh axes, each concatenated along its first axis, by one kernel."""
    return _gather.bind(*arrays, axes=axes, num_ranks=num_ranks(axes), lines=lines)


@partial(jax.jit, static_argnums=(1, 2))
def reduce_scatter(array: Shaped[Array, "..."], axes: Names, lines: bool = False) -> Shaped[Array, "..."]:
    """This rank's rows of the sum over all ranks along mesh axes, of float32 and in the order of the ranks."""
    return _scatter.bind(array, axes=axes, num_ranks=num_ranks(axes), lines=lines)[0]


@partial(jax.jit, static_argnums=(1, 2))
def all_reduce(array: Shaped[Array, "..."], axes: Names, lines: bool = False) -> Shaped[Array, "..."]:
    """The sum over all ranks along mesh axes, which is of float32 and in the order of the ranks."""
    return _sum.bind(array, axes=axes, num_ranks=num_ranks(axes), lines=lines)[0]


def num_ranks(axes: Names) -> int:
    """The number of devices along mesh axes."""
    return prod(lax.axis_size(axis) for axis in axes)


def _primitive(
    target: str, size: Callable[[int, int], int], by_xla: Callable[..., Any], *, alike: bool = False
) -> Primitive:
    """A collective of arrays.

    Args:
        target: name of the custom call.
        size: of the first axis of a result, by that of its array and the number of ranks.
        by_xla: (array, axes) -> its result, by XLA.
        alike: whether results are those of all ranks.
    """
    primitive = Primitive(target)
    primitive.multiple_results = True

    def types(*arrays: Any, axes: Names, num_ranks: int, lines: bool) -> list[Any]:
        del lines
        return [result_type(array, size(array.shape[0], num_ranks), axes if alike else ()) for array in arrays]

    def collective(*arrays: Any, axes: Names, num_ranks: int, lines: bool) -> list[Any]:
        del num_ranks, lines
        return [by_xla(array, axes) for array in arrays]

    def of_batch(arrays: Any, dims: Any, **static: Any) -> Any:
        """With the batch, of the arrays that have one, as their last axis."""
        moved = [a if dim is None else jnp.moveaxis(a, dim, -1) for a, dim in zip(arrays, dims, strict=True)]
        results = primitive.bind(*moved, **static)
        return results, [None if dim is None else a.ndim - 1 for a, dim in zip(results, dims, strict=True)]

    def on_gpu(ctx: Any, *operands: Any, axes: Names, num_ranks: int, lines: bool) -> Any:
        devices = devices_of(ctx, axes)
        if devices is None:
            static = {"axes": axes, "num_ranks": num_ranks, "lines": lines}
            return mlir.lower_fun(collective, multiple_results=True)(ctx, *operands, **static)
        rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
        sizes = [min(_bytes(its) for its in pair) for pair in zip(ctx.avals_in, ctx.avals_out, strict=True)]
        way = np.int64(way_of(sizes, lines))
        return rule(ctx, *operands, devices=devices, num_ranks=np.int64(num_ranks), way=way)

    primitive.def_abstract_eval(types)
    batching.primitive_batchers[primitive] = of_batch
    mlir.register_lowering(primitive, mlir.lower_fun(collective, multiple_results=True))
    mlir.register_lowering(primitive, on_gpu, platform="cuda")
    return primitive


def can_be_lines(sizes: Sequence[int]) -> bool:
    """Whether arrays of so many bytes, those of one rank, can be sent as lines."""
    return sum(sizes) <= MOST_LINE_BYTES and all(size % LINE_BYTES == 0 for size in sizes)


def _bytes(array: Any) -> int:
    return prod(array.shape) * array.dtype.itemsize


def result_type(array: Any, size: int, alike: Names) -> Any:
    """The type of an array with another first axis, whose values do not vary along mesh axes."""
    result = array.update(shape=(size, *array.shape[1:]))
    varying = array.manual_axis_type.varying - {*alike}
    if varying == array.manual_axis_type.varying:
        return result
    return result.update(manual_axis_type=array.manual_axis_type.update(varying=varying))


def devices_of(ctx: Any, axes: Names) -> np.ndarray | None:
    """The GPUs' numbers in this process, those of ranks beside each other; None if they are not known."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or ctx.module_context.lowering_parameters.for_export:
        return None
    others = [name for name in mesh.axis_names if name not in axes]
    devices = mesh.devices.transpose([mesh.axis_names.index(name) for name in (*others, *axes)]).ravel()
    if any(device.process_index != jax.process_index() or device.local_hardware_id is None for device in devices):
        return None
    return np.array([device.local_hardware_id for device in devices], np.int64)


_gather = _primitive(
    GATHER, lambda size, num_ranks: size * num_ranks, lambda array, axes: lax.all_gather(array, axes, tiled=True)
)
_scatter = _primitive(
    SCATTER,
    lambda size, num_ranks: size // num_ranks,
    lambda array, axes: lax.psum_scatter(array, axes, scatter_dimension=0, tiled=True),
)
_sum = _primitive(SUM, lambda size, num_ranks: size, lambda array, axes: lax.psum(array, axes), alike=True)
