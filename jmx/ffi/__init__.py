"""Engines in C++, called by XLA through its FFI."""

import contextlib
import ctypes
from collections.abc import Iterable

import jax


def register(loaded: ctypes.CDLL, targets: Iterable[str], platform: str) -> None:
    """Registers a library's handlers with XLA; each has the name of its target.

    The platform is initialised first, if it is here: a handler for another jax is an error then, which the caller sees.
    Else jax keeps it until it initialises the platform, which then fails, and every program with it.
    """
    with contextlib.suppress(RuntimeError):
        jax.devices(platform)
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(loaded, target)), platform=platform)
