"""From files to devices: whole tensors, or only the slices that each device needs."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jmx.checkpoint.host_arrays import aligned_copy, is_aligned
from jmx.util.typing import Array, Shaped

Index = tuple[slice, ...]
ShardingLike = Sharding | Mapping[str, Sharding | None] | Callable[[str], Sharding | None] | None


class View(Protocol):
    """An array, or an object that reads parts of one when it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    def __getitem__(self, index: Index, /) -> Shaped[np.ndarray, "..."]: ...


def sharding_of(name: str, sharding: ShardingLike) -> Sharding | None:
    """The sharding of the array called `name`; None for the default device.

    Args:
        name: of the array.
        sharding: one sharding for all arrays, a mapping or a function from names to shardings, or None.

    Raises:
        TypeError: `sharding` is, holds or returns anything else.
    """
    found = sharding
    if isinstance(sharding, Mapping):
        found = sharding.get(name)
    elif sharding is not None and not isinstance(sharding, Sharding):
        found = sharding(name) if callable(sharding) else sharding
    if found is not None and not isinstance(found, Sharding):
        raise TypeError(f"`sharding` (={found!r} for {name!r}) must be a jax.sharding.Sharding or None")
    return found


Check = Callable[[Shaped[np.ndarray, "..."], Index], None]


def place(name: str, view: View, sharding: ShardingLike, check: Check | None = None) -> Shaped[Array, "..."]:
    """Puts an array on its devices and waits for it, so that the host holds one at a time; see `send`."""
    return jax.block_until_ready(send(name, view, sharding, check))


def send(name: str, view: View, sharding: ShardingLike, check: Check | None = None) -> Shaped[Array, "..."]:
    """Starts to put an array on its devices: the next one can be read meanwhile. The host holds it until it is there.

    Args:
        name: of the array, for `sharding` and errors.
        view: a memory map of a file, or an object that reads files when sliced. Only what the devices of this process
            need is read.
        sharding: see `sharding_of`; None puts the array on the default device, uncommitted.
        check: called with each slice that is read, and its index, before it is moved to a device.

    Raises:
        ValueError: the sharding cannot split the array's shape.
    """
    its_sharding = sharding_of(name, sharding)
    if its_sharding is not None:
        try:
            its_sharding.shard_shape(view.shape)
        except ValueError as error:
            raise ValueError(f"`sharding` of {name!r} must fit its shape {view.shape}: {error}") from error
    devices = [jax.devices()[0]] if its_sharding is None else its_sharding.device_set
    on_cpu = any(device.platform == "cpu" for device in devices)

    everything = (slice(None),) * view.ndim

    def read(index: Index | None) -> Shaped[np.ndarray, "..."]:
        index = everything if index is None else index
        part = view[index]
        if check is not None:
            check(part, index)
        # Without a copy, arrays on a CPU would stay maps of the file, and change with it: these are read-only.
        return aligned_copy(part) if on_cpu and not (part.flags.writeable and is_aligned(part)) else part

    if its_sharding is None:
        return jax.device_put(read(None))
    return jax.make_array_from_callback(view.shape, its_sharding, read)
