"""Choosing the next token from logits."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sampler:
    """Greedy, or random from the softmax at a temperature, optionally only from its most probable part.

    Args:
        temperature: divides the logits; 0 takes the largest logit, and the lowest id among equals.
        top_p: in (0, 1]; keeps the most probable tokens up to the first at which their sum reaches it (nucleus
            sampling, Holtzman et al., 2019).
        seed: in 0..2^32 - 1; the same seed, step and logits give the same token.

    Raises:
        ValueError: a parameter outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`temperature` (={self.temperature}) must be at least 0, and finite")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` (={self.top_p}) must be above 0 and at most 1")
        check_seed(self.seed)

    def __call__(self, logits: jax.Array, step: int | jax.Array) -> jax.Array:
        """Logits (B, vocab_size) -> int32 (B,). `step` counts the tokens drawn so far."""
        if self.temperature == 0:
            return _largest(logits)
        return _draw(logits, self.temperature, self.top_p, np.uint32(self.seed), step, self.top_p < 1)


def check_seed(seed: int) -> None:
    """ValueError for a seed of more than 32 bits, of which `jax.random.key` would use only the low ones."""
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"`seed` (={seed}) must be in 0..{(1 << 32) - 1}")


@jax.jit
def _largest(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@partial(jax.jit, static_argnames="nucleus")
def _draw(
    logits: jax.Array, temperature: jax.Array, top_p: jax.Array, seed: jax.Array, step: int | jax.Array, nucleus: bool
) -> jax.Array:
    logits -= jnp.max(logits, axis=-1, keepdims=True)
    logits = jnp.where(logits == 0, 0, logits / temperature)  # a temperature that float32 rounds to 0
    if nucleus:
        descending = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.min(jnp.where(before < top_p, descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
