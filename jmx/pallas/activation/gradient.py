"""The activation's derivative: from the gradient of its value to those of its arguments and of routing weights.

One pass over rows of h, which XLA reads twice: a sum over columns is another kernel than what writes them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmx.activations import Activation
from jmx.pallas import defined
from jmx.pallas.activation.columns import Order, columns, join, split
from jmx.pallas.activation.functions import in_kernel
from jmx.util.typing import Array, Bool, Float, Float32

ROWS, COLUMNS = 4, 128  # of a tile: the fastest of nine on a Hopper GPU
WARPS = 4


@dataclass(frozen=True)
class Call:
    """What is static of a call.

    Args:
        activation: of h.
        size: I.
        order: of h's columns.
        dtype: of the gradient of h.
        interpret: as in `defined.Call`.
    """

    activation: Activation
    size: int
    order: Order
    dtype: Any
    interpret: bool = False

    def shapes(self, h: Any, *_: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(h.shape, self.dtype), jax.ShapeDtypeStruct(h.shape[:1], jnp.float32)]

    def define(
        self, h: Float[Array, "R W"], da: Float32[Array, "R K"], factor: Float32[Array, " R"], used: Bool[Array, " R"]
    ) -> list[Float[Array, "..."]]:
        parts, da = (part.astype(jnp.float32) for part in split(h, self.order, self.size)), da[:, : self.size]
        a, derivative = jax.vjp(self.activation, *parts)
        dparts = derivative(da * factor[:, None])
        dh = join(tuple(jnp.where(used[:, None], part, 0) for part in dparts), self.order, h.shape[1])
        return [dh.astype(self.dtype), jnp.where(used, (da * a).sum(-1), 0)]

    def launch(
        self, h: Float[Array, "R W"], da: Float32[Array, "R K"], factor: Float32[Array, " R"], used: Bool[Array, " R"]
    ) -> list[Float[Array, "..."]]:
        # Importing Pallas takes a second.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton as plgpu

        return pl.pallas_call(
            partial(_kernel, call=self),
            out_shape=self.shapes(h),
            grid=(pl.cdiv(h.shape[0], ROWS),),
            compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=self.interpret,
            name="jmx_activation_gradient",
        )(h, da, factor, used)


_through_activation = defined.primitive("jmx_activation_gradient")


def through_activation(
    h: Float[Array, "R W"],
    da: Float32[Array, "R K"],
    factor: Float32[Array, " R"],
    used: Bool[Array, " R"],
    call: Call,
) -> tuple[Float[Array, "R W"], Float32[Array, " R"]]:
    """The gradients of h, and of what multiplies each row's value.

    Args:
        h: the activation's arguments, in the order of the call.
        da: the gradient of each row's value, as if it were multiplied by 1; columns from I on are not read.
        factor: what multiplies the value.
        used: which rows have one; the gradients of others are 0, whatever they have in h and da.
    """
    dh, dfactor = _through_activation(h, da, factor, used, call=call)
    return dh, dfactor


def _kernel(h: Any, da: Any, factor: Any, used: Any, dh: Any, dfactor: Any, *, call: Call) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    num_rows, width = h.shape
    rows = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    inside = rows < num_rows
    valid = plgpu.load(used.at[rows], mask=inside, other=False)
    factors = plgpu.load(factor.at[rows], mask=inside, other=0.0)
    places = width if call.order is None else width // 2  # outputs, with those of padding
    activation = in_kernel(call.activation)

    def step(i: Any, total: Float32[Array, "rows columns"]) -> Float32[Array, "rows columns"]:
        output = i * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
        read = valid[:, None] & (output < call.size)[None, :]
        its = columns(output, call.order, call.size)
        parts = [
            plgpu.load(h.at[rows[:, None], column[None, :]], mask=read, other=0.0).astype(jnp.float32) for column in its
        ]
        d = plgpu.load(da.at[rows[:, None], output[None, :]], mask=read, other=0.0)
        a, derivative = jax.vjp(activation, *parts)
        written = inside[:, None] & (output < places)[None, :]
        for column, part in zip(its, derivative(d * factors[:, None]), strict=True):
            part = jnp.where(read, part, 0).astype(call.dtype)
            plgpu.store(dh.at[rows[:, None], column[None, :]], part, mask=written)
        return total + jnp.where(read, d * a, 0)

    total = lax.fori_loop(0, pl.cdiv(places, COLUMNS), step, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    plgpu.store(dfactor.at[rows], total.sum(1), mask=inside)
