"""What attention modules have in common: projections, the cache, attention, and the product of the result."""

from typing import Any, ClassVar

import jax
from flax import nnx

from jmx.models.cache import write
from jmx.models.layers import Linear, RMSNorm, Variables
from jmx.models.paged_cache import PagedLayer


class SelfAttention(nnx.Module):
    """Attention of a decoder's layer: `module.Attention`, or another subclass that has the methods below.

    Attributes:
        out: the projection of the result.
        cache_axes: what each axis of the cache is divided as over a mesh, keys of `model_split.DEFAULT_AXES`.
    """

    out: Linear
    cache_axes: ClassVar[tuple[str | None, ...]]

    def __call__[Layer: (jax.Array, PagedLayer)](
        self,
        x: jax.Array,
        norm: RMSNorm,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: Layer,
    ) -> tuple[jax.Array, Layer]:
        """Attends over the tokens in `cache` and T further ones of each row, and adds the result to x.

        Args:
            x: (B, T, H), before `norm`.
            starts: int32 (B,), positions of each row's first token, the number of its tokens in the cache; None for 0.
            angles: cosines and sines of the T positions, float32 (B or 1, T, D / 2) for D rotated channels.
            cache: of `cache_shape`, with capacity for position starts + T - 1; or a layer in pages, with T = 1.

        Returns:
            (B, T, H) of x's dtype, x with the result added, and the cache with the T tokens.
        """
        heads, cache = self.write(x, norm, angles, starts, cache)
        out = self.attend(heads, cache, starts)
        return self.out.add_to(x, out.reshape(*x.shape[:2], -1)), cache

    def write[Layer: (jax.Array, PagedLayer)](
        self,
        x: jax.Array,
        norm: RMSNorm,
        angles: tuple[jax.Array, jax.Array],
        starts: jax.Array | None,
        cache: Layer,
    ) -> tuple[tuple[jax.Array, ...], Layer]:
        """What `attend` needs of the T tokens, and the cache with them."""
        heads, parts = self.project(x, norm, angles)
        return heads, write(cache, parts, starts)

    def fill[Layer: (jax.Array, PagedLayer)](
        self,
        x: jax.Array,
        norm: RMSNorm,
        angles: tuple[jax.Array, jax.Array],
        starts: jax.Array | None,
        cache: Layer,
    ) -> Layer:
        """The cache with the T tokens, of which nothing else is wanted."""
        return write(cache, self.cached_parts(x, norm, angles), starts)

    def project(
        self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """What `attend` needs of the T tokens, and the parts of the cache, (B, T, heads, W) each."""
        raise NotImplementedError

    def cached_parts(self, x: jax.Array, norm: RMSNorm, angles: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        """The parts of the cache that `project` returns. A compiler leaves out most of what only queries need."""
        return self.project(x, norm, angles)[1]

    def attend(self, heads: tuple[jax.Array, ...], cache: Any, starts: jax.Array | None) -> jax.Array:
        """Attention over a cache that has the T tokens, or (`starts` None) over these alone: (B, T, heads, V)."""
        raise NotImplementedError

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of a cache of `batch` rows of `capacity` tokens: (parts, B, heads, C, W)."""
        raise NotImplementedError

    def variables(self) -> Variables:
        """The module's variables, by neutral name."""
        raise NotImplementedError
