"""Loads the library of the backend `cutlass` on first use, and registers it with XLA. Nothing is built here."""

import ctypes
import functools
import pathlib
from typing import Any, NamedTuple

from jmx.ffi import register
from jmx.ffi.cutlass import source

TARGET = "jmx_cutlass_moe"  # the name of the custom call, also in exported programs
INTERLEAVE = "jmx_cutlass_interleave"  # FlashInfer's own interleaving of weights, for tests
BUILD = "jmx build cutlass"


class Library(NamedTuple):
    """The loaded library: its path and the names of its tiles; or `fault`, why there is none."""

    path: pathlib.Path | None = None
    tiles: tuple[str, ...] = ()
    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library, which must be compiled from these sources, and registers it with XLA, once."""
    found, _ = _load()
    return found


def workspace_bytes(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, gated: bool
) -> int:
    """Bytes of workspace of a call with weights padded to these sizes.

    Raises:
        RuntimeError: the library is not built, or does not support these sizes.
    """
    found, loaded = _load()
    if loaded is None:
        raise RuntimeError(found.fault)
    sizes = (num_tokens, top_k, num_experts, hidden_size, intermediate_size)
    num_bytes = loaded.jmx_cutlass_workspace_bytes(*(ctypes.c_int64(size) for size in sizes), ctypes.c_int(gated))
    if num_bytes < 0:
        raise RuntimeError(f"{TARGET}: calls of sizes {sizes} are not supported")
    return num_bytes


@functools.cache
def _load() -> tuple[Library, Any]:
    fault = f"the kernels are not compiled on this machine ({source.LIBRARY} of this version)"
    for path in source.built():
        try:
            loaded = ctypes.CDLL(str(path))
            for name in (source.KEY_FUNCTION, "jmx_cutlass_tiles"):
                getattr(loaded, name).restype = ctypes.c_char_p
            loaded.jmx_cutlass_workspace_bytes.restype = ctypes.c_int64
            if loaded.jmx_cutlass_key().decode() != source.key():
                fault = f"{path} was compiled from other sources than this version's"
                continue
            register(loaded, (TARGET, INTERLEAVE), "gpu")
        except Exception as e:  # built on another machine or for another jax: other backends still work
            fault = f"{path} does not load: {' '.join(str(e).split())}"
            continue
        return Library(path, tuple(loaded.jmx_cutlass_tiles().decode().split())), loaded
    return Library(fault=fault), None


def forget() -> None:
    """Makes the next use look for the library again, in a process that has just built it."""
    library.cache_clear()
    _load.cache_clear()
