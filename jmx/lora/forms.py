"""Adapters of gate and up as one of both, and the reverse: what they add stays the same."""

import jax.numpy as jnp

from jmx.engines.block_products import of_half, side_by_side
from jmx.experts import Experts
from jmx.lora.adapters import Adapter, Adapters
from jmx.numerics.gate_up import split_gate_up
from jmx.util.typing import Array, Float


def fused(adapters: Adapters, experts: Experts) -> Adapters:
    """Adapters of gate and up as one, whose rank is the sum of theirs, and whose scale is 1 if theirs differ."""
    gate, up = adapters.gate, adapters.up
    if gate is None and up is None:
        return adapters
    order = str(experts.gate_up_order)
    scales = {each.scale for each in (gate, up) if each is not None}
    scale = scales.pop() if len(scales) == 1 else 1.0

    def columns(adapter: Adapter, *, of_up: bool) -> Float[Array, "*lead N r"]:
        b = jnp.asarray(adapter.b)
        return of_half(b * jnp.asarray(adapter.scale / scale, b.dtype), order, of_up=of_up)

    parts = [(each, of_up) for each, of_up in ((gate, False), (up, True)) if each is not None]
    matrices = {
        "a": side_by_side([jnp.asarray(each.a) for each, _ in parts], -2),
        "b": side_by_side([columns(each, of_up=of_up) for each, of_up in parts], -1),
    }
    return Adapters(gate_up=Adapter(**matrices, scale=scale), down=adapters.down)


def in_halves(adapters: Adapters, experts: Experts) -> Adapters:
    """An adapter of gate and up as two, each with its A.

    Raises:
        ValueError: experts without a gate, for which there is no such form.
    """
    if experts.gate_up_order is None:
        raise ValueError("`form` (='modules') must be 'parameters' for experts without a gate")
    both = adapters.gate_up
    if both is None:
        return adapters
    gate, up = (half.mT for half in split_gate_up(jnp.asarray(both.b).mT, experts.gate_up_order))
    return Adapters(gate=Adapter(both.a, gate, both.scale), up=Adapter(both.a, up, both.scale), down=adapters.down)
