"""From packed arrays to `jmx.Experts` in the layout of this machine: the last step of every loader."""

from collections.abc import Callable, Mapping

import jax

from jmx.backends import resolve_layout
from jmx.checkpoint.placement import ShardingLike, sharding_of
from jmx.experts import ROLES, Experts
from jmx.numerics.formats import BlockScaled, Format
from jmx.selection.environment import Environment


def experts_of(
    read: Callable[[], Mapping[str, jax.Array]],
    format: Format,
    gate_up_order: str,
    layout: str,
    sharding: ShardingLike,
    input_format: str | None = None,
) -> Experts:
    """Experts of arrays that a loader reads.

    Args:
        read: gives the packed arrays, by name as `Experts.arrays` names them. Called once nothing else can be wrong.
        format: of the weights.
        gate_up_order: as `Experts` has it.
        layout: a name in `jmx.numerics.layouts.LAYOUTS`; "auto" is that of the machine's engine family.
        sharding: of the arrays, before and after they are laid out; see `sharding_of`.
        input_format: in which the checkpoint declares both products' inputs, which "auto" goes by; None: of 16 bits.

    Raises:
        ValueError: an unknown `layout`, or one that does not hold `format`.
    """
    resolve_layout(layout, Environment.probe(), format)  # an unknown one is refused before anything is read
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
    """`experts` with each array placed by `sharding`; see `sharding_of`. ValueError for one that does not fit."""
    arrays = experts.arrays()
    wanted = {name: sharding_of(name, sharding) for name in arrays}
    return experts.with_arrays(arrays | {n: jax.device_put(arrays[n], s) for n, s in wanted.items() if s is not None})
