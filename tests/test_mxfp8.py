"""MXFP8 against a brute-force quantizer over ml_dtypes' values, and against what FlashInfer made on a CPU."""

from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from bits import bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jmx.numerics import element_codes
from jmx.numerics.formats import MXFP8
from jmx.numerics.mxfp8 import dequantize, quantize

BLOCK = MXFP8.block_size
GOLDEN = np.load(Path(__file__).parent / "data" / "blackwell.npz")  # see data/make_blackwell.py
MAGNITUDES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)  # 0 to 448, in order
MIDPOINTS = (MAGNITUDES[:-1] + MAGNITUDES[1:]) / 2
SHAPE = (3, 2 * BLOCK)  # one shape for all hypothesis examples: one compilation


def reference(x):
    """Codes and scale codes of finite `x`, in float64, where each quotient is exact."""
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    powers = np.ldexp(1.0, np.arange(-127, 128))
    scale = np.searchsorted(448 * powers, amax)  # the first power of two that brings amax to 448 at most
    quotient = np.abs(blocks) / powers[scale]
    assert quotient.max(initial=0) <= 448
    below, above = (np.searchsorted(MIDPOINTS, quotient, side) for side in ("left", "right"))
    elements = np.where(below % 2 == 0, below, above)  # they differ in a tie, and one of them is even
    elements = np.where(np.signbit(blocks), elements | 0x80, elements).reshape(x.shape)
    return elements.astype(np.uint8), scale[..., 0].astype(np.uint8)


def assert_quantizes_as_reference(x):
    q = quantize(x)
    elements, scales = reference(np.asarray(x))
    assert (q.values.dtype, q.scales.dtype) == (MXFP8.element_dtype, MXFP8.scale_dtype)
    np.testing.assert_array_equal(bits(q.scales), scales)
    np.testing.assert_array_equal(bits(q.values), elements)


def every_finite(dtype):
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    return values[np.isfinite(values.astype(np.float32))]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_16_bit_value_as_the_largest_of_its_block(rng, dtype):
    largest = every_finite(dtype)
    assert len(largest) > 63000
    part = rng.uniform(-1, 1, (len(largest), BLOCK)) * rng.choice([1, 1 / 16, 1 / 512], (len(largest), BLOCK))
    x = (part * np.abs(largest.astype(np.float64))[:, None]).astype(dtype)
    x[np.arange(len(x)), rng.integers(0, BLOCK, len(x))] = largest
    assert_quantizes_as_reference(x)


@pytest.mark.parametrize("amax", [448.0, 300.0, 2.0**-100, 2.0**-119, 2.0**-130])
def test_every_bfloat16_below_some_largest(amax):
    values = every_finite(jnp.bfloat16)
    values = values[np.abs(values.astype(np.float64)) <= amax]
    blocks = np.resize(values, (-(-len(values) // (BLOCK - 1)), BLOCK - 1))
    assert_quantizes_as_reference(np.column_stack([np.full(len(blocks), amax, jnp.bfloat16), blocks]))


def test_float32_ties_and_their_neighbours():
    """Each midpoint of two elements, the float32 below it and the one above, under scales over their whole range."""
    ties = MIDPOINTS.astype(np.float32)
    x = np.concatenate([np.nextafter(ties, 0), ties, np.nextafter(ties, 448)])
    blocks = np.column_stack([np.full(-(-len(x) // (BLOCK - 1)), 448.0), np.resize(x, (13, BLOCK - 1))])
    scales = np.ldexp(1.0, np.arange(-117, 120))[:, None, None]
    assert_quantizes_as_reference((blocks * scales).astype(np.float32).reshape(-1, BLOCK))


def test_the_scale_changes_just_above_448_times_a_power_of_two(rng):
    steps = 448 * np.ldexp(1.0, np.arange(-127, 120)).astype(np.float32)
    largest = np.concatenate([np.nextafter(steps, np.float32(0)), steps, np.nextafter(steps, np.float32(np.inf))])
    x = (rng.uniform(-1, 1, (len(largest), BLOCK)) * largest[:, None]).astype(np.float32)
    x[:, 0] = largest
    assert_quantizes_as_reference(x)
    codes_of = bits(quantize(x).scales)[:, 0].reshape(3, -1)
    np.testing.assert_array_equal(codes_of[1], np.arange(247))
    np.testing.assert_array_equal(codes_of[0], codes_of[1])
    np.testing.assert_array_equal(codes_of[2], codes_of[1] + 1)


@given(hnp.arrays(np.float32, SHAPE, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_any_floats(x):
    assert_quantizes_as_reference(x)


def test_the_same_bits_under_jit_and_in_any_shape(rng):
    x = rng.standard_normal((2, 3, 5, 2 * BLOCK)).astype(jnp.bfloat16)
    q = quantize(x)
    for other in (jax.jit(quantize)(x), jax.vmap(quantize)(x), quantize(jnp.asarray(x))):
        np.testing.assert_array_equal(bits(other.values), bits(q.values))
        np.testing.assert_array_equal(bits(other.scales), bits(q.scales))
    assert q.scales.shape == (2, 3, 5, 2)
    assert [array.shape for array in quantize(np.ones((0, BLOCK), np.float32))[:2]] == [(0, BLOCK), (0, 1)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(rng, bad):
    x = rng.standard_normal((3, 4 * BLOCK)).astype(np.float32)
    expected = quantize(x)
    x[1, BLOCK + 3] = bad
    q = quantize(x)
    scales, values = bits(expected.scales).copy(), bits(expected.values).copy()
    scales[1, 1], values[1, BLOCK : 2 * BLOCK] = element_codes.SCALE_NAN, 0
    np.testing.assert_array_equal(bits(q.scales), scales)
    np.testing.assert_array_equal(bits(q.values), values)
    nan = np.isnan(dequantize(q))
    assert nan[1, BLOCK : 2 * BLOCK].all()
    assert nan.sum() == BLOCK


def test_dequantize_multiplies_exactly(rng):
    """Every element under every scale at which no product is a subnormal or too large."""
    elements = np.setdiff1d(np.arange(256), [0x7F, 0xFF]).astype(np.uint8)  # those two are NaN
    scales = np.arange(10, 246, dtype=np.uint8)
    values = np.resize(rng.permutation(elements), (len(scales), 8 * BLOCK)).view(MXFP8.element_dtype)
    every = jnp.asarray(np.repeat(scales[:, None], 8, axis=1).view(MXFP8.scale_dtype))
    got = dequantize(quantize(np.ones((1, BLOCK), np.float32))._replace(values=jnp.asarray(values), scales=every))
    expected = values.astype(np.float64) * np.ldexp(1.0, scales.astype(int) - 127)[:, None]
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), expected)


def test_the_error_is_at_most_half_a_step(rng):
    x = (rng.standard_normal((64, 8 * BLOCK)) * np.exp(rng.normal(0, 3, (64, 8 * BLOCK)))).astype(np.float32)
    q = quantize(x)
    scale = np.repeat(np.asarray(q.scales).astype(np.float64), BLOCK, axis=-1)
    step = np.exp2(np.maximum(np.floor(np.log2(np.abs(x) / scale)), -6) - 3) * scale
    assert (np.abs(np.asarray(dequantize(q)).astype(np.float64) - x) <= step / 2).all()


def test_the_bits_are_those_of_flashinfer():
    """Except where its scale code is 0, that is below 448 * 2^-127: it makes zeros of such blocks."""
    x = GOLDEN["x"]
    assert not (x.view(np.uint32) & 0xFFFF).any()  # bfloat16 represents it, which is what kernels are given
    for q in (quantize(x), quantize(x.astype(jnp.bfloat16))):
        scales = GOLDEN["mxfp8_scales"].reshape(len(x), -1)
        np.testing.assert_array_equal(bits(q.scales), scales)
        assert len(np.unique(scales)) > 240
        least = np.repeat(scales == 0, BLOCK, axis=-1)
        np.testing.assert_array_equal(bits(q.values)[~least], GOLDEN["mxfp8_codes"][~least])
        assert 0.01 < least.mean() < 0.1
        assert not (GOLDEN["mxfp8_codes"][least] & 0x7F).any()


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(ValueError, match=r"`x.shape\[-1\]` \(=33\) must be a multiple of 32 for MXFP8"):
        quantize(np.ones(33, np.float32))
    with pytest.raises(ValueError, match="scalar"):
        quantize(cast(Any, np.float32(1)))
    for x in (np.ones(BLOCK), np.ones(BLOCK, np.int32)):
        with pytest.raises(TypeError, match=f"`x` .dtype {x.dtype}. must be float32"):
            quantize(x)


def test_the_format_of_activations_has_these_arrays():
    q = quantize(np.ones((5, 3 * BLOCK), np.float32))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), MXFP8.abstract((5, 3 * BLOCK))) == jax.tree.map(
        lambda a: (a.shape, a.dtype), q
    )
    assert MXFP8.bytes((5, 3 * BLOCK)) == sum(array.nbytes for array in jax.tree.leaves(q))
