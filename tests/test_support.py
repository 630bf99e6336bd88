"""docs/support.md: the page matches the backends' answers, and its times those of the reports."""

import dataclasses
import json
import pathlib
import re

import pytest

from benchmarks import support
from jmx.backends import registered_backends
from jmx.explain import explain_problem
from jmx.numerics.formats import FORMATS
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.selection.backend import Reason
from jmx.selection.environment import Environment

pytestmark = pytest.mark.costly

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"


def test_the_page_is_what_the_script_writes():
    page = support.page(support.measured(support.RESULTS))
    assert PAGE.read_text() == page, "regenerate it: python benchmarks/support.py > docs/support.md"


def test_every_pair_of_formats_has_a_row():
    _, plain, rounded, *_ = PAGE.read_text().split("\n## ")
    for input_format in (None, *INPUT_FORMATS):
        rows = re.findall(rf"^\| `{input_format}` \| (.*?) \|", rounded, re.MULTILINE)
        if input_format is None:
            rows = re.findall(r"^\| (`.*?) \|", plain, re.MULTILINE)
        assert rows.count("`int4_gN`, `int8_gN`, `fp8_block_RxC`") == 1, input_format
        named = [name for row in rows for part in row.split("; ") for name in expand(part)]
        assert sorted(named) == sorted(FORMATS), input_format


def expand(names: str) -> list[str]:
    whole, _, less = names.partition(" but ")
    every = [name for name in FORMATS if re.fullmatch(whole.strip("`").replace("*", ".*"), name)]
    every = [name for name in every if ("order" in name) == ("order" in whole)]
    return [name for name in every if name not in less.replace("`", "").split(", ")]


def test_answers_are_those_of_explain():
    asked = 0
    for backend in registered_backends():
        for target in support.targets(backend)[:1]:
            for format, input_format in (("mxfp4", None), ("int8_g64", None), ("int4_g32", "int8_token")):
                problem = dataclasses.replace(
                    support.SHAPE.problem(support.TOKENS, target.layout), format=format, input_format=input_format
                )
                trail = explain_problem(problem, Environment.named(target.device)).trail
                no = next(no for name, _, no in trail if name == backend.name)
                answer = support.cell(backend, [target], format, input_format, {}).no
                assert (answer is None) == (no is None or no.reason is Reason.NOT_BUILT)
                assert answer is None or no is None or answer.startswith(f"{no.reason.value}: ")
                asked += 1
    assert asked >= 12


@pytest.fixture
def reports(tmp_path):
    """A directory of reports, and what adds one to it."""

    def add(name, device, shape, *rows, date="2026-01-01"):
        keys = ("system", "format", "input_format", "tokens", "us", "error")
        entries = [{"shape": shape} | dict(zip(keys, row, strict=True)) for row in rows]
        report = {"device": device, "date": date, "settings": {"shape": {"format": "mxfp4"}}, "rows": entries}
        (tmp_path / name).write_text(json.dumps(report))

    return tmp_path, add


def test_times_are_those_of_the_fewest_and_the_most_tokens(reports):
    directory, add = reports
    add(
        "one.json",
        "a device",
        "small",
        ("cpu", None, None, 64, 1234.5, None),
        ("cpu", None, None, 1, 9.876, None),
        ("cpu", None, None, 8, 20.0, None),
        ("cpu", None, None, 128, 30.0, "wrong"),
        ("cpu", "nvfp4", None, 1, None, "no memory"),
        ("cpu", "int4_g32", "int8_token", 8, 5.0, None),
    )
    found = support.measured(directory)
    assert found.keys() == {("cpu", "mxfp4", None), ("cpu", "int4_g32", "int8_token")}
    cell = found["cpu", "mxfp4", None]
    assert (cell.source, cell.times) == (support.Source("a device", "small", (1, 64)), (9.876, 1234.5))
    page = support.page(found)
    assert re.search(r"^\| `mxfp4` \|.* yes: 9\.88 / 1234 \(a\) ", page, re.MULTILINE)
    assert re.search(r"^\| `int8_token` \| `int4_\*` but .* \|.* yes: 5 \(b, `int4_g32`\) ", page, re.MULTILINE)
    assert page.count("(a)") == page.count("(b, ") + page.count("(b)") == 2
    assert "* (a) a device, small, 1 / 64 tokens" in page
    assert "* (b) a device, small, 8 tokens" in page


def test_reports_of_formats_go_before_others_and_then_those_of_more_counts(reports):
    directory, add = reports
    for name, counts in (("a.json", 3), ("b.json", 5), ("z-formats.json", 2), ("c.json", 4)):
        add(name, name, "small", *(("xla", "mxfp4", None, count, 1.0, None) for count in range(counts)))
        source = support.measured(directory)["xla", "mxfp4", None].source
        assert source is not None
        assert source.device == {"c.json": "z-formats.json"}.get(name, name)


def test_reports_up_to_more_tokens_go_before_those_of_more_counts(reports):
    directory, add = reports
    for name, counts in (("a.json", (1, 2, 4, 8)), ("b.json", (1, 64)), ("c.json", (1, 32, 48))):
        add(name, name, "small", *(("xla", "mxfp4", None, count, 1.0, None) for count in counts))
    source = support.measured(directory)["xla", "mxfp4", None].source
    assert source is not None
    assert (source.device, source.tokens) == ("b.json", (1, 64))


def test_of_reports_with_as_many_counts_the_latest_goes_before(reports):
    directory, add = reports
    for name, date in (("b.json", "2026-02-01"), ("a.json", "2026-02-02"), ("c.json", "2026-01-31")):
        add(name, name, "small", ("xla", "mxfp4", None, 1, 1.0, None), date=date)
    source = support.measured(directory)["xla", "mxfp4", None].source
    assert source is not None
    assert source.device == "a.json"


def test_without_reports_a_yes_is_a_yes(tmp_path):
    page = support.page(support.measured(tmp_path))
    assert re.search(r"^\| `mxfp4` \| yes \| no \(1\) \| no \(2\)( *\| yes)+ \|$", page, re.MULTILINE)
    assert page.endswith("Nothing yet.\n")
