"""Loads the library of the backend `cpu` on first use, and registers its handlers with XLA."""

import ctypes
import functools
import pathlib
from typing import NamedTuple

from jmx.ffi.library import NOT_BUILT, load, register, warned_fault

# Names of the custom calls, as an exported program contains them.
GROUPED_PRODUCT = "jmx_cpu_grouped_product"
ROUND_ROWS = "jmx_cpu_round_rows"
ORDER_COLUMNS = "jmx_cpu_order_columns"
TARGETS = (GROUPED_PRODUCT, ROUND_ROWS, ORDER_COLUMNS)

_PATH = pathlib.Path(__file__).parent / "libjmx_cpu.so"


class Library(NamedTuple):
    """The outcome of loading.

    Args:
        kernels: names of the instruction sets that this machine supports, the best one last.
        fault: why there are none, or None.
    """

    kernels: tuple[str, ...] = ()
    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library and registers it with XLA, once. A library that is present and does not load is a warning."""
    if not _PATH.exists():
        return Library(fault=NOT_BUILT)
    try:
        loaded = load(_PATH, {"jmx_cpu_kernels": ctypes.c_char_p})
        names = loaded.jmx_cpu_kernels().decode().split()
        register(loaded, TARGETS, "cpu")
    except Exception as e:  # such as a library for another machine or a newer jax: other backends run
        return Library(fault=warned_fault("cpu", _PATH, e))
    return Library(tuple(names))
