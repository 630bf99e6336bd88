"""Loading a model: its family, by config.json, and its weights, one layer at a time."""

import dataclasses
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.checkpoint import CheckpointError
from jmx.checkpoint.shards import read_object
from jmx.models import hub
from jmx.models.checkpoint import Checkpoint
from jmx.models.config import Config, expert_sizes
from jmx.models.decoder import Model
from jmx.models.families import FAMILIES
from jmx.models.families.family import Family
from jmx.models.families.tensors import TOP_NAMES
from jmx.models.layers import Linear
from jmx.models.quantized_weights import QuantizedWeights, concatenated
from jmx.models.sources.files import FileSource
from jmx.models.sources.protocol import Source, in_layer
from jmx.models.sources.random import RandomSource

_FILE = "config.json"


def load(
    path: str | os.PathLike[str],
    *,
    format: jmx.Format | None = None,
    declared_inputs: bool = True,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> Model:
    """The model of a checkpoint, of the family that its config.json names; experts stay quantized from disk to device.

    Args:
        path: a directory of safetensors files, in floats or quantized by a tool that jmx supports; or the name of one
            on the Hugging Face Hub, as `jmx.models.find` takes.
        format: what float experts are quantized to on reading; None: they stay floats.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        dtype: of activations, dense weights and float experts, bfloat16 or float32.
        backend: name of the jmx backend that must run quantized experts, or None.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a family that jmx lacks; a `format` for experts that are
            quantized already.
        ValueError, FileNotFoundError, PermissionError, ImportError: no such model, see `jmx.models.find`.
    """
    source = file_source(hub.find(path), format=format, declared_inputs=declared_inputs)
    with source.progress(progress):
        return from_source(source, dtype=dtype, backend=backend)


def family_of(path: str | os.PathLike[str]) -> Family:
    """The family of a checkpoint, by the `architectures` of its config.json.

    Raises:
        CheckpointError: config.json is missing or broken, or names none of those that jmx has.
    """
    file = Path(path) / _FILE
    entries = read_object(file)
    named = entries.get("architectures")
    if named is None and "model_type" not in entries:  # the original form of gpt-oss has neither
        return FAMILIES["gpt_oss"]
    names = named if isinstance(named, list) else []
    for family in FAMILIES.values():
        if any(name in family.architectures for name in names) or (not names and entries["model_type"] == family.name):
            return family
    known = ", ".join(name for family in FAMILIES.values() for name in family.architectures)
    raise CheckpointError(file, f"`architectures` (={named!r}) must be one of {known}")


def file_source(path: Path, *, format: jmx.Format | None = None, declared_inputs: bool = True) -> Source:
    """The weights of a checkpoint. CheckpointError unless it holds exactly the tensors of a model with its config."""
    family = family_of(path)
    if format is None and (source := family.reader(path)) is not None:
        return source
    checkpoint = Checkpoint(path, format=format, gate_up_order=family.gate_up_order, declared_inputs=declared_inputs)
    config, stored = _untied(checkpoint, family.read_config(path))
    more = {}
    if config.tie_word_embeddings and checkpoint.holds(TOP_NAMES["unembedding"]):
        more[TOP_NAMES["unembedding"]] = (config.vocab_size, config.hidden_size)
    shapes = family.shapes(config)
    names = {name: stored.get(name) or family.file_name(name) for name in shapes}
    sizes, unused = expert_sizes(config), family.unused(config)
    return FileSource(checkpoint, config, shapes, names, family.experts(config), sizes, more, unused)


def random_source(config: Config, seed: int = 0, format: jmx.Format = jmx.MXFP4) -> RandomSource[Any]:
    """Random weights of the shapes of `config`, made on the device.

    ValueError for a `seed` outside 0..2^32 - 1.
    """
    family = _family_with(config)
    return RandomSource(
        config,
        seed,
        family.shapes(config),
        [*family.experts(config)],
        expert_sizes(config),
        format,
        gate_up_order=family.gate_up_order or "concatenated",
        bias=family.expert_bias,
    )


def from_source(source: Source, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None) -> Model:
    """The model of a source's weights, filled layer by layer. Peak memory is the model and one layer."""
    return fill(shapes_of(source.config, dtype=dtype, backend=backend), source)


def shapes_of(config: Config, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None) -> Model:
    """A model of shapes in place of arrays (`nnx.eval_shape`); those of experts stand for experts in any format."""
    format = jmx.FORMATS["fp8_channel"]  # supports any sizes; `fill` replaces the experts
    make = partial(_family_with(config).model, config, format=format, dtype=dtype, backend=backend)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def _family_with(config: Config) -> Family:
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))


def _untied[C: Config](checkpoint: Checkpoint, config: C) -> tuple[C, dict[str, str]]:
    """The config of a model whose tables are tied if its files allow it, and the files' name of a table that is stored
    under the other one's.

    As in transformers 5.23 (`PreTrainedModel.tie_weights`), files may hold either table, or both. Two that differ are
    not tied, with a UserWarning.
    """
    embedding, unembedding = TOP_NAMES["embedding"], TOP_NAMES["unembedding"]
    if not config.tie_word_embeddings or not checkpoint.holds(unembedding):
        return config, {}
    if not checkpoint.holds(embedding):
        return config, {"embedding": unembedding}
    if checkpoint.equal(embedding, unembedding):
        return config, {}
    warnings.warn(
        f"{checkpoint.path}: `tie_word_embeddings` is true, but {unembedding!r} is not {embedding!r}: it is used",
        stacklevel=4,  # where the model is loaded
    )
    return dataclasses.replace(
        config,  # pyright: ignore[reportArgumentType] (a protocol)
        tie_word_embeddings=False,
    ), {}


def fill[M: Model](model: M, source: Source) -> M:
    """Fills a model of shapes (`nnx.eval_shape`) with weights. Peak memory is the model and one layer."""
    _put(model, source, "")
    for number, block in enumerate(model.layers):
        if number in source.layers:  # others have one MLP for all tokens
            experts = source.experts(number)
            if isinstance(experts, jmx.Experts):
                experts = _with_biases_in(model.dtype, experts)
            block.moe = model.make_moe(experts, nnx.Rngs(0))  # not used: nothing is drawn
        _put(block, source, in_layer(number, ""))  # after `moe`, of which some are
    return model


def _with_biases_in(dtype: jax.typing.DTypeLike, experts: jmx.Experts) -> jmx.Experts:
    biases = {name: array.astype(dtype) for name, array in experts.arrays().items() if name.endswith("_bias")}
    return experts.with_arrays(experts.arrays() | biases)


def _put(module: Any, source: Source, prefix: str) -> None:
    """Fills a module's `variables()`, which are shapes, with arrays in their dtypes, or weights that stay quantized."""
    linears = {id(its.weights): its for _, its in nnx.iter_modules(module) if isinstance(its, Linear)}
    for names, variable in module.variables().items():
        linear, expected = linears.get(id(variable)), variable.get_value()
        found = concatenated([source.dense(prefix + name) for name in names], keep=linear is not None)
        if found.shape != expected.shape:
            raise ValueError(f"{'|'.join(names)} (shape {found.shape}) must be {expected.shape}, as in the model")
        if linear is not None and isinstance(found, QuantizedWeights):
            linear.weights = jmx.nnx.Quantized(found)
        else:
            variable.set_value(found.astype(expected.dtype))
