"""Padding of experts along their hidden and intermediate axes with weights of value 0, and slicing back."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from math import lcm
from typing import Any

import jax
import jax.numpy as jnp

from jmx.numerics import resizing
from jmx.numerics.formats import WHOLE_ROW, BlockScaled, Format
from jmx.numerics.gate_up import is_interleaved
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.util.checks import check_int, check_values
from jmx.util.typing import Array, Float, Shaped

# `resizing.pad` or `resizing.unpad`.
Resize = Callable[[BlockScaled, tuple[int, int], Format], BlockScaled]


def unit_of(format: Format, input_format: str | None) -> int:
    """The least size that blocks of weights, none of them short, blocks of inputs, and bytes divide."""
    blocks = [format.elements_in_a_byte, *[format.block_size] * (format.block_size != WHOLE_ROW)]
    if input_format is not None and isinstance(block := INPUT_FORMATS[input_format].block_size, int):
        blocks.append(block)
    return lcm(*blocks)


def resized(experts: Any, sizes: tuple[int, int], resize: Resize) -> Any:
    """`Experts` in the layout "packed" whose arrays have other sizes, hidden and intermediate.

    Raises:
        ValueError: sizes that blocks of the weights or of declared inputs do not allow.
    """
    check_blocks(experts, sizes)
    check_values({"experts": experts})
    hidden, intermediate = sizes
    order, gate_up_bias, down_bias = experts.gate_up_order, experts.gate_up_bias, experts.down_bias
    if gate_up_bias is not None:
        gate_up_bias = resize_rows(gate_up_bias, gate_up_bias.ndim - 1, order, intermediate)
    if down_bias is not None:
        down_bias = resize_axis(down_bias, down_bias.ndim - 1, hidden)
    return dataclasses.replace(
        experts,
        gate_up=resize_gate_up(experts.gate_up, order, sizes, experts.format, resize),
        down=resize(experts.down, sizes, experts.format),
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        padded_to=None if sizes == (experts.hidden_size, experts.intermediate_size) else sizes,
    )


def sizes_of(experts: Any, given: Mapping[str, int | None]) -> tuple[int, int]:
    """The hidden and the intermediate size to pad arrays to: those `given`, and for None the least whole ones.

    Raises:
        ValueError, TypeError: a size that is smaller than the present one.
    """
    unit = unit_of(experts.format, experts.input_format)
    hidden, intermediate = (
        -(-least // unit) * unit if size is None else check_int(name, size, least=least)
        for (name, size), least in zip(given.items(), experts.array_sizes, strict=True)
    )
    return hidden, intermediate


def check_blocks(experts: Any, sizes: tuple[int, int]) -> None:
    """Raises ValueError unless blocks of the weights and of declared inputs divide the hidden and intermediate size."""
    for name, size in zip(("hidden_size", "intermediate_size"), sizes, strict=True):
        experts.format.check_size(name, size)
        if experts.input_format is not None:
            INPUT_FORMATS[experts.input_format].check_size(name, size)


def fits(experts: Any, sizes: tuple[int, int]) -> bool:
    """Whether `check_blocks` raises nothing."""
    try:
        check_blocks(experts, sizes)
    except ValueError:
        return False
    return True


def without(experts: Any, role: str, taken: BlockScaled) -> BlockScaled:
    """Packed rows of some experts' weights without the padding of `experts`."""
    if experts.padded_to is None:
        return taken
    sizes = experts.hidden_size, experts.intermediate_size
    if role == "down":
        return resizing.unpad(taken, sizes, experts.format)
    return resize_gate_up(taken, experts.gate_up_order, sizes, experts.format, resizing.unpad)


def without_rows(experts: Any, role: str, floats: Float[Array, "..."], *, axis: int) -> Float[Array, "..."]:
    """Biases or weights as floats, whose rows are at `axis`, without the rows of the padding of `experts`."""
    if experts.padded_to is None:
        return floats
    axis %= floats.ndim
    if role == "down":
        return resize_axis(floats, axis, experts.hidden_size)
    return resize_rows(floats, axis, experts.gate_up_order, experts.intermediate_size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def trained_columns(size: int, weights: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """`weights`, of which the columns from `size` on, padding, have no gradient."""
    return weights


def _zeros_after(size: int, residuals: None, d: Float[Array, "*lead K"]) -> tuple[Float[Array, "*lead K"]]:
    return (jnp.where(jnp.arange(d.shape[-1]) < size, d, 0),)


trained_columns.defvjp(lambda size, weights: (weights, None), _zeros_after)


def halves_of(gate_up_order: str | None) -> int:
    """Contiguous parts of the rows of "gate_up" that are divided, or padded, each by itself."""
    return 1 if gate_up_order is None or is_interleaved(gate_up_order) else 2


def resize_gate_up(
    q: BlockScaled, gate_up_order: str | None, sizes: tuple[int, int], format: Format, resize: Resize
) -> BlockScaled:
    """The weight "gate_up" (*lead, N, H) with columns and rows for `sizes`, hidden and intermediate; gate and up each
    keep their first rows."""
    lead = q.values.ndim - 2
    hidden_size, intermediate_size = sizes
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
    resized = resize(of_rows(apart, q._replace(order=None), order), (rows // halves, hidden_size), format)
    order = None if resized.order is None else jnp.take(resized.order, 0, axis=lead)
    return of_rows(together, resized._replace(order=None), order)


def resize_rows(
    array: Float[Array, "..."], axis: int, gate_up_order: str | None, intermediate_size: int
) -> Float[Array, "..."]:
    """Floats of "gate_up" with zeros for more rows at `axis`, or without the last ones, as `resize_gate_up`."""
    halves = halves_of(gate_up_order)
    rows = intermediate_size * (1 if gate_up_order is None else 2) // halves
    lead, (count, *rest) = array.shape[:axis], array.shape[axis:]
    apart = resize_axis(array.reshape(*lead, halves, count // halves, *rest), axis + 1, rows)
    return apart.reshape(*lead, halves * rows, *rest)


def widened(x: Float[Array, "T H"], experts: Any) -> Float[Array, "T wide"]:
    """x with zeros for the padding of the experts' hidden size."""
    more = experts.array_sizes[0] - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, more))) if more else x


def resize_axis(array: Shaped[Array, "..."], axis: int, size: int) -> Shaped[Array, "..."]:
    """The array with zeros at the end of an axis, or without its last part."""
    kept = array[(slice(None),) * axis + (slice(size),)]
    more = [(0, size - kept.shape[axis] if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(kept, more)
