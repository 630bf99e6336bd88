"""Loading compiled libraries and registering their handlers with XLA."""

import contextlib
import ctypes
import pathlib
import struct
import warnings
from collections.abc import Iterable, Mapping

import jax

# Why a library that pip builds is not there, and what gives one that loads.
NOT_BUILT = "jmx was installed without its kernels in C++"
REINSTALL = (
    "reinstall jmx with a C++20 compiler in PATH (g++ 12, clang 16): "
    "pip install --force-reinstall --no-deps --no-cache-dir --no-binary jmx-moe jmx-moe"
)
_ELF64 = b"\x7fELF\x02\x01"  # 64 bits, little-endian


class LibraryWarning(UserWarning):
    """A compiled library is present and does not load; the text has the reason and the remedy."""


def load(path: pathlib.Path, results: Mapping[str, type]) -> ctypes.CDLL:
    """Loads a library.

    Args:
        path: the file.
        results: result types of its C functions, by name.

    Raises:
        OSError: the file is truncated or is not a library for this machine.
        AttributeError: it lacks one of the functions.
    """
    _check_size(path)
    loaded = ctypes.CDLL(str(path))
    for name, result in results.items():
        getattr(loaded, name).restype = result
    return loaded


def register(loaded: ctypes.CDLL, targets: Iterable[str], platform: str, *, initialized: bool = False) -> None:
    """Registers a library's handlers with XLA; each has the name of its target.

    `initialized`: each has another one, NAME_initialize, which XLA calls before.

    The platform is initialized first, if it is present: a handler for a newer jax is an error then, which the caller
    can handle. Otherwise jax keeps the handler until it initializes the platform, which then fails in every program.
    """
    with contextlib.suppress(RuntimeError):
        jax.devices(platform)
    for target in targets:
        stages = {"execute": target, **({"initialize": f"{target}_initialize"} if initialized else {})}
        handlers = {stage: jax.ffi.pycapsule(getattr(loaded, name)) for stage, name in stages.items()}
        jax.ffi.register_ffi_target(target, handlers, platform=platform)


def load_fault(path: pathlib.Path | str, error: Exception) -> str:
    """Why a library does not load, in one line."""
    return f"{path} does not load: {' '.join(str(error).split())}"


def warned_fault(backend: str, path: pathlib.Path, error: Exception) -> str:
    """Why a library that pip builds does not load; also a warning. Callers do so once a process."""
    fault = load_fault(path.name, error)
    warn_of_fault(backend, fault, REINSTALL)
    return fault


def warn_of_fault(backend: str, fault: str, remedy: str) -> None:
    """Warns that a library is present and cannot be used, so that other backends run. Callers do so once a process."""
    message = f"the backend {backend!r} cannot run, and others run instead: {fault}; remedy: {remedy}"
    warnings.warn(message, LibraryWarning, stacklevel=2)


def _check_size(path: pathlib.Path) -> None:
    """OSError where an ELF file is truncated: the dynamic linker maps such a file, and reading it ends the process."""
    with path.open("rb") as file:
        header, size = file.read(64), path.stat().st_size
    if len(header) == 64 and header.startswith(_ELF64):
        (start,), (entry, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        if size < start + entry * count:  # the table of sections, which linkers write last
            raise OSError(f"the file is truncated: {size} of {start + entry * count} bytes")
