"""Backends in C++ and CUDA, which XLA calls through its FFI."""

import contextlib
import ctypes
from collections.abc import Iterable

import jax


def register(loaded: ctypes.CDLL, targets: Iterable[str], platform: str) -> None:
    """Registers a library's handlers with XLA; each has the name of its target.

    The platform, if present, is initialized first: a handler that was built for another jax is then an error here.
    Otherwise jax would keep the handler until it initializes the platform, and that would fail for every program.
    """
    with contextlib.suppress(RuntimeError):
        jax.devices(platform)
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform=platform)
