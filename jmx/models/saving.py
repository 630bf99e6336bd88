"""Whole models as Orbax checkpoints, which are the same whatever mesh divides a model."""

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jmx
import jmx.nnx
from jmx.checkpoint import orbax
from jmx.experts import has_expert_axis
from jmx.meshes import MeshAxes
from jmx.models.config import Config
from jmx.models.decoder import Model
from jmx.models.families.choice import family_with
from jmx.models.loading import shapes_of, split_of
from jmx.models.model_split import ModelSplit
from jmx.models.per_device import keys_of
from jmx.models.quantized_weights import QuantizedWeights
from jmx.models.sharded_moe import ShardedMoE, in_shards
from jmx.numerics import formats
from jmx.numerics.input_formats import INPUT_FORMATS
from jmx.qat import QAT
from jmx.util.checks import check_instance

_SCALES = ("bfloat16", "float16", "float32")  # dtypes of scales and biases, which files choose


def save(path: str | os.PathLike[str], model: Model) -> None:
    """Saves a model with `jmx.checkpoint.orbax.save`. Shards of experts are saved as whole experts.

    Raises:
        ValueError: a model whose experts have adapters, or whose weights outside experts stay in FP8.
        TypeError, ValueError, FileExistsError, FileNotFoundError: as `jmx.checkpoint.orbax.save`.
    """
    check_instance("model", model, Model)
    if any(getattr(getattr(block, "moe", None), "adapters", None) is not None for block in model.layers):
        raise ValueError("`model` must have no adapters: jmx.checkpoint.peft.save writes them")
    for key, weights in nnx.to_flat_state(nnx.state(model)):
        if isinstance(its := weights.get_value(), QuantizedWeights):
            name = ".".join(map(str, key))
            raise ValueError(
                f"`model` must have floats outside experts, but {name} is in {its.format.name!r}: "
                "load it with dequantize_dense=True"
            )
    if any(isinstance(getattr(block, "moe", None), ShardedMoE) for block in model.layers):
        model = nnx.merge(*nnx.split(model))  # another object, which shares the arrays
        for block in model.layers:
            if isinstance(getattr(block, "moe", None), ShardedMoE):
                block.moe = _whole(model, block.moe)
    orbax.save(path, model)


def restore(
    path: str | os.PathLike[str],
    config: Config,
    *,
    format: jmx.Format | str | None = None,
    qat: QAT | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    mesh: Mesh | None = None,
    axes: Mapping[str, MeshAxes] | None = None,
) -> Model:
    """The model that `save` wrote, on one device or over a mesh; each device reads its own slices.

    Args:
        path: the checkpoint.
        config: that of the model which was saved.
        format: of its experts; None: floats.
        qat: that of the model which was saved.
        dtype, backend, mesh, axes: as in `jmx.models.load`; `dtype` is that of the model which was saved.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model.
        TypeError, ValueError: wrong arguments, and those of `jmx.models.load` for meshes.
    """
    split = split_of(mesh, axes)
    if format is None or qat is not None:
        family = family_with(config)
        options = {"format": format, "qat": qat, "dtype": dtype, "backend": backend, "split": split}
        model = nnx.eval_shape(lambda: family.model(config, **options, rngs=nnx.Rngs(0)))
    else:
        model = shapes_of(config, dtype=dtype, backend=backend, split=split)
        _take_saved_experts(model, formats.get(format), path)
    if split is None:
        return orbax.restore(path, model)
    model = orbax.restore(path, _placed(model, split))
    if split.intermediate:
        for block in model.layers:
            if isinstance(moe := getattr(block, "moe", None), jmx.nnx.MoE):
                bias = moe.correction_bias
                block.moe = model.make_moe(in_shards(moe.experts, split), nnx.Rngs(0))
                block.moe.correction_bias = bias
    return model


def _take_saved_experts(model: Model, format: jmx.Format, path: str | os.PathLike[str]) -> None:
    """Gives a model of shapes experts with saved ones' order of rows, padding, declared inputs and dtypes of scales.

    Loaders of files choose these. `orbax.restore` checks that all else is as the checkpoint has it.
    """
    layers = orbax.saved_layers(path)
    for number, block in enumerate(model.layers):
        saved = layers.get(f"layers.{number}.moe")
        if saved is not None and hasattr(block, "moe"):
            make = partial(_like_saved, model, block.moe.experts, format, saved)
            block.moe = nnx.eval_shape(lambda make=make: model.make_moe(make(), nnx.Rngs(0)))


def _like_saved(model: Model, experts: jmx.Experts, format: jmx.Format, saved: Mapping[str, Any]) -> jmx.Experts:
    order = saved.get("gate_up_order")
    num_experts, hidden, inner = model.config.num_experts, experts.hidden_size, experts.intermediate_size
    rows = inner if order is None else 2 * inner
    biases = [None, None]
    if experts.gate_up_bias is not None:
        biases = [jnp.zeros((num_experts, size), model.dtype) for size in (rows, hidden)]
    weights = jnp.zeros((num_experts, rows, hidden)), jnp.zeros((num_experts, hidden, inner))
    options = {"gate_up_order": order, "format": format, "pad": "padded_to" in saved, "nonfinite": "nan_block"}
    made = jmx.Experts.quantize(*weights, *biases, **options)
    stored = {name: str(its).partition("[")[0] for name, its in saved.get("arrays", {}).items()}
    arrays = made.arrays()
    scales = {name: array.astype(stored[name]) for name, array in arrays.items() if stored.get(name) in _SCALES}
    made = made.with_arrays(arrays | scales)
    inputs = saved.get("input_format")
    if inputs is None:
        return made
    scale = jnp.ones(()) if INPUT_FORMATS[inputs].static else None
    return made.with_inputs(inputs, scale, scale)


def _placed(model: Model, split: ModelSplit) -> Model:
    """A model of shapes whose shapes have the shardings of a mesh."""
    of_experts = {
        id(getattr(moe, name))
        for _, moe in nnx.iter_modules(model)
        if isinstance(moe, jmx.nnx.MoE)
        for name in moe.held.arrays()
        if has_expert_axis(name)
    }
    reading = split.reading(model.config.num_experts)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            sharding = reading if id(variable) in of_experts else split.sharding(*keys_of(variable))
            shape = variable.get_value()
            variable.set_value(jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding))
    return model


def _whole(model: Model, moe: ShardedMoE) -> Any:
    """A layer of whole experts, divided over the mesh as a reader has them."""
    layout, sharding = moe.experts.shards.layout, moe.split.reading(model.config.num_experts)

    def join(experts: jmx.ShardedExperts) -> jmx.Experts:
        return experts.whole().prepare(layout)

    names = jax.eval_shape(join, moe.experts).arrays()
    shared = moe.split.sharding()
    wanted = {name: sharding if has_expert_axis(name) else shared for name in names}
    out_shardings = jax.eval_shape(join, moe.experts).with_arrays(wanted)
    whole = model.make_moe(jax.jit(join, out_shardings=out_shardings)(moe.experts), nnx.Rngs(0))
    whole.correction_bias = moe.correction_bias
    return whole
