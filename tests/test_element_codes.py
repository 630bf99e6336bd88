"""Elements and scales one by one; `test_formats.py` sweeps whole weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmx.numerics import element_codes

E2M1 = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_every_nibble_of_a_word_is_its_element(rng, dtype):
    words = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), 4096, dtype=dtype)
    for index in range(2 * words.itemsize):
        got = jax.jit(lambda w, index=index: element_codes.element(w, index, element_codes.unit()))(words)
        np.testing.assert_array_equal(got, E2M1[(words >> dtype(4 * index)) & dtype(15)])


def test_large_activations_times_zero_elements_stay_zero():
    # A compiler that multiplied 2^126 into the activations first would get inf * 0.
    product = jax.jit(lambda w, a: element_codes.element(w, 0, element_codes.unit()) * a)
    assert (np.asarray(product(np.zeros(64, np.uint8), np.full(64, 1e30, np.float32))) == 0).all()


def test_scales_are_powers_of_two_and_255_is_nan():
    got = np.asarray(element_codes.power_of_two(jnp.arange(256, dtype=jnp.uint8)))
    expected = np.arange(256, dtype=np.uint8).view(jnp.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(got.view(np.uint32)[:255], expected.view(np.uint32)[:255])
    assert np.isnan(got[255])
