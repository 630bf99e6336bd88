"""What a compiled program depends on beside its function and arguments: jax's state, jmx's sources, and the machine."""

import functools
import hashlib
import importlib.metadata
import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jax

import jmx
from jmx.backends import registered_backends
from jmx.selection import select, tuning

# Options of jax that change no program: where compiled ones are kept, and what is logged.
_OF_NO_PROGRAM = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log")
# Environment variables that XLA, CUDA and jmx read while they compile.
_VARIABLES = ("XLA_", "JMX_", "CUDA_", "NVIDIA_", "TF_")
_PACKAGES = ("jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


def tracing_context() -> tuple[Hashable, ...]:
    """Equal for calls between which nothing changed, beside their arguments, on which traces depend.

    That is jax's configuration, the mesh in scope, and what decides which backend runs and how. jit keys its own
    programs by it.
    """
    values = jax.config.values
    options = tuple(map(values.get, _options(tuple(values))))
    backends = tuple(backend.name for backend in registered_backends())
    return (*options, jax.sharding.get_abstract_mesh(), select.requested(None), tuning.state(), backends)


@functools.cache
def _options(names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of jax's options that programs depend on."""
    return tuple(name for name in names if not name.startswith(_OF_NO_PROGRAM))


def default_device() -> Any:
    """Where arrays without a sharding go."""
    chosen = jax.config.jax_default_device
    return jax.local_devices(backend=chosen)[0] if chosen is None or isinstance(chosen, str) else chosen


@functools.cache
def process_identity() -> str:
    """A digest that is equal in processes that compile equal functions to equal programs.

    Of jmx's files, the user's tuned tables, the versions of packages, environment variables, and the devices.
    """
    digest = hashlib.sha256()
    for root in (Path(jmx.__file__).parent, _tables()):
        for file in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"):
            digest.update(f"{file.relative_to(root)} {file.stat().st_size} ".encode())
            digest.update(file.read_bytes())
    variables = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    devices = [(device.id, device.device_kind, device.client.platform_version) for device in jax.local_devices()]
    digest.update(repr((_versions(), sorted(variables.items()), devices)).encode())
    return digest.hexdigest()


def _versions() -> list[tuple[str, str]]:
    found = []
    for package in _PACKAGES:
        try:
            found.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _tables() -> Path:
    """The user's tuned tables, or a directory that does not exist."""
    try:
        return tuning.cache_directory() / "tuning"
    except RuntimeError:  # no home directory
        return Path(os.devnull)
