#!/usr/bin/env python3
"""Writes docs/support.md: which weight and input formats each backend supports, and how fast it is.

    python benchmarks/support.py > docs/support.md

Answers come from the backends themselves, for every known device and every layout. Kernels that were not built on this
machine count as built. Times come from the reports in benchmarks/results.
"""

import dataclasses
import itertools
import json
import pathlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.backends import registered_backends
from jmx.numerics import layouts
from jmx.numerics.formats import FORMATS, MXFP4
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.perf import shapes
from jmx.selection.backend import Backend, Reason, Rejection
from jmx.selection.environment import Environment, known_devices

RESULTS = pathlib.Path(__file__).parent / "results"

# Of any size: a larger power of two is decoded as 128, and any other stands for all.
OTHER_SIZES = ("int4_g16", "int8_g16", "fp8_block_64x64")
EVERY = (*FORMATS, "int4_g256", "int8_g256", "fp8_block_64x128", *OTHER_SIZES)

SHAPE = shapes.MODELS["deepseek-v3"]  # its sizes are whole blocks of every format
TOKENS = 64

_HEAD = """# What runs where

Every weight format and input format on every backend: yes, or the number of the reason that `jmx.explain` gives.
[Weight formats](weight_formats.md) and [input formats](input_formats.md) define them to the bit;
[backends](backends.md) lists what each backend needs.

[A script](../benchmarks/support.py) generates this page. It asks the backends themselves, each on the devices on which
it runs, in the layout that it reads, as if it had been built. A test compares the page with the script's output:

    python benchmarks/support.py > docs/support.md
"""

_OTHERS = "`int4_gN`, `int8_gN`, `fp8_block_RxC`"
_SIZES = f"""
{_OTHERS} are formats of other sizes than those listed. But groups of 256,
512 and so on are in the rows of `int4_*` and `int8_*`, and blocks of any number of rows and 128 columns in that of
`fp8_*`.
"""

_TIMES = """
After a yes come microseconds per layer, at the smallest and the largest token count of the measurement that the letter
names. For several formats that a backend treats alike they are those of one, which is named. Times of `xla` with a (d)
are of a CPU and a small layer: they show that it runs, and compare with nothing else.
"""


class Target(NamedTuple):
    """Where a backend runs: a device's name, and a layout."""

    device: str
    layout: str


class Source(NamedTuple):
    """A measurement: the device's name, the layer's shape, the fewest and the most tokens."""

    device: str
    shape: str
    tokens: tuple[int, int]


class Cell(NamedTuple):
    """A backend's answer: the reason against it, or None, and then microseconds at the fewest and the most tokens."""

    no: str | None
    source: Source | None = None
    times: tuple[float, float] | None = None


# By backend, format and input format.
Measured = Mapping[tuple[str, str, str | None], Cell]


def main() -> int:
    """Prints the page."""
    print(page(measured(RESULTS)), end="")
    return 0


# Answers of the backends


def ask(backend: Backend, target: Target, format: str, input_format: str | None) -> Rejection | None:
    """The backend's answer on that target, as if it had been built."""
    problem = SHAPE.problem(TOKENS, target.layout)
    problem = dataclasses.replace(problem, format=format, input_format=input_format)
    no = backend.supports(problem, Environment.named(target.device))
    if no is None and not layouts.get(target.layout).holds(FORMATS[format]):  # a backend need not reject it
        return Rejection(Reason.FORMAT, f"{target.layout!r} holds no {format!r}", "use another format")
    return None if no is not None and no.reason is Reason.NOT_BUILT else no


def targets(backend: Backend) -> list[Target]:
    """The targets on which the backend runs at least one pair of weight and input formats."""
    places = [Target(device, layout) for device in known_devices() for layout in layouts.LAYOUTS]
    pairs = [*itertools.product(FORMATS, (None, *INPUT_FORMATS))]
    return [target for target in places if any(ask(backend, target, *pair) is None for pair in pairs)]


def cell(backend: Backend, places: Sequence[Target], format: str, input_format: str | None, found: Measured) -> Cell:
    """The backend's answer on its own devices: yes if any of them gives yes, else the answer of the first."""
    if any(ask(backend, target, format, input_format) is None for target in places):
        return found.get((backend.name, format, input_format), Cell(None))
    answer = str(ask(backend, places[0], format, input_format))
    for name in (format, input_format):
        answer = answer.replace(repr(name), "X")  # so that formats with the same reason share it
    return Cell(answer)


# Measurements


def measured(directory: pathlib.Path) -> Measured:
    """The times in a directory's reports.

    If several have the same, reports made for formats take precedence, then those up to more tokens, then those of more
    token counts, then the latest.
    """
    ranked: dict[tuple[str, str, str | None], tuple[tuple[bool, int, int, str], Cell]] = {}
    for file in sorted(directory.glob("*.json")):
        report = json.loads(file.read_text())
        if not isinstance(report, dict) or "rows" not in report:  # of a server, or of training
            continue
        usual = report["settings"].get("shape", {}).get("format", MXFP4.name)
        times: dict[tuple[str, str, str | None], dict[str, dict[int, float]]] = {}
        for row in report["rows"]:
            if "shape" in row and row["us"] is not None and row.get("error") is None:  # others are of products
                key = row["system"], row.get("format") or usual, row.get("input_format")
                times.setdefault(key, {}).setdefault(row["shape"], {})[row["tokens"]] = row["us"]
        for key, by_shape in times.items():
            for shape, by_tokens in by_shape.items():
                ends = min(by_tokens), max(by_tokens)
                source = Source(report["device"], shape, ends)
                rank = "formats" in file.stem, ends[1], len(by_tokens), report["date"]
                if key not in ranked or rank > ranked[key][0]:
                    ranked[key] = rank, Cell(None, source, (by_tokens[ends[0]], by_tokens[ends[1]]))
    return {key: cell for key, (_, cell) in ranked.items()}


# Writing


class _Notes:
    """Numbers of reasons and letters of sources, in the order of their first use."""

    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self.sources: dict[Source, str] = {}

    def text(self, cells: Mapping[str, Cell]) -> str:
        """The backend's answer to all of these formats, with the time of one that was measured."""
        no = next(iter(cells.values())).no
        if no is not None:
            return f"no ({self.reasons.setdefault(no, len(self.reasons) + 1)})"
        for format, (_, source, times) in cells.items():
            if source is not None and times is not None:
                letter = self.sources.setdefault(source, chr(ord("a") + len(self.sources)))
                which = f"{letter}, `{format}`" if len(cells) > 1 else letter
                return f"yes: {' / '.join(_microseconds(us) for us in dict.fromkeys(times))} ({which})"
        return "yes"


def page(found: Measured) -> str:
    """The page, in Markdown, with the times that were `measured`."""
    places = {backend: its for backend in registered_backends() if (its := targets(backend))}
    notes = _Notes()
    titles = [f"`{backend.name}`" for backend in places]

    def rows(input_format: str | None) -> list[tuple[str, ...]]:
        """A row for each set of formats of one family with the same answers."""
        alike: dict[tuple[str, tuple[str | None, ...]], dict[str, tuple[Cell, ...]]] = {}
        for format in EVERY:
            cells = tuple(cell(backend, its, format, input_format, found) for backend, its in places.items())
            alike.setdefault((_family(format), tuple(cell.no for cell in cells)), {})[format] = cells
        found_rows = []
        for members in alike.values():
            columns = (dict(zip(members, column, strict=True)) for column in zip(*members.values(), strict=True))
            found_rows.append((_names([*members]), *map(notes.text, columns)))
        return found_rows

    plain = [("weights", *titles), *rows(None)]
    rounded = [("inputs", "weights", *titles), *((f"`{name}`", *row) for name in INPUT_FORMATS for row in rows(name))]
    devices = [
        f"* `{backend.name}`: {', '.join(dict.fromkeys(target.device for target in its))}"
        for backend, its in places.items()
    ]
    reasons = [_item(number, reason) for reason, number in notes.reasons.items()]
    sources = [
        f"* ({letter}) {source.device}, {source.shape}, {' / '.join(map(str, dict.fromkeys(source.tokens)))} tokens"
        for source, letter in notes.sources.items()
    ]
    parts = [
        _HEAD + _SIZES + _TIMES,
        "## Inputs of 16 bits",
        _table(plain),
        "## Rounded inputs",
        _table(rounded),
        "## Reasons\nX is the format in question.",
        "\n".join(reasons),
        "## Devices\nThe names of `--device` on which each backend runs.",
        "\n".join(devices),
        "## Measured",
        "\n".join(sources) or "Nothing yet.",
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _item(number: int, text: str) -> str:
    """An item of a numbered list, wrapped."""
    first = f"{number}. "
    lines = textwrap.wrap(text, 120 - len(first), break_long_words=False, break_on_hyphens=False)
    return first + f"\n{' ' * len(first)}".join(lines)


def _family(format: str) -> str:
    """Families: formats that differ only in block size and zero points. Formats with a column order are another one."""
    if format in OTHER_SIZES:
        return "other sizes"
    family, *kind = format.split("_")
    return family + ("_*" if kind else "") + ("_order" if "order" in kind else "")


def _names(formats: Sequence[str]) -> str:
    """The names of formats of one family; the family's name if all or nearly all of it are there."""
    family = _family(formats[0])
    others = [f"`{name}`" for name in EVERY if _family(name) == family and name not in formats]
    if family == "other sizes" and not others:
        return _OTHERS
    if len(others) < len(formats) - 1:
        return f"`{family}`" + (f" but {', '.join(others)}" if others else "")
    return "; ".join(f"`{name}`" for name in formats)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    head, *rest = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rest))


def _microseconds(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"


if __name__ == "__main__":
    sys.exit(main())
