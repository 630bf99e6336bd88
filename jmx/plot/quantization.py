"""The picture of quantization errors, layer by layer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmx.checkpoint.quantizing import report as reports
from jmx.plot import style
from jmx.util.checks import check_instance

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def quantization_error(report: reports.Report | str | Path) -> "Figure":
    """Lines of the relative error of each layer's gate, up and down projections: ||quantized - source|| / ||source||.

    Args:
        report: what `jmx.checkpoint.quantizing.convert` returned, or the JSON that `jmx convert --report FILE` saved.

    Raises:
        TypeError: `report` is neither.
        ValueError: the file is not such a report, or the report has no layers.
        OSError: the file cannot be read.
        ModuleNotFoundError: matplotlib is not installed.
    """
    check_instance("report", report, (reports.Report, str, Path), "a report of errors, or a path")
    values = report.as_dict() if isinstance(report, reports.Report) else _read(Path(report))
    layers = [*values["layers"].values()]
    if not layers:
        raise ValueError("`report` must have at least one layer")
    with style.settings():
        figure, axes = style.figure(8, 3.6)
        for part, marker, color in zip(layers[0], "osv", style.COLORS[1:], strict=False):
            errors = [100 * parts[part]["relative_error"] for parts in layers]
            axes.plot(range(len(layers)), errors, marker=marker, markersize=4, color=color, label=part)
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(0, len(layers), max(1, len(layers) // 12)))
        axes.set_xlabel("layer")
        axes.set_ylabel("relative error, %")
        axes.set_title(f"Experts quantized to {values['format']}")
        axes.grid(visible=True, linewidth=0.3)
        axes.legend(frameon=False, ncols=3)
    return figure


def _read(path: Path) -> dict[str, Any]:
    if (fault := reports.REPORT.fault(path)) is not None:
        raise ValueError(f"`report` ({path}) must be a report of `jmx convert --quantize`: {fault}")
    return json.loads(path.read_text())
