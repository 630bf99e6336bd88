"""Arrays in host memory: aligned, and stacked by several threads."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jmx.util.typing import Shaped, UInt8

ALIGNMENT = 64  # bytes of an address. XLA uses an array so aligned as one of its own on a CPU, without a copy
THREADS = 8  # that read files, or compute
_LEAST_PARALLEL = 1 << 22  # bytes of an array that several threads fill


def aligned(memory: UInt8[np.ndarray, " more"]) -> UInt8[np.ndarray, " bytes"]:
    """All but `ALIGNMENT` bytes of `memory`, from an aligned address."""
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + memory.size - ALIGNMENT]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """An aligned array of no particular numbers."""
    memory = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT, np.uint8)
    return aligned(memory).view(dtype).reshape(shape)


def aligned_copy(array: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """An aligned array of the same numbers."""
    copy = aligned_empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def is_aligned(array: Shaped[np.ndarray, "..."]) -> bool:
    """Whether an array is contiguous, and in aligned memory."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0


def stacked[Item](
    items: Sequence[Item], part: Callable[[Item], Shaped[np.ndarray, "..."]], dtype: np.dtype
) -> Shaped[np.ndarray, "items ..."]:
    """The arrays that `part` makes of `items`, along a new first axis.

    Several threads make the parts of a large array: numpy computes, and files are read, without the interpreter's lock.

    Args:
        items: at least one.
        part: of an item; all are of one shape.
        dtype: of the result.
    """
    first = part(items[0])
    found = aligned_empty((len(items), *first.shape), dtype)
    found[0] = first
    del first

    def fill(i: int) -> None:
        found[i] = part(items[i])

    if found.nbytes < _LEAST_PARALLEL:
        for i in range(1, len(items)):
            fill(i)
        return found
    pool = ThreadPoolExecutor(THREADS, "jmx stack")
    try:
        for done in [pool.submit(fill, i) for i in range(1, len(items))]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return found
