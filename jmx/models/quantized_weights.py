"""Weights of a linear layer that stay quantized, as a checkpoint has them, and are dequantized inside its product."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import jmx


@partial(jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("format",))
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
        """The matrix in bfloat16 or float32, computed in float32 and rounded once: see `jmx.dequantize`."""
        return jmx.dequantize(self.arrays, dtype, self.format)


def can_concatenate(format: jmx.Format) -> bool:
    """Whether all arrays of a format belong to rows, so that those of several matrices can follow each other."""
    return "order" not in format.arrays


def concatenated(parts: Sequence[jax.Array | QuantizedWeights], *, keep: bool) -> jax.Array | QuantizedWeights:
    """The rows of all parts.

    Args:
        keep: whether parts that are all quantized to one format stay so; others become floats.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedWeights)]
    formats = {part.format for part in quantized}
    if keep and len(quantized) == len(parts) and len(formats) == 1 and all(map(can_concatenate, formats)):
        arrays = jax.tree.map(lambda *rows: jnp.concatenate(rows), *(part.arrays for part in quantized))
        return QuantizedWeights(arrays, *formats)
    floats = [part.astype(jnp.float32) if isinstance(part, QuantizedWeights) else part for part in parts]
    return jnp.concatenate(floats) if len(floats) > 1 else floats[0]
