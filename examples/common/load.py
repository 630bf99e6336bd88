"""Filling a model with weights: arrays of a source, by neutral names, one layer at a time."""

import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
from examples.common.checkpoint import Checkpoint
from examples.common.config import Config
from examples.common.float_moe import FloatExperts
from examples.common.model import Model, Variables
from examples.common.sampling import check_seed
from jmx.backends import resolve_layout

Shape = tuple[int, ...]


class Source[C: Config](Protocol):
    """A source of weights: a `jmx.checkpoint.Reader`, or any object with these members.

    Tensors have the neutral names of `jmx.checkpoint.gpt_oss.Reader`, such as "embedding" and "layers.0.q_weight". A
    family without biases or sinks omits them, and one that normalizes heads adds q_norm and k_norm (D,). Tied models
    have no "unembedding".
    """

    @property
    def config(self) -> C: ...
    @property
    def layers(self) -> Collection[int]:
        """Numbers of the layers that have experts."""
        ...

    def dense(self, name: str) -> jax.Array: ...
    def experts(self, layer: int) -> jmx.Experts | FloatExperts: ...


def in_layer(layer: int, name: str) -> str:
    """The neutral name, in the whole model, of a layer's tensor."""
    return f"layers.{layer}.{name}"


def whole_model(top: Mapping[str, Shape], layers: Iterable[Mapping[str, Shape]]) -> dict[str, Shape]:
    """Shapes by neutral name of the tensors outside layers, and of each layer's."""
    found = dict(top)
    for number, shapes in enumerate(layers):
        found |= {in_layer(number, name): shape for name, shape in shapes.items()}
    return found


def fill[M: Model](model: M, source: Source) -> M:
    """Fills a model of shapes (`nnx.eval_shape`) with weights. Peak memory is the model and one layer."""
    _put(model.variables(), source, "")
    for number, block in enumerate(model.layers):
        _put(block.variables(), source, in_layer(number, ""))
        if number not in source.layers:  # one MLP for all tokens
            continue
        experts = source.experts(number)
        if isinstance(experts, jmx.Experts):
            experts = _with_biases_in(model.dtype, experts)
        block.moe = model.make_moe(experts, nnx.Rngs(0))  # not used: nothing is drawn
    return model


def _with_biases_in(dtype: jax.typing.DTypeLike, experts: jmx.Experts) -> jmx.Experts:
    biases = {name: array.astype(dtype) for name, array in experts.arrays().items() if name.endswith("_bias")}
    return experts.with_arrays(experts.arrays() | biases)


def _put(variables: Variables, source: Source, prefix: str) -> None:
    """Fills variables of shapes with arrays, in the dtypes of the model."""
    for names, variable in variables.items():
        parts = [source.dense(prefix + name) for name in names]
        array = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        expected = variable.get_value()
        if array.shape != expected.shape:
            raise ValueError(f"{'|'.join(names)} (shape {array.shape}) must be {expected.shape}, as in the model")
        variable.set_value(array.astype(expected.dtype))


class FileSource[C: Config]:
    """The weights of a checkpoint whose tensors have the names of the Hugging Face form.

    Args:
        checkpoint: the files.
        config: of the model.
        shapes: of the tensors outside the experts, by neutral name.
        names: neutral names -> names in the files, with the same keys.
        experts: numbers of the layers with experts -> names of the modules that hold them.
        sizes: E, H, I of each of those.
        more: shapes of further tensors that files may hold, by their names in the files.

    Raises:
        CheckpointError: files that do not hold all of these, or hold others.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: C,
        shapes: Mapping[str, Shape],
        names: Mapping[str, str],
        experts: Mapping[int, str],
        sizes: tuple[int, int, int],
        more: Mapping[str, Shape] | None = None,
    ):
        self.config, self.layers = config, experts.keys()
        self._checkpoint, self._names, self._experts = checkpoint, names, experts
        expected = {names[name]: shape for name, shape in shapes.items()}
        checkpoint.check(expected | {**(more or {})}, dict.fromkeys(experts.values(), sizes))

    def dense(self, name: str) -> jax.Array:
        return self._checkpoint.dense(self._names[name])

    def experts(self, layer: int) -> jmx.Experts | FloatExperts:
        return self._checkpoint.experts(self._experts[layer])


class RandomWeights[C: Config]:
    """Random weights, made on the device: codes and scales of experts are drawn directly.

    Norms are near 1, biases are small, and products preserve the variance. A tensor depends only on the seed and its
    name.

    Args:
        config: of the model.
        seed: in 0..2^32 - 1.
        shapes: of the tensors outside the experts, by neutral name.
        layers: numbers of the layers with experts.
        sizes: E, H, I of each of those.
        format: of experts' weights.
        gate_up_order: "interleaved" or "concatenated", as in `jmx.Experts`.
        bias: whether experts have biases.

    Raises:
        ValueError: `seed` is out of range.
    """

    def __init__(
        self,
        config: C,
        seed: int,
        shapes: Mapping[str, Shape],
        layers: Collection[int],
        sizes: tuple[int, int, int],
        format: jmx.Format,
        *,
        gate_up_order: str,
        bias: bool,
    ):
        check_seed(seed)
        self.config, self.layers = config, layers
        self._key = jax.random.key(seed)
        self._shapes, self._sizes = shapes, sizes
        self._made: tuple[str, jmx.Format, bool] = gate_up_order, format, bias

    def dense(self, name: str) -> jax.Array:
        shape, last = self._shapes[name], name.rpartition(".")[2]
        deviation = 0.02 if last.endswith("bias") else 1.0
        if last.endswith("_weight") or last == "unembedding":
            deviation = shape[-1] ** -0.5
        return _normal(self._named(name), shape, float(last.endswith("_norm")), deviation)

    def experts(self, layer: int) -> jmx.Experts:
        """A layer's experts, in the layout of this machine."""
        layout = resolve_layout("auto", jmx.Environment.probe(), self._made[1])
        return _random_experts(self._named(in_layer(layer, "experts")), *self._sizes, *self._made, layout)

    def _named(self, name: str) -> jax.Array:
        return jax.random.fold_in(self._key, zlib.crc32(name.encode()))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key: jax.Array, shape: tuple[int, ...], mean: float, deviation: float) -> jax.Array:
    return (mean + deviation * jax.random.normal(key, shape, jnp.bfloat16)).astype(jnp.bfloat16)


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6, 7))
def _random_experts(
    key: jax.Array,
    num_experts: int,
    hidden: int,
    intermediate: int,
    gate_up_order: str,
    format: jmx.Format,
    bias: bool,
    layout: str,
) -> jmx.Experts:
    sizes = num_experts, hidden, intermediate
    return jmx.Experts.random(key, *sizes, gate_up_order=gate_up_order, format=format, bias=bias).prepare(layout)
