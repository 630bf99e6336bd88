"""From a file's bytes to devices: whole tensors, or only the slices that each device needs."""

from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Sharding

_ALIGNMENT = 64  # bytes; XLA's, on a CPU

Index = tuple[slice, ...]
ShardingLike = Sharding | Mapping[str, Sharding | None] | Callable[[str], Sharding | None] | None


class View(Protocol):
    """What can be placed: an array, or something that makes parts of one when it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    def __getitem__(self, index: Index, /) -> np.ndarray: ...


def sharding_of(name: str, sharding: ShardingLike) -> Sharding | None:
    """The sharding of the array called `name`: one for all, by name, by a function of the name, or None for none.

    Raises:
        TypeError: `sharding` is, holds or gives something else.
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
    name: str, view: View, sharding: ShardingLike, check: Callable[[np.ndarray, Index], None] | None = None
) -> jax.Array:
    """Puts an array on its devices and waits for it, so that the host holds one at a time.

    Args:
        name: what `sharding` and errors call it.
        view: a map of a file, or what reads files when sliced. Only what the devices of this process need is read.
        sharding: see `sharding_of`; None puts it on the default device, uncommitted.
        check: is shown each slice that is read, and where it lies, before it goes to a device.

    Raises:
        ValueError: a shape that the sharding cannot split.
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

    def read(index: Index | None) -> np.ndarray:
        index = everything if index is None else index
        part = view[index]
        if check is not None:
            check(part, index)
        # A CPU's arrays would stay maps of the file, and change or vanish with it.
        return _aligned_copy(part) if on_cpu else part

    if its_sharding is None:
        return jax.block_until_ready(jax.device_put(read(None)))
    return jax.block_until_ready(jax.make_array_from_callback(view.shape, its_sharding, read))


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    """A copy that JAX takes as a CPU array's own memory, where it would copy again what begins elsewhere."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
