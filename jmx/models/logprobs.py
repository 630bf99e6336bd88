"""Log probabilities of tokens: of those that were chosen, and of the likeliest."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx.util.checks import check_int


class LogProbabilities(NamedTuple):
    """Natural logarithms of the model's probabilities of tokens, without temperature, filters and penalties.

    Args:
        chosen: float32 (..., B), of the tokens that were chosen.
        top_ids: int32 (..., B, N), the likeliest tokens, in descending order; the lower id first among equals.
        top: float32 (..., B, N), theirs.
    """

    chosen: np.ndarray | jax.Array
    top_ids: np.ndarray | jax.Array
    top: np.ndarray | jax.Array


@partial(jax.jit, static_argnums=2)
def log_probabilities(logits: jax.Array, tokens: jax.Array, count: int) -> LogProbabilities:
    """The log softmax, in float32, of logits (B, vocab_size): at `tokens` (B,), and its `count` largest values."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0]
    top, ids = jax.lax.top_k(logs, count)
    return LogProbabilities(chosen, ids, top)


def check_count(count: int | None, vocab_size: int) -> int | None:
    """The number of likeliest tokens whose log probabilities are asked for; None: not even of the chosen one.

    Raises:
        TypeError: `count` is neither an integer nor None.
        ValueError: it is outside 0..vocab_size.
    """
    return None if count is None else check_int("logprobs", count, least=0, most=vocab_size)
