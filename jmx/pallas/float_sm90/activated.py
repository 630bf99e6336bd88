"""The activation of outputs of a product, to which a product of few columns is added: one pass over the outputs.

Adapters add such a product to gate and up. Its sums, one or a few steps of the pipeline, stay in registers, to which
the epilogue adds the outputs and the bias; then it applies the activation. Outputs have 8 columns of gate, their 8 of
up, and so on (`jmx.pallas.activation.columns.EIGHTS`), so that a thread has both of a column.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmx.pallas.float_sm90.blocks import Groups
from jmx.pallas.float_sm90.config import Launch, deepest
from jmx.pallas.float_sm90.product import Tile, finished
from jmx.pallas.float_sm90.tile import add_columns, add_rows, every_other_eight, store
from jmx.pallas.sm90.operation import Ref
from jmx.util.typing import Array, Float, Float32

TILES = 128, 3  # columns of a warpgroup's tile, and warpgroups


def launch_of(num_cores: int) -> Launch:
    """How it is launched on so many SMs, with a bfloat16 result."""
    return Launch(jnp.bfloat16, deepest(*TILES), num_cores)


def activated(
    h: Float[Array, "R W"],
    rows: Float[Array, "R r"],
    matrices: Float[Array, "E W r"],
    bias: Float32[Array, "E W"],
    groups: Groups,
    activation: Callable[[Any, Any], Any],
    its: Launch,
    *,
    outputs: int,
) -> Float[Array, "R I"]:
    """activation(gate, up) of h + matrices @ row + bias. Rows of no group are undefined.

    Args:
        h: with gates and ups as above; R is a multiple of 8.
        rows: r is a multiple of 64.
        matrices, bias: of each group, in the order of h.
        activation: of float32 gate and up, for a kernel.
        its: the dtype is that of the result.
        outputs: I, a multiple of 8; W is at least 2 I.
    """

    def finish(h: Ref, bias: Ref, out: Ref, acc: Array, tile: Tile) -> None:
        acc = add_rows(acc, h, tile.first, tile.bounds, tile.column)
        acc = add_columns(acc, bias, tile.group, tile.column)
        a = activation(every_other_eight(acc, 0), every_other_eight(acc, 1))
        store(out, a.astype(jnp.float32), tile.first, tile.bounds, tile.column // 2, outputs)

    out = jax.ShapeDtypeStruct((len(h), outputs), its.dtype)
    return finished("float_activated", rows, matrices, groups, its, out, finish, h, bias)
