"""Making a model: out of a checkpoint in either form, or of random weights in the shape of a published one."""

import os
import zlib
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from examples.gpt_oss.model import Block, GptOss
from examples.gpt_oss.sampling import check_seed
from jmx.backends import resolve_layout
from jmx.checkpoint.gpt_oss import Config, Reader
from jmx.checkpoint.gpt_oss.forms import EXPERT_NAMES, layer_shapes, top_shapes
from jmx.experts import Experts
from jmx.selection import Environment


def _published(num_hidden_layers: int, num_experts: int) -> Config:
    return Config(
        num_hidden_layers=num_hidden_layers,
        hidden_size=2880,
        intermediate_size=2880,
        num_experts=num_experts,
        top_k=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        attention_bias=True,
        rms_norm_eps=1e-5,
        sliding_window=128,
        layer_types=("sliding_attention", "full_attention") * (num_hidden_layers // 2),
        rope_theta=150000.0,
        rope_factor=32.0,
        rope_beta_fast=32.0,
        rope_beta_slow=1.0,
        rope_truncate=False,
        rope_original_length=4096,
        swiglu_alpha=1.702,
        swiglu_beta=1.0,
        swiglu_limit=7.0,
        eos_token_ids=(200002, 199999, 200012),
        bos_token_id=199998,
        pad_token_id=199999,
    )


# The published models, by their config.json and generation_config.json.
CONFIGS = {"20b": _published(24, 32), "120b": _published(36, 128)}


class Source(Protocol):
    """Where weights come from: the part of `jmx.checkpoint.gpt_oss.Reader` that a model needs, by its names."""

    config: Config

    def top(self) -> dict[str, jax.Array]: ...
    def layer(self, layer: int) -> dict[str, jax.Array]: ...
    def experts(self, layer: int) -> Experts: ...


class RandomSource:
    """Random weights of the shapes that `config` says, made on the device: codes and scales are drawn directly.

    ValueError for a `seed` outside 0..2^32 - 1.
    """

    def __init__(self, config: Config, seed: int = 0):
        self.config = config
        check_seed(seed)
        self._key = jax.random.key(seed)

    def top(self) -> dict[str, jax.Array]:
        return {name: self._draw(name, shape, "top") for name, shape in top_shapes(self.config).items()}

    def layer(self, layer: int) -> dict[str, jax.Array]:
        shapes = layer_shapes(self.config).items()
        return {name: self._draw(name, shape, layer) for name, shape in shapes if name not in EXPERT_NAMES}

    def experts(self, layer: int) -> Experts:
        layout = resolve_layout("auto", Environment.probe())
        config = self.config
        return _random_experts(
            self._named("experts", layer), config.num_experts, config.hidden_size, config.intermediate_size, layout
        )

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


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _random_experts(key: jax.Array, num_experts: int, hidden: int, intermediate: int, layout: str) -> Experts:
    experts = Experts.random(key, num_experts, hidden, intermediate, gate_up_order="interleaved")
    return experts.prepare(layout)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> GptOss:
    """The model of a gpt-oss checkpoint; experts stay in 4 bits from disk to device.

    Args:
        path: a directory in the Hugging Face form or the original form.
        dtype: of activations and dense weights, bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        progress: whether to show a progress bar on stderr, where that is a terminal.

    Raises:
        jmx.checkpoint.gpt_oss.CheckpointError: files that are wrong or broken.
    """
    reader = Reader(path)
    with reader.progress(progress):
        return from_source(reader, dtype=dtype, backend=backend)


def from_source(source: Source, *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None) -> GptOss:
    """The model of a source's weights, a layer at a time: the peak is the model and one layer."""
    config = source.config
    model = nnx.eval_shape(lambda: GptOss(config, dtype=dtype, backend=backend, rngs=nnx.Rngs(0)))
    top = source.top()
    for variable, name in (
        (model.embedding, "embedding"),
        (model.final_norm.scale, "final_norm"),
        (model.unembedding.weights, "unembedding"),
    ):
        _put(variable, top.pop(name))
    for index, block in enumerate(model.layers):
        _put_layer(block, source.layer(index), source.experts(index))
    return model


def _put_layer(block: Block, dense: dict[str, jax.Array], experts: Experts) -> None:
    attention = block.attention
    _put(block.attention_norm.scale, dense["input_norm"])
    _put(block.moe_norm.scale, dense["post_attention_norm"])
    _put(attention.sinks, dense["sinks"])
    for linear, names in ((attention.query_key_value, "qkv"), (attention.out, "o"), (block.router, ["router"])):
        _put(linear.weights, jnp.concatenate([dense[f"{name}_weight"] for name in names]))
        if linear.bias is not None:
            _put(linear.bias, jnp.concatenate([dense[f"{name}_bias"] for name in names]))
    for name, array in experts.arrays().items():
        _put(getattr(block.moe, name), array)


def _put(variable: nnx.Variable, array: jax.Array) -> None:
    """Gives a variable that has only a shape its array, in the dtype that the model computes in."""
    expected = variable.get_value()
    if array.shape != expected.shape:
        raise ValueError(f"an array of shape {array.shape} must be {expected.shape}, as the model has it")
    variable.set_value(array.astype(expected.dtype))
