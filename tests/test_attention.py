"""Grouped-query attention: the plain code against numpy, and the kernels against the plain code."""

import math
from functools import partial

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_steps import relative_error

from jmx.models.attention.functions import QUERIES, attend
from jmx.pallas.attention.decode import flash_decode
from jmx.pallas.attention.prefill import flash_prefill
from jmx.selection.environment import Environment

ON_HOPPER = Environment.probe().compute_capability == (9, 0)


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
@pytest.mark.parametrize("length", [1, 20, 2 * QUERIES])
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


def test_attention_refuses_lengths_between_blocks() -> None:
    odd = jnp.ones((1, QUERIES + 1, 2, 8))
    with pytest.raises(ValueError, match=f"of {QUERIES + 1} tokens"):
        attend(odd, jnp.ones((1, 2, 256, 8)), jnp.ones((1, 2, 256, 8)), jnp.ones(2), jnp.zeros(1, jnp.int32), None)


def qkv(rng: np.random.Generator, batch: int, length: int, group: int, dim: int) -> list[jax.Array]:
    """bfloat16 (B, T, heads, D): queries, and the keys and values of two heads that groups of them share."""
    shapes = [(batch, length, heads, dim) for heads in (2 * group, 2, 2)]
    return [jnp.asarray(2 * rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]


@pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("window", [None, 1, 128, 300])
@pytest.mark.parametrize(("length", "group", "dim"), [(128, 1, 64), (384, 8, 64), (2048, 16, 64), (640, 8, 128)])
def test_the_kernels_attend_as_the_plain_code_does(
    rng: np.random.Generator, length: int, group: int, dim: int, window: int | None
) -> None:
    query, keys, values = qkv(rng, 2, length, group, dim)
    sinks = jnp.asarray(3 * rng.standard_normal(2 * group), jnp.float32)
    held = jnp.stack([keys, values]).swapaxes(2, 3)
    wide = held.astype(jnp.float32)
    expected = attend(query.astype(jnp.float32), wide[0], wide[1], sinks, jnp.zeros(2, jnp.int32), window)
    expected = np.asarray(expected)
    assert relative_error(flash_prefill(query, keys, values, sinks, window), expected) <= 4e-3
    if group % 8 == 0:
        at = np.array([length - 1, rng.integers(length)])
        got = flash_decode(query[np.arange(2), at], held, sinks, jnp.asarray(at), window)
        assert relative_error(got, expected[np.arange(2), at]) <= 4e-3


@pytest.mark.aot
@pytest.mark.parametrize(("window", "heads", "dim"), [(None, 64, 64), (128, 64, 64), (None, 32, 128)])
def test_the_kernels_compile_for_an_h200_and_keep_scores_on_the_chip(window: int | None, heads: int, dim: int) -> None:
    shape, dtype, sinks = jax.ShapeDtypeStruct, jnp.bfloat16, jax.ShapeDtypeStruct((heads,), jnp.float32)
    query, keys = shape((1, 8192, heads, dim), dtype), shape((1, 8192, heads // 8, dim), dtype)
    prefill = aot.compile_for_h200(partial(flash_prefill, window=window), query, keys, keys, sinks)
    one, position = shape((1, heads, dim), dtype), shape((1,), jnp.int32)
    cache = shape((2, 1, heads // 8, 8192, dim), dtype)
    decode = aot.compile_for_h200(partial(flash_decode, window=window), one, cache, sinks, position)
    for compiled in (prefill, decode):
        memory = compiled.memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 1e6
