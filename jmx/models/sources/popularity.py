"""Routers of random weights that prefer experts by Zipf's law, as a real model's load is uneven.

A router without biases whose rows have a normal distribution chooses every expert equally often. One whose rows are
longer has larger logits, of both signs, and is chosen more often, but for at most about half of the tokens.
"""

import functools

import numpy as np

from jmx.util.checks import check_int

# What `jmx.models.random_source` takes: how often experts are chosen.
ROUTINGS = ("uniform", "zipf")

_SAMPLES, _ROUNDS, _MOST = 4096, 80, 8.0


@functools.cache
def zipf_lengths(num_experts: int, top_k: int) -> np.ndarray:
    """How long a router's rows are, the most popular expert's first, so that `top_k` experts of each token are chosen
    about as often as by Zipf's law: draws without replacement, the n-th expert's probability in proportion to 1/n.

    Args:
        num_experts: E, at least `top_k`.
        top_k: experts of a token, at least 1.

    Returns:
        float32 (E,), of which the mean of the squares is 1.
    """
    check_int("top_k", top_k, least=1)
    check_int("num_experts", num_experts, least=top_k)
    rng, ranks = np.random.default_rng(0), np.arange(1, num_experts + 1)
    noise = rng.standard_normal((_SAMPLES, num_experts))
    # The largest of log p + Gumbel noise is a draw from p.
    wanted = _chosen(rng.gumbel(size=noise.shape) - np.log(ranks), top_k)
    lengths = np.ones(num_experts)
    for _ in range(_ROUNDS):
        found = np.maximum(_chosen(noise * lengths, top_k), 1 / _SAMPLES)
        lengths *= (wanted / found) ** 0.15
        lengths = np.clip(lengths / np.median(lengths), 1 / _MOST, _MOST)
    return (lengths / np.sqrt(np.mean(lengths**2))).astype(np.float32)


def _chosen(logits: np.ndarray, top_k: int) -> np.ndarray:
    """The share of tokens of each expert, at least half of one's."""
    last = np.partition(logits, -top_k, axis=-1)[:, -top_k, None]
    return np.maximum((logits >= last).mean(axis=0), 0.5 / len(logits))
