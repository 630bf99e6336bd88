"""A step of decoding by an example model, and how far its results are from others."""

from typing import Any

import jax
import numpy as np

from jmx.models import Model


@jax.jit
def decode_step(
    model: Model, tokens: jax.Array, starts: jax.Array, caches: list[jax.Array]
) -> tuple[jax.Array, list[Any]]:
    x, caches = model(tokens[:, None], starts, caches)
    return model.logits(x[:, 0]), caches


def relative_error(got: jax.typing.ArrayLike, expected: jax.typing.ArrayLike) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
