"""Prefill and decode: a model as jitted functions over a donated cache, and the loop that generates with them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmx.models.cache import Cache, bucket
from jmx.models.decoder import Model
from jmx.models.forward import Forward, Weights
from jmx.models.generation import Chunk, Generation
from jmx.models.logprobs import LogProbabilities, check_count, log_probabilities
from jmx.models.penalties import TokenCounts
from jmx.models.program_store import ProgramStore
from jmx.models.programs import Program
from jmx.models.sampling import Sampler, choose
from jmx.models.token_rows import TokenIds, check_tokens, padded_rows
from jmx.util.checks import check_array, check_bool, check_instance, check_int

# Decoding steps per program when generating. A caller may wait for so many, and so many may follow an EOS.
CHUNK = 16

# Tokens (steps, B) and their log probabilities, or None.
_Drawn = tuple[jax.Array, LogProbabilities | None]


class _State(NamedTuple):
    """What one step of generating hands to the next: the cache's arrays, the last tokens (B,), and counts or None."""

    layers: list[jax.Array]
    lengths: jax.Array
    tokens: jax.Array
    counts: TokenCounts | None


class _Call(NamedTuple):
    """What `Runner.generate` is called with, checked; `known`: how many tokens of each prompt are in the cache."""

    prompts: TokenIds
    known: Sequence[int]
    sampler: Sampler
    max_new_tokens: int
    cache: Cache | None
    logprobs: int | None


class Runner:
    """Runs a model.

    `prefill` is traced once per bucket of prompt lengths, `decode` once per bucket of cache lengths, `extend` once per
    pair of them, and all again for another number of rows. Buckets are powers of two.
    """

    def __init__(self, model: Model, *, store: ProgramStore | None = None):
        self.model: Model = check_instance("model", model, Model)
        check_instance("store", store, ProgramStore | None, "a ProgramStore, or None")
        weights = Weights.of(model)
        self._weights = weights.arrays
        self._forward = Forward(model, store)
        by_row, whole = self.model.by_row, self.model.whole

        def decode(
            arrays: list[jax.Array], layers: list[jax.Array], lengths: jax.Array, tokens: jax.Array
        ) -> tuple[jax.Array, list[jax.Array], jax.Array]:
            model = weights.merge(arrays)
            x, layers = model(tokens[:, None], lengths, layers)
            return model.logits(x[:, 0]), layers, by_row(lengths + 1)

        def steps(
            arrays: list[jax.Array],
            state: _State,
            numbers: dict[str, jax.Array],
            first: jax.Array,
            logprobs: int | None,
        ) -> tuple[_State, _Drawn]:
            def step(state: _State, number: jax.Array) -> tuple[_State, _Drawn]:
                logits, layers, lengths = decode(arrays, state.layers, state.lengths, state.tokens)
                tokens, counts, found = _draw(logits, numbers, number, state.counts, logprobs)
                lengths, tokens, counts = by_row((lengths, tokens, counts))
                return _State(layers, lengths, tokens, counts), whole((tokens, found))

            return lax.scan(step, state, first + jnp.arange(CHUNK))

        identity = repr(weights.graphdef)
        self._decode = Program(
            decode, weights.arrays, donate=("layers", "lengths"), identity=f"decode {identity}", store=store
        )
        self._steps = Program(
            steps,
            weights.arrays,
            donate=("state",),
            static=("logprobs",),
            identity=f"steps {CHUNK} {identity}",
            store=store,
        )

    def prefill(
        self, prompts: TokenIds, *, cache: Cache | None = None, all_logits: bool = False
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
        check_tokens("prompts", prompts, self.model.config.vocab_size)
        check_instance("cache", cache, Cache | None, "a Cache, or None")
        check_bool("all_logits", all_logits)
        self.model.check_rows("prompts", len(prompts))
        return self._prefill(prompts, cache, all_logits)

    def _prefill(self, prompts: TokenIds, cache: Cache | None, all_logits: bool) -> tuple[jax.Array, Cache]:
        """`prefill` of prompts that are checked, as checking thousands of tokens takes most of a millisecond."""
        padded, lengths = padded_rows(prompts)
        if cache is None:
            cache = self.model.empty_cache(*padded.shape)
        if cache.batch != padded.shape[0] or cache.capacity < padded.shape[1]:
            raise ValueError(
                f"`cache` ({cache.batch} rows of {cache.capacity}) must have {padded.shape[0]} rows of at least "
                f"{padded.shape[1]}, the bucket of the longest prompt (={lengths.max()})"
            )
        tokens, on_device = self.model.put_rows((padded, lengths))
        logits, layers = self._forward(tokens, None, cache.layers, on_device, all_logits=all_logits)
        return logits, Cache(layers, on_device, int(lengths.max()))

    def extend(self, tokens: TokenIds, cache: Cache) -> tuple[jax.Array, Cache]:
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
        check_tokens("tokens", tokens, self.model.config.vocab_size)
        check_instance("cache", cache, Cache)
        if len(tokens) != cache.batch:
            raise ValueError(f"`tokens` (of {len(tokens)} rows) must have {cache.batch} rows, those of the cache")
        padded, lengths = padded_rows(tokens)
        cache = cache.reserve(cache.longest + padded.shape[1])
        (new, on_device), starts = self.model.put_rows((padded, lengths)), self.model.by_row(cache.lengths)
        logits, layers = self._forward(new, starts, cache.layers, on_device)
        return logits, Cache(layers, starts + on_device, cache.longest + int(lengths.max()))

    def decode(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Appends one token a row, int32 (B,). Returns float32 (B, vocab_size) and the cache; donates the old one.

        A full cache grows into the next bucket. The call does not wait for the device.

        Raises:
            ValueError: `tokens` is not one token for each row of the cache.
        """
        check_array("tokens", tokens, jnp.integer)
        check_instance("cache", cache, Cache)
        if tokens.shape != (cache.batch,):
            raise ValueError(
                f"`tokens` (shape {tokens.shape}) must have shape ({cache.batch},), one a row of the cache"
            )
        cache = cache.reserve(cache.longest + 1)
        lengths, tokens = self.model.by_row((cache.lengths, tokens))
        logits, layers, lengths = self._decode(self._weights, cache.layers, lengths, tokens)
        return logits, Cache(layers, lengths, cache.longest + 1)

    def generate(
        self,
        prompts: TokenIds,
        sampler: Sampler,
        max_new_tokens: int,
        *,
        cache: Cache | None = None,
        logprobs: int | None = None,
    ) -> Generation:
        """New tokens after prompts, of all rows at once: an iterator, which a caller stops at an EOS.

        `CHUNK` steps run as one program. On an accelerator the next program is launched before their tokens are read,
        so that the device never waits for the host; on a CPU, where host and device are one, once they are all taken.

        Args:
            prompts: B lists of token ids.
            sampler: chooses tokens; its penalties count those of whole prompts.
            max_new_tokens: how many steps the iterator has, at least 1.
            cache: of the first tokens of each prompt, but not of all; donated. None: of none.
            logprobs: for how many of the likeliest tokens of each step log probabilities are computed, besides that of
                the chosen one; None computes none.

        Raises:
            TypeError: `max_new_tokens` or `logprobs` is not an integer.
            ValueError: those of `prefill` and `extend`; `max_new_tokens`, `logprobs` or lengths in the cache out of
                range.
        """
        self._check(prompts, sampler, max_new_tokens, logprobs)
        check_instance("cache", cache, Cache | None, "a Cache, or None")
        known = [0] * len(prompts) if cache is None else np.asarray(cache.lengths).tolist()
        if len(known) != len(prompts):
            raise ValueError(f"`cache` (of {len(known)} rows) must have {len(prompts)} rows, those of `prompts`")
        for row, (prompt, length) in enumerate(zip(prompts, known, strict=True)):
            if len(prompt) <= length:
                its = f"`prompts[{row}]` (of {len(prompt)} tokens)"
                raise ValueError(f"{its} must have more tokens than its row of `cache` (={length})")
        chunks = self._chunks(_Call(prompts, known, sampler, max_new_tokens, cache, logprobs))
        return Generation(chunks, [len(prompt) for prompt in prompts], max_new_tokens)

    def warm_up(self, prompts: TokenIds, sampler: Sampler, max_new_tokens: int, *, logprobs: int | None = None) -> int:
        """Compiles everything that `generate` needs for these arguments. Returns the bytes of its cache on a device."""
        self._check(prompts, sampler, max_new_tokens, logprobs)
        state, _ = self._start(_Call(prompts, [0] * len(prompts), sampler, max_new_tokens, None, logprobs))
        if max_new_tokens > 1:
            state, _ = self._steps(
                self._weights, state, jax.device_put(sampler.numbers), np.int32(1), logprobs=logprobs
            )
        jax.block_until_ready(state)
        return sum(layer.addressable_shards[0].data.nbytes for layer in state.layers)

    def _check(self, prompts: TokenIds, sampler: Sampler, max_new_tokens: int, logprobs: int | None) -> None:
        """Checks arguments that `generate` and `warm_up` share."""
        check_tokens("prompts", prompts, self.model.config.vocab_size)
        self.model.check_rows("prompts", len(prompts))
        check_instance("sampler", sampler, Sampler)
        check_int("max_new_tokens", max_new_tokens, least=1)
        check_count(logprobs, self.model.config.vocab_size)

    def _chunks(self, call: _Call) -> Iterator[Chunk]:
        """The first tokens alone, then `CHUNK` steps each; the last one may be longer than needed."""
        state, ready = self._start(call)
        numbers = jax.device_put(call.sampler.numbers)  # behind the prompt, which does not wait for it
        longest = max(map(len, call.prompts))

        def read() -> Chunk:
            tokens, found = jax.tree.map(np.asarray, ready)
            return Chunk(tokens, found, Cache(state.layers, state.lengths, longest))

        for step in range(1, call.max_new_tokens, CHUNK):
            if self._launches_ahead:
                jax.tree.map(lambda array: array.copy_to_host_async(), ready)
            else:
                yield read()
            state, new = self._steps(self._weights, state, numbers, np.int32(step), logprobs=call.logprobs)
            longest += CHUNK
            if self._launches_ahead:
                yield read()
            ready = new
        yield read()

    @cached_property
    def _launches_ahead(self) -> bool:
        """False on a CPU, where a launch may compute the program before it returns, while tokens wait to be taken."""
        return any(device.platform != "cpu" for device in jax.tree.leaves(self._weights)[0].devices())

    def _start(self, call: _Call) -> tuple[_State, _Drawn]:
        """The state after the first new tokens, with capacity for all the others in whole chunks, and these tokens."""
        prompts, known, sampler, max_new_tokens, cache, logprobs = call
        by_row = self.model.by_row
        counts = by_row(sampler.counts(prompts, self.model.config.vocab_size))
        chunks = -(-(max_new_tokens - 1) // CHUNK)
        needed = max(map(len, prompts)) + chunks * CHUNK
        further = [prompt[n:] for prompt, n in zip(prompts, known, strict=True)]
        if chunks:  # compile them while the first tokens are computed, or compiled for
            capacity = bucket(needed)
            if cache is not None:
                capacity = max(capacity, cache.capacity, bucket(cache.longest + bucket(max(map(len, further)))))
            row: Any = self.model.cache_lengths(len(prompts))
            layers: Any = self.model.cache_layers(len(prompts), capacity)
            state = _State(layers, row, row, counts)
            self._steps.compile(state, sampler.numbers, np.int32(1), logprobs=logprobs)
        logits, cache = self._prefill(prompts, None, False) if cache is None else self.extend(further, cache)
        tokens, counts, found = _draw_first(logits, sampler.numbers, 0, counts, logprobs)
        cache = cache.reserve(needed)
        drawn = self.model.whole(jax.tree.map(lambda array: array[None], (tokens, found)))
        lengths, tokens, counts = by_row((cache.lengths, tokens, counts))
        return _State(cache.layers, lengths, tokens, counts), drawn


def _draw(
    logits: jax.Array,
    numbers: Mapping[str, Any],
    step: int | jax.Array,
    counts: TokenCounts | None,
    logprobs: int | None,
) -> tuple[jax.Array, TokenCounts | None, LogProbabilities | None]:
    """The next tokens (B,), the counts with them, and their log probabilities if these are asked for."""
    tokens = choose(logits, numbers, step, counts)
    found = None if logprobs is None else log_probabilities(logits, tokens, logprobs)
    return tokens, None if counts is None else counts.add(tokens), found


_draw_first = jax.jit(_draw, static_argnames="logprobs")
