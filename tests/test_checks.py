"""The checks of arguments: what they take. What they refuse is tests/test_wrong_arguments.py's."""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmx
from jmx import routing
from jmx.util import checks


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), np.array(3), jnp.int32(3)], ids=lambda v: str(type(v)))
def test_integers_of_numpy_and_jax_are_integers(three):
    taken = checks.check_int("n", three, least=3, most=3)
    assert (taken, type(taken)) == (3, int)
    assert repr(jmx.TopKSoftmax(three)) == "TopKSoftmax(top_k=3)"
    assert jmx.token_counts(jmx.Routing(np.array([[0, 2]]), np.ones((1, 2))), three).tolist() == [1, 0, 1]


def test_a_traced_integer_is_refused_by_name():
    with pytest.raises(TypeError, match=r"`top_k` .* must be an integer"):
        jax.jit(lambda k: jmx.TopKSoftmax(k).top_k)(2)


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float32(2), np.int32(2), ml_dtypes.bfloat16(2), np.array(2.0), jnp.float32(2)]
)
def test_numbers_become_pythons_own(value):
    taken = checks.check_finite("alpha", value)
    assert (taken, type(taken)) == (2.0, float)
    assert jmx.SwiGLU(alpha=value) == jmx.SwiGLU(alpha=2)


def test_a_number_above_all_floats_is_not_finite():
    with pytest.raises(ValueError, match=r"`alpha` \(=inf\) must be finite"):
        checks.check_finite("alpha", 10**400)


def test_flags_may_be_numpys():
    assert checks.check_bool("approximate", np.bool_(True)) is True


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(jnp.bfloat16)])
def test_a_dtype_may_be_given_in_any_way_that_numpy_takes(dtype):
    assert checks.check_dtype("dtype", dtype, jnp.bfloat16, jnp.float32) == jnp.bfloat16
    assert checks.check_dtype("dtype", dtype, jnp.floating) == jnp.bfloat16


def test_keys_old_and_new():
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.zeros(2, np.uint32)):
        assert checks.check_key("key", key) is key
    with pytest.raises(TypeError, match=r"`key` .* must be one key"):
        checks.check_key("key", jax.random.split(jax.random.key(0), 2))


def test_arrays_may_be_traced_and_where_shapes_are_enough_abstract():
    shape = jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert checks.check_array("x", shape, jnp.floating, (None, 3), abstract=True) is shape
    with pytest.raises(TypeError, match=r"`x` \(a ShapeDtypeStruct of dtype bfloat16 and .*\) must have values"):
        checks.check_array("x", shape, jnp.floating)
    assert jax.eval_shape(lambda x: checks.check_array("x", x, jnp.floating), shape).shape == (2, 3)
    with pytest.raises(ValueError, match=r"`x` \(shape \(2, 3\)\) must be of shape \(\.\.\., 4\)"):
        checks.check_array("x", shape, None, (None, 4), abstract=True)


def test_paths():
    assert checks.check_path("path", "a/b") == checks.check_path("path", pathlib.Path("a", "b")) == pathlib.Path("a/b")


def test_the_nearest_name_is_said_where_one_is_near():
    with pytest.raises(
        ValueError, match=r"`format` \(='nvfp5'\) must be one of \['mxfp4', .*; did you mean 'nvfp4'\?$"
    ):
        jmx.quantize(np.ones((2, 32), np.float32), "nvfp5")
    with pytest.raises(
        ValueError, match=r"`routing` \(='softmax'\) must be one of .*; did you mean 'top_k_softmax'\?$"
    ):
        routing.get("softmax", 2)
    with pytest.raises(ValueError, match=r"must be one of [^;]*$"):
        jmx.quantize(np.ones((2, 32), np.float32), "zzz")
