"""Optimizers that refuse frozen weights: their state would take several times the memory of what is trained."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from jmx.util.checks import shown

# Arrays of `jmx.Experts` as a pytree, or in variables of modules.
_FROZEN = re.compile(r"(?:gate_up|down)[._](values|scales|global_scales|zero_points|order|input_scale)\b")


def refuse_frozen(optimizer: Any) -> Any:
    """`optimizer`, whose state cannot be made over quantized weights, which have no gradients.

    Args:
        optimizer: an `optax.GradientTransformation`.

    Returns:
        The same optimizer; its `init` raises TypeError for parameters among which are arrays of quantized experts,
        and names these.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"`optimizer` ({shown(optimizer)}) must be an optax.GradientTransformation")
    import optax  # not a dependency: users with an optimizer have it

    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        found = {
            jax.tree_util.keystr(path, simple=True, separator="."): array
            for path, array in jax.tree_util.tree_flatten_with_path(params)[0]
        }
        if frozen := sorted(path for path, array in found.items() if _is_frozen(path, array)):
            raise TypeError(
                f"`params` (with {', '.join(frozen)}) must not have quantized weights: they are frozen, and have no "
                "state of an optimizer. Train other parameters alone, such as nnx.LoRAParam or the collection 'lora'"
            )
        return optimizer.init(params)

    return optax.GradientTransformationExtraArgs(init, optimizer.update)


def _is_frozen(path: str, array: Any) -> bool:
    """Whether an array is one of quantized experts; the values of experts that are floats are trained."""
    (kind,) = _FROZEN.findall(path)[-1:] or [""]
    if kind == "values":
        return not (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1)
    return bool(kind)
