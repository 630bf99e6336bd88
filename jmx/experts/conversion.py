"""Conversion of one weight between layouts; the old arrays are kept or deleted."""

import warnings
from functools import partial
from typing import Any

import jax
from jax.core import Tracer

from jmx.numerics.formats import BlockScaled
from jmx.numerics.layouts import Layout, WeightSpec
from jmx.util.typing import Int32


@partial(jax.jit, static_argnums=(2, 3, 4))
def convert(
    q: BlockScaled, order: Int32[Any, "*lead I"] | None, source: Layout, target: Layout, spec: WeightSpec
) -> BlockScaled:
    """The weight `q`, converted from the layout `source` to the layout `target`.

    `order`: the order of the columns of "down", if they have one and `q` is a "gate_up" weight; else None.
    """
    canonical = source.inverse(q, spec, *source.rows(order, spec))
    return target.forward(canonical, spec, *target.rows(order, spec))


def convert_donating(
    q: BlockScaled, order: Int32[Any, "*lead I"] | None, source: Layout, target: Layout, spec: WeightSpec
) -> BlockScaled:
    """`convert`; outside a trace it then deletes the arrays of `q`."""
    converted = convert(q, order, source, target, spec)
    if not isinstance(q.values, Tracer):
        # XLA aliases donated buffers only to outputs of the same dtype; deleting them works for every layout.
        jax.block_until_ready(converted)
        kept = jax.tree.leaves(converted)
        for old in jax.tree.leaves(q):
            if isinstance(old, jax.Array) and not any(old is new for new in kept):
                old.delete()
    return converted


def warn_of_rounding(q: BlockScaled, spec: WeightSpec, layout: Layout) -> None:
    """UserWarning if the kernels that read `layout` round blocks of `q`; traced or abstract ones are not checked."""
    if layout.rounds is None or isinstance(q.values, Tracer | jax.ShapeDtypeStruct):
        return
    if count := int(jax.jit(layout.rounds, static_argnums=1)(q, spec)):
        warnings.warn(
            f"kernels that read {layout.name!r} round {count} blocks of {spec.role}, whose scales are too far below "
            "the largest of their rows; see docs/internals/mosaic_sm90_fp8.md",
            UserWarning,
            stacklevel=3,
        )


def place_like(old: Any, new: Any) -> Any:
    """The array `new` on the devices of `old`, if neither is traced."""
    if isinstance(old, Tracer) or isinstance(new, Tracer) or not isinstance(old, jax.Array):
        return new
    return jax.device_put(new, old.sharding)
