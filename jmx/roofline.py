"""Measured rows against the limits of the machine: as an object, as a table, as JSON, as a roofline picture."""

import dataclasses
import importlib.util
import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Limits:
    """What this machine reaches: bytes read plus written a second, and dense bfloat16 flop a second.

    A CPU's dense rate is that of float32 or bfloat16, whichever is faster there.
    """

    copy_rate: float
    dense_rate: float


@dataclass(frozen=True)
class Row:
    """One backend at one token count, a layer's share of the call.

    Args:
        backend, weights: who ran, and how its weights lay.
        tokens, layers: tokens of the call, and different layers in it.
        us: median microseconds of one layer; `spread` is (slowest - fastest) / median of the repeats.
        tb_s: bytes of the active experts in their block format over `us`, whatever the backend really moved; TB/s.
        tflop_s: flops of the two products over `us`; TFLOP/s.
        active_experts: experts that the tokens were routed to, mean over the layers.
        floor_us: max(bytes of active experts / copy rate, flops / dense rate).
        over_floor: us / floor_us.
        relative_error: ||y - ref|| / ||ref|| of the first layer against float32, over up to 64 of the tokens.
        temporary_bytes: device memory of the call beside its arguments and results, or None where not known.
        error: why there are no numbers, or what is wrong with them; None where all is well.
    """

    backend: str
    tokens: int
    weights: str | None = None
    layers: int | None = None
    us: float | None = None
    spread: float | None = None
    tb_s: float | None = None
    tflop_s: float | None = None
    active_experts: float | None = None
    floor_us: float | None = None
    over_floor: float | None = None
    relative_error: float | None = None
    temporary_bytes: int | None = None
    error: str | None = None

    def __str__(self) -> str:
        told = [] if self.error is None else [self.error]
        if self.us is not None:
            told.insert(
                0,
                f"{self.us:.1f} us, {self.tb_s:.3g} TB/s, {self.tflop_s:.3g} TFLOP/s, {self.over_floor:.2f} x floor, "
                f"relative error {self.relative_error:.1e}",
            )
        return f"{self.backend}, {self.tokens} tokens: {'; '.join(told)}"


@dataclass(frozen=True)
class Report:
    """The rows of a run, with the machine, its limits, and the settings: all that a reader needs to run it again."""

    machine: Mapping[str, Any]
    limits: Limits
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def load(cls, path: str) -> "Report":
        """Reads what `save` wrote. ValueError, naming the file, for anything else."""
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
            rows = tuple(Row(**row) for row in values["rows"])
            return cls(values["machine"], Limits(**values["limits"]), values["settings"], rows)
        except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as e:
            raise ValueError(f"{path} is not a saved report of the benchmark: {e!r}") from None

    def save(self, path: str) -> None:
        """Writes JSON: the whole file or none of it."""
        _write_whole(path, json.dumps(self.as_dict(), indent=1).encode() + b"\n")

    def __rich__(self) -> Table:
        s, limits = self.settings, self.limits
        title = f"{s['model']}, {s['routing']} routing, one layer on {self.machine['device']}"
        rates = f"copy {limits.copy_rate / 1e12:.3g} TB/s, dense {limits.dense_rate / 1e12:.3g} TFLOP/s, measured"
        told = [f"{row.backend}, {row.tokens} tokens: {row.error}" for row in self.rows if row.error is not None]
        caption = escape("\n".join([rates, *told]))
        table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
        for name in ("backend", "weights"):
            table.add_column(name)
        for name in ("tokens", "layers", "us", "+-", "TB/s", "TFLOP/s", "experts", "floor us", "x floor", "rel. error"):
            table.add_column(name, justify="right")
        table.add_column("temp. MB", justify="right")
        for row in self.rows:
            table.add_row(*_cells(row), style=None if row.error is None else "red")
        return table


def _cells(row: Row) -> list[str]:
    numbers = (
        (row.tokens, "d"),
        (row.layers, "d"),
        (row.us, ".1f"),
        (row.spread, ".0%"),
        (row.tb_s, ".3g"),
        (row.tflop_s, ".3g"),
        (row.active_experts, ".1f"),
        (row.floor_us, ".1f"),
        (row.over_floor, ".2f"),
        (row.relative_error, ".1e"),
        (None if row.temporary_bytes is None else row.temporary_bytes / 1e6, ".1f"),
    )
    return [row.backend, row.weights or "none", *("-" if n is None else format(n, spec) for n, spec in numbers)]


def draw(report: Report, path: str) -> None:
    """Draws the roofline of a report: flop per byte across, TFLOP/s up, the measured limits as the roof. A PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    limits = report.limits
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    ridge = limits.dense_rate / limits.copy_rate
    points = [(row, row.tflop_s / row.tb_s, row.tflop_s) for row in report.rows if row.tflop_s and row.tb_s]
    intensities = [ridge, *(intensity for _, intensity, _ in points)]
    across = np.geomspace(min(intensities) / 3, max(intensities) * 3, 200)
    roof = np.minimum(across * limits.copy_rate, limits.dense_rate) / 1e12
    label = f"copy {limits.copy_rate / 1e12:.3g} TB/s, dense {limits.dense_rate / 1e12:.3g} TFLOP/s"
    axes.plot(across, roof, color="black", label=label)
    for backend in dict.fromkeys(row.backend for row, _, _ in points):
        line = sorted((row.tokens, x, y) for row, x, y in points if row.backend == backend)
        axes.plot([x for _, x, _ in line], [y for _, _, y in line], marker="o", label=backend)
        for tokens, x, y in line:
            axes.annotate(str(tokens), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=7)
    s = report.settings
    axes.set_title(f"{s['model']}, {s['routing']} routing, {report.machine['device']} (labels: tokens)", fontsize=10)
    axes.set_xlabel("flop per byte of active experts")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=8)
    axes.grid(visible=True, which="both", linewidth=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    _write_whole(path, picture.getvalue())


def require_matplotlib() -> None:
    """Raises ModuleNotFoundError, saying what helps, where there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'jmx[bench]', or save JSON here and draw it elsewhere"
        )


def _write_whole(path: str, content: bytes) -> None:
    beside = f"{path}.{os.getpid()}.part"
    try:
        with open(beside, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    finally:
        if os.path.exists(beside):
            os.remove(beside)
