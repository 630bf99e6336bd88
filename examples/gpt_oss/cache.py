"""The keys and values of the tokens so far, in buckets of powers of two."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmx.checkpoint.gpt_oss import Config

SMALLEST_BUCKET = 16


def bucket(length: int) -> int:
    """The power of two, at least `SMALLEST_BUCKET`, that holds `length`: programs are compiled for buckets alone."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


class KeysValues(NamedTuple):
    """One layer's cache: keys (rotated) and values, both (B, kv_heads, C, head_dim), position p at index p."""

    keys: jax.Array
    values: jax.Array

    def write(self, keys: jax.Array, values: jax.Array, positions: jax.Array) -> "KeysValues":
        """Puts keys and values (B, T, kv_heads, head_dim) at positions (B, T); those beyond C are dropped."""
        rows = jnp.arange(positions.shape[0])[:, None]
        return KeysValues(
            *(
                old.at[rows, :, positions].set(new, mode="drop", unique_indices=True)
                for old, new in zip(self, (keys, values), strict=True)
            )
        )


@dataclass(frozen=True)
class Cache:
    """What `Runner.prefill` and `Runner.decode` hand on; both give up the one they are given.

    Args:
        layers: one `KeysValues` a layer.
        lengths: int32 (B,), tokens of each row so far.
        longest: the largest length, known to the host, so that nothing waits for the device to see if there is room.
    """

    layers: list[KeysValues]
    lengths: jax.Array
    longest: int

    @classmethod
    def empty(cls, config: Config, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> "Cache":
        """A cache of `batch` rows with room for `capacity` tokens each."""
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        layers = [KeysValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_hidden_layers)]
        return cls(layers, jnp.zeros(batch, jnp.int32), 0)

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        return self.layers[0].keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(array.nbytes for layer in self.layers for array in layer)

    def reserve(self, length: int) -> "Cache":
        """This cache with room for `length` tokens a row, in a bucket; gives up this one if it has to grow.

        One array after the other, so that the peak is the new cache and one array.
        """
        if length <= self.capacity:
            return self
        grown = [KeysValues(*(_grow(array, bucket(length)) for array in layer)) for layer in self.layers]
        return Cache(grown, self.lengths, self.longest)


@partial(jax.jit, static_argnums=1)
def _pad(array: jax.Array, capacity: int) -> jax.Array:
    return jnp.pad(array, ((0, 0), (0, 0), (0, capacity - array.shape[2]), (0, 0)))


def _grow(array: jax.Array, capacity: int) -> jax.Array:
    grown = _pad(array, capacity)
    array.delete()  # on the device it lives until the copy is done; a donation could not be used, as sizes differ
    return grown
