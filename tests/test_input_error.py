"""The script that measures what input formats cost, and the table that the docs have from it."""

import pathlib
import re

import pytest

from benchmarks import input_error
from jmx.inputs import INPUT_FORMATS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "input_formats.md"
ROW = re.compile(r"^\| `(\w+)` \| ([\d.]+)% \| ([\d.]+)% \|$", re.MULTILINE)


def table(text):
    return {name: (float(normal), float(heavy)) for name, normal, heavy in ROW.findall(text)}


def test_the_errors_are_those_of_the_docs(rng, capsys):
    seed = int(rng.integers(1 << 31))
    assert input_error.main(["--tokens", "64", "--rows", "128", "--draws", "3", "--seed", str(seed)]) == 0
    measured, written = table(capsys.readouterr().out), table(PAGE.read_text())
    assert [*measured] == [*written] == ["bfloat16", *INPUT_FORMATS]
    for name, (normal, heavy) in measured.items():
        assert normal == pytest.approx(written[name][0], rel=0.1), name
        assert heavy == pytest.approx(written[name][1], rel=0.3), name
