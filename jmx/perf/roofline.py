"""Measured rows against the limits of the machine: an object, a table, JSON, a picture."""

import dataclasses
import importlib.util
import io
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jmx.util import atomic_files, html
from jmx.util.atomic_files import Kind
from jmx.util.tables import FoldingTable, decimal, numbers, words


@dataclass(frozen=True)
class Limits:
    """Measured rates of this machine: bytes read plus written per second, and dense bfloat16 flop per second.

    A CPU's copy rate is that of reading only, and its dense rate that of float32, if these are higher.
    """

    copy_rate: float
    dense_rate: float


@dataclass(frozen=True)
class Row:
    """One system at one token count, a layer's share of the call.

    Args:
        system, weights: a backend or a peer, and the layout of its weights.
        tokens, layers: tokens of the call, and different layers in it.
        us: median microseconds of one layer; `spread` is (slowest - fastest) / median of the repeats.
        tb_s: bytes of the active experts in their block format over `us`, whatever the system itself moves; TB/s.
        tflop_s: flops of the two products over `us`; TFLOP/s.
        active: experts that the tokens were routed to, mean over the layers.
        floor_us: max(bytes of active experts / copy rate, flops / dense rate), the dense rate times
            `costs.times_bfloat16` of the row's formats.
        over_floor: us / floor_us.
        rel_err: ||y - ref|| / ||ref|| of the first layer against float32, over up to 64 of the tokens.
        temporary_bytes: device memory of the call beside its arguments and results, or None if not known.
        format, input_format: of weights and inputs, where a run has several; None: the run's own, and of 16 bits.
        error: why there are no numbers, or what is wrong with them; None without errors.
    """

    system: str
    tokens: int
    weights: str | None = None
    layers: int | None = None
    us: float | None = None
    spread: float | None = None
    tb_s: float | None = None
    tflop_s: float | None = None
    active: float | None = None
    floor_us: float | None = None
    over_floor: float | None = None
    rel_err: float | None = None
    temporary_bytes: int | None = None
    error: str | None = None
    format: str | None = None
    input_format: str | None = None

    def __str__(self) -> str:
        parts = [] if self.error is None else [self.error]
        if self.us is not None:
            parts.insert(
                0,
                f"{decimal(self.us)} us, {self.tb_s:.3g} TB/s, {self.tflop_s:.3g} TFLOP/s, "
                f"{self.over_floor:.2f} x floor, relative error {self.rel_err:.1e}",
            )
        return f"{self.name}, {self.tokens} tokens: {'; '.join(parts)}"

    @property
    def formats(self) -> str:
        """Of weights and inputs, where a run has several."""
        return " x ".join(name for name in (self.format, self.input_format) if name is not None)

    @property
    def name(self) -> str:
        """The system, and its formats where a run has several."""
        return f"{self.system} {self.formats}" if self.formats else self.system

    @property
    def held(self) -> str:
        """The layout of its weights and, if a run has several, the formats."""
        return f"{self.weights or 'none'} {self.formats}".rstrip()


@dataclass(frozen=True)
class DividedRow(Row):
    """A row of a layer that a mesh divides: `tokens` are those of a device, `us` the time of the divided layer.

    Bytes, flops and experts in use are those of one device, for tb_s, tflop_s, active and floor_us.

    Args:
        mesh: its axes and sizes, such as "dp=2,ep=4".
        exchange: name of the exchange; None: there is none.
        chunks: in which a device's tokens were exchanged.
        experts_us: the time of a device's experts alone, with the tokens that are exchanged.
        exchange_us: us - experts_us.
        fullest_experts_us: as experts_us, where each layer has every device do the work of the fullest one.
        waits_us: fullest_experts_us - experts_us, the part of exchange_us in which devices wait for others' experts.
        one_us, all_on_one_us: the time of the whole layer on one device, with the tokens of one, and of all.
        efficiency: all_on_one_us / (devices * us).
        sent_bytes: that a device sends to others.
    """

    mesh: str = ""
    exchange: str | None = None
    experts_us: float | None = None
    exchange_us: float | None = None
    fullest_experts_us: float | None = None
    waits_us: float | None = None
    one_us: float | None = None
    all_on_one_us: float | None = None
    efficiency: float | None = None
    sent_bytes: int | None = None
    chunks: int = 1

    @property
    def way(self) -> str:
        """The exchange, and its chunks if there are several."""
        return (self.exchange or "none") + (f", {self.chunks} chunks" if self.chunks > 1 else "")


@dataclass(frozen=True)
class Report:
    """The rows of a run, with the machine, its limits, and the settings: all that is needed to repeat it."""

    machine: Mapping[str, Any]
    limits: Limits
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: the machine's own beside `copy_TBs` (1e12 bytes a second), `dense_TFLOPs` and `rows`.

        Each row has its `shape`, so that rows of several files can be in one table.
        """
        limits = {"copy_TBs": self.limits.copy_rate / 1e12, "dense_TFLOPs": self.limits.dense_rate / 1e12}
        rows = [{"shape": self.settings["model"]} | dataclasses.asdict(row) for row in self.rows]
        return {**self.machine, **limits, "settings": self.settings, "rows": rows}

    @classmethod
    def load(cls, path: str) -> "Report":
        """Reads what `save` wrote. ValueError, naming the file, for anything else."""
        try:
            with open(path, encoding="utf-8") as file:
                values = json.load(file)
        except OSError as e:
            raise ValueError(f"{path} cannot be read: {e.strerror or e}") from None
        except (ValueError, RecursionError) as e:  # a name with a null in it; not UTF-8, not JSON
            raise ValueError(f"{path} is not a saved report of the benchmark: {e!r}") from None
        try:
            limits = Limits(values.pop("copy_TBs") * 1e12, values.pop("dense_TFLOPs") * 1e12)
            settings = values.pop("settings")
            rows = [{name: value for name, value in row.items() if name != "shape"} for row in values.pop("rows")]
            rows = tuple(_checked((DividedRow if "mesh" in row else Row)(**row)) for row in rows)
            if not all(isinstance(name, str) for name in (values["device"], settings["model"], settings["routing"])):
                raise TypeError("device, model and routing must be names")
            return cls(values, limits, settings, rows)
        except (AttributeError, LookupError, TypeError, ArithmeticError) as e:
            raise ValueError(f"{path} is not a saved report of the benchmark: {e!r}") from None

    def save(self, path: str) -> None:
        """Writes JSON: the whole file or none of it.

        Raises:
            FileExistsError: `path` exists and is not a saved report.
        """
        atomic_files.write(path, json.dumps(self.as_dict(), indent=1).encode() + b"\n", SAVED)

    def _repr_html_(self) -> str:
        return html.render(self.__rich__())

    def __rich__(self) -> FoldingTable:
        s, limits = self.settings, self.limits
        title = f"{s['model']}, {s['routing']} routing, one layer on {self.machine['device']}"
        rates = f"copy {limits.copy_rate / 1e12:.3g} TB/s, dense {limits.dense_rate / 1e12:.3g} TFLOP/s, measured"
        errors = [f"{row.name}, {row.tokens} tokens: {row.error}" for row in self.rows if row.error is not None]
        if any(isinstance(row, DividedRow) for row in self.rows):
            return _divided_table(self, title, [rates, *errors])
        columns = [*words("system"), *numbers("tokens"), *words("weights"), *numbers("us", "+-", "TB/s", "TFLOP/s")]
        columns += numbers("experts", "floor us", "x floor", "rel. error", "layers", "temp. MB")
        table = FoldingTable(columns, title, "\n".join([rates, *errors]), keys=2)
        for row in self.rows:
            table.add_row(*_cells(row), style=None if row.error is None else "red")
        return table


def _divided_table(report: Report, title: str, lines: list[str]) -> FoldingTable:
    """The rows of a layer that a mesh divides."""
    columns = [*words("mesh", "exchange"), *numbers("tokens a device", "split us", "+-", "experts us", "exchange us")]
    columns += numbers("of it waits us", "one us", "one, all tokens us", "efficiency", "floor us", "x floor")
    columns += numbers("rel. error", "sent kB")
    if (rate := report.machine.get("link_GBs")) is not None:
        lines.insert(1, f"links {rate:.3g} GB/s a device, by an all-gather, measured")
    table = FoldingTable(columns, title, "\n".join(lines), keys=3)
    for row in report.rows:
        assert isinstance(row, DividedRow)
        shown = (
            (row.us, decimal),
            (row.spread, ".0%"),
            *((us, decimal) for us in (row.experts_us, row.exchange_us, row.waits_us)),
            *((us, decimal) for us in (row.one_us, row.all_on_one_us)),
            (row.efficiency, ".0%"),
            (row.floor_us, decimal),
            (row.over_floor, ".2f"),
            (row.rel_err, ".1e"),
            (None if row.sent_bytes is None else row.sent_bytes / 1e3, decimal),
        )
        cells = [row.mesh, row.way, str(row.tokens), *map(_cell, shown)]
        table.add_row(*cells, style=None if row.error is None else "red")
    return table


def _checked(row: Row) -> Row:
    """TypeError for a row whose values are not of the types of their fields."""
    for name, kind in typing.get_type_hints(type(row)).items():
        value, kinds = getattr(row, name), typing.get_args(kind) or (kind,)
        if type(value) not in kinds and not (float in kinds and type(value) is int):
            raise TypeError(f"{name} (={value!r}) must be {kind}")
    return row


def _cells(row: Row) -> list[str]:
    shown = (
        (row.us, decimal),
        (row.spread, ".0%"),
        (row.tb_s, ".3g"),
        (row.tflop_s, ".3g"),
        (row.active, lambda n: decimal(n).removesuffix(".0")),
        (row.floor_us, decimal),
        (row.over_floor, ".2f"),
        (row.rel_err, ".1e"),
        (row.layers, "d"),
        (None if row.temporary_bytes is None else row.temporary_bytes / 1e6, decimal),
    )
    return [row.system, str(row.tokens), row.held, *map(_cell, shown)]


def _cell(shown: tuple[float | None, Any]) -> str:
    value, how = shown
    return "-" if value is None else format(value, how) if isinstance(how, str) else how(value)


_COLORS = 10  # of matplotlib's default cycle


def draw(report: Report, path: str) -> None:
    """Draws time over floor against tokens, one line a system, lower is better. A PNG.

    Raises:
        FileExistsError: `path` exists and is not a picture drawn by this function.
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    points = [(row.name, row.tokens, row.over_floor) for row in report.rows if row.over_floor is not None]
    limits = f"copy {report.limits.copy_rate / 1e12:.3g} TB/s, dense {report.limits.dense_rate / 1e12:.3g} TFLOP/s"
    axes.axhline(1, color="black", label=f"floor: {limits}")
    systems = [*dict.fromkeys(system for system, _, _ in points)]
    for number, system in enumerate(systems):
        line = sorted((tokens, ratio) for name, tokens, ratio in points if name == system)
        dashes = ("-", "--", ":")[number // _COLORS % 3]  # colors repeat
        axes.plot([tokens for tokens, _ in line], [ratio for _, ratio in line], dashes, marker="o", label=system)
    tokens = sorted({tokens for _, tokens, _ in points})
    axes.set_xticks(tokens, [str(count) for count in tokens])
    highest = max((ratio for _, _, ratio in points), default=1)
    ratios = [ratio for ratio in (1, 1.5, 2, 3, 5, 7, 10, 20, 30, 50, 100, 200, 500) if ratio < 1.5 * highest]
    axes.set_yticks(ratios, [f"{ratio:g}" for ratio in ratios])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    s = report.settings
    axes.set_title(f"{s['model']}, {s['routing']} routing, one layer on {report.machine['device']}", fontsize=10)
    axes.set_xlabel("tokens")
    axes.set_ylabel("time over floor")
    if len(systems) <= _COLORS:
        axes.legend(fontsize=8)
    else:  # inside it would cover the lines
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.grid(visible=True, linewidth=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": _DRAWN_BY})
    atomic_files.write(path, picture.getvalue(), PICTURE)


def require_matplotlib() -> None:
    """Raises ModuleNotFoundError, with the remedy, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "a picture needs matplotlib: pip install 'jmx-moe[bench]', or save JSON here and draw it elsewhere"
        )


def check_outputs(json_file: str | None, picture: str | None) -> None:
    """Raises the errors that `Report.save` and `draw` would raise for these files, before anything is measured.

    Raises:
        FileExistsError, FileNotFoundError: the path holds something else; its directory does not exist.
        ValueError: both are the same file, or one is inside the other.
    """
    atomic_files.check_apart(json=json_file, png=picture)
    for path, kind in ((json_file, SAVED), (picture, PICTURE)):
        if path is not None:
            atomic_files.check_new(path, kind, overwrite=True)


def _report_fault(path: Path) -> str | None:
    try:
        Report.load(str(path))
    except (ValueError, OSError) as e:
        return str(e)
    return None


def _picture_fault(path: Path) -> str | None:
    with path.open("rb") as file:
        begin = file.read(1 << 12)
    drawn = begin.startswith(b"\x89PNG") and b"tEXtSoftware\0" + _DRAWN_BY.encode() in begin
    return None if drawn else "it is another file"


_DRAWN_BY = "jmx bench"  # in a picture's metadata, to recognize it
SAVED = Kind("a saved report of the benchmark", _report_fault)
PICTURE = Kind("a picture that `jmx bench` drew", _picture_fault)
