"""Loads the library of the backend `cpu` on first use, and registers its handlers with XLA."""

import ctypes
import functools
import pathlib
from typing import NamedTuple

from jmx.ffi import register

# The custom calls' names, as an exported program has them.
TARGET = "jmx_cpu_grouped_product"
ROUND_ROWS = "jmx_cpu_round_rows"
ORDER_COLUMNS = "jmx_cpu_order_columns"
BUILD = "install it anew with a C++20 compiler in PATH (g++ 12, clang 16): pip install --force-reinstall --no-deps jmx"
_PATH = pathlib.Path(__file__).parent / "libjmx_cpu.so"


class Library(NamedTuple):
    """What was found: `kernels`, names of the instruction sets that run here, the best one last; or `fault`."""

    kernels: tuple[str, ...] = ()
    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library and registers it with XLA, once."""
    if not _PATH.exists():
        return Library(fault="jmx was installed without its kernels in C++")
    try:
        loaded = ctypes.CDLL(str(_PATH))
        loaded.jmx_cpu_kernels.restype = ctypes.c_char_p
        names = loaded.jmx_cpu_kernels().decode().split()
        register(loaded, (TARGET, ROUND_ROWS, ORDER_COLUMNS), "cpu")
    except Exception as e:  # of another machine, or built for another jax: whatever it is, the other backends still run
        return Library(fault=f"{_PATH.name} does not load: {' '.join(str(e).split())}")
    return Library(tuple(names))
