#!/usr/bin/env python3
"""Draws a layer divided over devices, from a saved report of `jmx bench --mesh`: times and efficiency against tokens.

    jmx bench --mesh ep=2 --exchange peer,gather,rows --json report.json
    python benchmarks/mesh_picture.py report.json picture.svg

Several reports, of other token counts, are drawn as one.

Above: the divided layer, a line an exchange; its experts alone; one device with all tokens, over the number of devices.
Below: the efficiency of each exchange.
"""

import argparse
import dataclasses
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.perf.roofline import DividedRow, Report, require_matplotlib

COLORS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#be185d", "#a16207")
Line = list[tuple[int, float]]  # (tokens a device, number), by tokens


def main() -> int:
    """Reads reports, writes the picture: SVG or PNG, by the name of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", help="JSON of `jmx bench --mesh`, of one layer on one machine")
    parser.add_argument("picture", help="file to write: .svg or .png")
    arguments = parser.parse_args()
    draw(together([Report.load(report) for report in arguments.reports]), arguments.picture)
    return 0


def together(reports: list[Report]) -> Report:
    """The rows of all in one. ValueError unless they are of one layer and mesh, and of devices of one kind."""
    first, *others = reports
    for other in others:
        for name, its, known in (
            ("mesh", other.machine.get("mesh"), first.machine.get("mesh")),
            ("device", other.machine["device"], first.machine["device"]),
            ("model", other.settings["model"], first.settings["model"]),
            ("routing", other.settings["routing"], first.settings["routing"]),
        ):
            if its != known:
                raise ValueError(f"`reports` must be of one {name}, and have {known!r} and {its!r}")
    return dataclasses.replace(first, rows=tuple(row for report in reports for row in report.rows))


def rows_of(report: Report) -> list[DividedRow]:
    """The measured rows of a layer that a mesh divides. ValueError if there are none."""
    rows = [row for row in report.rows if isinstance(row, DividedRow) and row.us is not None and row.error is None]
    if not rows:
        raise ValueError("`report` must have rows of a layer that a mesh divides: those of `jmx bench --mesh`")
    return rows


def lines_of(rows: list[DividedRow], field: str) -> dict[str, Line]:
    """The numbers of a field by exchange."""
    found: dict[str, Line] = {}
    for row in rows:
        found.setdefault(row.way, []).append((row.tokens, getattr(row, field)))
    return {name: sorted(line) for name, line in found.items()}


def references(rows: list[DividedRow], num_devices: int) -> dict[str, Line]:
    """What all exchanges share: the experts alone, and one device with all tokens over the number of devices."""
    experts = {row.tokens: row.experts_us for row in rows if row.experts_us is not None}
    ideal = {row.tokens: row.all_on_one_us / num_devices for row in rows if row.all_on_one_us is not None}
    return {"experts alone": sorted(experts.items()), f"one device, all tokens, / {num_devices}": sorted(ideal.items())}


def draw(report: Report, path: str) -> None:
    """Writes the picture to `path`; an SVG is the same bytes for the same report and matplotlib."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = rows_of(report)
    num_devices = 1
    for size in report.machine["mesh"].values():
        num_devices *= size
    with matplotlib.rc_context({"svg.hashsalt": "jmx", "font.size": 11, "svg.fonttype": "path"}):
        figure = Figure(figsize=(8, 6.4), layout="constrained", facecolor="white")
        times, efficiency = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for (name, line), style in zip(references(rows, num_devices).items(), ("--", ":"), strict=True):
            times.plot(*zip(*line, strict=True), style, color="black", linewidth=1.4, label=name)
        for axes, field in ((times, "us"), (efficiency, "efficiency")):
            for number, (name, line) in enumerate(lines_of(rows, field).items()):
                color = COLORS[number % len(COLORS)]
                axes.plot(*zip(*line, strict=True), color=color, marker="o", markersize=5, linewidth=2, label=name)
            axes.grid(visible=True, linewidth=0.3)
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
        times.set_xscale("log")
        times.set_yscale("log")
        times.set_ylabel("us a layer")
        times.legend(frameon=False, loc="upper left", fontsize=9)
        tokens = sorted({row.tokens for row in rows})
        efficiency.set_xticks(tokens, [str(count) for count in tokens])
        efficiency.xaxis.set_minor_locator(NullLocator())
        efficiency.set_ylim(bottom=0)
        efficiency.yaxis.set_major_formatter("{x:.0%}")
        efficiency.axhline(1, color="black", linewidth=0.8)
        efficiency.set_ylabel("efficiency")
        efficiency.set_xlabel("tokens a device")
        s = report.settings
        title = f"One MoE layer of {s['model']} over {rows[0].mesh} of {report.machine['device']}"
        times.set_title(f"{title}, {s['routing']} routing", fontsize=11)
        metadata = {"Date": None} if path.endswith(".svg") else None
        figure.savefig(path, dpi=130, metadata=metadata)


if __name__ == "__main__":
    sys.exit(main())
