"""Loading a model: its family, by config.json, and its weights, one layer at a time."""

import dataclasses
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from jmx.backends import registered_backends
from jmx.models import hub
from jmx.models.checkpoint import Checkpoint
from jmx.models.config import Config, check_config, expert_sizes
from jmx.models.decoder import DTYPES, Model
from jmx.models.families import FAMILIES
from jmx.models.families.choice import family_of
from jmx.models.families.family import Family
from jmx.models.families.tensors import TOP_NAMES
from jmx.models.layers import Linear
from jmx.models.quantized_weights import concatenated, stays_quantized
from jmx.models.sources.files import FileSource
from jmx.models.sources.protocol import QuantizedSource, Shape, Source, StoredSource, in_layer
from jmx.models.sources.random import RandomSource
from jmx.numerics import formats
from jmx.selection.select import check_backend
from jmx.util.checks import check_bool, check_dtype, check_path, shown


def load(
    path: str | os.PathLike[str],
    *,
    format: jmx.Format | str | None = None,
    declared_inputs: bool = True,
    dequantize_dense: bool = False,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> Model:
    """The model of a checkpoint, of the family that its config.json names; experts stay quantized from disk to device.

    A UserWarning names weights outside experts that are quantized in the files and stay so, or do not.

    Args:
        path: a directory of safetensors files, in floats or quantized by a tool that jmx supports; or the name of one
            on the Hugging Face Hub, as `jmx.models.find` takes.
        format: what float experts are quantized to on reading, or its name; None: they stay floats.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        dequantize_dense: whether all weights outside experts become floats of `dtype` on reading. False: the weights of
            a product stay in FP8 if files have all of them in one format of it.
        dtype: of activations, dense weights and float experts, bfloat16 or float32.
        backend: name of the jmx backend that must run quantized experts, or None.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a family that jmx lacks; a `format` for experts that are
            quantized already.
        ValueError, FileNotFoundError, PermissionError, ImportError: no such model, see `jmx.models.find`.
    """
    check_path("path", path)
    _check_options(dtype, backend, dequantize_dense)
    check_bool("progress", progress)
    source = file_source(hub.find(path), format=format, declared_inputs=declared_inputs)
    with source.progress(progress):
        return from_source(source, dtype=dtype, backend=backend, dequantize_dense=dequantize_dense)


def file_source(path: Path, *, format: jmx.Format | str | None = None, declared_inputs: bool = True) -> Source:
    """The weights of a checkpoint. CheckpointError unless it holds exactly the tensors of a model with its config."""
    format = None if format is None else formats.get(format)
    check_bool("declared_inputs", declared_inputs)
    family = family_of(path)
    if format is None and (source := family.reader(path)) is not None:
        return source
    checkpoint = Checkpoint(path, format=format, gate_up_order=family.gate_up_order, declared_inputs=declared_inputs)
    config, stored = _untied(checkpoint, family.read_config(path))
    more = {}
    if config.tie_word_embeddings and checkpoint.holds(TOP_NAMES["unembedding"]):
        more[TOP_NAMES["unembedding"]] = (config.vocab_size, config.hidden_size)
    shapes = family.shapes(config)
    file_name = partial(family.stored_name, stored=checkpoint.tensors)
    names = {name: stored.get(name) or file_name(family.file_name(name)) for name in shapes}
    experts = {layer: file_name(name) for layer, name in family.experts(config).items()}
    return FileSource(checkpoint, config, shapes, names, experts, expert_sizes(config), more, family.unused(config))


def random_source(config: Config, seed: int = 0, format: jmx.Format | str = jmx.MXFP4) -> RandomSource[Any]:
    """Random weights of the shapes of `config`, made on the device.

    Raises:
        TypeError: `config` is not that of a family, or `seed` no integer.
        ValueError: `seed` is outside 0..2^32 - 1; an unknown `format`.
    """
    family, format = _family_with(config), formats.get(format)
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


def from_source(
    source: Source,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    dequantize_dense: bool = False,
) -> Model:
    """The model of a source's weights, filled layer by layer. Peak memory is the model and one layer.

    Args:
        source: the weights.
        dtype, backend, dequantize_dense: as in `load`.
    """
    for member in ("config", "layers", "dense", "experts"):
        if not hasattr(source, member):
            raise TypeError(f"`source` ({shown(source)}) must be a source of weights, and has no `{member}`")
    _check_options(dtype, backend, dequantize_dense)
    return fill(shapes_of(source.config, dtype=dtype, backend=backend), source, dequantize_dense=dequantize_dense)


def shapes_of(config: Config, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None) -> Model:
    """A model of shapes in place of arrays (`nnx.eval_shape`); those of experts stand for experts in any format."""
    format = jmx.FORMATS["fp8_channel"]  # supports any sizes; `fill` replaces the experts
    make = partial(_family_with(config).model, config, format=format, dtype=dtype, backend=backend)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def _check_options(dtype: Any, backend: Any, dequantize_dense: Any) -> None:
    check_dtype("dtype", dtype, *DTYPES)
    check_backend(backend, registered_backends())
    check_bool("dequantize_dense", dequantize_dense)


def _family_with(config: Config) -> Family:
    check_config("config", config)
    for family in FAMILIES.values():
        if isinstance(config, family.config):
            return family
    raise TypeError(f"`config` (a {type(config).__name__}) must be of a family of {[*FAMILIES]}")


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


def fill[M: Model](model: M, source: Source, *, dequantize_dense: bool = False) -> M:
    """Fills a model of shapes (`nnx.eval_shape`) with weights. Peak memory is the model and one layer."""
    kept: Collection[str] = ()
    if isinstance(source, QuantizedSource):
        kept = () if dequantize_dense else _kept(model, source.formats)
        source.report(kept)
    with source.read_ahead(_order(model, source)) if isinstance(source, StoredSource) else nullcontext():
        _put(model, "", source, kept)
        for number, block in enumerate(model.layers):
            if number in source.layers:  # others have one MLP for all tokens
                experts = source.experts(number)
                if isinstance(experts, jmx.Experts):
                    experts = _with_biases_in(model.dtype, experts)
                block.moe = model.make_moe(experts, nnx.Rngs(0))  # not used: nothing is drawn
            _put(block, in_layer(number, ""), source, kept)  # after `moe`, of which some are
    return model


def _order(model: Model, source: Source) -> list[int | str]:
    """The layers whose experts `fill` reads, and neutral names of other tensors, in its order."""
    order: list[int | str] = [name for names, _, _ in _places(model, "") for name in names]
    for number, block in enumerate(model.layers):
        if number in source.layers:
            order.append(number)
        order += [name for names, _, _ in _places(block, in_layer(number, "")) for name in names]
    return order


def _with_biases_in(dtype: jax.typing.DTypeLike, experts: jmx.Experts) -> jmx.Experts:
    biases = {name: array.astype(dtype) for name, array in experts.arrays().items() if name.endswith("_bias")}
    return experts.with_arrays(experts.arrays() | biases)


class _Place(NamedTuple):
    """A variable of a model, neutral names of the tensors whose rows it has, and the product that it belongs to."""

    names: tuple[str, ...]
    variable: nnx.Variable
    linear: Linear | None


def _places(module: Any, prefix: str) -> Iterator[_Place]:
    """The variables of a module, whose names in the model begin with `prefix`."""
    linears = {id(its.weights): its for _, its in nnx.iter_modules(module) if isinstance(its, Linear)}
    for names, variable in module.variables().items():
        yield _Place(tuple(prefix + name for name in names), variable, linears.get(id(variable)))


def _kept(model: Model, formats: Mapping[str, jmx.Format]) -> set[str]:
    """Neutral names of the tensors, of those in `formats`, that stay quantized in the model."""
    return {name for place in _kept_places(model, formats) for name in place.names}


def _kept_places(model: Model, formats: Mapping[str, jmx.Format]) -> Iterator[_Place]:
    modules = {"": model} | {in_layer(number, ""): block for number, block in enumerate(model.layers)}
    for prefix, module in modules.items():
        for place in _places(module, prefix):
            if place.linear is not None and stays_quantized([formats.get(name) for name in place.names]):
                yield place


def num_kept(model: Model, source: Source) -> int:
    """How many weights outside the experts `fill` keeps in FP8."""
    formats = source.formats if isinstance(source, QuantizedSource) else {}
    return sum(place.variable.get_value().size for place in _kept_places(model, formats))


def _put(module: Any, prefix: str, source: Source, kept: Collection[str]) -> None:
    """Fills a module's variables, which are shapes: with arrays in their dtypes, or with `kept` weights as they are."""
    for names, variable, linear in _places(module, prefix):
        expected = variable.get_value()
        if linear is not None and isinstance(source, QuantizedSource) and names[0] in kept:
            found = concatenated([source.quantized(name) for name in names])
            _check_shape(names, found.shape, expected.shape)
            linear.weights = jmx.nnx.Quantized(found)
        else:
            floats = [source.dense(name) for name in names]
            found = jnp.concatenate(floats) if len(floats) > 1 else floats[0]
            _check_shape(names, found.shape, expected.shape)
            variable.set_value(found.astype(expected.dtype))


def _check_shape(names: tuple[str, ...], shape: Shape, expected: Shape) -> None:
    if shape != expected:
        raise ValueError(f"{'|'.join(names)} (shape {shape}) must be {expected}, as in the model")
