"""The benchmark of grouped products of float weights: results are checked, and wrong ones have no time."""

from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import float_products, float_products_cases, float_products_worker
from benchmarks.float_products_cases import Case, all_cases
from jmx.perf.shapes import MODELS

SMALL = Case("small", "gate_up", "forward", 24, 2, 4, 48, 32)
MACHINE = {"dense_TFLOPs": 100.0, "copy_TBs": 2.0}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(float_products_worker, "seconds", lambda call, *_: (call() is not None and 1e-3, 0.0))
    monkeypatch.setattr(float_products_worker, "PAUSE", 0)


def operands(case, rng):
    left, right, _ = float_products_worker.shapes_of(case)
    arrays = (jnp.asarray(rng.standard_normal(shape.shape), shape.dtype) for shape in (left, right))
    return *arrays, jnp.asarray(float_products_worker.sizes_of(case))


@pytest.mark.parametrize("which", float_products_cases.PASSES)
def test_a_right_result_is_timed_and_a_wrong_one_is_not(which, rng, quick, monkeypatch):
    case = SMALL._replace(which=which)
    right = float_products_cases.ragged_dot(case)[""]

    def wrong(left: Any, other: Any, sizes: Any) -> Any:
        shifted = jnp.roll(sizes, 1) if which != "dw" else jnp.roll(sizes, 1).at[0].add(3)
        return right(left, other, shifted)

    monkeypatch.setitem(float_products_cases.SYSTEMS, "both", lambda case: {"right": right, "wrong": wrong})
    given = operands(case, rng)
    assert int(given[2].sum()) == case.rows
    row = float_products_worker.measure(given, *float_products_worker.compile_case("both", case))
    assert (row["best"], row["us"], [*row["all_us"]]) == ("right", 1000.0, ["right"])
    assert row["failures"]["wrong"].startswith("the result is wrong by")


def test_a_system_that_is_not_there_is_a_row_with_the_reason(rng, quick, monkeypatch):
    def absent(case: Case) -> Any:
        raise ImportError("no module")

    monkeypatch.setitem(float_products_cases.SYSTEMS, "absent", absent)
    row = float_products_worker.measure(operands(SMALL, rng), *float_products_worker.compile_case("absent", SMALL))
    assert row == {"error": "ImportError: no module"}


def test_cases_are_the_products_of_published_layers():
    cases = all_cases(["gpt-oss-20b"], ["gate_up", "down"], ["forward", "dw"], [64])
    assert [(case.role, case.which, case.outputs, case.inputs) for case in cases] == [
        ("gate_up", "forward", 5760, 2880),
        ("gate_up", "dw", 5760, 2880),
        ("down", "forward", 2880, 2880),
        ("down", "dw", 2880, 2880),
    ]
    assert cases[0].rows == 64 * MODELS["gpt-oss-20b"].method.top_k


def test_rows_have_shares_of_the_machines_rates():
    row = float_products.row_of("jmx", {"case": SMALL, "us": 2.0, "all_us": {"": 2.0}}, MACHINE)
    assert row["of_dense"] == pytest.approx(SMALL.flops / 2e-6 / 100e12)
    assert row["of_copy"] == pytest.approx(SMALL.bytes / 2e-6 / 2e12)
    failed = float_products.row_of("tokamax", {"case": SMALL, "error": "not there"}, MACHINE)
    table = float_products.table([row, failed], ["jmx", "tokamax"], [SMALL])
    shares = f"{row['of_dense']:.1%} | {row['of_copy']:.1%}"
    assert table.splitlines()[2] == f"| small gate_up forward 24 | 2.0 | - | {shares} |"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--systems", "jmx,cublas"], "`--systems` (=cublas) must be of jmx, "),
        (["--models", "gpt-5"], "`--models` (=gpt-5) must be of "),
        (["--tokens", "64,0"], "`--tokens` (=0) must be numbers from 1 on"),
        (["--passes", "backward"], "`--passes` (=backward) must be of forward, dx, dw"),
    ],
)
def test_wrong_arguments_are_named(flags, message, capsys):
    with pytest.raises(SystemExit):
        float_products.main(flags)
    assert message in capsys.readouterr().err
