"""Integers against numpy's floats, which have subnormals and round correctly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx.numerics import rounding

COUNT = 1 << 18
LARGEST = np.finfo(np.float32).max


def magnitudes(rng, count=COUNT, least=1, most=0x7F7FFFFF):
    """float32 bits, each exponent as likely as another, significands of few bits among them."""
    bits = rng.integers(least, most, count, np.int32, endpoint=True)
    return np.where(rng.random(count) < 0.3, np.maximum(bits & -(1 << 18), least), bits)


def value(bits):
    return np.asarray(bits, np.int32).view(np.float32).astype(np.float64)


def extended(number):
    """Extended bits of float64 `number`, which is rounded to 24 bits."""
    fraction, exponent = np.frexp(number)
    significand = np.rint(np.ldexp(fraction, 24)).astype(np.int64)
    return (np.minimum(exponent + 126, 255).astype(np.int64) << 23) + significand - (1 << 23)


def test_quotients_of_every_size(rng):
    a, b = magnitudes(rng), magnitudes(rng)
    got = jax.jit(lambda a, b: rounding.divided(rounding.normalized(a), rounding.normalized(b)))(a, b)
    np.testing.assert_array_equal(got, extended(value(a) / value(b)))
    normal = np.flatnonzero((a >= 1 << 23) & (b >= 1 << 23))
    with np.errstate(over="ignore"):
        single = np.asarray(a[normal]).view(np.float32) / np.asarray(b[normal]).view(np.float32)
    inside = (single >= np.finfo(np.float32).tiny) & (single <= LARGEST)
    assert inside.mean() > 0.5
    np.testing.assert_array_equal(np.asarray(got)[normal][inside], single[inside].view(np.int32))


def test_quotients_next_to_the_middle_of_two_floats(rng):
    """The dividend next to (n + 1/2) units times the divisor, where one unit decides."""
    b = rng.integers(1 << 23, 1 << 24, COUNT)
    quotient = rng.integers(1 << 23, 1 << 24, COUNT)
    a = (2 * quotient + 1) * b >> 25  # of 48 bits, the upper 24 or 23
    a = np.where(a < 1 << 23, a * 2, a) + rng.integers(-1, 2, COUNT)
    a, b = (np.clip(part, 1 << 23, (1 << 24) - 1).astype(np.float32).view(np.int32) for part in (a, b))
    np.testing.assert_array_equal(rounding.divided(jnp.asarray(a), jnp.asarray(b)), extended(value(a) / value(b)))


@pytest.mark.parametrize("units", [-9, -2, -1, 1, 2, 9])
def test_a_division_that_is_off_by_some_units_is_put_right(rng, monkeypatch, units):
    def off(dividend, divisor):
        near = dividend.astype(jnp.float32) / jnp.asarray(divisor, jnp.float32)
        return near * (1 + units * 2.0**-23)

    a, b = magnitudes(rng, least=1 << 23), magnitudes(rng, least=1 << 23)
    expected = extended(value(a) / value(b))
    monkeypatch.setattr(rounding, "_about", off)
    np.testing.assert_array_equal(rounding.divided(jnp.asarray(a), jnp.asarray(b)), expected)


@pytest.mark.parametrize("divisor", [127.0, 448.0, 6.0, 1.0])
def test_quotients_by_constants(rng, divisor):
    a = magnitudes(rng)
    got = jax.jit(lambda a: rounding.divided(rounding.normalized(a), rounding.bits_of(divisor)))(a)
    np.testing.assert_array_equal(got, extended(value(a) / divisor))


def test_products_of_every_size(rng):
    a = magnitudes(rng) & -(1 << 16)  # 8 significant bits
    a[:256] = rng.integers(0, 1 << 7, 256) << 16  # subnormals, and zero
    a[256:512] = 0
    # Half of the partners are such that the product is around the least float32, where it is rounded twice as easily.
    b = magnitudes(rng, least=0)
    near = np.clip(np.frexp(value(a))[1], -126, 120)
    near = np.ldexp(rng.random(COUNT) + 0.5, -149 - near + rng.integers(-4, 30, COUNT)).astype(np.float32)
    b = np.where(rng.random(COUNT) < 0.5, b, near.view(np.int32))
    with np.errstate(over="ignore", under="ignore"):
        expected = (value(a) * value(b)).astype(np.float32)
    assert (expected[expected > 0] < np.finfo(np.float32).tiny).sum() > 1000
    assert np.isinf(expected).sum() > 1000
    np.testing.assert_array_equal(jax.jit(rounding.times)(a, b), expected.view(np.int32))


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_products_with_what_is_not_finite_are_nan(bad):
    bad = rounding.bits_of(bad)
    one, zero = (jnp.int32(rounding.bits_of(number)) for number in (1.0, 0.0))
    for pair in ((bad, one), (one, jnp.int32(bad)), (zero, jnp.int32(bad)), (bad, zero)):
        assert rounding.times(*pair) == rounding.NAN


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float4_e2m1fn])
def test_every_bfloat16_and_its_neighbours_as_a_narrower_float(dtype):
    """All ties, and the numbers next to them."""
    upper = np.arange(1, 0x7F80, dtype=np.int32) << 16
    bits = np.concatenate([[0], upper - 1, upper, upper + 1]).astype(np.int32)
    got = rounding.minifloat(rounding.normalized(jnp.asarray(bits)), dtype)
    most = float(jnp.finfo(dtype).max)
    expected = np.minimum(value(bits), most).astype(dtype).view(np.uint8)
    np.testing.assert_array_equal(got, expected)
    assert len(np.unique(expected)) == {jnp.float8_e4m3fn: 127, jnp.float4_e2m1fn: 8}[dtype]


def test_integers(rng):
    numbers = np.concatenate([np.arange(0, 300, 0.25), rng.uniform(0, 300, COUNT), [1e-30, 2.0**-149, 4194303.5]])
    bits = numbers.astype(np.float32).view(np.int32)
    got = rounding.integer(rounding.normalized(jnp.asarray(bits)))
    np.testing.assert_array_equal(got, np.rint(value(bits)))


def test_zero_divided_by_a_small_float_is_still_small():
    zero, small = (jnp.int32(rounding.bits_of(number)) for number in (0.0, 2.0**-140))
    quotient = rounding.divided(rounding.normalized(zero), rounding.normalized(small))
    for dtype in (jnp.float8_e4m3fn, jnp.float4_e2m1fn):
        assert rounding.minifloat(quotient, dtype) == 0
    assert rounding.integer(quotient) == 0
