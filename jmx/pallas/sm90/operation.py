"""Operations in a kernel's body that are written for one thread, in MLIR and PTX: how one is declared.

Pallas Mosaic GPU works on arrays that are distributed over a warpgroup. Where it cannot express a step, an operation
does: for example

    @operation(arg_types=(plgpu.RefType(), SCALAR), return_type=result((n,), jnp.float32, layout))
    def body(context, ref, index): ...

    y = body(ref, index)

The caller passes references and arrays. `body` gets an MLIR value for each reference and a `Fragment` for each array,
and returns fragments. Arguments may be pytrees, so that one may also be None (`optional`).
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

# A reference to an array in global or shared memory, or to barriers, as a kernel body has it; or the type of one, where
# scratch memory is described. Pallas has no public class for them.
Ref = Any
Fragment = mgpu.FragmentedArray  # one thread's registers of an array
SCALAR = plgpu.Layout.WG_SPLAT
operation: Any = plgpu.inline_mgpu
result: Any = plgpu.ShapeDtypeStruct


def optional(value: Any, type_: Any) -> Any:
    """The type of an operation's argument that may be None."""
    return None if value is None else type_


def fragment(
    registers: Iterable[ir.Value], shape: tuple[int, ...], layout: Any, is_signed: bool | None = None
) -> Fragment:
    """An array of `shape` from a thread's registers, in the order that they have in `layout`.

    `is_signed`: of integers; None for floats.
    """
    values = [*registers]
    ordered = np.empty(len(values), dtype=object)  # np.array might take vectors apart
    for i, value in enumerate(values):
        ordered[i] = value
    return Fragment(_registers=ordered.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=is_signed)
