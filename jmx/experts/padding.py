"""Padding of experts along their intermediate axis with weights of value 0, and slicing back."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jmx.numerics import formats
from jmx.numerics.formats import BlockScaled, Format
from jmx.util.typing import Array, Float, Shaped

# `formats.pad` or `formats.unpad`.
Resize = Callable[[BlockScaled, tuple[int, int], Format], BlockScaled]


def halves_of(gate_up_order: str | None) -> int:
    """Contiguous parts of the rows of "gate_up" that are divided, or padded, each by itself."""
    return 2 if gate_up_order == "concatenated" else 1


def resize_gate_up(
    q: BlockScaled, gate_up_order: str | None, intermediate_size: int, format: Format, resize: Resize
) -> BlockScaled:
    """The weight "gate_up" (*lead, N, H) with rows for `intermediate_size`; gate and up each keep their first rows."""
    lead, columns = q.values.ndim - 2, formats.logical_shape(q, format)[-1]
    halves = halves_of(gate_up_order)
    rows = intermediate_size * (1 if gate_up_order is None else 2)

    def apart(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return array.reshape(*array.shape[:lead], halves, array.shape[lead] // halves, *array.shape[lead + 1 :])

    def together(array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return array.reshape(*array.shape[:lead], rows, *array.shape[lead + 2 :])

    def of_rows(function: Callable[[Any], Any], q: BlockScaled, order: Any) -> BlockScaled:
        arrays = {name: None if array is None else function(array) for name, array in q._asdict().items()}
        return BlockScaled(**arrays | {"order": order})

    order = None if q.order is None else jnp.stack([q.order] * halves, axis=lead)  # of columns: as if it had rows
    resized = resize(of_rows(apart, q._replace(order=None), order), (rows // halves, columns), format)
    return of_rows(together, resized._replace(order=None), q.order)


def resize_gate_up_bias(
    bias: Float[Array, "*lead N"] | None, gate_up_order: str | None, intermediate_size: int
) -> Float[Array, "*lead n"] | None:
    """The bias with zeros for more rows, or without rows that are too many, as `resize_gate_up`."""
    if bias is None:
        return None
    halves = halves_of(gate_up_order)
    rows = intermediate_size * (1 if gate_up_order is None else 2) // halves
    apart = bias.reshape(*bias.shape[:-1], halves, -1)[..., :rows]
    more = [(0, 0)] * (apart.ndim - 1) + [(0, rows - apart.shape[-1])]
    return jnp.pad(apart, more).reshape(*bias.shape[:-1], -1)
