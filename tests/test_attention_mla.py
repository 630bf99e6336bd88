"""Multi-head latent attention against its definition in numpy, with keys and values of each head."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_steps import relative_error

from jmx.checkpoint.model_configs.yarn import Yarn
from jmx.models.attention.functions import QUERIES, attend
from jmx.models.attention.mla import LatentAttention
from jmx.models.cache import Cache
from jmx.models.layers import RMSNorm
from jmx.models.rope import rope_angles, rotate

BATCH, CAPACITY = 2, 32
YARN = Yarn(40.0, 64, 8.0, 1.0, True, 0.8, 0.6)


class Sizes(NamedTuple):
    """The fields of a configuration that the module reads."""

    q_lora_rank: int | None
    yarn: Yarn | None
    rope_interleave: bool
    attention_bias: bool = False
    hidden_size: int = 24
    num_attention_heads: int = 3
    kv_lora_rank: int = 10
    qk_nope_head_dim: int = 6
    qk_rope_head_dim: int = 4
    v_head_dim: int = 5
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-3


CASES = {
    "with a latent of queries": Sizes(12, None, True),
    "without": Sizes(None, YARN, True),
    "with biases": Sizes(12, YARN, False, attention_bias=True),
}


def made(sizes: Any) -> LatentAttention:
    """A module whose norms and biases are not trivial."""
    module = LatentAttention(sizes, dtype=jnp.float32, rngs=nnx.Rngs(0))
    for number, variable in enumerate(module.variables().values()):
        value = variable.get_value()
        if value.ndim == 1:
            variable.set_value(value + jax.random.normal(jax.random.key(number), value.shape) / 4)
    return module


def normalized(x: np.ndarray, scale: Any, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * np.asarray(scale, np.float64)


def turned(x: np.ndarray, sizes: Sizes) -> np.ndarray:
    """x (T, channels) of positions 0 to T - 1, each pair as a complex number times the power of its frequency."""
    angles = rope_angles(jnp.arange(len(x))[None], x.shape[-1], 1e4, sizes.yarn)
    turns = np.asarray(angles[0][0], np.float64) + 1j * np.asarray(angles[1][0], np.float64)
    half = x.shape[-1] // 2
    pairs = x[:, ::2] + 1j * x[:, 1::2] if sizes.rope_interleave else x[:, :half] + 1j * x[:, half:]
    return np.concatenate([(pairs * turns).real, (pairs * turns).imag], axis=-1)


def definition(module: LatentAttention, sizes: Sizes, x: np.ndarray) -> np.ndarray:
    """One row x (T, H), after the norm, in float64, by the paper's equations 37 to 47."""
    arrays = {name: np.asarray(its.get_value(), np.float64) for name, its in module.variables().items()}
    rank, heads = sizes.kv_lora_rank, sizes.num_attention_heads
    first = () if sizes.q_lora_rank is None else ("q_a",)
    names = (*first, "kv_a")
    weights, bias = (tuple(f"{name}_{kind}" for name in names) for kind in ("weight", "bias"))
    inputs = x @ arrays[weights].T + arrays.get(bias, 0)
    query, latent, key = np.split(inputs, (module.query_width, module.query_width + rank), axis=-1)
    if sizes.q_lora_rank is None:
        query = x @ arrays["q_weight",].T
    else:
        query = normalized(query, arrays["q_a_norm",], sizes.latent_norm_eps) @ arrays["q_b_weight",].T
    up = normalized(latent, arrays["kv_a_norm",], sizes.latent_norm_eps) @ arrays["kv_b_weight",].T
    query, up = (array.reshape(len(x), heads, -1) for array in (query, up))
    key, nope = turned(key, sizes), sizes.qk_nope_head_dim
    scale = (nope + sizes.qk_rope_head_dim) ** -0.5
    if sizes.yarn is not None:
        scale *= (0.1 * sizes.yarn.mscale_all_dim * math.log(sizes.yarn.factor) + 1) ** 2
    out = []
    for head in range(heads):
        rotated = turned(query[:, head, nope:], sizes)
        scores = scale * (query[:, head, :nope] @ up[:, head, :nope].T + rotated @ key.T)
        powers = np.tril(np.exp(scores - scores.max(axis=-1, keepdims=True)))
        out.append(powers / powers.sum(axis=-1, keepdims=True) @ up[:, head, nope:])
    return np.concatenate(out, axis=-1) @ arrays["o_weight",].T + arrays.get(("o_bias",), 0)


@jax.jit
def run(module: LatentAttention, norm: RMSNorm, x: jax.Array, starts: Any, angles: Any, cache: jax.Array) -> Any:
    return module(x, norm, starts, angles, cache)


def called(module: LatentAttention, sizes: Sizes, x: np.ndarray, starts: list[int] | None, cache: jax.Array) -> Any:
    """The module's result of x (B, T, H) from `starts` on, and the cache."""
    positions = jnp.arange(x.shape[1])[None] + (0 if starts is None else jnp.array(starts)[:, None])
    angles = rope_angles(positions, sizes.qk_rope_head_dim, 1e4, sizes.yarn)
    given = None if starts is None else jnp.array(starts, jnp.int32)
    norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
    return run(module, norm, jnp.asarray(x, jnp.float32), given, angles, cache)


@pytest.mark.costly
@pytest.mark.parametrize("case", CASES)
def test_prompts_and_steps_after_them_are_the_definition(case: str, rng: np.random.Generator) -> None:
    """A prompt, then one token at a time from another length in each row, then several, and one row alone."""
    sizes = CASES[case]
    module, total = made(sizes), 16
    x = rng.standard_normal((BATCH, total, sizes.hidden_size))
    expected = x + np.stack([definition(module, sizes, normalized(row, 1, sizes.rms_norm_eps)) for row in x])
    cache = jnp.zeros(module.cache_shape(BATCH, CAPACITY))
    got, cache = called(module, sizes, x, None, cache)
    assert relative_error(got, expected) <= 1e-5

    lengths = [3, 9]
    tokens = np.stack([row[at : at + 4] for row, at in zip(x, lengths, strict=True)])
    wanted = np.stack([row[at : at + 4] for row, at in zip(expected, lengths, strict=True)])
    beyond = jnp.arange(CAPACITY) >= jnp.array(lengths)[:, None]
    before = jnp.where(beyond[None, :, None, :, None], 7.0, cache)  # what is beyond a row's length has no effect
    written = before
    for step in range(4):
        got, written = called(module, sizes, tokens[:, step : step + 1], [at + step for at in lengths], written)
        assert relative_error(got[:, 0], wanted[:, step]) <= 1e-5
    several, same = called(module, sizes, tokens, lengths, before)
    assert relative_error(several, wanted) <= 1e-5
    np.testing.assert_allclose(same, written, rtol=1e-5, atol=1e-5)
    alone, _ = called(module, sizes, tokens[1:, :1], lengths[1:], before[:, 1:])
    assert relative_error(alone[0], wanted[1, :1]) <= 1e-5


def test_the_cache_has_one_latent_and_one_rotated_key_a_token() -> None:
    sizes: Any = CASES["without"]
    shape = made(sizes).cache_shape(BATCH, CAPACITY)
    assert math.prod(shape) == BATCH * CAPACITY * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
    cache = Cache.empty([shape, shape], jnp.float32)
    assert (cache.batch, cache.capacity, cache.reserve(CAPACITY + 1).capacity) == (BATCH, CAPACITY, 2 * CAPACITY)


@pytest.mark.parametrize("length", [1, 2 * QUERIES])
def test_values_may_be_of_another_width_and_scores_of_another_scale(length: int, rng: np.random.Generator) -> None:
    query, keys = rng.standard_normal((1, length, 2, 8)), rng.standard_normal((1, 2, length, 8))
    values = rng.standard_normal((1, 2, length, 3))
    scores = np.einsum("bthd,bhsd->bhts", query, keys) * 0.7
    powers = np.tril(np.exp(scores))
    expected = np.einsum("bhts,bhsd->bthd", powers / powers.sum(-1, keepdims=True), values)
    on_device = [jnp.asarray(a, jnp.float32) for a in (query, keys, values, np.full(2, -1e30))]
    got = attend(*on_device, starts=jnp.zeros(1, jnp.int32), window=None, scale=0.7)
    assert relative_error(got, expected) <= 1e-5


def test_interleaved_pairs_are_rotated_as_halves_are(rng: np.random.Generator) -> None:
    heads = jnp.asarray(rng.standard_normal((2, 3, 2, 10)), jnp.float32)  # of which the last two are not rotated
    angles = rope_angles(jnp.arange(6).reshape(2, 3), 8, 1e4)
    interleaved = jnp.concatenate([heads[..., :8].reshape(2, 3, 2, 2, 4).mT.reshape(2, 3, 2, 8), heads[..., 8:]], -1)
    assert not np.array_equal(interleaved, heads)
    assert np.array_equal(rotate(interleaved, angles, interleaved=True), rotate(heads, angles))


@pytest.mark.parametrize(
    ("mscale", "all_dim", "concentration", "score_factor"),
    [
        (1.0, 0.0, 1.3688879, 1.0),
        (1.0, 1.0, 1.0, 1.8738541),
        (0.707, 0.707, 1.0, 1.5896258),
        (1, 0.5, 1.1557, 1.402908),
    ],
)
def test_the_factors_of_scores_are_deepseeks(
    mscale: float, all_dim: float, concentration: float, score_factor: float
) -> None:
    """Of a context 40 times as long: 0.1 ln 40 is 0.3688879."""
    yarn = Yarn(40.0, 4096, 32.0, 1.0, True, mscale, all_dim)
    assert yarn.concentration == pytest.approx(concentration, rel=1e-4)
    assert yarn.score_factor == pytest.approx(score_factor, rel=1e-4)
    cos, sin = rope_angles(jnp.arange(50)[None], 8, 1e4, yarn)
    np.testing.assert_allclose(cos**2 + sin**2, concentration**2, rtol=1e-4)
    shorter = Yarn(0.5, 4096, 32.0, 1.0, True, mscale, all_dim)
    assert (shorter.concentration, shorter.score_factor) == (1.0, 1.0)
