"""Loads the library of the exchange `peer` on first use, compiles its kernels, and registers its handlers with XLA."""

import ctypes
import functools
import pathlib
from typing import NamedTuple

import jax

from jmx.ffi import nvrtc
from jmx.ffi.library import NOT_BUILT, load, register, warned_fault

# Names of the custom calls.
GATHER = "jmx_peer_gather"
SCATTER = "jmx_peer_scatter"
SUM = "jmx_peer_sum"
SCATTER_TERMS = "jmx_peer_scatter_terms"
START = "jmx_peer_start"
FINISH = "jmx_peer_finish"
GATHER_NEEDED = "jmx_peer_gather_needed"
SCATTER_NEEDED = "jmx_peer_scatter_needed"
# The sources of kernels that are compiled only for programs that call them; others are in kernels.cu.
SOURCES = {SCATTER_TERMS: "terms.cu", GATHER_NEEDED: "needed.cu", SCATTER_NEEDED: "needed.cu"}
TARGETS = (GATHER, SCATTER, SUM, START, FINISH, *SOURCES)

FOLDER = pathlib.Path(__file__).parent
_PATH = FOLDER / "libjmx_peer.so"
# Of all sources.
HEADERS = ("region.h", "lines.h", "ptx.h", "calls.h", "units.h", "needed.h", "terms_of.h")


class Library(NamedTuple):
    """The outcome of loading; `fault`: why the GPUs of this process cannot exchange rows by these kernels, or None."""

    fault: str | None = None
    loaded: ctypes.CDLL | None = None


@functools.cache
def library() -> Library:
    """Loads the library, compiles the kernels for the first GPU, and registers the handlers with XLA, once.

    A library that is present and does not load is a warning.
    """
    if not _PATH.exists():
        return Library(NOT_BUILT)
    try:
        num_gpus = jax.local_device_count("gpu")
    except RuntimeError:
        return Library("this process has no GPU: it compiles for others")
    try:
        loaded = load(_PATH, {"jmx_peer_set_image": ctypes.c_int, "jmx_peer_fault": ctypes.c_char_p})
        if fault := loaded.jmx_peer_fault(ctypes.c_int(num_gpus)).decode():
            return Library(fault)
        _compile("kernels.cu", loaded)
        register_handlers(loaded)
    except Exception as e:  # such as a library for a newer jax: another exchange runs
        return Library(warned_fault("peer", _PATH, e))
    return Library(loaded=loaded)


def compile_for(target: str) -> None:
    """Compiles the kernels of a custom call, if others do not need them, where this process runs any of the library.

    Raises:
        RuntimeError: NVRTC does not compile them.
    """
    if target in SOURCES:
        _compile_once(SOURCES[target])


@functools.cache
def _compile_once(source: str) -> None:
    if (loaded := library().loaded) is not None:
        _compile(source, loaded)


def _compile(source: str, loaded: ctypes.CDLL) -> None:
    image = nvrtc.compile_kernels(FOLDER / "src", HEADERS, nvrtc.architecture(), source)
    loaded.jmx_peer_set_image(source.encode(), ctypes.c_char_p(image), ctypes.c_size_t(len(image)))


def register_handlers(loaded: ctypes.CDLL) -> None:
    """Registers the handlers of a loaded library with XLA."""
    register(loaded, tuple(target for target in TARGETS if target != FINISH), "gpu", initialized=True)
    register(loaded, (FINISH,), "gpu")  # for which everything is there since the start
