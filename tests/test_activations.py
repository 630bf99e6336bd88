"""Activations against float64 numpy, with their gradients, clamps and refusals."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jmx import activations
from jmx.activations import (
    GELU,
    GELUAndMul,
    ReLU,
    ReLU2,
    SiLU,
    SiLUAndMul,
    SwiGLU,
    SwiGLUStep,
)
from jmx.numerics.gate_up import GATE_UP_ORDERS, join_gate_up, split_gate_up

GPT_OSS = SwiGLU(alpha=1.702, beta=1.0, limit=7.0)
GATED = [
    SwiGLU(),
    GPT_OSS,
    SwiGLU(alpha=0.5, limit=2.0),
    SwiGLUStep(limit=2.0),
    SiLUAndMul(),
    GELUAndMul(True),
    GELUAndMul(False),
]
UNGATED = [SiLU(), GELU(True), GELU(False), ReLU(), ReLU2()]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x, approximate):
    if approximate:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def reference(activation, *inputs) -> np.ndarray:
    """The definition, in float64 numpy."""
    x = inputs[0]
    match activation:
        case SwiGLU(alpha, beta, limit):
            bound = np.inf if limit is None else limit
            gate, up = np.minimum(x, bound), np.clip(inputs[1], -bound, bound)
            return (up + beta) * gate * sigmoid(alpha * gate)
        case SwiGLUStep(limit):
            return np.minimum(x * sigmoid(x), limit) * np.clip(inputs[1], -limit, limit)
        case SiLUAndMul():
            return x * sigmoid(x) * inputs[1]
        case GELUAndMul(approximate):
            return gelu(x, approximate) * inputs[1]
        case SiLU():
            return x * sigmoid(x)
        case GELU(approximate):
            return gelu(x, approximate)
        case ReLU():
            return np.maximum(x, 0)
        case ReLU2():
            return np.maximum(x, 0) ** 2
    raise NotImplementedError(activation)


def inputs_of(activation, shape=(64, 48), dtype: Any = jnp.float32):
    rng = np.random.default_rng()
    return [jnp.asarray(5 * rng.standard_normal(shape), dtype) for _ in range(1 + activation.gated)]


def relative_error(result, expected):
    return np.linalg.norm(np.asarray(result, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("activation", GATED + UNGATED, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)])
def test_values_match_float64(activation, dtype, tolerance):
    inputs = inputs_of(activation, dtype=dtype)
    expected = reference(activation, *(np.asarray(x, np.float64) for x in inputs))
    for function in (activation, jax.jit(activation)):
        result = function(*inputs)
        assert result.dtype == dtype
        assert relative_error(result, expected) < tolerance


@pytest.mark.parametrize("activation", GATED + UNGATED, ids=str)
def test_gradients_match_differences(activation):
    inputs = inputs_of(activation)
    gradients = jax.grad(lambda *xs: activation(*xs).sum(), argnums=tuple(range(len(inputs))))(*inputs)
    step = 1e-7  # so small that no input is that close to a clamp
    for i, gradient in enumerate(gradients):
        above, below = ([np.asarray(x, np.float64) + s * (j == i) for j, x in enumerate(inputs)] for s in (step, -step))
        expected = (reference(activation, *above) - reference(activation, *below)) / (2 * step)
        assert relative_error(gradient, expected) < 1e-5


@pytest.mark.parametrize("activation", GATED + UNGATED, ids=str)
def test_nan_in_any_input_stays_nan(activation):
    for i in range(1 + activation.gated):
        inputs = inputs_of(activation, (8,))
        inputs[i] = inputs[i].at[3].set(jnp.nan)
        np.testing.assert_array_equal(np.isnan(activation(*inputs)), np.arange(8) == 3)


def test_limit_clamps_gate_above_and_up_on_both_sides():
    gate, up = jnp.array([9.0, -9.0, 1.0, 1.0]), jnp.array([1.0, 1.0, 9.0, -9.0])
    clamped_gate, clamped_up = jnp.array([7.0, -9.0, 1.0, 1.0]), jnp.array([1.0, 1.0, 7.0, -7.0])
    unlimited = SwiGLU(alpha=1.702, beta=1.0)
    np.testing.assert_array_equal(GPT_OSS(gate, up), unlimited(clamped_gate, clamped_up))
    assert not np.allclose(GPT_OSS(gate, up), unlimited(gate, up))


def test_gradient_at_the_clamp_is_half_of_that_inside():
    unlimited = SwiGLU(alpha=1.702, beta=1.0)
    at_clamp, beyond = jnp.float32(7), jnp.float32(8)
    for argument in (0, 1):
        inside = float(jax.grad(unlimited, argument)(at_clamp, at_clamp))
        assert float(jax.grad(GPT_OSS, argument)(at_clamp, at_clamp)) == pytest.approx(0.5 * inside, rel=1e-6)
        assert jax.grad(GPT_OSS, argument)(beyond, beyond) == 0


def test_plain_swiglu_is_silu_and_mul():
    gate, up = inputs_of(SwiGLU())
    np.testing.assert_allclose(SwiGLU()(gate, up), SiLUAndMul()(gate, up), rtol=1e-5)


def test_activations_are_static_values():
    assert SwiGLU(1.702, 1.0, 7.0) == GPT_OSS
    assert hash(SwiGLU(1.702, 1.0, 7.0)) == hash(GPT_OSS)
    assert GELU(True) != GELU(False)
    assert len({*GATED, *UNGATED}) == len(GATED + UNGATED)


def test_numpy_parameters_do_not_promote():
    activation = SwiGLU(alpha=np.float64(1.5), beta=np.float64(1.0), limit=np.float64(7.0))
    assert activation(*inputs_of(activation, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    assert activation == SwiGLU(1.5, 1.0, 7.0)


@examples(30)
@given(st.integers(0, 3), st.integers(0, 5), st.sampled_from(GATE_UP_ORDERS))
def test_join_is_the_inverse_of_split(rows, size, order):
    h = np.random.default_rng().standard_normal((rows, 2 * size)).astype(np.float32)
    gate, up = split_gate_up(jnp.asarray(h), order)
    assert gate.shape == up.shape == (rows, size)
    np.testing.assert_array_equal(join_gate_up(gate, up, order), h)


def test_orders_are_what_they_say():
    h = jnp.arange(6)
    assert [part.tolist() for part in split_gate_up(h, "interleaved")] == [[0, 2, 4], [1, 3, 5]]
    assert [part.tolist() for part in split_gate_up(h, "concatenated")] == [[0, 1, 2], [3, 4, 5]]
    assert [part.tolist() for part in split_gate_up(h, "interleaved_up_first")] == [[1, 3, 5], [0, 2, 4]]
    assert [part.tolist() for part in split_gate_up(h, "concatenated_up_first")] == [[3, 4, 5], [0, 1, 2]]


@pytest.mark.parametrize("order", GATE_UP_ORDERS)
def test_apply_splits_for_gated_activations_only(order):
    gate, up = inputs_of(GPT_OSS)
    h = join_gate_up(gate, up, order)
    np.testing.assert_array_equal(activations.apply(GPT_OSS, h, order), GPT_OSS(gate, up))
    np.testing.assert_array_equal(activations.apply(ReLU2(), h, None), ReLU2()(h))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"alpha": math.nan}, r"`alpha` \(=nan\) must be finite"),
        ({"beta": math.inf}, r"`beta` \(=inf\) must be finite"),
        ({"limit": 0.0}, r"`limit` \(=0.0\) must be positive"),
        ({"limit": -7.0}, r"`limit` \(=-7.0\) must be positive"),
        ({"limit": math.inf}, r"`limit` \(=inf\) must be finite"),
    ],
)
def test_swiglu_refuses_bad_parameters(parameters, message):
    with pytest.raises(ValueError, match=message):
        SwiGLU(**parameters)


@pytest.mark.parametrize("limit", [0.0, -7.0, math.inf, math.nan])
def test_swiglu_step_refuses_bad_limits(limit):
    with pytest.raises(ValueError, match=r"`limit` \(=.*\) must be (positive|finite)"):
        SwiGLUStep(limit)


@dataclass(frozen=True)
class Wrong(activations.Activation):
    """An activation of a user's own that returns anything but an array of its arguments' shape."""

    returned: Any
    gated: ClassVar[bool] = True

    def __call__(self, gate, up):
        return self.returned(gate)


@pytest.mark.parametrize(
    ("returned", "shown"), [(lambda gate: gate[:, :1], r"shape \(2, 1\)"), (lambda gate: None, "None, a NoneType")]
)
def test_what_an_activation_returns_is_checked(returned, shown):
    message = rf"`activation` .* must return an array of its arguments' shape \(2, 4\), not .*{shown}"
    with pytest.raises(TypeError, match=message):
        activations.apply(Wrong(returned), jnp.ones((2, 8)), "interleaved")


def test_an_activation_must_be_defined():
    with pytest.raises(NotImplementedError, match="`Activation` must define `__call__`"):
        activations.Activation()(1.0)


def test_bad_shapes_and_orders_are_refused():
    with pytest.raises(ValueError, match=r"`h` \(shape \(3, 5\)\) must have an even last axis"):
        split_gate_up(jnp.ones((3, 5)), "interleaved")
    with pytest.raises(ValueError, match=r"`up` \(shape \(1, 3\)\) must have the shape of `gate`"):
        join_gate_up(jnp.ones((2, 3)), jnp.ones((1, 3)), "interleaved")
    for call in (
        lambda: split_gate_up(jnp.ones(4), "alternating"),
        lambda: join_gate_up(jnp.ones(4), jnp.ones(4), "alternating"),
        lambda: activations.apply(SiLUAndMul(), jnp.ones(4), "alternating"),
    ):
        with pytest.raises(ValueError, match=r"`order` \(='alternating'\) must be one of"):
            call()
