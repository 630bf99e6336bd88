"""Loads the library of a token's kernels on first use, compiles them, and registers their handler with XLA."""

import ctypes
import functools
import pathlib
from typing import NamedTuple

import jax

from jmx.ffi import nvrtc
from jmx.ffi.library import NOT_BUILT, load, register, warned_fault

TARGET = "jmx_one_token"  # name of the custom call
TARGETS = (TARGET,)
CAPABILITY = "9.0"  # of the GPUs that the kernels are for
FOLDER = pathlib.Path(__file__).parent
_PATH = FOLDER / "libjmx_one_token.so"
HEADERS = ("call.h", "primitives.cuh", "tile.cuh", "few_tokens.cuh", "attention.cuh")


class Library(NamedTuple):
    """The outcome of loading; `fault`: why the kernels cannot run in this process, or None."""

    fault: str | None = None


@functools.cache
def library() -> Library:
    """Loads the library, compiles the kernels for the first GPU, and registers the handler with XLA, once.

    A library that is present and does not load is a warning.
    """
    if not _PATH.exists():
        return Library(NOT_BUILT)
    try:
        capability = jax.devices("gpu")[0].compute_capability
    except RuntimeError:
        return Library("this process has no GPU: it compiles for others")
    if capability != CAPABILITY:
        return Library(f"needs a GPU of compute capability {CAPABILITY} (this is {capability})")
    try:
        loaded = load(_PATH, {"jmx_one_token_set_image": ctypes.c_int})
        image = nvrtc.compile_kernels(FOLDER / "src", HEADERS, "sm_90a")
        loaded.jmx_one_token_set_image(ctypes.c_char_p(image), ctypes.c_size_t(len(image)))
        register(loaded, TARGETS, "gpu", initialized=True)
    except Exception as e:  # such as a library for a newer jax: other kernels run
        return Library(warned_fault("one_token", _PATH, e))
    return Library()
