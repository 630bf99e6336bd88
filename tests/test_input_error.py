"""The script that measures what input formats cost, and the table that the docs have from it."""

import pathlib
import re

import pytest

from benchmarks import input_error
from jmx.numerics.input_formats import INPUT_FORMATS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "input_formats.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+)% \| ([\d.]+)% \|$", re.MULTILINE)


def table(text):
    return {name: (float(normal), float(heavy)) for name, normal, heavy in ROW.findall(text)}


@pytest.mark.costly
def test_the_errors_are_those_of_the_docs(capsys):
    # The page's own command and seed: static scales come from a heavy tail's largest magnitude, on which
    # fresh draws do not agree.
    (command,) = re.findall(r"^    python benchmarks/input_error\.py (.*)$", PAGE.read_text(), re.MULTILINE)
    assert input_error.main([*command.split(), "--draws", "3"]) == 0  # of nine, for a third of the time
    measured, written = table(capsys.readouterr().out), table(PAGE.read_text())
    assert [*measured] == [*written] == ["bfloat16", *INPUT_FORMATS]
    for name, (normal, heavy) in measured.items():
        assert normal == pytest.approx(written[name][0], rel=0.1), name
        assert heavy == pytest.approx(written[name][1], rel=0.3), name
