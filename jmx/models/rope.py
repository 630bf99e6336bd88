"""Rotary positions: plain (RoFormer), of some of a head's channels, and stretched (YaRN)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint.gpt_oss import Config


def rope_angles(positions: jax.Array, rotary_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 (B, T, rotary_dim / 2), of int32 positions (B, T), as RoFormer (Su et al., 2021)."""
    frequencies = (theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates heads (B, T, heads, D) by angles: cosines and sines (B or 1, T, R / 2), with R at most D.

    Channel i is paired with channel i + R / 2. Channels from R on are not rotated.
    """
    cos, sin = (a[:, :, None] for a in angles)
    half = cos.shape[-1]
    first, second, kept = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, kept], axis=-1)
    return rotated.astype(x.dtype)


def yarn_frequencies(config: Config) -> np.ndarray:
    """Angle per position of each pair of a head's channels: float32 (head_dim / 2,).

    YaRN (Peng et al., 2023): channels that turn more than `rope_beta_fast` times within the original length keep their
    frequency; those that turn less than `rope_beta_slow` times have it divided by `rope_factor`; between is a ramp.
    """
    dim = config.head_dim

    def channel(turns: float) -> float:
        wavelength = config.rope_original_length / (2 * math.pi * turns)
        return dim / 2 * math.log(wavelength) / math.log(config.rope_theta)

    low, high = channel(config.rope_beta_fast), channel(config.rope_beta_slow)
    if config.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    frequencies = config.rope_theta ** (-np.arange(0, dim, 2) / dim)
    return (frequencies * (1 - slowed + slowed / config.rope_factor)).astype(np.float32)


def yarn_angles(config: Config, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 (B, T, head_dim / 2), of int32 positions (B, T).

    Both are multiplied by YaRN's concentration 0.1 ln(factor) + 1, so scores are multiplied by its square.
    """
    angles = positions[..., None].astype(jnp.float32) * yarn_frequencies(config)
    concentration = 0.1 * math.log(config.rope_factor) + 1
    return concentration * jnp.cos(angles), concentration * jnp.sin(angles)
