"""Prefill and decode: a model as jitted functions over a donated cache, and the loop that generates with them."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jmx.models.cache import Cache, bucket
from jmx.models.config import Config
from jmx.models.decoder import Model
from jmx.models.sampling import Sampler

# Decoding steps per program when generating. A caller may wait for so many, and so many may follow an EOS.
CHUNK = 16


class Runner:
    """Runs a model. `prefill` is traced once per bucket of prompt lengths, `decode` once per bucket of cache
    lengths, `extend` once per pair of them.

    All are traced again for another number of rows. Buckets are powers of two.
    """

    def __init__(self, model: Model):
        self.model = model
        # Split once, into a plain list: flattening a module at every step would cost more than launching the step.
        graphdef, state = nnx.split(model)
        self._weights, treedef = jax.tree.flatten(state)

        def merged(weights: list[Any]) -> Model:
            return nnx.merge(graphdef, jax.tree.unflatten(treedef, weights))

        def prefill(
            weights: list[Any], layers: list[jax.Array], tokens: jax.Array, lengths: jax.Array, all_logits: bool
        ) -> tuple[jax.Array, list[jax.Array]]:
            model = merged(weights)
            mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
            x, layers = model(tokens, None, layers, mask=mask)
            if not all_logits:
                x = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
            return model.logits(x), layers

        def extend(
            weights: list[Any], layers: list[jax.Array], starts: jax.Array, tokens: jax.Array, lengths: jax.Array
        ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
            model = merged(weights)
            mask = jnp.arange(tokens.shape[1]) < lengths[:, None]
            x, layers = model(tokens, starts, layers, mask=mask)
            x = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
            return model.logits(x), layers, starts + lengths

        def decode(
            weights: list[Any], layers: list[jax.Array], lengths: jax.Array, tokens: jax.Array
        ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
            model = merged(weights)
            x, layers = model(tokens[:, None], lengths, layers)
            return model.logits(x[:, 0]), layers, lengths + 1

        def chunk(
            weights: list[Any],
            layers: list[jax.Array],
            lengths: jax.Array,
            tokens: jax.Array,
            first: jax.Array,
            sampler: Sampler,
        ) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
            def step(carry: tuple[Any, ...], number: jax.Array) -> tuple[tuple[Any, ...], jax.Array]:
                layers, lengths, tokens = carry
                logits, layers, lengths = decode(weights, layers, lengths, tokens)
                tokens = sampler(logits, number)
                return (layers, lengths, tokens), tokens

            carry, new = lax.scan(step, (layers, lengths, tokens), first + jnp.arange(CHUNK))
            return new, *carry

        self._prefill = jax.jit(prefill, static_argnames="all_logits", donate_argnames="layers")
        self._extend = jax.jit(extend, donate_argnames=("layers", "starts"))
        self._decode = jax.jit(decode, donate_argnames=("layers", "lengths"))
        self._chunk = jax.jit(chunk, static_argnames="sampler", donate_argnames=("layers", "lengths"))

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, cache: Cache | None = None, all_logits: bool = False
    ) -> tuple[jax.Array, Cache]:
        """Runs the model on prompts, which may differ in length.

        Args:
            prompts: B lists of token ids, none of them empty.
            cache: overwritten from its start and donated; with B rows, and capacity for the bucket of the longest
                prompt. Each capacity is traced separately. None makes one of exactly that bucket.
            all_logits: whether to return the logits of all positions instead of each row's last.

        Returns:
            Logits, float32 (B, vocab_size) or (B, bucket, vocab_size), undefined beyond a row's length; and the cache.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, or a cache that does not fit.
        """
        check_tokens(self.model.config, "prompts", prompts)
        padded, lengths = _padded(prompts)
        if cache is None:
            cache = self.model.empty_cache(*padded.shape)
        if cache.batch != padded.shape[0] or cache.capacity < padded.shape[1]:
            raise ValueError(
                f"`cache` ({cache.batch} rows of {cache.capacity}) must have {padded.shape[0]} rows of at least "
                f"{padded.shape[1]}, the bucket of the longest prompt (={lengths.max()})"
            )
        on_device = jnp.asarray(lengths)
        logits, layers = self._prefill(self._weights, cache.layers, jnp.asarray(padded), on_device, all_logits)
        return logits, Cache(layers, on_device, int(lengths.max()))

    def extend(self, tokens: Sequence[Sequence[int]], cache: Cache) -> tuple[jax.Array, Cache]:
        """Runs the model on further tokens of each row, which may differ in number: the next turn of a conversation.

        Args:
            tokens: lists of token ids, one a row of the cache, none of them empty.
            cache: of the tokens before; donated. It grows if it has no capacity for the bucket of the longest list.

        Returns:
            Logits of each row's last token, float32 (B, vocab_size), and the cache. Its `longest` is a bound: what the
            longest row would have if it were given the most tokens.

        Raises:
            ValueError: not one list for each row, an empty one, or ids outside the vocabulary.
        """
        if len(tokens) != cache.batch:
            raise ValueError(f"`tokens` (of {len(tokens)} rows) must have {cache.batch} rows, those of the cache")
        check_tokens(self.model.config, "tokens", tokens)
        padded, lengths = _padded(tokens)
        cache = cache.reserve(cache.longest + padded.shape[1])
        logits, layers, new_lengths = self._extend(self._weights, cache.layers, cache.lengths, padded, lengths)
        return logits, Cache(layers, new_lengths, cache.longest + int(lengths.max()))

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends one token a row, int32 (B,). Returns float32 (B, vocab_size) and the cache; donates the old one.

        A full cache grows into the next bucket. The call does not wait for the device.

        Raises:
            ValueError: `tokens` is not one token for each row of the cache.
        """
        if tokens.shape != (cache.batch,):
            raise ValueError(
                f"`tokens` (shape {tokens.shape}) must have shape ({cache.batch},), one a row of the cache"
            )
        cache = cache.reserve(cache.longest + 1)
        logits, layers, lengths = self._decode(self._weights, cache.layers, cache.lengths, tokens)
        return logits, Cache(layers, lengths, cache.longest + 1)

    def generate(self, prompts: Sequence[Sequence[int]], sampler: Sampler, max_new_tokens: int) -> Iterator[np.ndarray]:
        """Yields the new tokens of all rows, int32 (B,), `max_new_tokens` times; a caller stops it at an EOS.

        `CHUNK` steps run as one program, and the next program is launched before their tokens are read, so that the
        device never waits for the host.
        """
        tokens, cache = self._start(prompts, sampler, max_new_tokens)
        ready = tokens[None]
        for step in range(1, max_new_tokens, CHUNK):
            ready.copy_to_host_async()
            new, tokens, cache = self._steps(tokens, cache, step, sampler)
            yield from np.asarray(ready)
            ready = new
        yield from np.asarray(ready)[: (max_new_tokens - 2) % CHUNK + 1]  # the last chunk may be longer than needed

    def warm_up(self, prompts: Sequence[Sequence[int]], sampler: Sampler, max_new_tokens: int) -> int:
        """Compiles everything that `generate` needs for these arguments. Returns the bytes of its cache."""
        tokens, cache = self._start(prompts, sampler, max_new_tokens)
        if max_new_tokens > 1:
            _, tokens, cache = self._steps(tokens, cache, 1, sampler)
        jax.block_until_ready((tokens[None], cache.layers))
        return cache.nbytes

    def _steps(
        self, tokens: jax.Array, cache: Cache, step: int, sampler: Sampler
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """`CHUNK` steps from the `step`-th on, after `tokens` (B,). Returns all new tokens (CHUNK, B), the last
        of them, and the cache."""
        new, layers, lengths, tokens = self._chunk(self._weights, cache.layers, cache.lengths, tokens, step, sampler)
        return new, tokens, Cache(layers, lengths, cache.longest + CHUNK)

    def _start(
        self, prompts: Sequence[Sequence[int]], sampler: Sampler, max_new_tokens: int
    ) -> tuple[jax.Array, Cache]:
        """The first new tokens, and a cache with capacity for all the others, in whole chunks."""
        logits, cache = self.prefill(prompts)
        tokens = sampler(logits, 0)
        chunks = -(-(max_new_tokens - 1) // CHUNK)
        return tokens, cache.reserve(cache.longest + chunks * CHUNK)


def check_tokens(config: Config, name: str, rows: Sequence[Sequence[int]]) -> None:
    """ValueError, with the argument's name, unless there is a row, and each has a token, all of the vocabulary."""
    if not rows:
        raise ValueError(f"`{name}` must be at least one")
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"`{name}[{number}]` must have at least one token")
        for token in row:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"`{name}[{number}]` has the id {token}, which must be in 0..{config.vocab_size - 1}")


def _padded(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The rows as int32 (B, bucket of the longest), and their lengths, int32 (B,)."""
    lengths = np.array([len(row) for row in rows], np.int32)
    padded = np.zeros((len(rows), bucket(int(lengths.max()))), np.int32)
    for filled, row in zip(padded, rows, strict=True):
        filled[: len(row)] = row
    return padded, lengths
