"""The benchmark of grouped products of float weights: results are checked, and wrong ones have no time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import float_products, float_products_cases, float_products_worker
from benchmarks.float_products_cases import Case, all_cases
from jmx.perf.shapes import MODELS

SMALL = Case("small", "gate_up", "forward", 24, 2, 4, 48, 32)
MACHINE = {"dense_TFLOPs": 100.0, "copy_TBs": 2.0}


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(float_products_worker, "seconds", lambda call, *_: (call() is not None and 1e-3, 0.0))


def operands(case, rng, align=1):
    """Rows between groups are NaN."""
    sizes = float_products_worker.sizes_of(case)
    starts = float_products_worker.starts_of(sizes, align)
    shapes = float_products_worker.shapes_of(case, align)
    left, right = (jnp.asarray(rng.standard_normal(shape.shape), shape.dtype) for shape in shapes[:2])
    rows = np.arange(len(left))[:, None]
    inside = ((rows >= starts) & (rows < starts + sizes)).any(1)
    assert inside.sum() == case.rows
    left = jnp.where(inside[:, None], left, jnp.nan)
    right = jnp.where(inside[:, None], right, jnp.nan) if right.ndim == 2 else right
    _, shapes = float_products_worker.dense_of(case)
    dense = tuple(jnp.asarray(rng.standard_normal(shape.shape), shape.dtype) for shape in shapes)
    return (left, right, jnp.asarray(starts), jnp.asarray(sizes)), dense


@pytest.mark.parametrize("which", float_products_cases.PASSES)
def test_a_right_result_is_timed_and_a_wrong_one_is_not(which, rng, quick, monkeypatch):
    case = SMALL._replace(which=which)
    right = float_products_cases.ragged_dot(case)[""]

    def wrong(left: Any, other: Any, starts: Any, sizes: Any) -> Any:
        shifted = jnp.roll(sizes, 1) if which != "dw" else jnp.roll(sizes, 1).at[0].add(3)
        return right(left, other, starts, shifted)

    monkeypatch.setitem(float_products_cases.SYSTEMS, "both", lambda case: {"right": right, "wrong": wrong})
    given = operands(case, rng)
    row = float_products_worker.measure(*given, float_products_worker.compile_case("both", case))
    assert (row["best"], row["us"], [*row["all_us"]]) == ("right", 1000.0, ["right"])
    assert row["failures"]["wrong"].startswith("the result is wrong by")
    assert (row["dense_us"], row["shares_of_dense"]) == (1000.0, [1.0] * float_products_worker.ROUNDS)


@pytest.mark.parametrize("which", float_products_cases.PASSES)
def test_groups_with_rows_of_none_between_them_are_checked_alike(which, rng, quick, monkeypatch):
    case = SMALL._replace(which=which)

    def loop(left: Any, other: Any, starts: Any, sizes: Any) -> Any:
        rows = jnp.arange(len(left))[:, None]
        inside = (rows >= starts) & (rows < starts + sizes)
        if which == "dw":
            each = [
                jnp.where(inside[:, g, None], left, 0).T @ jnp.where(inside[:, g, None], other, 0) for g in range(4)
            ]
            return jnp.stack(each)
        every = [left @ (other[g].T if which == "forward" else other[g]) for g in range(4)]
        return sum(jnp.where(inside[:, g, None], every[g], 0) for g in range(4))

    monkeypatch.setitem(float_products_cases.SYSTEMS, "loop", lambda case: {"": loop})
    monkeypatch.setitem(float_products_cases.ALIGN, "loop", 8)
    row = float_products_worker.measure(*operands(case, rng, 8), float_products_worker.compile_case("loop", case))
    assert "failures" not in row
    assert 0 < row["rel_err"] < float_products_worker.TOLERANCE


@pytest.mark.parametrize("which", float_products_cases.PASSES)
def test_the_dense_product_has_the_flops_of_the_case(which):
    case = SMALL._replace(which=which)
    product, shapes = float_products_worker.dense_of(case)
    analysis = jax.jit(product).lower(*shapes).compile().cost_analysis()
    assert analysis is not None
    assert analysis["flops"] == pytest.approx(case.flops, rel=0.05)  # and conversions, on a CPU


def test_a_system_that_is_not_there_is_a_row_with_the_reason(rng, quick, monkeypatch):
    def absent(case: Case) -> Any:
        raise ImportError("no module")

    monkeypatch.setitem(float_products_cases.SYSTEMS, "absent", absent)
    row = float_products_worker.measure(*operands(SMALL, rng), float_products_worker.compile_case("absent", SMALL))
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
    row = float_products.row_of("jmx", {"case": SMALL, "us": 2.0, "all_us": {"": 2.0}, "dense_us": 1.5}, MACHINE)
    assert row["of_dense"] == 0.75
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
