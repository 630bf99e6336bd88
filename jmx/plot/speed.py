"""Pictures of speed: benchmarks under the roofline of their machine, and the kernels of a profile."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jmx.perf.roofline import Report
from jmx.plot import style
from jmx.util.checks import check_instance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 12  # kernels that are shown by name
_LONGEST = 44  # characters of a name


def roofline(report: Report) -> "Figure":
    """TFLOP/s of each row against its flops per byte, under the limits that were measured in the same run.

    Bytes are those of the experts in use in their block format, whatever the system itself moves, and the limits are
    the rates of a copy and of a dense bfloat16 product. Rows without numbers are left out.

    Args:
        report: what `jmx bench --json` saved, read by `jmx.perf.roofline.Report.load`.

    Raises:
        TypeError: `report` is no report.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("report", report, Report, "a jmx.perf.roofline.Report")
    points: dict[str, list[tuple[float, float, int]]] = {}
    for row in report.rows:
        if row.error is None and row.tflop_s and row.tb_s:
            points.setdefault(row.name, []).append((row.tflop_s / row.tb_s, row.tflop_s, row.tokens))
    copy, dense = report.limits.copy_rate / 1e12, report.limits.dense_rate / 1e12
    with style.settings():
        figure, axes = style.figure(8, 4.2, xscale="log", yscale="log")
        found = [intensity for line in points.values() for intensity, _, _ in line] or [dense / copy]
        ends = np.array([min(found) / 1.5, dense / copy, max(*found, dense / copy) * 1.5])
        limits = f"limits: {copy:.3g} TB/s, {dense:.3g} TFLOP/s"
        axes.plot(ends, np.minimum(copy * ends, dense), color="black", linewidth=1.5, label=limits)
        for i, (name, line) in enumerate(points.items()):
            intensity, rate, tokens = zip(*sorted(line), strict=True)
            ours = i == 0
            color = style.OURS if ours else f"C{i - 1}"
            axes.plot(intensity, rate, "o-" if ours else "o--", color=color, markersize=6 if ours else 3, label=name)
            for where, label in zip(zip(intensity, rate, strict=True), tokens, strict=True) if ours else ():
                near = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "path_effects": style.outlined()}
                axes.annotate(str(label), where, (-5, 5), **near)
        axes.set_ylim(top=2 * dense)
        axes.set_xlabel("FLOP per byte of weights in use (numbers at points: tokens)")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"One layer of {report.settings['model']} on {report.machine['device']}")
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(frameon=False, fontsize=9, ncols=1 + len(points) // 8)
    return figure


def kernels(events: Sequence[Mapping[str, Any]], *, highlight: str | None = None) -> "Figure":
    """Bars of the time that each kernel of a profile took, all its launches together, the longest first.

    Args:
        events: a mapping for each launch: its "name", and its "start" and "end" in microseconds, such as the
            "kernels" of what `benchmarks/profile_layer.py capture` writes. A number at the end of a name is left out.
        highlight: the beginning of names that have another color: that of a backend.

    Raises:
        TypeError: `events` is no sequence of mappings, or `highlight` no str.
        ValueError: no events, or one that lacks a name, a start or an end.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("events", events, Sequence, "a sequence")
    check_instance("highlight", highlight, (str, type(None)), "a str or None")
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for i, event in enumerate(events):
        check_instance(f"events[{i}]", event, Mapping, "a mapping")
        if lacking := {"name", "start", "end"} - event.keys():
            raise ValueError(f"`events[{i}]` (={event!r}) must have {', '.join(sorted(lacking))}")
        name = re.sub(r"_\d+$", "", event["name"])
        times[name] += event["end"] - event["start"]
        launches[name] += 1
    if not times:
        raise ValueError(f"`events` (={events!r}) must have at least one launch")
    shown: list[tuple[str, float]] = [*times.most_common(_MOST)]
    if others := times.total() - sum(time for _, time in shown):
        shown.append((f"{len(times) - len(shown)} others", others))
    with style.settings():
        figure, axes = style.figure(9, 1.2 + 0.32 * len(shown))
        _kernel_bars(axes, shown, launches, times.total(), highlight)
    return figure


def _kernel_bars(axes: Any, shown: list[tuple[str, float]], launches: Counter[str], total: float, ours: Any) -> None:
    colors = [style.OURS if ours and name.startswith(ours) else style.OTHERS for name, _ in shown]
    bars = axes.barh(range(len(shown)), [time for _, time in shown], color=colors)
    labels = [f"{time:.1f} us ({time / total:.0%})" for _, time in shown]
    axes.bar_label(bars, labels, padding=4, fontsize=9)
    axes.set_yticks(range(len(shown)), [_label(name, launches[name]) for name, _ in shown], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(time for _, time in shown))
    axes.set_xlabel("us")
    axes.set_title(f"{launches.total()} launches, {total:.1f} us")


def _label(name: str, launches: int) -> str:
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 3]}..."
    return f"{short} x {launches}" if launches > 1 else short
