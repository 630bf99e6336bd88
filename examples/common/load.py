"""Filling a model with weights: a source's arrays, by neutral names, one layer at a time."""

import zlib
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from examples.common.config import Config
from examples.common.float_moe import FloatExperts
from examples.common.model import Model, Variables
from examples.common.sampling import check_seed
from jmx.backends import resolve_layout
from jmx.experts import Experts
from jmx.numerics.formats import Format
from jmx.selection.environment import Environment


class Source[C: Config](Protocol):
    """Where weights come from, by the names of `jmx.checkpoint.gpt_oss.Reader`, which is one.

    A family without biases or sinks leaves them out, and one whose heads are normed adds q_norm and k_norm (D,). An
    unembedding is missing where it is the embedding.
    """

    @property
    def config(self) -> C: ...
    def top(self) -> dict[str, jax.Array]: ...
    def layer(self, layer: int) -> dict[str, jax.Array]: ...
    def experts(self, layer: int) -> Experts | FloatExperts | None: ...


def fill[M: Model](model: M, source: Source) -> M:
    """Gives a model that has only shapes (`nnx.eval_shape`) its weights: the peak is the model and one layer."""
    _put(model.variables(), source.top())
    for index, block in enumerate(model.layers):
        _put(block.variables(), source.layer(index))
        experts = source.experts(index)
        if experts is None:  # one MLP for all tokens
            continue
        if isinstance(experts, Experts):
            experts = _with_biases_in(model.dtype, experts)
        block.moe = model.make_moe(experts, nnx.Rngs(0))  # of which nothing is drawn
    return model


def _with_biases_in(dtype: jax.typing.DTypeLike, experts: Experts) -> Experts:
    biases = {name: array.astype(dtype) for name, array in experts.arrays().items() if name.endswith("_bias")}
    return experts.with_arrays(experts.arrays() | biases)


def _put(variables: Variables, arrays: dict[str, jax.Array]) -> None:
    """Gives variables that have only shapes their arrays, in the dtypes that the model computes in."""
    for names, variable in variables.items():
        parts = [arrays[name] for name in names]
        array = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        expected = variable.get_value()
        if array.shape != expected.shape:
            raise ValueError(f"{'|'.join(names)} (shape {array.shape}) must be {expected.shape}, as the model has it")
        variable.set_value(array.astype(expected.dtype))


class RandomWeights:
    """Random weights by name, made on the device: codes and scales of experts are drawn directly.

    ValueError for a `seed` outside 0..2^32 - 1.
    """

    def __init__(self, seed: int):
        check_seed(seed)
        self._key = jax.random.key(seed)

    def dense(self, place: int | str, shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        """Arrays of a layer, or of "top": norms are near 1, biases small, and products keep a variance."""
        return {name: self._draw(name, shape, place) for name, shape in shapes.items()}

    def experts(
        self, layer: int, sizes: tuple[int, int, int], gate_up_order: str, format: Format, *, bias: bool
    ) -> Experts:
        """Experts of `sizes` E, H, I, in the layout of this machine."""
        layout = resolve_layout("auto", Environment.probe(), format)
        return _random_experts(self._named("experts", layer), *sizes, gate_up_order, format, bias, layout)

    def _draw(self, name: str, shape: tuple[int, ...], place: int | str) -> jax.Array:
        deviation = 0.02 if name.endswith("bias") else 1.0
        if name.endswith("_weight") or name == "unembedding":
            deviation = shape[-1] ** -0.5
        return _normal(self._named(name, place), shape, float(name.endswith("_norm")), deviation)

    def _named(self, name: str, place: int | str) -> jax.Array:
        return jax.random.fold_in(self._key, zlib.crc32(f"{place}.{name}".encode()))


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
    format: Format,
    bias: bool,
    layout: str,
) -> Experts:
    sizes = num_experts, hidden, intermediate
    return Experts.random(key, *sizes, gate_up_order=gate_up_order, format=format, bias=bias).prepare(layout)
