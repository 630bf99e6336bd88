"""Rows of a device's own experts: the kernels against their definitions, interpreted; on a GPU; and compiled."""

import dataclasses
from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx import grouping
from jmx.grouping import Cut
from jmx.pallas import own_rows
from jmx.perf.shapes import routed_shape

INTERPRETED = pytest.mark.usefixtures("on_cpu")
WHOLE = routed_shape("gpt-oss-120b", "uniform").problem(1024, "mosaic_sm90")
QUARTER, HALF = (dataclasses.replace(WHOLE, num_experts=128 // n, num_routed=128) for n in (4, 2))
SIZES = [(24, 4, 5, 96), (40, 1, 3, 640), (9, 2, 4, 50)]  # tokens, slots, experts, columns


def draw(rng, sizes, dtype, of_others=0.6):
    """x, weights, parts with NaN in rows of no assignment, and the blocks of ids most of which are elsewhere."""
    num_tokens, top_k, num_experts, columns = sizes
    ids = rng.integers(num_experts, size=(num_tokens, top_k))
    ids = np.where(rng.random(ids.shape) < of_others, -1, ids).astype(np.int32)
    work = grouping.many(jnp.asarray(ids), num_experts, Cut(16, 8, largest_first=bool(rng.integers(2))))
    x = jnp.asarray(rng.normal(size=(num_tokens, columns)), dtype)
    parts = np.full((2, work.num_rows, columns), np.nan, np.float32)
    used = np.asarray(work.row_of).ravel()
    used = used[used >= 0]
    parts[:, used] = rng.normal(size=(2, used.size, columns))
    return x, jnp.asarray(rng.random((num_tokens, top_k)), jnp.float32), jnp.asarray(parts), work, used


def assert_kernels(drawn, interpret):
    """Both kernels give what plain jnp does."""
    x, weights, parts, work, used = drawn
    given = x, work.token_of_row, own_rows.last_row(work.blocks)
    (rows,) = own_rows._take(*given, call=own_rows.Take(interpret))
    np.testing.assert_array_equal(np.asarray(rows)[used], np.asarray(x[work.token_of_row])[used])
    for its in ((weights,), ()):
        expected = grouping.combine(parts, work, *(its or (None,)))
        (sums,) = own_rows._combine(parts, work.row_of, *its, call=own_rows.Combine(x.dtype, interpret))
        assert sums.dtype == x.dtype
        error = np.linalg.norm(np.asarray(sums, np.float32) - expected) / max(1e-9, float(np.linalg.norm(expected)))
        assert error <= (1e-6 if x.dtype == jnp.float32 else 4e-3)


@INTERPRETED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_kernels_are_their_definitions(sizes, dtype, rng):
    assert_kernels(draw(rng, sizes, dtype), interpret=True)


@INTERPRETED
@pytest.mark.parametrize("of_others", [0.0, 1.0])
def test_all_rows_and_none(of_others, rng, monkeypatch):
    monkeypatch.setattr(own_rows, "LEAST_SLOTS_OF_A_QUARTER", 1)
    x, weights, parts, work, _ = drawn = draw(rng, SIZES[0], "bfloat16", of_others)
    assert_kernels(drawn, interpret=True)
    assert work.token_of_row is not None
    assert own_rows.take(QUARTER, x, work).shape == (work.num_rows, x.shape[1])
    sums = own_rows.combine(QUARTER, x.dtype, parts, work, weights)
    if of_others == 1:
        np.testing.assert_array_equal(np.asarray(sums), 0)


@INTERPRETED
@pytest.mark.parametrize("problem", [HALF, WHOLE], ids=["half", "whole"])
def test_rows_of_few_slots_are_placed(problem, rng):
    x, _, _, work, used = draw(rng, SIZES[0], "bfloat16")
    taken = partial(own_rows.take, problem)
    np.testing.assert_array_equal(np.asarray(taken(x, work))[used], np.asarray(x[work.token_of_row])[used])
    assert "jmx_place_rows" in str(jax.make_jaxpr(taken)(x, work))


def test_how_many_slots_they_are_for():
    assert [own_rows.applies(QUARTER, slots) for slots in (4095, 4096)] == [False, True]
    assert [own_rows.applies(HALF, slots) for slots in (4096, 1 << 15)] == [False, True]
    assert not own_rows.applies(WHOLE, 1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES, (2048, 4, 64, 2880)], ids=str)
def test_on_a_gpu(sizes, rng):
    assert_kernels(draw(rng, sizes, "bfloat16"), interpret=False)


@pytest.mark.aot
def test_they_compile_for_a_gpu(rng, monkeypatch):
    monkeypatch.setattr(own_rows, "LEAST_SLOTS_OF_A_QUARTER", 1)
    x, weights, parts, work, _ = draw(rng, (64, 4, 8, 2880), "bfloat16")
    for function, given, name in (
        (partial(own_rows.take, QUARTER), (x, work), "jmx_take_own_rows"),
        (partial(own_rows.take, HALF), (x, work), "jmx_place_rows"),
        (partial(own_rows.combine, QUARTER, jnp.bfloat16), (parts, work, weights), "jmx_combine_own_rows"),
    ):
        assert name in (aot.compile_for_h200(function, *given).as_text() or "")
