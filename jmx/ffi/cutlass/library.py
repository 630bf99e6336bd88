"""Loads the library of the backend `cutlass` on first use, and registers its handlers with XLA. It builds nothing."""

import ctypes
import functools
import pathlib
from typing import Any, NamedTuple

from jmx.ffi.cutlass import source
from jmx.ffi.library import load, load_fault, register, warn_of_fault

TARGET = "jmx_cutlass_moe"  # the name of the custom call, also in exported programs
INTERLEAVE = "jmx_cutlass_interleave"  # FlashInfer's own interleaving of weights, for tests
TARGETS = (TARGET, INTERLEAVE)
BUILD = "jmx build cutlass"


class Library(NamedTuple):
    """The outcome of loading: the file and the names of its tiles; or `fault`, why there is none."""

    path: pathlib.Path | None = None
    tiles: tuple[str, ...] = ()
    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library, compiled from these sources, and registers it with XLA, once."""
    found, _ = _load()
    return found


def workspace_bytes(
    num_tokens: int, top_k: int, num_experts: int, hidden_size: int, intermediate_size: int, gated: bool
) -> int:
    """Bytes of workspace of a call with weights padded to these sizes.

    Raises:
        RuntimeError: the library does not load, or computes no size.
    """
    found, loaded = _load()
    if loaded is None:
        raise RuntimeError(found.fault)
    sizes = (num_tokens, top_k, num_experts, hidden_size, intermediate_size)
    num_bytes = loaded.jmx_cutlass_workspace_bytes(*(ctypes.c_int64(size) for size in sizes), ctypes.c_int(gated))
    if num_bytes < 0:
        raise RuntimeError(f"{TARGET}: calls of sizes {sizes} are not supported")
    return num_bytes


_RESULTS = {
    source.KEY_FUNCTION: ctypes.c_char_p,
    "jmx_cutlass_tiles": ctypes.c_char_p,
    "jmx_cutlass_workspace_bytes": ctypes.c_int64,
}


@functools.cache
def _load() -> tuple[Library, Any]:
    """The first library that loads; a warning if there are libraries and none does."""
    fault = None
    for path in source.built():
        try:
            loaded = load(path, _RESULTS)
            if loaded.jmx_cutlass_key().decode() != source.key():
                fault = f"{path} was compiled from other sources than this version's"
                continue
            register(loaded, TARGETS, "gpu")
        except Exception as e:  # such as a library for another machine or a newer jax: other backends run
            fault = load_fault(path, e)
            continue
        return Library(path, tuple(loaded.jmx_cutlass_tiles().decode().split())), loaded
    if fault is None:
        return Library(fault=f"the kernels are not compiled on this machine ({source.LIBRARY} of this version)"), None
    warn_of_fault("cutlass", fault, BUILD)
    return Library(fault=fault), None


def forget() -> None:
    """Makes the next call of `library` load again: for a process that continues after a build."""
    library.cache_clear()
    _load.cache_clear()
