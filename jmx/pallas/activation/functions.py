"""Activations for kernels, written with the operations that Mosaic GPU and Triton support.

`jmx.activations` defines them; those of its functions that use other operations have a replacement here.
"""

from collections.abc import Callable
from math import sqrt

import jax.numpy as jnp

from jmx.activations import GELU, Activation, GELUAndMul, ReLU, ReLU2
from jmx.util.typing import Array, Float32

# erf(x) = 1 - (t * (c0 + t * (c1 + ...))) * exp(-x^2) with t = 1 / (1 + p * x) for x >= 0, within 1.5e-7
# (Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26).
_P = 0.3275911
_C = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _erf(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    size = jnp.abs(x)
    t = 1.0 / (1.0 + _P * size)
    series = t * (_C[0] + t * (_C[1] + t * (_C[2] + t * (_C[3] + t * _C[4]))))
    value = 1.0 - series * jnp.exp(-size * size)
    return jnp.where(x < 0, -value, value)


def _gelu(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return 0.5 * x * (1.0 + _erf(x * sqrt(0.5)))


def _relu(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    return jnp.maximum(x, 0.0)


def in_kernel(activation: Activation) -> Callable[..., Array]:
    """The function that computes `activation` on float32 arrays in a Mosaic GPU or Triton kernel."""
    match activation:
        case ReLU():
            return _relu
        case ReLU2():
            return lambda x: jnp.square(_relu(x))
        case GELU(approximate=False):
            return _gelu
        case GELUAndMul(approximate=False):
            return lambda gate, up: _gelu(gate) * up
    return activation
