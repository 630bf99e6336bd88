"""A generation: an iterator over new tokens, which arrive in chunks."""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jmx.models.cache import Cache
from jmx.models.logprobs import LogProbabilities


class Chunk(NamedTuple):
    """Tokens of one or more steps, on the host.

    Args:
        tokens: int32 (steps, B).
        logprobs: of these, or None.
        cache: of at least all tokens before the last ones of this chunk.
    """

    tokens: np.ndarray
    logprobs: LogProbabilities | None
    cache: Cache


class Generation:
    """New tokens of all rows, int32 (B,) at each step: an iterator, from `Runner.generate`.

    A row that has ended goes on with the others; a caller ignores its tokens.

    Attributes:
        logprobs: of the tokens that were returned last, or None if they were not asked for.
    """

    def __init__(self, chunks: Iterator[Chunk], lengths: list[int], max_new_tokens: int):
        self.logprobs: LogProbabilities | None = None
        self._chunks, self._lengths, self._max_new_tokens = chunks, lengths, max_new_tokens
        self._chunk: Chunk | None = None
        self._step, self._returned = 0, 0

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> np.ndarray:
        if self._returned == self._max_new_tokens:
            raise StopIteration
        if self._chunk is None or self._step == len(self._chunk.tokens):
            self._chunk, self._step = next(self._chunks), 0
        tokens, logprobs = self._chunk.tokens[self._step], self._chunk.logprobs
        self.logprobs = None if logprobs is None else jax.tree.map(lambda array: array[self._step], logprobs)
        self._step += 1
        self._returned += 1
        return tokens

    def cache(self) -> Cache:
        """The cache of the prompts and of all tokens returned so far but the last ones, which the model has not read.

        It is the generation's own until the next step, which donates it.

        Raises:
            ValueError: no token has been returned yet.
        """
        if self._chunk is None:
            raise ValueError("a generation has a cache when its first tokens have been returned")
        return self._chunk.cache.truncate([length + self._returned - 1 for length in self._lengths])
