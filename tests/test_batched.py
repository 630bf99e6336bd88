"""`batched_moe`: rows that are with their experts already, on every backend, against the layer's float64 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_cases import TESTED, Case, assert_agrees, draw_weights, draw_x, reference, suited

import jmx
from jmx import Routing, SwiGLU
from jmx.layer import batched_moe

E, M = 4, 12
CASE = Case(tokens=E * M, num_experts=E, top_k=1)
COUNTS = [[0, 12, 5, 1], [12, 12, 12, 12], [0, 0, 0, 0]]
SMALL = jmx.Experts.random(jax.random.key(0), E, 32, 32, gate_up_order="interleaved")
X = np.ones((E, M, 32), np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("backend", [backend.name for backend in TESTED if not backend.name.endswith("interpreted")])
def test_rows_before_the_count_are_computed_and_others_are_zero(backend, counts, weights_on, rng):
    case = suited(backend, Case(tokens=E * M, num_experts=E, top_k=1, weights_on=weights_on))
    weights, x = draw_weights(rng, case), draw_x(rng, case)
    filled = np.arange(M) < np.array(counts)[:, None]
    ids = np.where(filled, np.arange(E)[:, None], -1).reshape(-1, 1)
    of_rows = rng.standard_normal((E, M)).astype(np.float32)
    expected = reference(case, weights, x, Routing(ids, of_rows.reshape(-1, 1)))
    x[~filled.reshape(-1)] = np.nan  # as memory that nothing was written to
    y = jax.jit(
        lambda x, counts, of_rows, experts: batched_moe(
            x,
            counts,
            experts,
            activation=case.activation,
            weights=of_rows,
            weights_on=weights_on,
            input_format=case.input_format,
            backend=backend,
        )
    )(x.reshape(E, M, -1), np.array(counts), of_rows, weights.experts(case))
    assert y.shape == (E, M, case.hidden)
    assert y.dtype == case.dtype
    assert not np.asarray(y, np.float32)[~filled].any()
    assert_agrees(backend, case, np.asarray(y, np.float64).reshape(E * M, -1), expected)


def test_without_weights_rows_count_once_and_gradients_are_those_of_filled_rows(rng):
    counts, x = np.array([3, 0, 12, 7], np.int32), rng.standard_normal(X.shape).astype(np.float32)

    def run(x, weights=None):
        return batched_moe(x, counts, SMALL, activation=SwiGLU(), weights=weights)

    np.testing.assert_array_equal(run(x), run(x, np.ones((E, M), np.float32)))
    gradient = jax.jit(jax.grad(lambda x: run(x).sum()))(x)
    filled = np.arange(M) < counts[:, None]
    assert np.abs(gradient).max(axis=-1)[filled].all()
    assert not np.asarray(gradient)[~filled].any()


def test_traced_counts_beyond_the_rows_are_limited_to_them():
    run = jax.jit(lambda counts: batched_moe(X, counts, SMALL, activation="swiglu"))
    np.testing.assert_array_equal(run(np.array([99, -3, 12, 0])), run(np.array([12, 0, 12, 0])))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[0]}, ValueError, r"`x` \(shape \(12, 32\)\) must be \(E, M, H\) with E = 4"),
        ({"x": X[:3]}, ValueError, r"`x` \(shape \(3, 12, 32\)\) must be \(E, M, H\) with E = 4"),
        ({"x": X[..., :31]}, ValueError, r"`x` .* must be \(..., 32\)"),
        ({"counts": np.ones(3, np.int32)}, ValueError, r"`counts` \(shape \(3,\)\) must be \(4,\)"),
        ({"counts": np.ones(E, np.float32)}, TypeError, r"`counts` \(dtype float32\) must be integer"),
        ({"counts": np.array([1, 2, 3, 13])}, ValueError, r"`counts` .* must be 0 to 12"),
        ({"counts": jnp.array([-1, 2, 3, 4])}, ValueError, r"`counts` .* must be 0 to 12"),
        ({"weights": np.ones((E, M + 1), np.float32)}, ValueError, r"`weights` \(shape \(4, 13\)\) must be \(4, 12\)"),
        ({"weights": np.ones((E, M), np.int32)}, TypeError, r"`weights` \(dtype int32\) must be floating"),
        ({"activation": jmx.SiLU()}, ValueError, "`activation`"),
        ({"backend": "fastest"}, ValueError, "`backend`"),
    ],
)
def test_what_does_not_fit_is_an_error(change, error, message):
    arguments = {"x": X, "counts": np.ones(E, np.int32), "experts": SMALL, "activation": SwiGLU()} | change
    with pytest.raises(error, match=message):
        batched_moe(**arguments)
