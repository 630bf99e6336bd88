"""What ran on a GPU while a function was called, by `jax.profiler`: each kernel's name, start and end."""

import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

Trace = list[dict[str, Any]]  # events of Chrome's trace format


class Kernel(NamedTuple):
    """A launch: start and end in us, and the kernel's name. Copies and fills are among them."""

    start: float
    end: float
    name: str


def record(function: Callable[[], Any]) -> tuple[Any, Trace]:
    """What `function` returns, and the trace of its call. Python calls are left out: recording them delays the host."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True, profiler_options=options):
            result = function()
        (trace,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
        return result, json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]


def on_device(trace: Sequence[dict[str, Any]]) -> Trace:
    """The events of a trace that ran on a stream of the GPU, in order of time."""
    streams = {
        (event["pid"], event["tid"])
        for event in trace
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }
    found = (event for event in trace if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams)
    return sorted(found, key=lambda event: float(event["ts"]))


def kernels(trace: Sequence[dict[str, Any]]) -> list[Kernel]:
    """What ran on the GPU in a trace, in order of time."""
    return [
        Kernel(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])
        for event in on_device(trace)
    ]
