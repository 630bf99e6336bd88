#!/usr/bin/env python3
"""Profiles a decoding step of gpt-oss on a Hopper GPU, and draws where its time goes.

    python benchmarks/profile_step.py capture profile.json --model gpt-oss-120b --layers 6
    python benchmarks/profile_step.py draw profile.json docs/images/h200-step.svg

`capture` makes random weights, computes prompts, and generates: some programs of `CHUNK` steps are timed alone, then
some are recorded by `jax.profiler`, which names every kernel. The profile has all kernels of one step, that of median
length, and of all whole steps recorded what each part takes. Launches of CUDA graphs are those that the host made.
"""

import argparse
import dataclasses
import itertools
import pathlib
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from benchmarks import kernel_trace, profile_command
from benchmarks.kernel_trace import Kernel
from jmx.models import FAMILIES, Runner, Sampler, from_source, random_source
from jmx.models.runner import CHUNK
from jmx.perf.roofline import require_matplotlib
from jmx.plot import style

PUBLISHED = FAMILIES["gpt_oss"].published
TIMED, RECORDED = 6, 4  # programs of CHUNK steps

# The parts of a step in order, and their colors. Kernels of jmx have names (`BEGINNINGS`); XLA's do not, and belong to
# what they come after.
PARTS = {
    "embedding, angles": "#9ca3af",
    "norm, queries, keys, values, cache": "#1d4ed8",
    "attention": "#0891b2",
    "output product, residual": "#7c3aed",
    "norm, router": "#a16207",
    "routing": "#be185d",
    "experts": "#c2410c",
    "sum of experts, residual": "#f59e0b",
    "norm, logits, next token": "#047857",
}
BEGINNINGS = {"jmx_heads": 1, "flash_decode": 2, "jmx_route": 5, "mosaic": 6} | {
    f"jmx_{tokens}_{kernel}": part
    for tokens in ("one_token", "few_tokens")  # kernels of one user, and of a few
    for kernel, part in {"heads": 1, "attention": 2, "out": 3, "router": 4}.items()
}
ATTENTION = tuple(its for its, part in BEGINNINGS.items() if part == 2)  # each layer has one such kernel
EXPERTS = tuple(its for its, part in BEGINNINGS.items() if part == 6)
PRODUCT = re.compile(r"gemm|nvjet|cutlass|cublas|_dot")
LAYERS_SHOWN = 2
OVERLAP = 1.0  # us by which a kernel begins before the last one ends, if they are shown below each other
LANE = 0.7  # height of a bar


def main() -> int:
    """Captures a profile on this machine's GPU, or draws one."""

    def options(command: argparse.ArgumentParser) -> None:
        command.add_argument("--model", choices=PUBLISHED, default="gpt-oss-120b")
        command.add_argument("--layers", type=int, help="of the model's, the first so many (default: all)")
        command.add_argument("--rows", type=int, default=1, help="prompts at once")
        command.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")

    def capture_and_print(arguments: argparse.Namespace) -> dict[str, Any]:
        profile = capture(arguments.model, arguments.rows, arguments.prompt, arguments.layers)
        print(table(profile))
        return profile

    return profile_command.run(
        str(__doc__),
        "steps",
        capture_and_print,
        lambda profile, its: draw(profile, its.picture),
        capture_options=options,
    )


def capture(model: str, rows: int, prompt: int, layers: int | None = None) -> dict[str, Any]:
    """Times of steps with and without the profiler, what the parts take, and the kernels of one step."""
    config = PUBLISHED[model]
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise ValueError(f"`layers` (={layers}) must be 1 to {config.num_hidden_layers}, those of {model}")
        config = dataclasses.replace(config, num_hidden_layers=layers, layer_types=config.layer_types[:layers])
        model = f"{layers} layers of {model}"
    runner = Runner(from_source(random_source(config)))
    prompts = np.random.default_rng(0).integers(config.vocab_size, size=(rows, prompt)).tolist()
    generation = runner.generate(prompts, Sampler(), 1 + (2 + TIMED + RECORDED) * CHUNK)

    def take(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            next(generation)
        return time.perf_counter() - start

    take(1 + CHUNK)  # compiles
    us = 1e6 * take(TIMED * CHUNK) / (TIMED * CHUNK)
    _, trace = kernel_trace.record(lambda: take((RECORDED + 1) * CHUNK))
    about = {"model": model, "rows": rows, "prompt": prompt, "device": jax.devices()[0].device_kind}
    about |= {"jax": jax.__version__, "step_us": round(us, 1)}
    return about | summary(trace, config.num_hidden_layers)


def summary(trace: kernel_trace.Trace, layers: int) -> dict[str, Any]:
    """What `capture` saves of a trace."""
    steps = list(whole_steps(kernel_trace.kernels(trace), layers))
    if not steps:
        raise RuntimeError(
            f"no step was recorded that has {layers} kernels named {' or '.join(ATTENTION)}: is this a Hopper GPU?"
        )
    lengths = [step[-1].end - step[0].start for step in steps]
    median = statistics.median_low(lengths)
    found = steps[lengths.index(median)]
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    launched: dict[str, list[int]] = defaultdict(lambda: [0] * len(steps))
    for index, step in enumerate(steps):
        until = step[0].start
        for kernel, part in zip(step, parts_of(step), strict=True):
            spent[part][index] += max(0.0, kernel.end - max(kernel.start, until))  # not beside the one before
            until = max(until, kernel.end)
            launched[part][index] += 1
    first = found[0].start
    launches = sum(str(event.get("name")).startswith("cuGraphLaunch") for event in trace if event.get("ph") == "X")
    all_steps = sum(kernel.name.startswith(ATTENTION) for kernel in kernel_trace.kernels(trace)) / layers
    return {
        "layers": layers,
        "steps": len(steps),
        "recorded_step_us": round(median, 1),
        "idle_us": round(median - busy(found), 1),
        "graph_launches_per_step": round(launches / all_steps, 2),
        "parts": {
            part: {"us": round(statistics.median(spent[part]), 1), "kernels": statistics.median_low(launched[part])}
            for part in PARTS
            if part in spent
        },
        "kernels": [[kernel.name, round(kernel.start - first, 2), round(kernel.end - first, 2)] for kernel in found],
    }


def whole_steps(kernels: Sequence[Kernel], layers: int) -> Iterator[list[Kernel]]:
    """Kernels of each step that is whole. It begins with the kernel that usually follows the logits and a pause."""
    attention = [i for i, kernel in enumerate(kernels) if kernel.name.startswith(ATTENTION)]
    if len(attention) <= layers:
        return
    apart = [kernels[b].start - kernels[a].start for a, b in itertools.pairwise(attention)]
    most = 2 * statistics.quantiles(apart, n=4)[0]  # between the last layer of a step and the next are the logits
    between = [range(attention[i] + 1, attention[i + 1] + 1) for i, us in enumerate(apart) if us > most]
    found = [after_logits(kernels, its) for its in between]
    if not found:
        return
    first = statistics.mode(kernels[i].name for i in found)
    begins = [
        next((i for i in its if kernels[i].name == first), other) for its, other in zip(between, found, strict=True)
    ]
    for start, end in itertools.pairwise(begins):
        if sum(start <= i < end for i in attention) == layers:
            yield [*kernels[start:end]]


def after_logits(kernels: Sequence[Kernel], between: range) -> int:
    """The first kernel after the logits that follows a pause, from a step's last attention to the next one's first.

    The logits are the longest kernel after the experts of the last layer. The host launches some kernels after them
    alone, so there are several pauses, and others are before the logits: this is the first that is no short one.
    """
    experts = [i for i in between if kernels[i].name.startswith(EXPERTS)]
    rest = range(experts[-1] + 1 if experts else between.start, between.stop)
    logits = max(rest, key=lambda i: kernels[i].end - kernels[i].start)
    pauses = {i: kernels[i].start - kernels[i - 1].end for i in range(logits + 1, between.stop)}
    return next((i for i, us in pauses.items() if us >= max(pauses.values()) / 2), between.stop - 1)


def parts_of(step: Sequence[Kernel]) -> list[str]:
    """The part of each kernel of a step."""
    names, found = [*PARTS], []
    embedding, attention, output, router, experts, combined, logits = (names[i] for i in (0, 2, 3, 4, 6, 7, 8))
    part = embedding
    for kernel in step:
        beginning = next((its for its in BEGINNINGS if kernel.name.startswith(its)), None)
        if beginning is not None:
            part = names[BEGINNINGS[beginning]]
        elif kernel.name.startswith("jmx_linear"):
            part = output if part == attention else router
        elif part == attention and PRODUCT.search(kernel.name):
            part = output
        elif part in (experts, combined):
            part = combined if part == experts else logits
        found.append(part)
    return found


def busy(step: Sequence[Kernel]) -> float:
    """us in which a kernel ran."""
    total, until = 0.0, step[0].start
    for kernel in step:
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def table(profile: dict[str, Any]) -> str:
    """The parts as a table."""
    text = "{model}, {rows} rows after {prompt} tokens, {device}: {step_us} us a step, {recorded_step_us} recorded, of"
    text += " which idle {idle_us}; {graph_launches_per_step} launches of a CUDA graph a step"
    lines = [text.format(**profile), "", "| part | kernels a step | us | share |", "|---|---|---|---|"]
    total = profile["recorded_step_us"]
    rows = ((part, its["kernels"], its["us"]) for part, its in profile["parts"].items())
    return "\n".join([*lines, *(f"| {part} | {n} | {us:.1f} | {us / total:.1%} |" for part, n, us in rows)])


def draw(profile: dict[str, Any], path: str) -> None:
    """Writes the picture to `path`: a step, two of its layers with the names of kernels, and what the parts take."""
    require_matplotlib()
    from matplotlib.figure import Figure

    step = [Kernel(start, end, name) for name, start, end in profile["kernels"]]
    parts = parts_of(step)
    with style.settings():
        figure = Figure(figsize=(11, 8), layout="constrained", facecolor="white")
        whole, layers, shares = figure.subplots(3, 1, height_ratios=(0.8, 2.4, 3.2))
        users = "1 user" if profile["rows"] == 1 else f"{profile['rows']} users"
        figure.suptitle("A decoding step of {model}, {} after {prompt} tokens, {device}".format(users, **profile))
        for kernel, part in zip(step, parts, strict=True):
            whole.barh(0, kernel.end - kernel.start, 0.8, kernel.start, color=PARTS[part], linewidth=0, snap=False)
        title = "all {layers} layers and the logits: {kernels} kernels, {recorded_step_us:.0f} us"
        whole.set_title(title.format(**profile | {"kernels": len(step)}), fontsize=11)
        draw_layers(layers, step, parts)
        draw_shares(shares, profile)
        for axes in (whole, layers):
            axes.set_yticks([])
            axes.set_xlabel("us")
            axes.margins(x=0.005)
            axes.spines["left"].set_visible(False)
        for axes in (whole, layers, shares):
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        style.save(figure, path)


def draw_layers(axes: Any, step: Sequence[Kernel], parts: Sequence[str]) -> None:
    """The kernels of the first layers, with names. One that begins while another runs is below that."""
    heads = [*PARTS][1]
    begin = [i for i, part in enumerate(parts) if part == heads and (i == 0 or parts[i - 1] != heads)]
    shown = range(begin[0], begin[LAYERS_SHOWN])
    first, until, lane = step[begin[0]].start, 0.0, 0
    for i in shown:
        kernel = step[i]
        start, end = kernel.start - first, kernel.end - first
        lane = lane + 1 if start < until - OVERLAP else 0
        until = end
        axes.barh(-LANE * lane, end - start, LANE, start, color=PARTS[parts[i]], linewidth=0, snap=False)
        short = re.match(r"(?:jmx_(?:one_token_|few_tokens_)?([a-z]+)|(flash_decode|mosaic))", kernel.name)
        text = re.sub(r"_\d+$", "", kernel.name) if short is None else short[1] or short[2]
        if text == "flash_decode":
            text += re.sub(r".*?(_splits\d+)(_window\d+)?.*", r"\1\2", kernel.name)
        if lane:
            axes.text(end, -LANE * lane, " " + text, va="center", fontsize=8)
        else:
            axes.text((start + end) / 2, 0.6 * LANE, text, rotation=50, fontsize=8, rotation_mode="anchor")
    axes.set_ylim(-4 * LANE, 4 * LANE)
    axes.set_title(
        f"its first {LAYERS_SHOWN} layers: the first attends to a window, the second to all tokens", fontsize=11
    )


def draw_shares(axes: Any, profile: dict[str, Any]) -> None:
    """us of each part, of all layers together."""
    found, total = profile["parts"], profile["recorded_step_us"]
    idle = {"no kernel": {"us": profile["idle_us"], "kernels": 0}}
    rows = [*(found | idle).items()]
    bars = axes.barh(range(len(rows)), [its["us"] for _, its in rows], color=[PARTS.get(p, "#e2e8f0") for p, _ in rows])
    labels = []
    for part, its in rows:
        kernels = f"{its['kernels']} kernels, " if its["kernels"] else ""
        labels.append(f"{part}: {kernels}{its['us']:.0f} us ({its['us'] / total:.1%})")
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_yticks([])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * max(its["us"] for _, its in rows))
    axes.set_xlabel("us a step")


if __name__ == "__main__":
    sys.exit(main())
