"""What the attention kernels for Hopper GPUs share: shared memory as wgmma reads it, and the running softmax."""

# pyright: reportAbstractUsage=false, reportPrivateImportUsage=false
# (Mosaic's transforms and accumulators are public, but not so declared.)

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jmx.pallas.sm90.operation import Ref

TILE = 8  # rows of a tile of shared memory, and columns of one of accumulators
TO_BITS = math.log2(math.e)  # exponentials are powers of two: those the hardware has
LEAST = -1e30  # the peak of no scores: finite, since minus infinity cannot be subtracted from a hidden score
MERGED = 8  # splits whose results are one sum: of twice as many, XLA computes the peaks in a kernel of their own


class RunningSoftmax(NamedTuple):
    """The softmax of a block of rows over the keys so far, float32 in a warpgroup's registers.

    Args:
        gathered: (rows, D), the values, weighted by `2 ** (score - peak)`.
        peak: (rows,), the highest score.
        total: (rows,), the sum of the weights; or (rows, 8), a sum of every eighth of them, until `closed`. A thread
            has some of these, so that adding to them exchanges nothing.
    """

    gathered: jax.Array
    peak: jax.Array
    total: jax.Array

    @classmethod
    def begin(cls, rows: int, channels: int, *, open: bool = False) -> "RunningSoftmax":
        """That of no keys; `open`: with totals that are not `closed`."""
        total = _filled((rows, TILE) if open else (rows,), 0)
        return cls(_filled((rows, channels), 0), _filled((rows,), LEAST), total)

    def closed(self) -> "RunningSoftmax":
        return self._replace(total=self.total.sum(axis=1))

    @jax.named_scope("softmax")
    def add_scores(self, scores: jax.Array, scale: float) -> tuple["RunningSoftmax", jax.Array]:
        """With the weights of further keys in it, but not their values; and these weights, of `scores`' shape."""
        peak = jnp.maximum(self.peak, scores.max(axis=1) * scale)
        shrink = jnp.exp2(self.peak - peak)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(peak, scores.shape, [0]))
        gathered = self.gathered * lax.broadcast_in_dim(shrink, self.gathered.shape, [0])
        if self.total.ndim == 1:
            return RunningSoftmax(gathered, peak, self.total * shrink + weights.sum(axis=1)), weights
        eighths = [weights[:, first : first + TILE] for first in range(0, weights.shape[1], TILE)]
        total = self.total * lax.broadcast_in_dim(shrink, self.total.shape, [0])
        return RunningSoftmax(gathered, peak, total + _sum(eighths)), weights

    @jax.named_scope("weigh_values")
    def add_values(self, weights: jax.Array, values: Ref) -> "RunningSoftmax":
        """With the product of weights and values, on tensor cores."""

        def multiply(accumulator: Ref) -> None:
            plgpu.wgmma(accumulator, weights.astype(values.dtype), values)

        return self._replace(gathered=pl.run_state(multiply)(plgpu.ACC.init(self.gathered)))

    @jax.named_scope("weigh_values_and_score")
    def add_values_and_score(
        self,
        weights: jax.Array,
        values: Ref,
        rows: Ref,
        keys: Ref,
        *,
        queued: Callable[[], None],
        read: Callable[[], None],
    ) -> tuple["RunningSoftmax", jax.Array]:
        """`add_values`, and the scores of `rows` (rows, D) over further keys (keys, D), on tensor cores without a gap.

        Args:
            queued: called when both products are.
            read: called when all values are.
        """

        def multiply(accumulators: tuple[Ref, Ref]) -> None:
            gathered, scores = accumulators
            plgpu.wgmma(gathered, weights.astype(values.dtype), values)
            plgpu.wgmma(scores, rows, keys.transpose((1, 0)))
            queued()
            plgpu.wgmma_wait(1)
            read()

        zeros = _filled((rows.shape[0], keys.shape[0]), 0)
        given = plgpu.ACC.init(self.gathered), plgpu.ACC.init(zeros)
        found: Any = pl.run_state(multiply)(given)
        return self._replace(gathered=found[0]), found[1]

    def results(self, sinks: jax.typing.ArrayLike) -> jax.Array:
        """`gathered` over the total, with the sinks in it, in powers of two: one more score a row, without a value."""
        total = self.total + jnp.exp2(sinks - self.peak)
        return self.gathered * lax.broadcast_in_dim(1 / total, self.gathered.shape, [*range(total.ndim)])


class SplitResults(NamedTuple):
    """Running softmaxes of a row's queries over each split of its keys, in a cache: arrays, or references to them.

    Args:
        gathered: float32 (splits, B, heads, D).
        peaks, totals: float32 (splits, B, heads).
    """

    gathered: Ref
    peaks: Ref
    totals: Ref

    @classmethod
    def shapes(cls, splits: int, batch: int, heads: int, channels: int) -> "SplitResults":
        per_head = jax.ShapeDtypeStruct((splits, batch, heads), jnp.float32)
        return cls(jax.ShapeDtypeStruct((*per_head.shape, channels), jnp.float32), per_head, per_head)

    def merged(self) -> RunningSoftmax:
        """All splits as one: float32 (B, heads, D), and (B, heads). Written out, so that XLA makes it one kernel."""
        its = [RunningSoftmax(*split) for split in zip(*self, strict=True)]
        while len(its) > 1:
            its = [_merge(its[first : first + MERGED]) for first in range(0, len(its), MERGED)]
        return its[0]


def _merge(its: Sequence[RunningSoftmax]) -> RunningSoftmax:
    """Softmaxes over different keys as one over all of them."""
    peak = reduce(jnp.maximum, (one.peak for one in its))
    shares = [jnp.exp2(one.peak - peak) for one in its]
    gathered = [share[..., None] * one.gathered for share, one in zip(shares, its, strict=True)]
    totals = [share * one.total for share, one in zip(shares, its, strict=True)]
    return RunningSoftmax(reduce(jnp.add, gathered), peak, reduce(jnp.add, totals))


def _sum(parts: Sequence[jax.Array]) -> jax.Array:
    """The sum of arrays, of neighbors first: fewer depend on each other."""
    while len(parts) > 1:
        pairs = [first + second for first, second in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[2 * len(pairs) :]]
    return parts[0]


def _filled(shape: tuple[int, ...], value: jax.typing.ArrayLike) -> jax.Array:
    """A float32 matrix in wgmma's layout of accumulators, or a vector with one number for each row of such a matrix."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def element_ids(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The index of each element along `axis`, in wgmma's layout of accumulators."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def hide_unseen(scores: jax.Array, distance: jax.Array, window: int | None) -> jax.Array:
    """`scores`, minus infinity where the key is ahead of the query or outside its window.

    `distance` is from the key to the query, in positions.
    """
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return jnp.where(seen, scores, -jnp.inf)


@jax.named_scope("scores")
def token_scores(rows: Ref, keys: Ref, distance: jax.Array, window: int | None) -> jax.Array:
    """Scores of one token's query heads over a block of keys; `distance` is from the first key to the token."""

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, rows, keys.transpose((1, 0)))
        return accumulator[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((rows.shape[0], keys.shape[0]), jnp.float32))
    return hide_unseen(scores, distance - element_ids(scores.shape, 1), window)


def shared_memory(*shape: int, dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory in the tiles that wgmma reads, swizzled so that its loads do not conflict.

    A row of a tile is the largest of 128, 64 and 32 bytes that divides a row of `shape`.
    """
    size = jnp.dtype(dtype).itemsize
    swizzle = next(swizzle for swizzle in (128, 64, 32) if shape[-1] * size % swizzle == 0)
    tiles = plgpu.TilingTransform((TILE, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=tiles)
