"""Loading a model: its family, by config.json, and its weights, one layer at a time."""

import dataclasses
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

import jmx
import jmx.nnx
from jmx.backends import registered_backends
from jmx.checkpoint import CheckpointError, peft
from jmx.checkpoint.quantizing import FloatExperts
from jmx.experts import has_expert_axis
from jmx.meshes import MeshAxes
from jmx.models import hub
from jmx.models.adapters import check_adaptable, open_adapter, put
from jmx.models.checkpoint import Checkpoint
from jmx.models.config import Config, expert_sizes
from jmx.models.decoder import DTYPES, Model
from jmx.models.families.choice import family_of, family_with
from jmx.models.families.tensors import TOP_NAMES
from jmx.models.float_experts import experts_of
from jmx.models.layers import Place, places
from jmx.models.model_split import ModelSplit
from jmx.models.per_device import keys_of, local_size
from jmx.models.quantized_weights import concatenated, in_groups, stays_quantized
from jmx.models.sharded_moe import in_shards
from jmx.models.sources.files import FileSource
from jmx.models.sources.protocol import QuantizedSource, Shape, Source, StoredSource, in_layer
from jmx.models.sources.random import RandomSource
from jmx.numerics import formats
from jmx.qat import QAT
from jmx.selection.select import check_backend
from jmx.util.checks import check_bool, check_dtype, check_instance, check_path, shown


def load(
    path: str | os.PathLike[str],
    *,
    format: jmx.Format | str | None = None,
    qat: QAT | None = None,
    declared_inputs: bool = True,
    pad_experts: bool = False,
    dequantize_dense: bool = False,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    mesh: Mesh | None = None,
    axes: Mapping[str, MeshAxes] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Model:
    """The model of a checkpoint, of the family that its config.json names; experts stay quantized from disk to device.

    A UserWarning names weights outside experts that are quantized in the files and stay so, or do not.

    Args:
        path: a directory of safetensors files, in floats or quantized by a tool that jmx supports; or the name of one
            on the Hugging Face Hub, as `jmx.models.find` takes.
        format: what float experts are quantized to on reading, or its name; None: they stay floats.
        qat: makes experts master weights, for training: floats, which each call rounds to `format`, or the values of
            experts that are quantized in the files, of whose format the result then is. None: they are not trained.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        pad_experts: whether experts that are quantized in the files are padded where whole blocks of their weights and
            inputs do not divide their sizes, as `jmx.Experts.pad` does. Those that `format` quantizes always are.
        dequantize_dense: whether all weights outside experts become floats of `dtype` on reading. False: the weights of
            a product stay in FP8 if files have all of them in one format of it.
        dtype: of activations, dense weights and float experts, bfloat16 or float32.
        backend: name of the jmx backend that must run the experts, or None.
        mesh: of the devices that divide the model; None: it is on one. See docs/many_gpus.md.
        axes: mesh axes by what they divide, as in `jmx.models.ModelSplit.of`; None: the default ones.
        adapter: a directory of PEFT's files with adapters of the experts, see docs/training.md; None: there are none.
            They are added to products, not to weights, and are held in `dtype`.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a family that jmx lacks; a `format` for experts that are
            quantized already; adapters of other experts, or of anything but experts.
        ValueError: a mesh that does not divide the model evenly; the message names the key of the config.
        ValueError, FileNotFoundError, PermissionError, ImportError: no such model, see `jmx.models.find`.
    """
    check_path("path", path)
    _check_options(dtype, backend, dequantize_dense)
    split = split_of(mesh, axes)
    if adapter is not None:
        check_path("adapter", adapter)
        check_adaptable(split, backend)
    check_bool("progress", progress)
    check_instance("qat", qat, QAT | None, "a jmx.training.QAT, or None")
    if adapter is not None and qat is not None:
        raise ValueError(f"`adapter` (={os.fspath(adapter)!r}) must be None with `qat`: adapters are of frozen weights")
    of_masters = None if qat is None or format is None else formats.get(format)
    options = {
        "format": format if qat is None else None,
        "declared_inputs": declared_inputs,
        "pad_experts": pad_experts,
    }
    source = file_source(hub.find(path), **options)
    adapters = None if adapter is None else open_adapter(adapter, source)
    if qat is not None:
        of_masters = _master_format(source, of_masters)
    with source.progress(progress):
        model = shapes_of(source.config, dtype=dtype, backend=backend, split=split, format=of_masters, qat=qat)
        return fill(model, source, dequantize_dense=dequantize_dense, adapters=adapters)


def _master_format(source: Source, format: jmx.Format | None) -> jmx.Format:
    """The format of master weights: that of quantized experts, or the given one of floats."""
    stored = {layer.format for layer in source.layers.values()}
    if stored == {None}:
        if format is None:
            raise ValueError("`format` (=None) must be given with `qat` for experts that are floats in the files")
        return format
    found = next((its for its in stored if its is not None and format in (None, its)), None)
    if found is None or len(stored) > 1:
        names = sorted("floats" if its is None else its.name for its in stored)
        raise ValueError(f"`format` (={format and format.name!r}) must be that of the experts in the files, {names}")
    return found


def file_source(
    path: Path,
    *,
    format: jmx.Format | str | None = None,
    declared_inputs: bool = True,
    pad_experts: bool = False,
) -> Source:
    """The weights of a checkpoint. CheckpointError unless it holds exactly the tensors of a model with its config."""
    format = None if format is None else formats.get(format)
    options = {
        "declared_inputs": check_bool("declared_inputs", declared_inputs),
        "pad_experts": check_bool("pad_experts", pad_experts),
    }
    family = family_of(path)
    if format is None and (source := family.reader(path)) is not None:
        return source
    config = family.read_config(path)
    if not family.experts(config):
        number = config.num_hidden_layers
        raise CheckpointError(path / "config.json", f"must have a layer with experts, but all {number} are dense")
    checkpoint = Checkpoint(path, format=format, gate_up_order=family.gate_up_order, **options)
    config, stored = _untied(checkpoint, config)
    more = {}
    if config.tie_word_embeddings and checkpoint.holds(TOP_NAMES["unembedding"]):
        more[TOP_NAMES["unembedding"]] = (config.vocab_size, config.hidden_size)
    shapes = family.shapes(config)
    file_name = partial(family.stored_name, stored=checkpoint.tensors)
    names = {name: stored.get(name) or file_name(family.file_name(name)) for name in shapes}
    experts = {layer: file_name(name) for layer, name in family.experts(config).items()}
    source = FileSource(checkpoint, config, shapes, names, experts, expert_sizes(config), more, family.unused(config))
    for layer, name in experts.items():
        if source.layers[layer].has_bias is not family.expert_bias:
            rule = "have no biases, but must have some" if family.expert_bias else "have biases, but must have none"
            raise CheckpointError(path, f"experts {name!r} {rule} in a model of {family.name}")
    return source


def random_source(
    config: Config, seed: int = 0, format: jmx.Format | str = jmx.MXFP4, *, routing: str = "uniform"
) -> RandomSource[Any]:
    """Random weights of the shapes of `config`, made on the device.

    Args:
        config: of the model.
        seed: of the weights.
        format: of experts' weights.
        routing: "uniform": routers choose all experts about equally often. "zipf": each layer's about as often as by
            Zipf's law, the n-th most popular of them in proportion to 1/n, but none for more than half of the tokens.

    Raises:
        TypeError: `config` is not that of a family, or `seed` no integer.
        ValueError: `seed` is outside 0..2^32 - 1; an unknown `format` or `routing`.
    """
    family, format = family_with(config), formats.get(format)
    return RandomSource(
        config,
        seed,
        family.shapes(config),
        [*family.experts(config)],
        expert_sizes(config),
        format,
        gate_up_order=family.gate_up_order or "concatenated",
        bias=family.expert_bias,
        routing=routing,
    )


def from_source(
    source: Source,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    dequantize_dense: bool = False,
    split: ModelSplit | None = None,
    adapters: peft.Reader | None = None,
) -> Model:
    """The model of a source's weights, filled layer by layer. Peak memory is the model and one layer.

    Args:
        source: the weights.
        dtype, backend, dequantize_dense: as in `load`.
        split: how a mesh divides the model; None: it is on one device.
        adapters: of the experts, as `jmx.models.adapters.open_adapter` opens them; None: there are none.
    """
    for member in ("config", "layers", "dense", "experts"):
        if not hasattr(source, member):
            raise TypeError(f"`source` ({shown(source)}) must be a source of weights, and has no `{member}`")
    _check_options(dtype, backend, dequantize_dense)
    if check_instance("adapters", adapters, peft.Reader | None, "a jmx.checkpoint.peft.Reader, or None") is not None:
        check_adaptable(split, backend)
    model = shapes_of(source.config, dtype=dtype, backend=backend, split=split)
    return fill(model, source, dequantize_dense=dequantize_dense, adapters=adapters)


def split_of(mesh: Mesh | None, axes: Mapping[str, MeshAxes] | None = None) -> ModelSplit | None:
    """How a mesh divides a model, as in `load`; None without a mesh."""
    if mesh is not None:
        return ModelSplit.of(mesh, axes)
    if axes is not None:
        raise ValueError(f"`axes` (={axes!r}) needs a `mesh`, which is None")
    return None


def shapes_of(
    config: Config,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    split: ModelSplit | None = None,
    format: jmx.Format | None = None,
    qat: QAT | None = None,
) -> Model:
    """A model of shapes in place of arrays (`nnx.eval_shape`).

    Without a `format`, those of experts stand for experts in any format.
    """
    format = format or jmx.FORMATS["fp8_channel"]  # supports any sizes; `fill` replaces the experts
    options = {"format": format, "qat": qat, "dtype": dtype, "backend": backend, "split": split}
    make = partial(family_with(config).model, config, **options)
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def _check_options(dtype: Any, backend: Any, dequantize_dense: Any) -> None:
    check_dtype("dtype", dtype, *DTYPES)
    check_backend(backend, registered_backends())
    check_bool("dequantize_dense", dequantize_dense)


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


def fill[M: Model](
    model: M, source: Source, *, dequantize_dense: bool = False, adapters: peft.Reader | None = None
) -> M:
    """Fills a model of shapes (`nnx.eval_shape`) with weights. Peak memory is the model and one layer."""
    kept: Collection[str] = ()
    if isinstance(source, QuantizedSource):
        kept = () if dequantize_dense else _kept(model, source.formats)
        source.report(kept)
    of_experts = None if model.split is None else model.split.reading(source.config.num_experts)
    # Threads read whole tensors ahead, of which one of several processes needs a part only.
    of_all = model.split is None or not model.split.of_several_processes
    ahead = source.read_ahead(_order(model, source)) if of_all and isinstance(source, StoredSource) else nullcontext()
    with ahead:
        _put(model, "", source, kept, model.split)
        for number, block in enumerate(model.layers):
            if number in source.layers:  # others have one MLP for all tokens
                experts = source.experts(number) if of_experts is None else source.experts(number, sharding=of_experts)
                if isinstance(experts, FloatExperts) and model.qat is None:
                    experts = experts_of(experts, model.dtype)
                if isinstance(experts, jmx.Experts):
                    experts = with_biases_in(model.dtype, experts)
                    experts = experts if model.split is None else _over(model.split, experts)
                block.moe = model.make_moe(experts, nnx.Rngs(0))  # not used: nothing is drawn
                if adapters is not None and number in adapters.layers:
                    put(adapters.adapters(number), block.moe, model.dtype, model.split)
            _put(block, in_layer(number, ""), source, kept, model.split)  # after `moe`, of which some are
    return model


def _order(model: Model, source: Source) -> list[int | str]:
    """The layers whose experts `fill` reads, and neutral names of other tensors, in its order."""
    order: list[int | str] = [name for place in places(model, "") for name in place.names]
    for number, block in enumerate(model.layers):
        if number in source.layers:
            order.append(number)
        order += [name for place in places(block, in_layer(number, "")) for name in place.names]
    return order


def with_biases_in(dtype: jax.typing.DTypeLike, experts: jmx.Experts) -> jmx.Experts:
    biases = {name: array.astype(dtype) for name, array in experts.arrays().items() if name.endswith("_bias")}
    return experts.with_arrays(experts.arrays() | biases)


def _over(split: ModelSplit, experts: jmx.Experts) -> jmx.Experts | jmx.ShardedExperts:
    """Experts that were read onto a mesh, with what belongs to all of them on every device, or shards of them."""
    scales = {name: split.place(its) for name, its in experts.arrays().items() if not has_expert_axis(name)}
    experts = experts.with_arrays(experts.arrays() | scales)
    return in_shards(experts, split) if split.intermediate else experts


def _kept(model: Model, formats: Mapping[str, jmx.Format]) -> set[str]:
    """Neutral names of the tensors, of those in `formats`, that stay quantized in the model."""
    return {name for place in _kept_places(model, formats) for name in place.names}


def _kept_places(model: Model, formats: Mapping[str, jmx.Format]) -> Iterator[Place]:
    modules = {"": model} | {in_layer(number, ""): block for number, block in enumerate(model.layers)}
    for prefix, module in modules.items():
        for place in places(module, prefix):
            found = [formats.get(name) for name in place.names]
            if place.linear is not None and stays_quantized(found) and _has_whole_blocks(model.split, place, found[0]):
                yield place


def _has_whole_blocks(split: ModelSplit | None, place: Place, format: jmx.Format | None) -> bool:
    """Whether each device's part of a matrix's columns has all columns of each of its scales."""
    keys, columns = keys_of(place.variable), place.variable.get_value().shape[-1]
    ways = 1 if split is None or len(keys) < 2 or keys[1] is None else split.ways(keys[1])
    if ways == 1 or format is None:
        return True
    return format.block_size != formats.WHOLE_ROW and columns % (ways * format.block_size) == 0


def num_kept(model: Model, source: Source) -> int:
    """How many weights outside the experts `fill` keeps in FP8, on one device."""
    formats = source.formats if isinstance(source, QuantizedSource) else {}
    return sum(local_size(model.split, place.variable) for place in _kept_places(model, formats))


def _put(module: Any, prefix: str, source: Source, kept: Collection[str], split: ModelSplit | None) -> None:
    """Fills a module's variables, which are shapes: with arrays in their dtypes, or with `kept` weights as they are."""
    for names, variable, groups, linear in places(module, prefix):
        expected, keys = variable.get_value(), keys_of(variable)
        sharding = None if split is None else split.sharding(*keys)
        if linear is not None and isinstance(source, QuantizedSource) and names[0] in kept:
            parts = [source.quantized(name) for name in names]
            _check_shape(names, [part.shape for part in parts], expected.shape)
            found = concatenated(parts, groups)
            linear.weights = jmx.nnx.Quantized(found if split is None else split.place(found, *keys), divided=keys)
        else:
            floats = [source.dense(name) if sharding is None else source.dense(name, sharding) for name in names]
            _check_shape(names, [part.shape for part in floats], expected.shape)
            found = floats[0]
            if len(floats) > 1:
                found = _joined(floats, groups, sharding)
            variable.set_value(found.astype(expected.dtype))


@partial(jax.jit, static_argnums=(1, 2))
def _joined(parts: Sequence[jax.Array], groups: int, sharding: jax.sharding.Sharding | None) -> jax.Array:
    joined = in_groups(parts, groups)
    return joined if sharding is None else jax.lax.with_sharding_constraint(joined, sharding)


def _check_shape(names: tuple[str, ...], shapes: Sequence[Shape], expected: Shape) -> None:
    (_, *rest), *_ = shapes
    shape = (sum(rows for rows, *_ in shapes), *rest)
    if shape != expected or any([*its[1:]] != rest for its in shapes):
        raise ValueError(f"{'|'.join(names)} (shape {shape}) must be {expected}, as in the model")
