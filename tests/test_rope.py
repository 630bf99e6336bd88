"""Rotary positions, plain and stretched."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED
from jmx.models.rope import rope_angles, rope_frequencies, rotate


def test_rotary_scores_depend_on_the_distance_alone(rng: np.random.Generator) -> None:
    config = PUBLISHED["gpt-oss-20b"]
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, config.head_dim)), jnp.float32) for _ in range(2))

    def score(at: int, other: int) -> float:
        positions = (jnp.full((1, 1), position) for position in (at, other))
        angles = [rope_angles(its, config.head_dim, config.rope_theta, config.yarn) for its in positions]
        return float((rotate(query, angles[0]) * rotate(key, angles[1])).sum())

    concentration = 0.1 * math.log(config.rope_factor) + 1
    assert score(0, 0) == pytest.approx(concentration**2 * float((query * key).sum()), rel=1e-5, abs=1e-4)
    assert score(9, 4) == pytest.approx(score(509, 504), rel=1e-3, abs=1e-3)
    assert score(9, 4) != pytest.approx(score(4, 9), rel=1e-3, abs=1e-3)


def test_yarn_keeps_fast_channels_and_stretches_slow_ones() -> None:
    config = PUBLISHED["gpt-oss-20b"]
    plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = config.rope_original_length * plain / (2 * math.pi)
    ratio = rope_frequencies(config.head_dim, config.rope_theta, config.yarn) / plain
    np.testing.assert_allclose(ratio[turns >= config.rope_beta_fast], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns <= config.rope_beta_slow], 1 / config.rope_factor, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-6).all()
    assert ((ratio > 1.001 / config.rope_factor) & (ratio < 0.999)).sum() > 3
