"""The last step of every loader: from packed arrays to `jmx.Experts` in the layout of this machine."""

from collections.abc import Callable, Mapping

import jax

from jmx.backends import resolve_layout
from jmx.checkpoint.placement import ShardingLike, sharding_of
from jmx.experts import ROLES, Experts
from jmx.numerics.formats import BlockScaled, Format
from jmx.selection.environment import Environment
from jmx.util.typing import Array, Shaped


def experts_of(
    read: Callable[[], Mapping[str, Shaped[Array, "..."]]],
    format: Format,
    gate_up_order: str,
    layout: str,
    sharding: ShardingLike,
    input_format: str | None = None,
) -> Experts:
    """Experts made of arrays that a loader reads.

    Args:
        read: returns the packed arrays by their names in `Experts.arrays`. It is called after all other checks.
        format: of the weights.
        gate_up_order: as in `Experts`.
        layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is chosen for this machine.
        sharding: of the arrays, before and after they are converted to the layout; see `sharding_of`.
        input_format: the inputs' format that the checkpoint declares, on which "auto" depends; None: 16 bits.

    Raises:
        ValueError: an unknown `layout`, or one that does not support `format`.
    """
    resolve_layout(layout, Environment.probe(), format)  # rejects an unknown one before anything is read
    arrays = dict(read())
    gate_up, down = (BlockScaled(**{n: arrays[f"{role}_{n}"] for n in format.arrays}) for role in ROLES)
    experts = Experts.of(
        gate_up,
        down,
        arrays.get("gate_up_bias"),
        arrays.get("down_bias"),
        gate_up_order=gate_up_order,
        format=format,
    )
    wanted = {name: sharding_of(name, sharding) for name in arrays}
    del arrays, gate_up, down  # the layout's arrays replace them one by one
    experts = experts.prepare(resolve_layout(layout, Environment.probe(experts), format, input_format), donate=True)
    return put(experts, wanted)


def put(experts: Experts, sharding: ShardingLike) -> Experts:
    """`experts` with each array placed by `sharding`; see `sharding_of`. ValueError if one cannot split its array."""
    arrays = experts.arrays()
    wanted = {name: sharding_of(name, sharding) for name in arrays}
    return experts.with_arrays(arrays | {n: jax.device_put(arrays[n], s) for n, s in wanted.items() if s is not None})
