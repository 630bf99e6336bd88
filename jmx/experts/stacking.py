"""Stacks of layers: checks that experts differ only in values, and the index of a layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmx.util.typing import Array, Int32

_COMPARED = ("num_experts", "hidden_size", "intermediate_size", "format", "gate_up_order", "layout", "input_format")


def check_alike(name: str, experts: Any, others: Any, purpose: str) -> None:
    """Raises ValueError, naming the difference, unless two `Experts` differ in nothing but values.

    `name`: that of the first one in messages. `purpose`: why both must be alike.
    """
    for field in _COMPARED:
        ours, theirs = getattr(experts, field), getattr(others, field)
        if ours != theirs:
            raise ValueError(f"`{name}.{field}` (={ours!r}) must be {theirs!r} {purpose}")
    ours, theirs = experts.arrays(), others.arrays()
    for array in sorted({*ours, *theirs}):
        kinds = [f"{a[array].dtype}{list(a[array].shape)}" if array in a else "None" for a in (ours, theirs)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"`{name}.{array}` (={kinds[0]}) must be {kinds[1]} {purpose}")


def layer_index(index: Any, num_layers: int) -> Int32[Array, ""]:
    """The index of a layer: checked if its value is known, clamped if it is traced. See `Experts.layer`."""
    rule = f"must be an integer in 0..{num_layers - 1}, the layers of this stack"
    if isinstance(index, np.ndarray | np.generic | jax.Array):
        if index.shape or not jnp.issubdtype(index.dtype, jnp.integer):
            raise TypeError(f"`index` ({index.dtype}{list(index.shape)}) {rule}")
    elif not isinstance(index, int) or isinstance(index, bool):
        raise TypeError(f"`index` (={index!r}) {rule}")
    if isinstance(index, Tracer):
        last = min(num_layers - 1, int(jnp.iinfo(index.dtype).max))
        return jnp.clip(index, 0, last).astype(jnp.int32)  # clipped first: 64 bits may not fit into int32
    if not 0 <= int(index) < num_layers:
        raise ValueError(f"`index` (={int(index)}) {rule}")
    return jnp.asarray(int(index), jnp.int32)
