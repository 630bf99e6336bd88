"""From files to devices: whole tensors, or only the slices that each device needs."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jmx.util.typing import Array, Shaped

_ALIGNMENT = 64  # bytes; XLA's, on a CPU

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


def place(
    name: str,
    view: View,
    sharding: ShardingLike,
    check: Callable[[Shaped[np.ndarray, "..."], Index], None] | None = None,
) -> Shaped[Array, "..."]:
    """Puts an array on its devices and waits for it, so that the host holds one at a time.

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
        # Without a copy, arrays on a CPU would stay maps of the file, and change with it.
        return _aligned_copy(part) if on_cpu else part

    if its_sharding is None:
        return jax.block_until_ready(jax.device_put(read(None)))
    return jax.block_until_ready(jax.make_array_from_callback(view.shape, its_sharding, read))


def _aligned_copy(array: Shaped[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """A copy in aligned memory, which JAX uses as a CPU array without copying it again."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
