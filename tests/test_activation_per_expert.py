"""SwiGLU with parameters of each expert: against the sum over experts that each have their own `SwiGLU`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmx
from jmx.selection.backend import Reason

E, SIZES = 4, (64, 96)
NUMBERS = {"alpha": (0.5, 1.0, 1.7, 0.1), "beta": (0.0, 1.0, -1.0, 2.0)}
LIMIT = (0.5, 7.0, 1.0, 0.2)


def problem(tokens, format, order, rng, seed=0):
    experts = jmx.Experts.random(jax.random.key(seed), E, *SIZES, gate_up_order=order, format=format)
    x = jnp.asarray(3 * rng.standard_normal((tokens, SIZES[0])), jnp.float32)
    ids = np.stack([rng.permutation(E)[:2] for _ in range(tokens)]).astype(np.int32)
    return x, jmx.Routing(jnp.asarray(ids), jnp.asarray(rng.uniform(0.1, 1, ids.shape), jnp.float32)), experts


def summed(x, routing, experts, activation, **call):
    """Each expert by itself: other experts' terms have the weight 0."""
    out = jnp.zeros_like(x)
    for expert in range(E):
        limit = None if activation.limit is None else activation.limit[expert]
        own = jmx.SwiGLU(activation.alpha[expert], activation.beta[expert], limit)
        weights = jnp.where(routing.expert_ids == expert, routing.weights, 0)
        out += jmx.moe(x, routing._replace(weights=weights), experts, activation=own, **call)
    return out


@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize(
    ("tokens", "format", "order"),
    [(2, "mxfp4", "interleaved"), (16, "int8_g32", "concatenated_up_first"), (9, "mxfp4", "concatenated")],
)
def test_each_expert_has_its_parameters(tokens, format, order, limit, rng):
    x, routing, experts = problem(tokens, format, order, rng)
    activation = jmx.SwiGLUPerExpert(**NUMBERS, limit=limit)
    found = jmx.moe(x, routing, experts, activation=activation)
    expected = summed(x, routing, experts, activation)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
    same = jmx.moe(x, routing, experts, activation=jmx.SwiGLU(1.0, 0.0, None if limit is None else 7.0))
    assert np.linalg.norm(same - expected) > 0.05 * np.linalg.norm(expected)


@pytest.mark.costly
def test_gradients_are_those_of_each_expert(rng):
    x, routing, experts = problem(12, "int4_g32", "interleaved", rng)
    activation = jmx.SwiGLUPerExpert(**NUMBERS, limit=LIMIT)

    def loss(function, x):
        return jnp.sum(jnp.sin(function(x, routing, experts, activation)))

    def together(x, routing, experts, activation):
        return jmx.moe(x, routing, experts, activation=activation)

    found, expected = (jax.grad(lambda x, f=f: loss(f, x))(x) for f in (together, summed))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="`cpu` runs on CPUs")
def test_other_backends_state_why_they_do_not_run_it(rng):
    x, routing, experts = problem(4, "mxfp4", "interleaved", rng)
    activation = jmx.SwiGLUPerExpert(**NUMBERS)
    call = {"activation": activation, "backend": "cpu"}
    with pytest.raises(jmx.NoBackendError, match="the activation has parameters of each expert"):
        jmx.moe(x, routing, experts.prepare("packed"), **call)
    explained = jmx.explain(x, routing, experts, activation=activation)
    assert explained.chosen == "xla"
    assert Reason.ACTIVATION.value in str(explained)


def test_another_number_of_experts_is_refused(rng):
    x, routing, experts = problem(4, "mxfp4", "interleaved", rng)
    activation = jmx.SwiGLUPerExpert((1.0, 2.0), (0.0, 0.0))
    with pytest.raises(ValueError, match=re.escape("`activation` (with parameters of 2 experts) must have those of 4")):
        jmx.moe(x, routing, experts, activation=activation)


def test_calls_of_several_devices_refuse_it(rng):
    x, routing, experts = problem(4, "mxfp4", "interleaved", rng)
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1])
    split = jmx.Split(expert="ep", mesh=mesh)
    with pytest.raises(ValueError, match="must have the same parameters for all experts where several devices run"):
        jmx.moe(x, routing, experts, activation=jmx.SwiGLUPerExpert(**NUMBERS), split=split)
