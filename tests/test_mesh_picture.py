"""benchmarks/mesh_picture.py: which lines it draws of a report of a layer that a mesh divides."""

import pathlib

import pytest

from benchmarks import mesh_picture
from jmx.perf.roofline import DividedRow, Limits, Report, Row


def row(tokens: int, exchange: str, us: float, chunks: int = 1) -> DividedRow:
    return DividedRow(
        "ep=2",
        tokens,
        us=us,
        mesh="ep=2",
        exchange=exchange,
        experts_us=8.0 * tokens,
        all_on_one_us=20.0 * tokens,
        efficiency=10.0 / us,
        chunks=chunks,
    )


def report(*rows: Row) -> Report:
    machine = {"device": "a device", "mesh": {"ep": 2}}
    return Report(machine, Limits(1e12, 1e15), {"model": "small", "routing": "uniform"}, rows)


def test_lines_and_picture(tmp_path: pathlib.Path) -> None:
    failed = DividedRow("ep=2", 8, mesh="ep=2", exchange="rows", error="out of memory")
    its = report(row(4, "gather", 30), row(1, "gather", 12), row(4, "gather", 25, 2), row(1, "peer", 11), failed)
    rows = mesh_picture.rows_of(its)
    assert mesh_picture.lines_of(rows, "us") == {
        "gather": [(1, 12), (4, 30)],
        "gather, 2 chunks": [(4, 25)],
        "peer": [(1, 11)],
    }
    shared = {"experts alone": [(1, 8), (4, 32)], "one device, all tokens, / 2": [(1, 10), (4, 40)]}
    assert mesh_picture.references(rows, 2) == shared
    for name in ("a.svg", "b.svg", "c.png"):
        mesh_picture.draw(its, str(tmp_path / name))
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_several_reports() -> None:
    one, two = report(row(1, "gather", 12)), report(row(4, "gather", 30))
    assert mesh_picture.together([one, two]).rows == one.rows + two.rows
    other = Report({"device": "another", "mesh": {"ep": 2}}, two.limits, two.settings, two.rows)
    with pytest.raises(ValueError, match="must be of one device, and have 'a device' and 'another'"):
        mesh_picture.together([one, other])


def test_a_report_of_one_device() -> None:
    with pytest.raises(ValueError, match="`report` must have rows of a layer that a mesh divides"):
        mesh_picture.rows_of(report(Row("xla", 1, us=3.0)))
