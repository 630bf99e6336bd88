"""Tables and numbers for terminals of any width: no column is dropped and no number is truncated."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_NARROW = 10  # characters to which a column of words may be folded
_BORDERS = 3  # characters of borders for each column; the table has one more


class Column(NamedTuple):
    """The heading of a column, which may fold if it has several words, and whether numbers are below it."""

    heading: str
    numbers: bool


def words(*headings: str) -> list[Column]:
    """Columns of words: aligned to the left, and folded where the table is narrow."""
    return [Column(heading, False) for heading in headings]


def numbers(*headings: str) -> list[Column]:
    """Columns of numbers: aligned to the right, and never folded."""
    return [Column(heading, True) for heading in headings]


@dataclass
class FoldingTable:
    """A table that is split into several, one below the other, if it is too wide; each has the first columns.

    Before that, words fold into more lines. If not even a second column fits, rows are lists of headings and cells.

    Args:
        columns: see `words` and `numbers`.
        title, caption: lines above and below, or "".
        keys: how many of the first columns identify a row, and are repeated in each table.

    Attributes:
        rows: the cells of each row, and its style or None.
    """

    columns: Sequence[Column]
    title: str = ""
    caption: str = ""
    keys: int = 1
    rows: list[tuple[tuple[Text, ...], str | None]] = field(default_factory=list, init=False)
    _sections: set[int] = field(default_factory=set)

    def add_row(self, *cells: str | Text, style: str | None = None) -> None:
        """One cell for each column, in order."""
        assert len(cells) == len(self.columns)
        self.rows.append((tuple(cell if isinstance(cell, Text) else Text(cell) for cell in cells), style))

    def add_section(self) -> None:
        """A line below the last row."""
        self._sections.add(len(self.rows) - 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title:
            yield Text(self.title, "table.title")
        tables = [*self._tables(options.max_width)]
        if any(self._least(columns) > options.max_width for columns in tables):
            yield from self._lists()
        else:
            for columns in tables:
                yield self._table(columns, self._widths(columns, options.max_width))
        if self.caption:
            yield Text(self.caption, "table.caption")

    def _lengths(self, column: int) -> tuple[int, int]:
        """The minimum width of a column, and the width without folding."""
        cells = [Text(self.columns[column].heading), *(cells[column] for cells, _ in self.rows)]
        longest = max((Text(word).cell_len for cell in cells for word in cell.plain.split()), default=1)
        lines = max((Text(line).cell_len for cell in cells for line in cell.plain.splitlines()), default=1)
        return longest if self.columns[column].numbers else min(longest, _NARROW), max(lines, 1)

    def _least(self, columns: Sequence[int]) -> int:
        """The minimum width of a table of these columns."""
        return sum(self._lengths(column)[0] + _BORDERS for column in columns) + 1

    def _tables(self, width: int) -> Iterator[list[int]]:
        """The columns of each table, as few tables as possible."""
        keys = [*range(self.keys)]
        columns = list(keys)
        for column in range(self.keys, len(self.columns)):
            if self._least([*columns, column]) > width and len(columns) > len(keys):
                yield columns
                columns = list(keys)
            columns.append(column)
        yield columns

    def _widths(self, columns: Sequence[int], width: int) -> list[int]:
        """The width of each column: space beyond the minimum goes first to columns that need little."""
        lengths = [self._lengths(column) for column in columns]
        widths = [least for least, _ in lengths]
        left = width - 1 - sum(least + _BORDERS for least in widths)
        wanting = sorted(range(len(columns)), key=lambda place: lengths[place][1] - lengths[place][0])
        for done, place in enumerate(wanting):
            more = min(max(0, left) // (len(wanting) - done), lengths[place][1] - lengths[place][0])
            widths[place] += max(0, more)
            left -= more
        return widths

    def _lists(self) -> Iterator[Text]:
        for cells, style in self.rows:
            for (heading, _), cell in zip(self.columns, cells, strict=True):
                yield Text.assemble(f"{heading}: " if heading else "", cell, style=style or "")
            yield Text("")

    def _table(self, columns: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table()
        for (heading, right), width in zip((self.columns[place] for place in columns), widths, strict=True):
            table.add_column(heading, justify="right" if right else "left", width=width, overflow="fold")
        for number, (cells, style) in enumerate(self.rows):
            chosen = (cells[place] for place in columns)
            table.add_row(*chosen, style=style, end_section=number in self._sections)
        return table


def decimal(value: float) -> str:
    """With one decimal, or more for three significant digits: 1648.9, 11.0, 0.0123; 0 is "0"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(1, 2 - math.floor(math.log10(abs(value))))}f}"
