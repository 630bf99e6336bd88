#!/usr/bin/env python3
"""Prints saved reports as the tables of README.md: python benchmarks/table.py benchmarks/results/*.json"""

import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from jmx.perf.roofline import Report, Row


def main(paths: Sequence[str]) -> None:
    """Prints one table per file, each below a line that states where and when it was measured."""
    for path in paths:
        print(markdown(Report.load(path)))


def markdown(report: Report) -> str:
    """A report as Markdown: a row for each token count, a column for each system, the fastest in bold."""
    settings, machine, limits = report.settings, report.machine, report.limits
    rows = {(row.system, row.tokens): row for row in report.rows}
    systems = [*dict.fromkeys(row.system for row in report.rows)]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{settings['model']}, {settings['routing']} routing. {machine['device']}, {machine['date'][:10]}; {versions}; "
        f"copy {limits.copy_rate / 1e12:.2f} TB/s, dense {limits.dense_rate / 1e12:.0f} TFLOP/s.",
        "",
        f"| tokens | experts used | floor, us | {' | '.join(systems)} |",
        f"|{'---|' * (len(systems) + 3)}",
    ]
    for tokens in settings["tokens"]:
        found = [rows.get((system, tokens)) for system in systems]
        sound = [row.us for row in found if row is not None and row.us is not None and row.error is None]
        first = next((row for row in found if row is not None and row.active is not None), Row("none", tokens))
        cells = [_cell(row, min(sound, default=None)) for row in found]
        lines.append(f"| {tokens} | {first.active or 0:.0f} | {first.floor_us or 0:.1f} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(row: Row | None, least: float | None) -> str:
    if row is None or row.us is None or row.error is not None:
        return "-"
    cell = f"{row.us:.4g}" if row.us < 1000 else f"{row.us:.0f}"
    return f"{f'**{cell}**' if row.us == least else cell} ({row.over_floor:.2f}x)"


if __name__ == "__main__":
    main(sys.argv[1:])
