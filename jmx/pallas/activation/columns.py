"""Where gate and up of an output are in a row of the first product's results."""

import jax.numpy as jnp

from jmx.numerics.gate_up import is_interleaved, is_up_first, join_gate_up, split_gate_up
from jmx.util.typing import Array, Float, Int32

# An order of results: this one, an order of `jmx.numerics.gate_up`, or None without a gate.
EIGHTS = "eights"  # 8 gates, then their 8 ups, and so on up to whole tiles, as in the tiles of `mosaic`
_EIGHT = 8
Order = str | None


def columns(output: Int32[Array, "*n"], order: Order, size: int) -> tuple[Int32[Array, "*n"], ...]:
    """The columns of gate and up of some outputs, or the one column without a gate; `size`: I."""
    if order is None:
        return (output,)
    if order == EIGHTS:
        gate = output // _EIGHT * (2 * _EIGHT) + output % _EIGHT
        return gate, gate + _EIGHT
    first, second = (2 * output, 2 * output + 1) if is_interleaved(order) else (output, output + size)
    return (second, first) if is_up_first(order) else (first, second)


def split(h: Float[Array, "*lead W"], order: Order, size: int) -> tuple[Float[Array, "*lead I"], ...]:
    """Gate and up of results, or all of them without a gate; `size`: I."""
    if order is None:
        return (h[..., :size],)
    if order != EIGHTS:
        return split_gate_up(h, order)
    eights = h.reshape(*h.shape[:-1], -1, 2, _EIGHT)
    return tuple(eights[..., half, :].reshape(*h.shape[:-1], -1)[..., :size] for half in range(2))


def join(parts: tuple[Float[Array, "*lead I"], ...], order: Order, width: int) -> Float[Array, "*lead W"]:
    """The inverse of `split`, with zeros in the padding up to `width` columns."""
    if order is not None and order != EIGHTS:
        gate, up = parts
        return join_gate_up(gate, up, order)
    missing = width // len(parts) - parts[0].shape[-1]
    parts = tuple(jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)]) for part in parts)
    if order is None:
        return parts[0]
    halves = [part.reshape(*part.shape[:-1], -1, _EIGHT) for part in parts]
    return jnp.stack(halves, axis=-2).reshape(*parts[0].shape[:-1], width)
