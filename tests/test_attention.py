"""Grouped-query attention: the plain code against numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error

from jmx.models.attention import functions
from jmx.models.attention.functions import QUERIES, attend, flash_attention
from jmx.models.attention.prompt_gradients import squares


def plain_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray, sinks: np.ndarray, window: int | None):
    """One row, all heads of their own, in float64: query, keys, values (T, heads, D)."""
    out = np.zeros(query.shape)
    for t in range(query.shape[0]):
        first = 0 if window is None else max(0, t - window + 1)
        scores = np.einsum("hd,shd->hs", query[t], keys[first : t + 1]) / math.sqrt(query.shape[-1])
        powers = np.exp(np.concatenate([scores, sinks[:, None]], axis=1))
        weights = (powers / powers.sum(axis=1, keepdims=True))[:, :-1]
        out[t] = np.einsum("hs,shd->hd", weights, values[first : t + 1])
    return out


@pytest.mark.parametrize("window", [None, 1, 16, 300])
@pytest.mark.parametrize("length", [1, 20, QUERIES + 1, 2 * QUERIES - 3, 2 * QUERIES])
def test_attention_is_the_plain_one(rng: np.random.Generator, length: int, window: int | None) -> None:
    batch, kv_heads, group, dim, capacity = 2, 2, 3, 8, 2 * QUERIES + 5
    query = rng.standard_normal((batch, capacity, kv_heads * group, dim))
    keys, values = rng.standard_normal((2, batch, kv_heads, capacity, dim))
    sinks = rng.standard_normal(kv_heads * group)
    starts = rng.integers(capacity - length + 1, size=batch)
    rows = np.stack([row[start : start + length] for row, start in zip(query, starts, strict=True)])
    on_device = [jnp.asarray(a, jnp.float32) for a in (rows, keys, values, sinks)]
    got = attend(*on_device, starts=jnp.asarray(starts), window=window)
    for row in range(batch):
        key, value = (np.repeat(a[row].swapaxes(0, 1), group, axis=1) for a in (keys, values))
        expected = plain_attention(query[row], key, value, sinks, window)
        assert relative_error(got[row], expected[starts[row] : starts[row] + length]) <= 1e-5


def attend_from_the_start(query, keys, values, sinks, window, scale=None):
    """`attend` in float32, with the arguments of the kernel for prompts."""
    query, keys, values = (array.astype(jnp.float32) for array in (query, keys, values))
    starts = jnp.zeros(len(query), jnp.int32)
    return attend(query, keys.swapaxes(1, 2), values.swapaxes(1, 2), sinks, starts, window, scale)


@pytest.mark.costly
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("window", [None, 1, 100, 300])
def test_gradients_of_the_kernel_are_those_of_the_plain_code(window, scale, dtype, tolerance, rng, monkeypatch) -> None:
    """With the plain code in place of the kernel, so that its derivatives are not its own."""

    def kernel(query, *rest):
        *rest, _ = rest  # the number of cores
        return jax.lax.stop_gradient(attend_from_the_start(query, *rest)).astype(query.dtype)

    monkeypatch.setattr(functions.prefill, "flash_prefill", kernel)
    shapes = ((2, 3 * QUERIES, 6, 16), (2, 3 * QUERIES, 2, 16), (2, 3 * QUERIES, 2, 8), (2, 3 * QUERIES, 6, 8))
    *arrays, dout = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    arrays.append(jnp.asarray(rng.standard_normal(6), jnp.float32))

    def gradients(function, *arrays):
        out, vjp = jax.vjp(lambda *arrays: function(*arrays, window, scale), *arrays)
        return vjp(dout.astype(out.dtype))

    expected = gradients(attend_from_the_start, *(array.astype(jnp.float32) for array in arrays))
    for got, wanted, array in zip(gradients(flash_attention, *arrays), expected, arrays, strict=True):
        assert got.dtype == array.dtype
        assert jnp.linalg.norm(wanted) > 0
        assert jnp.linalg.norm(got.astype(jnp.float32) - wanted) <= tolerance * jnp.linalg.norm(wanted) + 1e-6


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300, 2000])
@pytest.mark.parametrize("length", [128, 384, 512, 768, 1024])
def test_squares_are_those_in_which_a_query_sees_a_key(length: int, window: int | None) -> None:
    size, found = squares(length, window)
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (length if window is None else window))
    blocks = seen.reshape(length // size, size, length // size, size).any(axis=(1, 3))
    assert {*map(tuple, found.tolist())} == {*zip(*(axis.tolist() for axis in np.nonzero(blocks)), strict=True)}
    assert length % size == 0
    assert size == (math.gcd(length, 1024) if window is None else math.gcd(length, 256))
