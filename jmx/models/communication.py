"""Whether the devices of a mesh reach each other, found out before a model is read."""

import threading
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jmx.models.model_split import ModelSplit

SECONDS = 60.0


class CommunicationError(RuntimeError):
    """Devices of a mesh do not reach each other. Threads of this process may wait for them until it ends."""


def check_communication(split: ModelSplit) -> None:
    """Adds numbers of the devices of a mesh, along each of its axes and along all of them, and waits for the sums.

    NCCL makes what it communicates with at the first exchange along some axes, in a device's memory outside jax's pool.
    If one device lacks it, that exchange fails there, and all others wait for it without an end.

    Args:
        split: how the mesh divides a model.

    Raises:
        CommunicationError: an exchange fails, or is not over within `SECONDS`.
    """
    names = split.mesh.axis_names
    if split.mesh.size == 1:
        return
    failed: list[BaseException] = []

    def exchange() -> None:
        try:
            for axes in dict.fromkeys([names, *((name,) for name in names)]):
                _add(split, axes)
        except Exception as error:  # of any kind: XLA's too
            failed.append(error)

    thread = threading.Thread(target=exchange, name="jmx-communication", daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive() or failed:
        what = f"failed ({failed[0]})" if failed else f"was not over within {SECONDS:g} s"
        raise CommunicationError(
            f"an exchange between the {split.mesh.size} devices of `mesh` {what}; NCCL needs some GB on each device "
            "outside jax's pool: end other processes there, or lower XLA_PYTHON_CLIENT_MEM_FRACTION (0.75 by default)"
        ) from (failed[0] if failed else None)


def _add(split: ModelSplit, axes: Sequence[str]) -> None:
    every = P(*split.mesh.axis_names)
    numbers = np.arange(split.mesh.size, dtype=np.int32).reshape(split.mesh.devices.shape)
    placed = jax.device_put(numbers, NamedSharding(split.mesh, every))
    add = jax.shard_map(lambda its: jax.lax.psum(its, axes), mesh=split.mesh, in_specs=every, out_specs=every)
    at = tuple(number for number, name in enumerate(split.mesh.axis_names) if name in axes)
    expected = np.broadcast_to(numbers.sum(axis=at, keepdims=True), numbers.shape)
    if not np.array_equal(np.asarray(jax.jit(add)(placed)), expected):
        raise ValueError(f"the sum along {axes} was wrong")
