"""HTML of tables and lines that terminals print, for notebooks: what `_repr_html_` of results returns."""

import html
from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.text import Text

from jmx.util.tables import Column, FoldingTable

_STYLES = {"red": "color:#dc2626", "bold green": "color:#16a34a;font-weight:bold", "bold": "font-weight:bold"}


def render(parts: Group | FoldingTable) -> str:
    """What `rich` prints, as HTML: lines become paragraphs, tables of any width one table each."""
    if isinstance(parts, FoldingTable):
        return "".join([_line(parts.title, "font-weight:bold"), _of_table(parts), _line(parts.caption)])
    found = []
    for part in parts.renderables:
        assert isinstance(part, FoldingTable | Text)
        found.append(render(part) if isinstance(part, FoldingTable) else _line(part.plain, _style(part)))
    return "".join(found)


def table(columns: Sequence[Column], rows: Iterable[Sequence[str | Text]]) -> str:
    """A table of `columns`, see `jmx.util.tables.words` and `numbers`, with a cell for each in every row."""
    aligned = ["text-align:right" if column.numbers else "text-align:left" for column in columns]
    head = "".join(_cell("th", column.heading, how) for column, how in zip(columns, aligned, strict=True))
    body = [
        "".join(_cell("td", cell, how) for cell, how in zip(cells, aligned, strict=True)).join(("<tr>", "</tr>"))
        for cells in rows
    ]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def preformatted(text: str) -> str:
    """Text in which spaces and line breaks count."""
    return f"<pre>{html.escape(text)}</pre>"


def _of_table(printed: FoldingTable) -> str:
    return table(printed.columns, (cells for cells, _ in printed.rows))


def _cell(tag: str, cell: str | Text, how: str) -> str:
    text = cell.plain if isinstance(cell, Text) else cell
    style = ";".join(filter(None, (how, _style(cell))))
    return f'<{tag} style="{style}">{html.escape(text).replace(chr(10), "<br>")}</{tag}>'


def _line(text: str, style: str = "") -> str:
    if not text:
        return ""
    lines = html.escape(text).replace("\n", "<br>")
    return f'<p style="{style}">{lines}</p>' if style else f"<p>{lines}</p>"


def _style(cell: str | Text) -> str:
    return _STYLES.get(str(cell.style), "") if isinstance(cell, Text) else ""
