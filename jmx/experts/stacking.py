"""Stacks of layers: checks that experts differ only in values, and the index of a layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmx.util.checks import check_instance, shown
from jmx.util.typing import Array, Int32, Shaped

_COMPARED = (
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "padded_to",
    "format",
    "gate_up_order",
    "layout",
    "input_format",
)


def check_alike(name: str, experts: Any, others: Any, purpose: str) -> None:
    """Raises ValueError, naming the difference, unless two `Experts` differ in nothing but values.

    `name`: that of the first one in messages. `purpose`: why both must be alike, the end of the sentence.
    """
    for field in _COMPARED:
        ours, theirs = getattr(experts, field), getattr(others, field)
        if ours != theirs:
            raise ValueError(f"`{name}.{field}` (={ours!r}) must be {theirs!r}{purpose}")
    check_arrays_alike(name, experts.arrays(), others.arrays(), purpose)


def check_arrays_alike(
    name: str, arrays: Mapping[str, Shaped[Any, "..."]], others: Mapping[str, Shaped[Any, "..."]], purpose: str
) -> None:
    """Raises ValueError, naming the first array that differs, unless both have the same ones, in dtype and shape."""
    for array in sorted({*arrays, *others}):
        kinds = [f"{a[array].dtype}{list(a[array].shape)}" if array in a else "None" for a in (arrays, others)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"`{name}.{array}` (={kinds[0]}) must be {kinds[1]}{purpose}")


def check_one_layer(experts: Any) -> None:
    """Raises ValueError unless `Experts` are of one layer."""
    if experts.index is not None or len(experts.canonical_shape()) != 3:
        raise ValueError("`experts` must be those of one layer, not a stack or a `layer` of one")


def check_fields(experts: Any, bias: bool, fields: Mapping[str, Any]) -> None:
    """Raises ValueError unless `Experts` are of one layer and have such `fields`; see `Experts.check`."""
    check_one_layer(experts)
    for name, value in fields.items():
        if (its := getattr(experts, name)) != value:
            given, its = (getattr(format, "name", format) for format in (value, its))
            raise ValueError(f"`{name}` (={given!r}) must be {its!r}, as `experts` have it")
    for name in ("gate_up_bias", "down_bias"):
        if bias != (getattr(experts, name) is not None):
            raise ValueError(f"`bias` (={bias}) must be {not bias}: `experts` have {'no' if bias else 'a'} `{name}`")


def check_stackable(experts: Any, kind: type) -> None:
    """Raises TypeError or ValueError unless these are a sequence of `Experts` (`kind`) that can be one stack."""
    if not isinstance(experts, Sequence) or isinstance(experts, str):
        raise TypeError(f"`experts` ({shown(experts)}) must be a sequence of jmx.Experts")
    for i, other in enumerate(experts):
        check_instance(f"experts[{i}]", other, kind, "jmx.Experts")
    if not experts:
        raise ValueError("`experts` (=[]) must hold those of one layer at least")
    for i, other in enumerate(experts):
        if other.index is not None:
            raise ValueError(f"`experts[{i}]` must be whole experts, not a `layer` of a stack")
        check_alike(f"experts[{i}]", other, experts[0], " in one stack")


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
