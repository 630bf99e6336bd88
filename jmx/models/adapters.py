"""Adapters of a whole model's experts, from PEFT's files to the layers that they are added to."""

import os
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

import jmx
from jmx.backends import registered_backends
from jmx.checkpoint import peft
from jmx.lora import Adapters
from jmx.models.families.choice import family_with
from jmx.models.float_experts import ORDER
from jmx.models.model_split import ModelSplit
from jmx.models.sources.protocol import Source
from jmx.selection.backend import ProductBackend


def open_adapter(path: str | os.PathLike[str], source: Source) -> peft.Reader:
    """The adapters in a directory of PEFT's files, for the model of `source`. Only headers are read.

    Raises:
        CheckpointError: files that are missing or broken, or that are not of adapters of this model's experts alone.
    """
    of_layers = {
        number: abstract_experts(
            layer.num_experts,
            layer.hidden_size,
            layer.intermediate_size,
            ORDER if layer.format is None else layer.gate_up_order,
        )
        for number, layer in source.layers.items()
    }
    order = family_with(source.config).gate_up_order or "concatenated"  # as transformers fuses gate and up
    return peft.Reader(path, of_layers, gate_up_order=order)


@lru_cache
def abstract_experts(num_experts: int, hidden: int, intermediate: int, gate_up_order: str | None) -> Any:
    """Experts without arrays, whose adapters have the shapes of any others of these sizes."""
    make = partial(jmx.Experts.random, gate_up_order=gate_up_order, format="float32")
    return jax.eval_shape(lambda: make(jax.random.key(0), num_experts, hidden, intermediate))  # no device is used


def check_adaptable(split: ModelSplit | None, backend: str | None) -> None:
    """Raises ValueError unless experts can have adapters where `split` divides a model, and on the named backend."""
    if split is not None and split.intermediate:
        raise ValueError(
            f"`axes['intermediate']` (={split.intermediate}) must be None for experts with adapters (--mesh-axes "
            "intermediate=none): divide whole experts, or merge the adapters into the weights"
        )
    able = [its.name for its in registered_backends() if isinstance(its, ProductBackend)]
    if backend is not None and backend not in able:
        raise ValueError(f"`backend` (={backend!r}) must be one of {able}, or None, for experts with adapters")


def put(adapters: Adapters, moe: Any, dtype: jax.typing.DTypeLike, split: ModelSplit | None) -> None:
    """Adds adapters to a layer's experts, in the dtype of activations: products would round them to it anyway."""
    on_device = jax.tree.map(lambda matrix: jnp.asarray(matrix, dtype), adapters)
    moe.adapt(on_device if split is None else split.place(on_device, "expert"))


def nbytes(reader: peft.Reader, dtype: jax.typing.DTypeLike, split: ModelSplit | None) -> int:
    """Bytes of a model's adapters on one device."""
    matrices = [matrix for layer in reader.layers for matrix in jax.tree.leaves(reader.shapes(layer))]
    ways = 1 if split is None else split.ways("expert")
    return sum(matrix.size for matrix in matrices) * jnp.dtype(dtype).itemsize // ways
