#!/usr/bin/env python3
"""Profiles one MoE layer on an NVIDIA GPU, and draws what the profile shows.

    python benchmarks/profile_layer.py capture profile.json --model gpt-oss-20b --tokens 16
    python benchmarks/profile_layer.py draw profile.json docs/images/h200-profile.svg
    python benchmarks/profile_layer.py draw --kernels profile.json kernels.svg

`capture` runs a few layers under `jax.profiler`, which names every kernel; and one more layer whose Hopper kernel
records the `jax.named_scope`s of one CTA, warp by warp, which Pallas writes where `profile_space` asks for it.
"""

import argparse
import contextlib
import functools
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import kernel_trace, profile_command
from jmx import plot
from jmx.perf import bench, shapes
from jmx.perf.roofline import require_matplotlib
from jmx.plot import style
from jmx.selection.environment import Environment

LAYERS = 4
SCOPES = 88  # ranges that a warp may record: each takes 16 bytes of shared memory

WARPS = 4  # of a warpgroup
WINDOW_US = 45.0
COLORS = {
    "quantize": "#a16207",
    "wait_for_rows": "#e2e8f0",
    "prologue": "#7c3aed",
    "accumulate": "#1d4ed8",
    "wait": "#fca5a5",
    "epilogue": "#047857",
    "copy_weights": "#0e7490",
    "copy_rows": "#0891b2",
    "acquire": "#fcd34d",
}

Event = dict[str, Any]  # "name", "start" and "end" in us, "thread"


def main() -> int:
    """Captures a profile on this machine's GPU, or draws one."""

    def capture_options(command: argparse.ArgumentParser) -> None:
        command.add_argument("--model", choices=shapes.MODELS, default="gpt-oss-20b")
        command.add_argument("--tokens", type=int, default=16)
        command.add_argument("--backend", choices=("mosaic", "mosaic_fp8"), default="mosaic")

    def draw_options(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--kernels", action="store_true", help="the time of each kernel, all its launches together"
        )

    return profile_command.run(
        str(__doc__),
        "a layer",
        lambda its: capture(its.model, its.tokens, its.backend),
        draw_saved,
        capture_options=capture_options,
        draw_options=draw_options,
    )


def capture(model: str, tokens: int, backend: str) -> dict[str, Any]:
    """Kernels of a few layers, and the first scopes of a CTA, each a list of events; with what was profiled."""
    pair = "mxfp4:fp8_token" if backend == "mosaic_fp8" else "mxfp4"
    shape = shapes.MODELS[model].in_formats(pair)
    system = bench.System.of(backend, shape, tokens, Environment.probe())
    keys = jax.random.split(jax.random.key(0), LAYERS)
    x = jax.random.normal(jax.random.key(1), (tokens, shape.hidden_size), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(2), (LAYERS, tokens, shape.num_experts))
    weights = system.build(shape, keys, {})
    layers = jax.jit(functools.partial(bench.run_layers, system.layer))
    jax.block_until_ready(layers(x, logits, weights))
    _, trace = kernel_trace.record(lambda: [jax.block_until_ready(layers(x, logits, weights)) for _ in range(3)])
    kernels = kernel_events(trace)
    with tempfile.TemporaryDirectory() as folder:
        jax.clear_caches()  # what is compiled records nothing
        with recorded_scopes(folder):
            jax.block_until_ready(jax.jit(system.layer)(x, logits[0], weights[0]))
            jax.effects_barrier()
        traces = sorted(pathlib.Path(folder).iterdir(), key=lambda path: path.stat().st_size)
        scopes = scope_events(json.loads(traces[-1].read_text())["traceEvents"])
    threads = shown_threads(scopes)
    scopes = [scope for scope in scopes if scope["thread"] in threads and scope["start"] < WINDOW_US]
    about = {"model": model, "tokens": tokens, "backend": backend, "device": jax.devices()[0].device_kind}
    return about | {"jax": jax.__version__, "kernels": kernels, "scopes": scopes}


@contextlib.contextmanager
def recorded_scopes(folder: str) -> Iterator[None]:
    """Hopper kernels that are compiled meanwhile write the scopes of their warps into `folder`."""
    recording = {
        "profile_space": SCOPES,
        "profile_dir": folder,
        "profile_bounds_check": True,  # a warp that has more leaves the rest out
        "profile_trace_scope": plgpu.TraceScope.WARP,
    }
    with mock.patch.object(plgpu, "CompilerParams", functools.partial(plgpu.CompilerParams, **recording)):
        yield


def kernel_events(trace: Sequence[Event]) -> list[Event]:
    """Kernels of the last call in a trace of `jax.profiler`, in order of time, from 0 us."""
    found = [
        {"name": event["name"], "start": float(event["ts"]), "end": float(event["ts"]) + float(event["dur"])}
        | {"thread": 0, "scope": event.get("args", {}).get("tf_op", "")}
        for event in kernel_trace.on_device(trace)
    ]
    gaps = [i for i in range(1, len(found)) if found[i]["start"] - found[i - 1]["end"] > 100]
    return from_zero(found[gaps[-1] if gaps else 0 :])


def scope_events(trace: Sequence[Event]) -> list[Event]:
    """Scopes of the CTA that recorded first, nested as they were entered, from 0 us."""
    processor = min(trace, key=lambda event: event["ts"])["pid"]
    events, entered = [], {}
    for event in (event for event in trace if event["pid"] == processor):
        stack = entered.setdefault(event["tid"], [])
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"]))
        else:
            name, start = stack.pop()
            place = {"thread": event["tid"], "depth": len(stack)}
            events.append({"name": name, "start": start, "end": event["ts"]} | place)
    first = min(event["thread"] for event in events)
    return from_zero([event | {"thread": event["thread"] - first} for event in events])


def from_zero(events: Sequence[Event]) -> list[Event]:
    """`events` with the earliest start at 0, to the nanosecond."""
    first = min((event["start"] for event in events), default=0.0)
    times = ({"start": round(event["start"] - first, 3), "end": round(event["end"] - first, 3)} for event in events)
    return [event | time for event, time in zip(events, times, strict=True)]


def draw_saved(profile: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Draws a saved profile: kernels and scopes along the time, or the time of each kernel."""
    if arguments.kernels:
        figure = plot.kernels(profile["kernels"], highlight=profile["backend"])
        title = "{model} at {tokens} tokens on {device}".format(**profile)
        figure.axes[0].set_title(f"{LAYERS} layers of {title}: {figure.axes[0].get_title()}")
        style.save(figure, arguments.picture)
    else:
        draw(profile, arguments.picture)


def draw(profile: dict[str, Any], path: str) -> None:
    """Writes the picture to `path`: kernels of a layer above, below them one warp of each warpgroup of a CTA."""
    require_matplotlib()
    import matplotlib
    import matplotlib.patches
    from matplotlib.figure import Figure

    kernels, scopes = profile["kernels"], profile["scopes"]
    layer = kernels[: next(i for i, kernel in enumerate(kernels) if is_ours(kernel, profile)) + 2]
    with matplotlib.rc_context({"svg.hashsalt": "jmx", "font.size": 10, "svg.fonttype": "path"}):
        figure = Figure(figsize=(12, 6), layout="constrained", facecolor="white")
        above, below = figure.subplots(2, 1, height_ratios=(1, 4))
        for kernel in layer:
            ours = is_ours(kernel, profile)
            add_bar(above, 0, kernel, "#c2410c" if ours else "#94a3b8", kernel["name"] if ours else "")
        above.set_yticks([0], ["kernels"])
        above.set_title("One layer of {model} at {tokens} tokens, `{backend}`, {device}".format(**profile))
        threads = shown_threads(scopes)
        for scope in sorted(scopes, key=lambda scope: scope["depth"]):
            if scope["name"] in COLORS:
                add_bar(below, threads.index(scope["thread"]), scope, COLORS[scope["name"]], "")
        below.set_yticks(range(len(threads)), [label_of(thread, scopes) for thread in threads])
        below.invert_yaxis()
        below.set_title("Scopes in the first CTA of that kernel: its first microseconds, slowed down by being recorded")
        below.set_xlim(0, WINDOW_US)
        for axes in (above, below):
            axes.set_xlabel("us")
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
        handles = [matplotlib.patches.Patch(color=color, label=name) for name, color in COLORS.items()]
        figure.legend(handles=handles, frameon=False, ncols=len(COLORS), loc="outside lower center")
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


def is_ours(kernel: Event, profile: dict[str, Any]) -> bool:
    """Whether a kernel is that of the backend, and not one of XLA's around it."""
    return kernel["name"].startswith(profile["backend"])


def add_bar(axes: Any, y: int, event: Event, color: str, text: str) -> None:
    """One event as a bar; a scope that is deeper lies on the one around it, and is lower."""
    height = 0.8 - 0.2 * max(0, event.get("depth", 0) - 2)
    axes.barh(y, event["end"] - event["start"], height, event["start"], color=color, linewidth=0)
    if text:
        axes.text((event["start"] + event["end"]) / 2, y, text, ha="center", va="center", fontsize=7, color="white")


def shown_threads(scopes: Sequence[Event]) -> list[int]:
    """The first warp of each consumer warpgroup, and all producer warps that record more than their start."""
    of = {scope["thread"]: scope["name"] for scope in scopes if scope["name"] in ("consumer", "producer")}
    busy = {scope["thread"] for scope in scopes if scope["name"] in COLORS}
    consumers = [thread for thread, name in of.items() if name == "consumer" and thread % WARPS == 0]
    return sorted(consumers) + sorted(thread for thread, name in of.items() if name == "producer" and thread in busy)


def label_of(thread: int, scopes: Sequence[Event]) -> str:
    """What a warp is, by what it records."""
    names = {scope["name"] for scope in scopes if scope["thread"] == thread}
    if "consumer" in names:
        return f"consumer\nwarpgroup {thread // WARPS}"
    return "producer warp,\n" + ("weights" if "copy_weights" in names else "rows")


if __name__ == "__main__":
    sys.exit(main())
