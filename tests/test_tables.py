"""Tables at every width: all cells are there, whole, and no line is wider than the terminal."""

import re

import hypothesis
import pytest
from hypothesis import strategies as st
from properties import examples
from rich.console import Console

from jmx.util.tables import FoldingTable, decimal, numbers, words


def printed(table, width):
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def cells_of(text):
    """Every cell, what was folded into several lines joined again."""
    found = []
    for block in re.split(r"[┏┡├└][^\n]*", text):
        rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in block.splitlines()]
        rows = [row for row in rows if row]
        joined = ["".join(column) for column in zip(*rows, strict=True)]
        found += [cell for cell in joined if cell]
    return found


@hypothesis.given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["a", "rel. error", "TFLOP/s", "how many"]), st.booleans()), min_size=1),
    st.integers(40, 200),
    st.data(),
)
@examples(60)
def test_no_column_is_dropped_and_no_number_is_truncated(keys, rest, width, data):
    word = st.text("abcdefgh", min_size=1, max_size=18)
    columns = [*words(*(f"key{i}" for i in range(keys))), *numbers("tokens")]
    for heading, right in rest:
        columns += numbers(heading) if right else words(heading)
    cells = [
        data.draw(st.integers(0, 10**9).map(str) if column.numbers else st.lists(word, min_size=1).map(" ".join))
        for column in columns
    ]
    table = FoldingTable(columns, "a title", "a caption", keys)
    table.add_row(*cells)
    text = printed(table, width)
    assert all(len(line) <= width for line in text.splitlines())
    squeezed = [cell.replace(" ", "") for cell in cells_of(text)]
    lists = "".join(text.split())
    for column, cell in zip(columns, cells, strict=True):
        assert cell.replace(" ", "") in squeezed or f"{column.heading}:{cell}".replace(" ", "") in lists
        assert not column.numbers or re.search(rf"(?<!\d){cell}(?!\d)", text)
    assert text.startswith("a title")
    assert text.rstrip().endswith("a caption")


def test_what_fits_is_one_table_and_what_does_not_has_its_keys_again():
    table = FoldingTable([*words("system"), *numbers("tokens", "microseconds", "relative error")], keys=2)
    table.add_row("mosaic", "8192", "1234.5", "1.2e-03")
    assert printed(table, 80).count("mosaic") == 1
    narrow = printed(table, 40)
    assert narrow.count("mosaic") == narrow.count("8192") == 2
    assert "│ mosaic │   8192 │       1234.5 │" in narrow
    least = printed(table, 20)
    assert [line.strip() for line in least.splitlines()][:4] == [
        "system: mosaic",
        "tokens: 8192",
        "microseconds: 1234.5",
        "relative error:",
    ]


def test_cells_are_text_and_not_markup():
    table = FoldingTable(words("what"))
    table.add_row("[none] left [red]")
    assert "[none] left [red]" in printed(table, 80)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123, "0.0123"),
        (2e-7, "0.000000200"),
        (-0.5, "-0.500"),
        (1.234, "1.23"),
        (9.996, "10.00"),
        (11.02, "11.0"),
        (1648.93, "1648.9"),
        (float("inf"), "inf"),
    ],
)
def test_decimals_have_three_digits_at_least(value, text):
    assert decimal(value) == text
