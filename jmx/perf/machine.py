"""The machine: its description, its measured limits, and the time of a call on it."""

import datetime
import math
import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jmx import _version
from jmx.perf.roofline import Limits

Device = Any  # a jax.Device


def num_cpus() -> int:
    """Cores that this process may use, where the platform reports that; else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine(device: Device) -> dict[str, Any]:
    """The device by its own name, its memory in bytes, and the versions."""
    versions = {"jmx": _version.__version__, "jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "platform_version": " ".join(device.client.platform_version.split()),
        "memory_bytes": memory_limit(device),
        "host_cpus": os.cpu_count(),
        "versions": versions | {"python": platform.python_version()},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def memory_limit(device: Device) -> int | None:
    """Bytes that a program may hold on `device`, or None if that is not known. On a CPU, the memory of the machine."""
    if device.platform == "cpu":
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):
            return None
    return (device.memory_stats() or {}).get("bytes_limit")


def measure_limits(repeats: int) -> Limits:
    """The best of two ways to copy (a plain copy, and a kernel that changes each word), and a square product.

    On a CPU, where a copy also reads its destination, a read-only loop is measured too.
    """
    on_cpu = jax.default_backend() == "cpu"
    key = jax.random.key(secrets.randbits(32))
    words = jax.random.bits(key, (1 << (25 if on_cpu else 29),), jnp.uint32)
    copies = [jax.jit(jnp.copy), jax.jit(lambda words: words ^ 1)]
    copy_rate = max(2 * words.nbytes / seconds(partial(copy, words), repeats)[0] for copy in copies)
    if on_cpu:
        copy_rate = max(copy_rate, _read_rate(np.asarray(words), repeats))
    del words
    size = 1024 if on_cpu else 8192
    squares = []
    for dtype in (jnp.bfloat16, jnp.float32) if on_cpu else (jnp.bfloat16,):
        left, right = jax.random.normal(key, (2, size, size), dtype)
        squares.append(2 * size**3 / seconds(partial(jax.jit(jnp.matmul), left, right), repeats)[0])
    return Limits(copy_rate, max(squares))


def _read_rate(words: np.ndarray[Any, Any], repeats: int) -> float:
    """Bytes a second that all cores of this process together read of `words`, each core a separate part."""
    with ThreadPoolExecutor(num_cpus()) as pool:
        parts = np.array_split(words, num_cpus())
        return words.nbytes / seconds(lambda: [*pool.map(np.bitwise_or.reduce, parts)], repeats)[0]


def measure_links(mesh: Mesh, axes: tuple[str, ...], repeats: int) -> float | None:
    """Bytes a second that each device sends in an all-gather along mesh axes; None if they have one device."""
    others = math.prod(mesh.shape[name] for name in axes) - 1
    if not others:
        return None
    count = 1 << (18 if mesh.devices.flat[0].platform == "cpu" else 24)  # words of a device
    words = jax.device_put(jnp.zeros(count * mesh.size, jnp.uint32), NamedSharding(mesh, P(mesh.axis_names)))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names))
    def gather(words: Any) -> Any:
        return jax.lax.all_gather(words, axes, tiled=True) ^ 1

    return others * words.dtype.itemsize * count / seconds(partial(gather, words), repeats)[0]


def seconds(call: Callable[[], Any], repeats: int, least: float = 0.05) -> tuple[float, float]:
    """Median seconds of a call, and (slowest - fastest) / median.

    Each of the `repeats` samples is the mean of so many calls, queued without waiting, that it lasts `least`
    seconds. Two rounds before them warm up. A call's result is released before the next call, which so gets the same
    memory: a CUDA graph need not be updated.
    """
    jax.block_until_ready(call())
    calls, samples, out = 1, [], None
    for _ in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(calls):
            del out
            out = call()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / calls)
        calls = max(1, min(1000, math.ceil(least / samples[-1])))
    samples = samples[2:]
    median = statistics.median(samples)
    return median, (max(samples) - min(samples)) / median


def check_memory(compiled: Any) -> int | None:
    """The call's temporary bytes. MemoryError before it runs, where a CPU would start to swap instead."""
    needs, has = compiled.memory_analysis(), memory_limit(jax.devices()[0])
    if needs is None:
        return None
    total = needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes
    if has is not None and total > has:
        raise MemoryError(f"the call needs {total / 1e9:.1f} GB, and the device has {has / 1e9:.1f} GB")
    return needs.temp_size_in_bytes


def out_of_memory(error: Exception) -> bool:
    """Whether `error` means that the device is out of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
