"""Weights of a linear layer that stay quantized, as a checkpoint has them, and are dequantized inside its product."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

import jmx
from jmx.numerics import formats
from jmx.util import pytrees


@pytrees.register(data=["arrays"], static=["format"], format=formats.CODEC)
@dataclass(frozen=True)
class QuantizedWeights:
    """A matrix (out, in). Like an array of floats it has a shape, and `astype`, which XLA fuses into a product.

    Args:
        arrays: its packed arrays.
        format: of the matrix.
    """

    arrays: jmx.BlockScaled
    format: jmx.Format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays.values.shape[0], self.arrays.values.shape[1] * 8 // self.format.element_bits

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self.arrays))

    def astype(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The matrix in bfloat16 or float32, computed in float32 and rounded once, also inside a product."""
        info = jnp.finfo(dtype)
        # XLA may drop a conversion to bfloat16 and back (`xla_allow_excess_precision`), but not this.
        rounded = lax.reduce_precision(jmx.dequantize(self.arrays, jnp.float32, self.format), info.nexp, info.nmant)
        return rounded.astype(dtype)


def stays_quantized(formats: Sequence[jmx.Format | None]) -> bool:
    """Whether matrices whose rows one product multiplies by stay as they are stored.

    They do if all are in one format of FP8, which a product dequantizes at little cost.

    Args:
        formats: of the matrices; None: floats.
    """
    first = formats[0]
    return first is not None and first.element_dtype == jnp.float8_e4m3fn and all(its == first for its in formats)


def concatenated(parts: Sequence[QuantizedWeights], groups: int = 1) -> QuantizedWeights:
    """`in_groups` of all parts, which are in one format whose arrays all belong to rows, as those of FP8 do."""
    arrays = jax.tree.map(lambda *rows: in_groups(rows, groups), *(part.arrays for part in parts))
    return QuantizedWeights(arrays, parts[0].format)


def in_groups(parts: Sequence[jax.Array], groups: int) -> jax.Array:
    """The rows of all parts in `groups` groups: the n-th has the n-th of as many slices of rows of each part."""
    sliced = [part.reshape(groups, part.shape[0] // groups, *part.shape[1:]) for part in parts]
    return jnp.concatenate(sliced, axis=1).reshape(-1, *parts[0].shape[1:])
