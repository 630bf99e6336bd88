#!/usr/bin/env python3
"""Draws the README's picture from a saved benchmark: time over floor against tokens, of jmx and its peers.

python benchmarks/picture.py benchmarks/results/h200-gpt-oss-120b.json docs/images/h200-gpt-oss-120b.svg
python benchmarks/picture.py --roofline benchmarks/results/h200-gpt-oss-120b.json docs/images/h200-roofline.svg
"""

import argparse
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx import plot
from jmx.perf.roofline import Report, require_matplotlib
from jmx.plot import style

# System of a report -> its label, color, and whether it is the line that the picture is about.
SYSTEMS = {
    "mosaic": ("jmx (mosaic)", "#c2410c", True),
    "humming": ("Humming (vLLM)", "#1d4ed8", False),
    "triton_kernels": ("triton_kernels (OpenAI)", "#047857", False),
    "marlin": ("Marlin (vLLM)", "#7c3aed", False),
}
TICKS = (1, 1.25, 1.5, 2, 3, 4, 5)


def main() -> int:
    """Reads a report, writes the picture: SVG or PNG, by the name of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="JSON of benchmarks/layer.py --peers")
    parser.add_argument("picture", help="file to write: .svg or .png")
    parser.add_argument("--roofline", action="store_true", help="draw TFLOP/s against flops per byte instead")
    arguments = parser.parse_args()
    report = Report.load(arguments.report)
    if arguments.roofline:
        rows = tuple(row for row in report.rows if row.system in SYSTEMS)
        style.save(plot.roofline(dataclasses.replace(report, rows=rows)), arguments.picture)
    else:
        draw(report, arguments.picture)
    return 0


def lines(report: Report) -> dict[str, list[tuple[int, float]]]:
    """System -> (tokens, time over floor), by tokens."""
    points = {system: [] for system in SYSTEMS}
    for row in report.rows:
        if row.system in points and row.over_floor is not None and row.error is None:
            points[row.system].append((row.tokens, row.over_floor))
    return {system: sorted(line) for system, line in points.items() if line}


def speedups(report: Report) -> list[float]:
    """How many times as fast as the fastest peer jmx is, at each token count."""
    found = {system: dict(line) for system, line in lines(report).items()}
    ours = found.pop("mosaic")
    return [min(peer[tokens] for peer in found.values()) / ours[tokens] for tokens in sorted(ours)]


def draw(report: Report, path: str) -> None:
    """Writes the picture to `path`; an SVG is the same bytes for the same report and matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    with style.settings():
        figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor="white")
        axes = figure.add_subplot(xscale="log", yscale="log")
        axes.axhline(1, color="black", linewidth=1.2)
        axes.text(1, 1.02, "hardware limit measured in the same run", fontsize=9, va="bottom")
        for system, line in lines(report).items():
            label, color, ours = SYSTEMS[system]
            how = (
                {"linewidth": 3.0, "markersize": 6} if ours else {"linewidth": 1.5, "markersize": 4, "linestyle": "--"}
            )
            axes.plot(*zip(*line, strict=True), marker="o", color=color, label=label, **how)
        tokens = sorted({tokens for line in lines(report).values() for tokens, _ in line})
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.set_yticks(TICKS, [f"{tick:g}x" for tick in TICKS])
        axes.set_ylim(0.95, max(TICKS))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_title(f"One MoE layer of {report.settings['model']} (MXFP4 weights) on {report.machine['device']}")
        axes.set_xlabel("tokens")
        axes.set_ylabel("time over hardware limit (lower is better)")
        axes.legend(frameon=False)
        axes.grid(visible=True, linewidth=0.3)
        style.save(figure, path)


if __name__ == "__main__":
    sys.exit(main())
