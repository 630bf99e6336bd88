"""Parts of a block beside its experts: shared experts, and the bias of the choice of experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmx
import jmx.nnx
from jmx.models.layers import RMSNorm
from jmx.models.shared_experts import SharedExperts

HIDDEN, INTERMEDIATE = 8, 6


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gate", [False, True])
def test_shared_experts_are_an_mlp_for_all_tokens(
    gate: bool, normed: bool, rows: int, rng: np.random.Generator
) -> None:
    part = SharedExperts(HIDDEN, INTERMEDIATE, gate=gate, dtype=jnp.float32, rngs=nnx.Rngs(0))
    found = part.variables()
    names = {("shared_gate_weight", "shared_up_weight"), ("shared_down_weight",)}
    assert found.keys() == (names | {("shared_expert_gate_weight",)} if gate else names)
    wide, down, *other = (variable.get_value() for variable in found.values())
    assert (wide.shape, down.shape) == ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.scale.set_value(jnp.asarray(rng.uniform(0.5, 2, HIDDEN), jnp.float32))
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    got = part(jnp.asarray(x), norm if normed else None)
    if normed:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(norm.scale[...])
    first, second = np.split(x @ np.asarray(wide).T, 2, axis=-1)
    expected = (first * sigmoid(first) * second) @ np.asarray(down).T
    if gate:
        expected *= sigmoid(x @ np.asarray(other[0]).T)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.costly
def test_a_correction_bias_changes_the_choice_of_float_experts_and_not_their_weights(rng: np.random.Generator) -> None:
    options: dict[str, Any] = {"gate_up_order": "concatenated", "format": "float32", "bias": False}
    experts = jmx.Experts.random(jax.random.key(0), 4, HIDDEN, INTERMEDIATE, **options)
    of_layer: dict[str, Any] = {"routing": jmx.SigmoidTopK(1, renormalize=False), "router": False, "format": "float32"}
    layer = jmx.nnx.MoE(HIDDEN, INTERMEDIATE, 4, 1, **of_layer, correction_bias=True, experts=experts, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((3, HIDDEN)), jnp.float32)
    logits = jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)
    layer.correction_bias.set_value(jnp.array([0.0, 0.0, 9.0, 0.0]))
    third = jax.tree.map(lambda array: array[2:3], experts)
    only = jmx.nnx.MoE(HIDDEN, INTERMEDIATE, 1, 1, **of_layer, experts=third, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(x, logits), only(x, logits[:, 2:3]), rtol=1e-5, atol=1e-6)
