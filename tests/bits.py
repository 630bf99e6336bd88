"""Arrays compared bit by bit: NaN equals itself, and zeros differ by their sign."""

from typing import Any

import jax
import numpy as np


def bits(array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.itemsize])


def assert_same_bits(a: Any, b: Any) -> None:
    """Two pytrees of one structure, whose arrays have the same dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(bits(left), bits(right))
