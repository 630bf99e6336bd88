"""The order of gate and up in the rows of a gate-up matrix, and in its outputs: splitting and joining both halves."""

from typing import Any

import jax.numpy as jnp

from jmx.util.typing import Array, Shaped

GATE_UP_ORDERS = ("interleaved", "concatenated", "interleaved_up_first", "concatenated_up_first")


def is_interleaved(order: str | None) -> bool:
    """Whether rows of gate and up alternate in `order`, one of `GATE_UP_ORDERS`; False for None."""
    return order is not None and order.startswith("interleaved")


def is_up_first(order: str | None) -> bool:
    """Whether up comes before gate in `order`, one of `GATE_UP_ORDERS`; False for None."""
    return order is not None and order.endswith("up_first")


def split_gate_up(
    h: Shaped[Any, "*lead N"], order: str | None
) -> tuple[Shaped[Any, "*lead I"], Shaped[Any, "*lead I"]]:
    """Splits `h` (..., 2I) into gate and up, (..., I) each.

    Args:
        h: outputs of a gate-up matrix.
        order: "interleaved" (gate 0, up 0, gate 1, ...: gpt-oss), "concatenated" (all of gate, then all of up), or
            either with up before gate: "interleaved_up_first", "concatenated_up_first" (w3 before w1).

    Raises:
        ValueError: an odd last axis or an unknown order.
    """
    _check_order(order)
    if h.shape[-1] % 2:
        raise ValueError(f"`h` (shape {h.shape}) must have an even last axis to hold gate and up")
    half = h.shape[-1] // 2
    first, second = (h[..., 0::2], h[..., 1::2]) if is_interleaved(order) else (h[..., :half], h[..., half:])
    return (second, first) if is_up_first(order) else (first, second)


def join_gate_up(
    gate: Shaped[Any, "*lead I"], up: Shaped[Any, "*lead I"], order: str | None
) -> Shaped[Array, "*lead N"]:
    """Joins gate and up (..., I) into (..., 2I): the inverse of `split_gate_up`.

    Raises:
        ValueError: shapes that differ or an unknown order.
    """
    _check_order(order)
    if gate.shape != up.shape:
        raise ValueError(f"`up` (shape {up.shape}) must have the shape of `gate` (={gate.shape})")
    halves = [up, gate] if is_up_first(order) else [gate, up]
    if is_interleaved(order):
        return jnp.stack(halves, axis=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return jnp.concatenate(halves, axis=-1)


def _check_order(order: str | None) -> None:
    if order not in GATE_UP_ORDERS:
        raise ValueError(f"`order` (={order!r}) must be one of {GATE_UP_ORDERS}")
