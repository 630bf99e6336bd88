"""Products of sorted rows with their experts' float weights, and their gradients, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx.xla.grouped_dot import grouped_dot

SIZES = {
    "even": [5, 5, 5, 5],
    "empty": [0, 11, 0, 9],
    "one expert": [0, 0, 300, 0],
    "odd": [1, 129, 7, 0],
    "rows of none": [3, 0, 4, 2],
    "no rows": [0, 0, 0, 0],
}
SPARE = {"rows of none": 6, "no rows": 4}  # rows after those of all experts
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2}


def data(rng, name, dtype):
    sizes = np.array(SIZES[name], np.int32)
    rows = int(sizes.sum()) + SPARE.get(name, 0)
    arrays = [rng.standard_normal(shape) for shape in ((rows, 24), (4, 40, 24), (rows, 40))]
    return jnp.asarray(sizes), *(jnp.asarray(array, dtype) for array in arrays)


def exact(sizes, rows, weights, d):
    """float64: products, and the gradients of their inner product with d."""
    rows, weights, d = (np.asarray(array, np.float64) for array in (rows, weights, d))
    ends = np.cumsum(sizes)
    products, drows, dweights = np.zeros((ends[-1], weights.shape[1])), np.zeros_like(rows), np.zeros_like(weights)
    for group, end in enumerate(ends):
        mine = slice(end - int(sizes[group]), end)
        products[mine], drows[mine] = rows[mine] @ weights[group].T, d[mine] @ weights[group]
        dweights[group] = d[mine].T @ rows[mine]
    return products, drows, dweights


def inner(sizes, d, dot=grouped_dot):
    def of(rows, weights):
        inside = jnp.arange(len(rows))[:, None] < sizes.sum()
        return jnp.where(inside, dot(rows, weights, sizes) * d, 0).sum()

    return of


def assert_close(got, want, dtype):
    assert np.isfinite(np.asarray(got, np.float64)).all()
    assert np.abs(np.asarray(got, np.float64) - want).max(initial=0) <= BOUNDS[dtype] * max(
        1, np.abs(want).max(initial=0)
    )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", SIZES)
def test_products_and_gradients_are_those_of_float64(name, dtype, rng):
    sizes, rows, weights, d = data(rng, name, dtype)
    products, drows, dweights = exact(sizes, rows, weights, d)
    got = jax.jit(grouped_dot)(rows, weights, sizes)
    assert got.dtype == jnp.float32
    assert_close(got[: len(products)], products, dtype)
    got = jax.jit(jax.grad(inner(sizes, d), (0, 1)))(rows, weights)
    assert [part.dtype for part in got] == [rows.dtype, weights.dtype]
    assert_close(got[0], drows, dtype)
    assert_close(got[1], dweights, dtype)


def test_a_nan_stays_in_its_row_and_in_its_experts_gradient(rng):
    sizes, rows, weights, d = data(rng, "odd", "float32")
    nan = rows.at[0].set(jnp.nan)  # the one row of the first expert
    clean, got = grouped_dot(rows, weights, sizes), grouped_dot(nan, weights, sizes)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1:], clean[1:])
    dweights = jax.grad(inner(sizes, d), 1)(nan, weights)
    assert np.isnan(dweights[0]).all()
    assert np.isfinite(dweights[1:]).all()


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="XLA's `ragged_dot` has no such batch; engines run elements in turn"
)
def test_a_batch_has_the_results_of_its_elements(rng):
    sizes, rows, weights, _ = data(rng, "even", "float32")
    batch, other = jnp.stack([rows, rows * 2]), jnp.stack([sizes, jnp.asarray(SIZES["empty"], jnp.int32)])
    got = jax.vmap(grouped_dot, (0, None, 0))(batch, weights, other)
    for of_batch, element, its in zip(got, batch, other, strict=True):
        np.testing.assert_allclose(of_batch, grouped_dot(element, weights, its), rtol=1e-5, atol=1e-5)
