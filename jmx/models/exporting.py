"""Writing a model as a checkpoint in the Hugging Face form, with its experts in the format that they compute in."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import jmx
import jmx.nnx
from jmx.checkpoint import shards
from jmx.checkpoint.compressed_tensors import config_writer
from jmx.checkpoint.compressed_tensors.config import Scheme
from jmx.checkpoint.compressed_tensors.module_writer import module_tensors
from jmx.checkpoint.compressed_tensors.quantization_config import KEYS, TEXT_CONFIG
from jmx.checkpoint.gpt_oss import tensor_names
from jmx.checkpoint.gpt_oss.writer import COMPANIONS
from jmx.checkpoint.model_configs.gpt_oss import FILE, QUANTIZATION, entries
from jmx.checkpoint.progress import progress_bar
from jmx.checkpoint.quantizing.output_forms import check_columns, check_writable, storage_of
from jmx.checkpoint.shards import DTYPES, Output
from jmx.experts import ROLES
from jmx.models.decoder import Model
from jmx.models.families.choice import family_of, family_with
from jmx.models.families.family import Family
from jmx.models.layers import Place, places
from jmx.models.sources.protocol import in_layer
from jmx.numerics.formats import BlockScaled, Format
from jmx.numerics.gate_up import join_gate_up, split_gate_up
from jmx.util import atomic_files
from jmx.util.checks import check_bool, check_instance, check_path

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SPELLINGS: dict[bool, dict[str, str]] = {  # of projections in files, by whether they are as in Mixtral
    True: {"gate": "w1", "up": "w3", "down": "w2"},
    False: {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
}


def export(
    path: str | os.PathLike[str],
    model: Model,
    *,
    like: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> None:
    """Writes a model as a checkpoint in the Hugging Face form, which `load` reads as a model of the same outputs.

    Master weights are rounded as each call rounds them. With MXFP4 gpt-oss has the published form; other quantized
    experts are written as compressed-tensors; experts in floats as transformers has them, without any quantization, in
    the dtype of their weights. What is outside experts keeps its dtype. The outputs are the same bits on one backend,
    if `load` gets the dtype of this model. (Files in NVFP4 hold reciprocals of global scales: those that `quantize`
    makes and those of compressed-tensors give the same bits again, others, as ModelOpt's, may differ in the last one.)

    Args:
        path: must not exist. It appears when it is complete; a failure leaves nothing behind.
        model: on one device, or over a mesh of one process.
        like: a checkpoint of the same config, of which the other entries of config.json, tokenizer files and licenses
            are copied. None, for gpt-oss alone: config.json has the entries of `model.config`.
        max_shard_bytes: the most bytes of tensors in one file, unless a single tensor has more.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        FileExistsError, FileNotFoundError: `path` exists, or the directory that should hold it does not.
        CheckpointError: `like` is wrong or broken.
        TypeError: experts in shards.
        ValueError: experts with adapters, padding or an input format; formats or dtypes that no file of this form
            holds, as of biases beside float experts that `load` would round; NaN or infinite weights; no `like` for a
            family that needs it, or one of another config.
    """
    check_path("path", path)
    check_instance("model", model, Model, "a model of jmx.models")
    shards.check_shard_size(max_shard_bytes)
    check_bool("progress", progress)
    family, layers = family_with(model.config), {}
    for number, name in family.experts(model.config).items():
        layers[name] = _checked(f"model.layers[{number}].moe", model.layers[number].moe)
    form = _form_of(family, model, next(iter(layers.values())))
    config = _config_entries(model, family, like)
    outputs = [*_dense_outputs(model, family)]
    quantization = form.config([output.name for output in outputs if len(output.shape) == 2])
    if quantization is not None:
        config["quantization_config"] = quantization
    for name, moe in layers.items():
        outputs += form.outputs(name, moe)
    form.check(outputs)
    if like is not None:
        atomic_files.check_apart(path=path, like=like)
    with atomic_files.new_path(path) as directory:
        directory.mkdir()
        for pattern in COMPANIONS if like is not None else ():
            for file in Path(like or "").glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, directory / file.name)
        atomic_files.write_json(directory / FILE, config)
        total = sum(output.nbytes for output in outputs)
        with progress_bar("exporting", total, progress) as advance:
            shards.write(directory, outputs, max_shard_bytes, advance)


def _checked(name: str, moe: Any) -> jmx.nnx.MoE:
    """A layer's `moe`. Raises TypeError or ValueError, naming it, unless files can hold its experts."""
    if not isinstance(moe, jmx.nnx.MoE):
        raise TypeError(f"`{name}` (a {type(moe).__name__}) must have experts in a format, whole on each device")
    if moe.adapters is not None:
        raise ValueError(f"`{name}` (with adapters) must have none: merge them, with jmx.lora.requantize")
    experts = _abstract(moe)
    if experts.padded_to is not None:
        raise ValueError(f"`{name}` (experts with padded_to={experts.padded_to}) must have no padding")
    if (inputs := moe.input_format or experts.input_format) is not None:
        raise ValueError(f"`{name}` (with input_format={inputs!r}) must round no inputs: its files do not declare it")
    for role, array in moe.held.arrays().items():
        _check_finite(f"{name}.{role}", array)
    return moe


def _check_finite(name: str, array: Any) -> None:
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize > 1 and not _is_finite(array):
        raise ValueError(f"`{name}` must be finite, but has NaN or infinity")


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


def _abstract(moe: jmx.nnx.MoE) -> jmx.Experts:
    """The shapes of a layer's packed experts."""
    return jax.eval_shape(lambda: moe.experts.prepare("packed"))


def _config_entries(model: Model, family: Family, like: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The contents of config.json, without the format of experts."""
    if like is None:
        if family.name != "gpt_oss":
            raise ValueError(f"`like` (=None) must be a checkpoint of the same config for {family.name}")
        found = entries(model.config, "hf") | {"dtype": jnp.dtype(model.dtype).name}
    else:
        check_path("like", like)
        found = shards.read_object(Path(like) / FILE)
        tied: dict[str, Any] = {}
        if "tie_word_embeddings" in {field.name for field in dataclasses.fields(model.config)}:
            tied["tie_word_embeddings"] = model.config.tie_word_embeddings  # tables decide, see `load`
        if family_of(like) is not family or dataclasses.replace(family.read_config(like), **tied) != model.config:
            raise ValueError(f"`like` (={str(like)!r}) must be a checkpoint of the config of `model`")
        found |= tied
    for its in (found, found.get(TEXT_CONFIG)):
        if isinstance(its, dict):
            for key in KEYS:
                its.pop(key, None)
    return found


def _dense_outputs(model: Model, family: Family) -> Iterator[Output]:
    """The tensors outside experts, in the order of the model."""
    shapes = family.shapes(model.config)
    modules = {"": model} | {in_layer(number, ""): block for number, block in enumerate(model.layers)}
    for prefix, module in modules.items():
        for place in places(module, prefix):
            array = place.variable.get_value()
            if not isinstance(array, jax.Array | np.ndarray):
                raise TypeError(f"`{'|'.join(place.names)}` ({type(array).__name__}) must be floats: see `load`")
            _check_finite("|".join(place.names), array)
            for index, name in enumerate(place.names):
                rows = [shapes[its][0] for its in place.names]
                part = partial(_part, place, rows, index)
                yield Output(family.file_name(name), _NAMES[np.dtype(array.dtype)], shapes[name], part)


def _part(place: Place, rows: list[int], index: int) -> Iterator[np.ndarray]:
    """The rows of one tensor of a variable: of each of its groups they are the same slice."""
    array = np.asarray(place.variable.get_value())
    groups = array.reshape(place.groups, -1, *array.shape[1:])
    starts = np.cumsum([0, *rows]) // place.groups
    yield groups[:, starts[index] : starts[index + 1]].reshape(rows[index], *array.shape[1:])


class _Form(Protocol):
    """How files hold the experts of all layers."""

    def config(self, linear: list[str]) -> Mapping[str, Any] | None:
        """`quantization_config`, if there is one; `linear`: names of the tensors of other matrices."""
        ...

    def outputs(self, name: str, moe: jmx.nnx.MoE) -> Iterator[Output]:
        """The tensors of a layer's experts, which are the module `name`."""
        ...

    def check(self, outputs: list[Output]) -> None:
        """ValueError, naming the tensor, for one that this form cannot hold."""
        ...


def _form_of(family: Family, model: Model, moe: jmx.nnx.MoE) -> _Form:
    format = _abstract(moe).format
    if format.is_float:
        return _Floats(format, jnp.dtype(model.dtype), fused=family.name == "gpt_oss")
    if family.name == "gpt_oss" and format == jmx.MXFP4:
        return _Blocks({name: family.file_name(name) for name in family.shapes(model.config)})
    check_writable(format)
    return _Apart(format)


class _Latest:
    """The packed experts of the layer that was asked for last, on the host."""

    def __init__(self) -> None:
        self._of: tuple[Any, dict[str, np.ndarray]] = None, {}

    def arrays(self, moe: jmx.nnx.MoE) -> dict[str, np.ndarray]:
        """By the names of `Experts.arrays`."""
        if self._of[0] is not moe:
            packed = moe.experts.prepare("packed").arrays()
            self._of = moe, {name: np.asarray(array) for name, array in packed.items()}
        return self._of[1]


class _Blocks:
    """gpt-oss as published: all experts in one tensor of blocks and one of scales, gate and up interleaved.

    Args:
        dense: names in files of the tensors outside experts, by neutral name.
    """

    def __init__(self, dense: Mapping[str, str]):
        self._latest = _Latest()
        self._dtypes = {name: tensor_names.dtypes(neutral) for neutral, name in dense.items()}

    def config(self, linear: list[str]) -> Mapping[str, Any]:
        return QUANTIZATION

    def outputs(self, name: str, moe: jmx.nnx.MoE) -> Iterator[Output]:
        experts = _abstract(moe)
        if experts.format != jmx.MXFP4 or experts.gate_up_order != "interleaved":
            raise ValueError(f"`{name}` must have MXFP4 experts whose rows of gate and up are interleaved")
        for array, its in experts.arrays().items():
            role, _, kind = array.rpartition("_")
            shape, last = its.shape, {"values": "blocks"}.get(kind, kind)
            if kind == "values":
                shape = (*shape[:-1], shape[-1] // 16, 16)  # 32 elements of 4 bits
            parts = partial(self._parts, moe, array, shape)
            yield Output(f"{name}.{role}_proj_{last}", _NAMES[np.dtype(its.dtype)], shape, parts)

    def _parts(self, moe: jmx.nnx.MoE, array: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        yield self._latest.arrays(moe)[array].reshape(shape)

    def check(self, outputs: list[Output]) -> None:
        for output in outputs:
            allowed = self._allowed(output.name)
            if output.dtype not in allowed:
                rule = f"must be {' or '.join(allowed)} in this form: make the model with dtype bfloat16"
                raise ValueError(f"`{output.name}` ({output.dtype}) {rule}")

    def _allowed(self, name: str) -> tuple[str, ...]:
        return self._dtypes.get(name) or (("U8",) if name.endswith(("_blocks", "_scales")) else ("BF16",))


class _Apart:
    """compressed-tensors: every projection of every expert in tensors of its own."""

    def __init__(self, format: Format):
        self._latest, self._format = _Latest(), format
        storage = storage_of(format)
        assert storage is not None, "checked by `check_writable`"
        self._scheme = Scheme(format.name, None, storage)

    def config(self, linear: list[str]) -> Mapping[str, Any]:
        names = [name.removesuffix(".weight") for name in linear if name.endswith(".weight")]
        return config_writer.entries({"group_0": (["Linear"], self._scheme)}, [*dict.fromkeys([*names, "lm_head"])])

    def outputs(self, name: str, moe: jmx.nnx.MoE) -> Iterator[Output]:
        experts = _abstract(moe)
        _check_format(name, experts, self._format)
        for columns in (experts.hidden_size, experts.intermediate_size):
            check_columns(self._format, columns)
        for module, number, role, part in _projections(name, experts):
            made = partial(self._tensors, moe, number, role, part)
            for last, like in self._expected(experts, role, part).items():
                yield Output(f"{module}.{last}", _NAMES[like.dtype], like.shape, partial(_taken, made, last))

    def _expected(self, experts: jmx.Experts, role: str, part: str) -> dict[str, np.ndarray]:
        """Tensors of the shapes and dtypes of one matrix, made of ones."""
        arrays = {n: np.ones(a.shape[1:], a.dtype) for n, a in experts.arrays().items() if n.startswith(role)}
        return self._written(arrays, experts, role, part)

    def _tensors(self, moe: jmx.nnx.MoE, number: int, role: str, part: str) -> dict[str, np.ndarray]:
        arrays = {n: a[number] for n, a in self._latest.arrays(moe).items() if n.startswith(role)}
        return self._written(arrays, _abstract(moe), role, part)

    def _written(
        self, arrays: Mapping[str, np.ndarray], experts: jmx.Experts, role: str, part: str
    ) -> dict[str, np.ndarray]:
        arrays = {n: _part_of_expert(array, experts, part) for n, array in arrays.items()}
        weight = BlockScaled(*(arrays.get(f"{role}_{field}") for field in BlockScaled._fields))
        found = module_tensors(self._scheme, weight, {})
        bias = arrays.get(f"{role}_bias")
        return found if bias is None else found | {"bias": bias}

    def check(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.name.endswith(".bias") and output.dtype not in ("BF16", "F16", "F32"):
                raise ValueError(f"`{output.name}` ({output.dtype}) must be BF16, F16 or F32 in this form")


def _taken(make: Callable[[], dict[str, np.ndarray]], name: str) -> Iterator[np.ndarray]:
    yield make()[name]


class _Floats:
    """Experts that are not quantized: those of gpt-oss in one tensor of each weight, transposed, with gate and up
    interleaved; others in a tensor of every projection of every expert.

    Args:
        format: of the weights.
        dtype: of the model.
        fused: whether they are those of gpt-oss.
    """

    def __init__(self, format: Format, dtype: np.dtype[Any], *, fused: bool):
        self._latest, self._format, self._dtype, self._fused = _Latest(), format, dtype, fused

    def config(self, linear: list[str]) -> None:
        del linear

    def outputs(self, name: str, moe: jmx.nnx.MoE) -> Iterator[Output]:
        experts = _abstract(moe)
        _check_format(name, experts, self._format)
        for array, its in experts.arrays().items():
            if array.endswith("_bias") and its.dtype != self._dtype:
                rule = f"must have the model's dtype, {self._dtype}, to which reading would round them"
                raise ValueError(f"`{name}.{array}` ({its.dtype}) {rule}")
        yield from self._fused_outputs(name, moe, experts) if self._fused else self._outputs_apart(name, moe, experts)

    def _fused_outputs(self, name: str, moe: jmx.nnx.MoE, experts: jmx.Experts) -> Iterator[Output]:
        for array, its in experts.arrays().items():
            role = array.removesuffix("_values").removesuffix("_bias")
            shape = its.shape if array.endswith("_bias") else (its.shape[0], its.shape[2], its.shape[1])
            parts = partial(self._experts, moe, experts, array)
            yield Output(f"{name}.{role}_proj{'_bias' * array.endswith('_bias')}", _NAMES[its.dtype], shape, parts)

    def _experts(self, moe: jmx.nnx.MoE, experts: jmx.Experts, array: str) -> Iterator[np.ndarray]:
        for one in self._latest.arrays(moe)[array]:
            rows = one.T  # outputs are the last axis
            if array.startswith("gate_up"):
                rows = np.asarray(join_gate_up(*split_gate_up(rows, experts.gate_up_order), "interleaved"))
            yield np.ascontiguousarray(rows)

    def _outputs_apart(self, name: str, moe: jmx.nnx.MoE, experts: jmx.Experts) -> Iterator[Output]:
        for module, number, role, part in _projections(name, experts):
            for array, its in experts.arrays().items():
                if array.startswith(role):
                    last = "bias" if array.endswith("_bias") else "weight"
                    rows = its.shape[1] // (1 if part == "down" or not experts.gated else 2)
                    parts = partial(self._one, moe, experts, number, part, array)
                    yield Output(f"{module}.{last}", _NAMES[its.dtype], (rows, *its.shape[2:]), parts)

    def _one(self, moe: jmx.nnx.MoE, experts: jmx.Experts, number: int, part: str, array: str) -> Iterator[np.ndarray]:
        yield _part_of_expert(self._latest.arrays(moe)[array][number], experts, part)

    def check(self, outputs: list[Output]) -> None:
        del outputs  # all dtypes are read


def _check_format(name: str, experts: jmx.Experts, format: Format) -> None:
    if experts.format != format:
        raise ValueError(f"`{name}` (in {experts.format.name}) must be in {format.name}, as other layers are")


def _projections(name: str, experts: jmx.Experts) -> Iterator[tuple[str, int, str, str]]:
    """Of every projection of every expert of the module `name`: its own name, the expert, its weight, and its part of
    that: "gate", "up" or "down"."""
    spelling = _SPELLINGS[".block_sparse_moe." in name]
    for number in range(experts.num_experts):
        for role in ROLES:
            for part in ("gate", "up") if role == "gate_up" and experts.gated else (role.replace("gate_", ""),):
                yield f"{name}.{number}.{spelling[part]}", number, role, part


def _part_of_expert(array: np.ndarray, experts: jmx.Experts, part: str) -> np.ndarray:
    """The rows of gate or up, or all rows of another weight or of one without a gate."""
    if part == "down" or not experts.gated:
        return array
    return np.ascontiguousarray(split_gate_up(array.T, experts.gate_up_order)[part == "up"].T)
