"""The cache of what attention keeps of each token, such as keys and values. Its capacity is a power of two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from jmx.models.paged_cache import PagedLayer
from jmx.util.checks import check_dtype, check_instance, check_int, check_shape

SMALLEST_BUCKET = 16


def bucket(length: int) -> int:
    """The power of two, at least `SMALLEST_BUCKET`, that holds `length`: programs are compiled per bucket."""
    return max(SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def write[Layer: (jax.Array, PagedLayer)](layer: Layer, parts: Sequence[jax.Array], starts: jax.Array | None) -> Layer:
    """Writes parts (B, T, heads, W), such as keys and values, to a layer's cache, from positions `starts` (B,), None
    for 0.

    The cache must have capacity for them (`Cache.reserve`). A layer in pages has places of its own for them.
    """
    if isinstance(layer, PagedLayer):
        return layer.write(parts)
    new = jnp.stack(parts).swapaxes(2, 3)
    if starts is None or new.shape[1] == 1:  # XLA compiles this form to a plain write
        return lax.dynamic_update_slice(layer, new, (0, 0, 0, 0 if starts is None else starts[0], 0))
    put = jax.vmap(partial(lax.dynamic_update_slice_in_dim, axis=2), (1, 1, 0), 1)
    return put(layer, new, starts)


@dataclass(frozen=True)
class Cache:
    """The state that the methods of `Runner` return; they donate the one that they are given.

    Args:
        layers: of each layer an array (parts, B, heads, C, W), position p at index p of C. Grouped-query attention has
            two parts, keys (rotated) and values, which share an array so that a step writes both at once.
        lengths: int32 (B,), tokens of each row so far.
        longest: at least the largest length, and known to the host, so that checking the capacity does not wait for the
            device.
    """

    layers: list[jax.Array]
    lengths: jax.Array
    longest: int

    @classmethod
    def empty(cls, shapes: Sequence[tuple[int, ...]], dtype: jax.typing.DTypeLike) -> "Cache":
        """A cache of no tokens, of each layer's shape (parts, B, heads, C, W)."""
        check_instance("shapes", shapes, list | tuple)
        if not shapes:
            raise ValueError(f"`shapes` (={shapes!r}) must have one for each layer")
        found = [check_shape(f"shapes[{number}]", shape, 5) for number, shape in enumerate(shapes)]
        dtype = check_dtype("dtype", dtype, jnp.bfloat16, jnp.float16, jnp.float32)
        layers = [jax.ShapeDtypeStruct(shape, dtype) for shape in found]
        return zeros(layers, jax.ShapeDtypeStruct(found[0][1:2], jnp.int32))

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        return self.layers[0].shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def reserve(self, length: int) -> "Cache":
        """This cache with capacity for `length` tokens a row, rounded up to a bucket. If it grows, this one is donated.

        Arrays grow one by one, so that peak memory is the new cache and one array.
        """
        if check_int("length", length, least=0) <= self.capacity:
            return self
        return Cache([_grow(layer, bucket(length)) for layer in self.layers], self.lengths, self.longest)

    def truncate(self, lengths: Sequence[int]) -> "Cache":
        """The cache of each row's first `lengths` tokens. It shares the arrays, so that donating one donates both.

        Waits until the device has computed this cache.

        Raises:
            TypeError: `lengths` are no integers.
            ValueError: not one length for each row, or one outside 0..the row's length.
        """
        check_instance("lengths", lengths, list | tuple)
        longest = np.asarray(self.lengths)
        if len(lengths) != self.batch:
            raise ValueError(f"`lengths` (of {len(lengths)} rows) must have {self.batch} rows, those of the cache")
        for row, (length, most) in enumerate(zip(lengths, longest, strict=True)):
            if not 0 <= check_int(f"lengths[{row}]", length) <= most:
                raise ValueError(f"`lengths[{row}]` (={length}) must be in 0..{most}, the length of the row")
        return Cache(self.layers, jnp.asarray(lengths, jnp.int32), max(lengths))


def zeros(layers: Sequence[jax.ShapeDtypeStruct], lengths: jax.ShapeDtypeStruct) -> Cache:
    """A cache of no tokens, of such arrays, by one program: a launch for each would delay a prompt by milliseconds."""
    *made, none = _zeros((*layers, lengths))()
    return Cache(made, none, 0)


@cache
def _zeros(arrays: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], list[jax.Array]]:
    def make() -> list[jax.Array]:
        return [jnp.zeros(its.shape, its.dtype) for its in arrays]

    return jax.jit(make, out_shardings=[its.sharding for its in arrays])


@partial(jax.jit, static_argnums=(1, 2))
def _pad(layer: jax.Array, capacity: int, sharding: NamedSharding | None) -> jax.Array:
    grown = jnp.pad(layer, ((0, 0), (0, 0), (0, 0), (0, capacity - layer.shape[3]), (0, 0)))
    return grown if sharding is None else lax.with_sharding_constraint(grown, sharding)


def _grow(layer: jax.Array, capacity: int) -> jax.Array:
    grown = _pad(layer, capacity, layer.sharding if isinstance(layer.sharding, NamedSharding) else None)
    layer.delete()  # freed when the copy is done; donation needs equal sizes
    return grown
