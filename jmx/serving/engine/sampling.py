"""The choice of tokens of a step: each row has parameters of its own, and none of them compiles anything.

There is a program for each `Level`: sorting a vocabulary takes longer than a layer, so steps whose rows need none of it
do not compute it. A condition within one program would make the host wait for the device.
"""

from enum import IntEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmx.models.logprobs import LogProbabilities, log_probabilities
from jmx.models.penalties import TokenCounts, penalize
from jmx.models.sampling import Sampler, likeliest
from jmx.serving.engine.request import TOP_LOGPROBS

_NO_TOP_K = np.iinfo(np.int32).max


class Level(IntEnum):
    """What a step's rows need: the likeliest tokens, random ones of all, or whatever `choose` can do."""

    GREEDY = 0
    RANDOM = 1
    ALL = 2

    @classmethod
    def of(cls, sampler: Sampler, *, forbids: bool, logprobs: bool) -> "Level":
        """What a row needs. `forbids`: whether some tokens must not be chosen."""
        is_random = sampler.temperature > 0
        filters = is_random and (sampler.top_k is not None or sampler.top_p < 1 or sampler.min_p > 0)
        if filters or sampler.has_penalties or forbids or logprobs:
            return cls.ALL
        return cls.RANDOM if is_random else cls.GREEDY


class Rows(NamedTuple):
    """Parameters of R rows, as `Sampler` has them.

    Args:
        integers: uint32 (R, 3): top_k, the seed, and the number of tokens drawn before.
        floats: float32 (R, 6): temperature, top_p, min_p, and the penalties of repetition, presence and frequency.
    """

    integers: np.ndarray | jax.Array
    floats: np.ndarray | jax.Array

    @classmethod
    def greedy(cls, count: int) -> "Rows":
        """Rows that take the likeliest token, as numpy arrays that a caller fills."""
        floats = np.tile(np.array([0, 1, 0, 1, 0, 0], np.float32), (count, 1))
        return cls(np.tile(np.array([_NO_TOP_K, 0, 0], np.uint32), (count, 1)), floats)

    def put(self, row: int, sampler: Sampler, number: int) -> None:
        """Sets a row's parameters; `number` tokens were drawn before."""
        top_k = _NO_TOP_K if sampler.top_k is None else min(sampler.top_k, _NO_TOP_K)
        self.integers[row] = top_k, sampler.seed, number
        penalties = sampler.repetition_penalty, sampler.presence_penalty, sampler.frequency_penalty
        self.floats[row] = sampler.temperature, sampler.top_p, sampler.min_p, *penalties


class History(NamedTuple):
    """What choices depend on besides logits, of every slot.

    Args:
        counts: tokens so far, (slots, vocab_size); kept of slots with penalties only.
        allowed: uint32 (slots, vocab_size / 32, rounded up), a bit for each token that may be chosen.
    """

    counts: TokenCounts
    allowed: jax.Array

    @classmethod
    def empty(cls, slots: int, vocab_size: int) -> "History":
        """Of slots without tokens, that may choose all."""
        counts = TokenCounts(jnp.zeros((slots, vocab_size), bool), jnp.zeros((slots, vocab_size), jnp.int32))
        return cls(counts, jnp.full((slots, -(-vocab_size // 32)), 0xFFFFFFFF, jnp.uint32))


def choose_simply(logits: jax.Array, rows: Rows, level: Level) -> jax.Array:
    """As `choose` below `Level.ALL`: the next token of each row, int32 (R,), which depends on no history."""
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return tokens if level == Level.GREEDY else _random(logits, tokens, rows, level)


def choose(
    logits: jax.Array, rows: Rows, history: History, slots: jax.Array, draws: jax.Array, level: Level
) -> tuple[jax.Array, LogProbabilities | None, History]:
    """The next token of each row, as `Sampler` chooses it for a row alone.

    Args:
        logits: float32 (R, vocab_size).
        rows: parameters.
        history: of all slots.
        slots: int32 (R,), each row's slot; outside the slots for padding.
        draws: bool (R,), whether the row's token counts in its history.
        level: at least that of each row; static.

    Returns:
        int32 (R,); log probabilities of them and of the likeliest `TOP_LOGPROBS`, at `Level.ALL`; and the history with
        the tokens.
    """
    if level < Level.ALL:
        return choose_simply(logits, rows, level), None, history
    changed = _allowed(_penalized(logits, rows, history.counts, slots), history.allowed, slots)
    tokens = _random(changed, jnp.argmax(changed, axis=-1).astype(jnp.int32), rows, level)
    counts = history.counts
    counts = counts._replace(new=counts.new.at[slots, tokens].add(draws, mode="drop"))
    found = log_probabilities(logits, tokens, min(TOP_LOGPROBS, logits.shape[-1]))
    return tokens, found, history._replace(counts=counts)


def _penalized(logits: jax.Array, rows: Rows, counts: TokenCounts, slots: jax.Array) -> jax.Array:
    its = TokenCounts(*(jnp.take(array, slots, axis=0, mode="clip") for array in counts))
    return penalize(logits, its, *(jnp.asarray(rows.floats)[:, at, None] for at in (3, 4, 5)))


def _allowed(logits: jax.Array, allowed: jax.Array, slots: jax.Array) -> jax.Array:
    ids = jnp.arange(logits.shape[-1])
    words = jnp.take(allowed, slots, axis=0, mode="clip")[:, ids // 32]
    return jnp.where((words >> (ids % 32).astype(jnp.uint32)) & 1, logits, -jnp.inf)


def _random(logits: jax.Array, greedy: jax.Array, rows: Rows, level: Level) -> jax.Array:
    """Random tokens of rows with a temperature, and `greedy` ones of the others: see `models.sampling.choose`."""
    temperature, top_p, min_p = (jnp.asarray(rows.floats)[:, at, None] for at in (0, 1, 2))
    top_k, seeds, numbers = (jnp.asarray(rows.integers)[:, at] for at in (0, 1, 2))
    largest = jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(logits == largest, 0, (logits - largest) / jnp.where(temperature > 0, temperature, 1))
    if level == Level.ALL:
        kept = jax.vmap(lambda row, count: likeliest(row, count, None))(scaled, top_k.astype(jnp.int32))
        nucleus = jax.vmap(lambda row, most: likeliest(row, None, most))(kept, top_p[:, 0])
        scaled = jnp.where(top_p < 1, nucleus, kept)
        scaled = jnp.where(scaled >= jnp.log(min_p), scaled, -jnp.inf)

    def draw(logits: jax.Array, seed: jax.Array, number: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.categorical(key, logits[None], axis=-1)[0]

    drawn = jax.vmap(draw)(scaled, seeds, numbers).astype(jnp.int32)
    return jnp.where(temperature[:, 0] > 0, drawn, greedy)
