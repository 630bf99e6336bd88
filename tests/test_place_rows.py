"""Rows of tokens in the order of experts: the kernel against its definition, interpreted; on a GPU; and compiled."""

import aot
import jax.numpy as jnp
import numpy as np
import pytest

from jmx import grouping
from jmx.grouping import Cut
from jmx.pallas import place_rows, row_tiles

INTERPRETED = pytest.mark.usefixtures("on_cpu")
SIZES = [(9, 2, 4, 50), (24, 4, 5, 96), (33, 1, 3, 640), (17, 3, 5, 51)]  # tokens, slots, experts, columns


def draw(rng, sizes, dtype):
    """x, and the rows of ids some of which are of no expert."""
    num_tokens, top_k, num_experts, columns = sizes
    ids = rng.integers(-1, num_experts, size=(num_tokens, top_k)).astype(np.int32)
    work = grouping.many(jnp.asarray(ids), num_experts, Cut(16, 8))
    assert work.token_of_row is not None
    return jnp.asarray(rng.normal(size=(num_tokens, columns)), dtype), work.row_of, work.token_of_row


def assert_places(drawn, interpret):
    x, row_of, token_of_row = drawn
    (rows,) = place_rows._place(*drawn, call=place_rows.Place(interpret))
    row_of = np.asarray(row_of)
    tokens = np.broadcast_to(np.arange(row_of.shape[0])[:, None], row_of.shape)
    assert (rows.shape, rows.dtype) == ((token_of_row.size, x.shape[1]), x.dtype)
    np.testing.assert_array_equal(np.asarray(rows)[row_of[row_of >= 0]], np.asarray(x)[tokens[row_of >= 0]])


@INTERPRETED
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("interpret", [True, False])
def test_every_assignment_has_its_token(sizes, dtype, interpret, rng):
    assert_places(draw(rng, sizes, dtype), interpret)


def assert_parts(drawn, first, count, interpret):
    """Rows of some tokens are placed, and then those of the others from an array in which the first ones are NaN."""
    x, row_of, token_of_row = drawn
    work = row_of, token_of_row, jnp.full(1, first, jnp.int32)
    number = jnp.arange(x.shape[0])[:, None]
    others = jnp.where((number >= first) & (number < first + count), jnp.nan, x)
    (some,) = place_rows._place(x[first : first + count], *work, call=place_rows.Place(interpret))
    (rows,) = place_rows._place(others, *work, some, call=place_rows.Place(interpret, count))
    tokens = np.broadcast_to(np.arange(row_of.shape[0])[:, None], row_of.shape)
    used = np.asarray(row_of) >= 0
    np.testing.assert_array_equal(np.asarray(rows)[np.asarray(row_of)[used]], np.asarray(x)[tokens[used]])


@INTERPRETED
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
@pytest.mark.parametrize("interpret", [True, False])
def test_rows_of_some_tokens_and_then_of_the_others(sizes, interpret, rng):
    drawn = draw(rng, sizes, "bfloat16")
    for first in (0, 3, sizes[0] - 4):
        assert_parts(drawn, first, 4, interpret)


@INTERPRETED
def test_too_many_rows_for_32_bits_are_gathered(rng, monkeypatch):
    x, row_of, token_of_row = draw(rng, SIZES[0], "bfloat16")
    monkeypatch.setattr(row_tiles, "MOST_ELEMENTS", token_of_row.size * x.shape[1])
    monkeypatch.setattr(place_rows, "_place", None)
    rows = np.asarray(place_rows.place(x, row_of, token_of_row))
    np.testing.assert_array_equal(rows, np.asarray(x)[np.asarray(token_of_row)])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", [*SIZES, (1024, 4, 128, 2880)], ids=str)
def test_on_a_gpu(sizes, dtype, rng):
    drawn = draw(rng, sizes, dtype)
    assert_places(drawn, interpret=False)
    for first in (0, sizes[0] - 5):
        assert_parts(drawn, first, 5, interpret=False)


@pytest.mark.aot
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_compiles_for_a_gpu(dtype, rng):
    compiled = aot.compile_for_h200(place_rows.place, *draw(rng, (64, 4, 8, 2880), dtype))
    assert "jmx_place_rows" in (compiled.as_text() or "")


@pytest.mark.aot
def test_rows_of_others_are_written_into_those_of_some_when_compiled(rng):
    x, *work = draw(rng, (64, 4, 8, 2880), "bfloat16")

    def both(x, row_of, token_of_row, first):
        some = place_rows.place_some(x[:32], row_of, token_of_row, first)
        return place_rows.place_rest(some, x, row_of, token_of_row, first, 32)

    text = aot.compile_for_h200(both, x, *work, jnp.zeros(1, jnp.int32)).as_text() or ""
    assert text.count("output_to_operand_aliasing={{}: (3, {})}") == 1
    assert f" copy({x.dtype}" not in text
