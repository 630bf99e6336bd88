"""The protocol of an attention module."""

from typing import Protocol

import jax

from jmx.models.layers import RMSNorm, Variables
from jmx.models.paged_cache import PagedLayer


class SelfAttention(Protocol):
    """Attention of a decoder's layer: `module.Attention`, or another module with these members."""

    def __call__[Layer: (jax.Array, PagedLayer)](
        self,
        x: jax.Array,
        norm: RMSNorm,
        starts: jax.Array | None,
        angles: tuple[jax.Array, jax.Array],
        cache: Layer,
    ) -> tuple[jax.Array, Layer]:
        """Attends over the tokens in `cache` and T further ones of each row.

        Args:
            x: (B, T, H), before `norm`.
            starts: int32 (B,), positions of each row's first token, the number of its tokens in the cache; None for 0.
            angles: cosines and sines of the T positions, float32 (B or 1, T, D / 2) for D rotated channels.
            cache: of `cache_shape`, with capacity for position starts + T - 1; or a layer in pages, with T = 1.

        Returns:
            (B, T, H) of x's dtype, and the cache with the T tokens.
        """
        ...

    def cache_shape(self, batch: int, capacity: int) -> tuple[int, ...]:
        """Shape of a cache of `batch` rows of `capacity` tokens: (parts, B, heads, C, W)."""
        ...

    @property
    def cache_axes(self) -> tuple[str | None, ...]:
        """What each axis of the cache is divided as over a mesh, keys of `model_split.DEFAULT_AXES`."""
        ...

    def variables(self) -> Variables: ...
