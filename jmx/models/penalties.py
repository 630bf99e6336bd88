"""Penalties of tokens that a row has already: how often it has each, and what that changes in its logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx.models.token_rows import TokenIds, check_tokens
from jmx.util.checks import check_array, check_int


class TokenCounts(NamedTuple):
    """The tokens of each row so far.

    Args:
        prompt: bool (B, vocab_size), which tokens its prompt has.
        new: int32 (B, vocab_size), how often each was generated.
    """

    prompt: jax.Array
    new: jax.Array

    @classmethod
    def of(cls, prompts: TokenIds, vocab_size: int) -> "TokenCounts":
        """The counts of B prompts, with nothing generated yet.

        TypeError or ValueError for arguments of other types, or ids outside the vocabulary.
        """
        check_tokens("prompts", prompts, check_int("vocab_size", vocab_size, least=1))
        found = np.zeros((len(prompts), vocab_size), bool)
        for row, prompt in zip(found, prompts, strict=True):
            row[np.asarray(prompt)] = True
        return cls(jnp.asarray(found), jnp.zeros(found.shape, jnp.int32))

    def add(self, tokens: jax.Array) -> "TokenCounts":
        """The counts after a token more of each row, int32 (B,)."""
        check_array("tokens", tokens, jnp.integer, self.new.shape[:1])
        drawn = tokens[:, None] == jnp.arange(self.new.shape[1])[None]
        return TokenCounts(self.prompt, self.new + drawn.astype(jnp.int32))


def penalize(
    logits: jax.Array,
    counts: TokenCounts,
    repetition: float | jax.Array,
    presence: float | jax.Array,
    frequency: float | jax.Array,
) -> jax.Array:
    """Logits (B, vocab_size) -> the same, with lower ones for tokens that rows have already.

    Args:
        logits: float32 (B, vocab_size).
        counts: of the same shape.
        repetition: divides positive logits of tokens of the prompt or generated, and multiplies negative ones, as in
            CTRL (Keskar et al., 2019) and transformers.
        presence: then subtracted from logits of tokens that were generated, as in OpenAI's API.
        frequency: then subtracted as often as a token was generated, likewise.
    """
    scaled = jnp.where(logits < 0, logits * repetition, logits / repetition)
    generated = counts.new > 0
    logits = jnp.where(counts.prompt | generated, scaled, logits)
    return logits - jnp.where(generated, presence, 0) - frequency * counts.new.astype(jnp.float32)
