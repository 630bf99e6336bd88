"""Rotary positions: plain (RoFormer), of some of a head's channels, and stretched (YaRN)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jmx.checkpoint.model_configs.yarn import Yarn


def rope_frequencies(rotary_dim: int, theta: float, yarn: Yarn | None = None) -> np.ndarray:
    """Angle per position of each pair of a head's rotated channels: float32 (rotary_dim / 2,).

    Without `yarn` as in RoFormer (Su et al., 2021). YaRN (Peng et al., 2023): channels that turn more than `beta_fast`
    times within the original length keep their frequency; those that turn less than `beta_slow` times have it divided
    by `factor`; between is a ramp.
    """
    frequencies = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    if yarn is None:
        return frequencies.astype(np.float32)

    def channel(turns: float) -> float:
        wavelength = yarn.original_length / (2 * math.pi * turns)
        return rotary_dim / 2 * math.log(wavelength) / math.log(theta)

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    slowed = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (frequencies * (1 - slowed + slowed / yarn.factor)).astype(np.float32)


def rope_angles(
    positions: jax.Array, rotary_dim: int, theta: float, yarn: Yarn | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 (B, T, rotary_dim / 2), of int32 positions (B, T).

    With `yarn` both are multiplied by its concentration, so scores are multiplied by its square.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rotary_dim, theta, yarn)[None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if yarn is None else (yarn.concentration * cos, yarn.concentration * sin)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array], *, interleaved: bool = False) -> jax.Array:
    """Rotates heads (B, T, heads, D) by angles: cosines and sines (B or 1, T, R / 2), with R at most D.

    Channel i is paired with channel i + R / 2. If x is `interleaved`, channel 2 i is paired with channel 2 i + 1; the
    result is not: pair i is in channels i and i + R / 2. Channels from R on are not rotated.
    """
    cos, sin = (a[:, :, None] for a in angles)
    half = cos.shape[-1]
    rotated, kept = jnp.split(x.astype(jnp.float32), (2 * half,), axis=-1)
    pairs = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else (rotated[..., :half], rotated[..., half:])
    first, second = pairs
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, kept], axis=-1)
    return rotated.astype(x.dtype)
