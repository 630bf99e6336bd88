"""A stop at the first step whose loss or weights are not finite, before they replace what is good."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmx.util.checks import check_int, is_array


def check_finite(tree: Any, *, step: int, kept: str | os.PathLike[str] | None = None) -> None:
    """Raises FloatingPointError if a value of `tree` is NaN or infinite; call it before each checkpoint is saved.

    A loss alone is not enough: an update may spoil the weights of which the next loss is NaN.

    Args:
        tree: a pytree of arrays and numbers, such as the losses since the last checkpoint and all weights. Integers are
            finite. Values are read from the device.
        step: the number of the training step, at least 0.
        kept: the last good checkpoint, which the message names.

    Raises:
        FloatingPointError: it names the step, the first such array, how many of its values are not finite, and `kept`.
        TypeError, ValueError: leaves that are no arrays or numbers, traced arrays, or a wrong step.
    """
    step = check_int("step", step, least=0)
    if kept is not None and not isinstance(kept, str | os.PathLike):
        raise TypeError(f"`kept` ({type(kept).__name__}) must be a path, or None")
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    if not named:
        raise ValueError(f"`tree` (={tree!r}) must have an array")
    for name, leaf in named:
        if not is_array(leaf) and not isinstance(leaf, int | float):
            raise TypeError(f"`tree{name}` ({type(leaf).__name__}) must be an array or a number")
        if isinstance(leaf, jax.core.Tracer):
            raise ValueError(f"`tree{name}` must be known, and is traced: call this outside jit")
    floats = [(name, leaf) for name, leaf in named if jnp.issubdtype(jnp.result_type(leaf), jnp.floating)]
    counts = jax.device_get(_not_finite([leaf for _, leaf in floats]))
    for (name, leaf), count in zip(floats, counts, strict=True):
        if count:
            good = "" if kept is None else f"; the last good checkpoint is {os.fspath(kept)}"
            size = np.size(leaf)
            raise FloatingPointError(f"step {step}: `tree{name}` has {count} NaN or infinite values of {size}{good}")


@jax.jit
def _not_finite(arrays: list[Any]) -> list[jax.Array]:
    return [jnp.sum(~jnp.isfinite(array), dtype=jnp.int32) for array in arrays]
