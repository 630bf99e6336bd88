"""The transfer of weights between ranks: one compiled program for all placements of the same sizes."""

import time
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.parallel.moves import Schedule
from jmx.util.typing import Array, Bool, Int32, Shaped, UInt

_POLL_S = 1e-3


def transfer(
    arrays: Sequence[Shaped[Array, "..."]],
    schedule: Schedule,
    mesh: Mesh,
    axes: tuple[str, ...],
    timeout_s: float,
    slot_axes: tuple[int, ...] | None = None,
) -> tuple[Shaped[Array, "..."], ...]:
    """New arrays, whose slot s is slot `schedule.sources[s]` of the old ones, complete on return.

    The old arrays are not changed. Beside the new ones a rank needs memory for two of its slots. On a CPU it is three,
    and for arrays of 4-bit elements the bytes of all its old and new slots, too.

    Args:
        arrays: of any dtypes, their axis of S slots split over `axes` and others over other axes of the mesh.
        schedule: of as many ranks as `axes` have devices.
        timeout_s: how long to wait, in seconds, after compilation.
        slot_axes: which axis of each array is that of the slots, not its last one; None: the first of all.

    Raises:
        RuntimeError: processes passed different schedules.
        TimeoutError: not complete in time.
    """
    specs = tuple(_spec(array) for array in arrays)
    tables = jax.tree.map(lambda table: _by_rank(table, NamedSharding(mesh, P(axes))), schedule)
    slot_axes = (0,) * len(arrays) if slot_axes is None else slot_axes
    new, agreed = _transfer(tuple(arrays), tables, mesh=mesh, axes=axes, specs=specs, slot_axes=slot_axes)
    wait((*new, agreed), timeout_s)
    if not bool(agreed):
        raise RuntimeError(
            "processes passed different placements to one transfer, whose results were discarded: balance on one "
            "process and send its placement to the others, as jax.experimental.multihost_utils does"
        )
    return new


def wait(arrays: Sequence[Any], timeout_s: float) -> None:
    """Waits for arrays, as `jax.block_until_ready`, but not longer than `timeout_s` seconds: then TimeoutError."""
    end = time.monotonic() + timeout_s
    while not all(array.is_ready() for array in arrays):
        if time.monotonic() > end:
            raise TimeoutError(
                f"weights were still moving after `timeout_s` (={timeout_s:g}) seconds: a process may have stopped, or "
                "not have called jmx.parallel.rebalance"
            )
        time.sleep(_POLL_S)
    jax.block_until_ready(arrays)  # raises the error of a transfer that failed


def _spec(array: Shaped[Array, "..."]) -> P:
    """How an array is split, with an entry for each axis, so that equal splits have equal specs."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    return P(*sharding.spec, *(None,) * (array.ndim - len(sharding.spec)))


def _by_rank(table: Int32[np.ndarray, "ranks ..."], sharding: NamedSharding) -> Int32[Array, "ranks ..."]:
    """A table on the devices, of which each process provides the rows of its own ranks."""
    return jax.make_array_from_callback(table.shape, sharding, lambda rows: table[rows])


@partial(jax.jit, static_argnames=("mesh", "axes", "specs", "slot_axes"))
def _transfer(
    arrays: tuple[Shaped[Array, "..."], ...],
    tables: Schedule,
    *,
    mesh: Mesh,
    axes: tuple[str, ...],
    specs: tuple[P, ...],
    slot_axes: tuple[int, ...],
) -> tuple[tuple[Shaped[Array, "..."], ...], Bool[Array, ""]]:
    """`transfer`, and whether all ranks had the same sources."""
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis in axes}
    here = partial(_transfer_here, axes=axes, sizes=sizes, slot_axes=slot_axes)
    return jax.shard_map(here, mesh=mesh, in_specs=(specs, P(axes)), out_specs=(specs, P()))(arrays, tables)


def _transfer_here(
    arrays: tuple[Shaped[Array, "..."], ...],
    tables: Schedule,
    axes: tuple[str, ...],
    sizes: dict[str, int],
    slot_axes: tuple[int, ...],
) -> tuple[tuple[Shaped[Array, "..."], ...], Bool[Array, ""]]:
    """`_transfer` on one rank, with its n slots and its rows of the tables.

    axes: mesh axes in the order in which they split the slots. sizes: theirs, in the order of the mesh. slot_axes: of
    the arrays, see `transfer`.
    """
    mine = jax.tree.map(lambda table: table[0], tables)
    agreed = (lax.pmin(mine.sources, axes) == lax.pmax(mine.sources, axes)).all()
    rounds = lax.pmax(mine.rounds, axes)  # with different ones ranks would wait for each other without end
    old = tuple(bits_of(array) for array in arrays)
    new = tuple(jnp.take(array, mine.local, axis=axis, mode="clip") for array, axis in zip(old, slot_axes, strict=True))
    device = _devices(axes, sizes)
    for index in range(len(device) - 1):
        to = [(device[rank], device[(rank + index + 1) % len(device)]) for rank in range(len(device))]
        tables_here = {"send": mine.send[index], "receive": mine.receive[index]}
        one_round = partial(_round, old=old, **tables_here, axes=(*sizes,), to=to, slot_axes=slot_axes)
        new = lax.fori_loop(0, rounds[index], one_round, new)
    return tuple(from_bits(bits, array) for bits, array in zip(new, arrays, strict=True)), agreed


def _devices(axes: tuple[str, ...], sizes: dict[str, int]) -> list[int]:
    """The number of each rank's device among those along the axes in the order of the mesh, as `ppermute` counts."""
    ranks = np.arange(prod(sizes.values())).reshape([sizes[axis] for axis in axes])
    return np.argsort(ranks.transpose([axes.index(axis) for axis in sizes]).reshape(-1)).tolist()


def _round(
    j: Int32[Array, ""],
    new: tuple[UInt[Array, "..."], ...],
    *,
    old: tuple[UInt[Array, "..."], ...],
    send: Int32[Array, " n"],
    receive: Int32[Array, " n"],
    axes: tuple[str, ...],
    to: list[tuple[int, int]],
    slot_axes: tuple[int, ...],
) -> tuple[UInt[Array, "..."], ...]:
    """`new` after round j, in which each rank sends a slot of `old` to the rank that `to` pairs it with."""
    slot = jnp.maximum(receive[j], 0)

    def moved(old: UInt[Array, "..."], new: UInt[Array, "..."], axis: int) -> UInt[Array, "..."]:
        sent = lax.dynamic_index_in_dim(old, send[j], axis, keepdims=False)
        received = lax.ppermute(sent, axes, to)
        kept = lax.dynamic_index_in_dim(new, slot, axis, keepdims=False)
        return lax.dynamic_update_index_in_dim(new, jnp.where(receive[j] < 0, kept, received), slot, axis)

    return tuple(moved(*its) for its in zip(old, new, slot_axes, strict=True))


def bits_of(array: Shaped[Array, "..."]) -> UInt[Array, "..."]:
    """The bits of an array as unsigned integers, which every collective moves unchanged; two of 4 bits are a byte."""
    info = jnp.iinfo if jnp.issubdtype(array.dtype, jnp.integer) else jnp.finfo
    bits = info(array.dtype).bits
    if bits == 4:
        return lax.bitcast_convert_type(array.reshape(*array.shape[:-1], -1, 2), jnp.uint8)
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))


def from_bits(bits: UInt[Array, "..."], like: Shaped[Any, "..."]) -> Shaped[Array, "..."]:
    """The inverse of `bits_of`: an array like `like`."""
    return lax.bitcast_convert_type(bits, like.dtype).reshape(like.shape)
