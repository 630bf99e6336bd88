"""Tokens from a model of one layer around the experts of a golden checkpoint, beside the same experts in numpy."""

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from input_formats import worth
from model_steps import decode_step, relative_error

import jmx
from jmx.checkpoint import compressed_tensors
from jmx.checkpoint.compressed_tensors.layers import Layer
from jmx.models import Model, Sampler
from jmx.numerics.input_formats import INPUT_FORMATS

DATA = Path(__file__).parent / "data" / "compressed_tensors"
EXPERTS = "model.layers.0.mlp.experts"
NAMES = sorted(path.name for path in DATA.iterdir() if path.is_dir() and "gpt_oss" not in path.name)

# Of the logits of a layer alone, where experts round their inputs as files declare, beside inputs that are not rounded.
# That is for scales that are found as tokens come: the golden files' static ones are random.
INPUT_ERRORS = {"int8_token": 0.1, "fp8_token": 0.15, "fp8_block": 0.15, "mxfp4": 0.6}

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Family(NamedTuple):
    """A family of models.

    Args:
        random: the family's `RandomSource` of one layer, with the sizes and the number of experts of a golden file's.
        from_source: as it has it.
        activation: of gate and up, in numpy's float64.
        biases: whether experts have some, which then are random: those of files have none.
    """

    random: Callable[[Layer], Any]
    from_source: Callable[..., Model]
    activation: Activation
    biases: bool = False


class PlainMoE(nnx.Module):
    """Experts in numpy, which round what both products take, unless `rounds` is False."""

    def __init__(self, moe: Any, activation: Activation, *, rounds: bool):
        experts = moe.experts
        scales = experts.gate_up_input_scale, experts.down_input_scale
        biases = (jnp.zeros(1) if bias is None else bias for bias in (experts.gate_up_bias, experts.down_bias))
        given = *experts.dequantize(jnp.float32), *biases, *(scale for scale in scales if scale is not None)
        self.arrays = nnx.List([nnx.Param(array) for array in given])
        self.format = INPUT_FORMATS[experts.input_format] if rounds else None
        self.routing, self.order, self.activation = moe.routing, experts.gate_up_order, activation

    def __call__(self, x: jax.Array, logits: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        assert mask is None
        rows = x.reshape(-1, x.shape[-1])
        routing = jmx.route(jmx.Logits(logits.reshape(len(rows), -1), self.routing))
        shape = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
        arrays = [array[...] for array in self.arrays]
        return jax.pure_callback(self.products, shape, rows, routing, arrays).reshape(x.shape)

    def products(self, rows: Any, routing: Any, arrays: Any) -> np.ndarray:
        rows, *arrays = (np.asarray(array, np.float64) for array in (rows, *arrays))
        gate_up, down, *biases, scales = *arrays[:4], arrays[4:]
        gate_up_bias, down_bias = (np.broadcast_to(bias, (len(down), bias.shape[-1])) for bias in biases)
        ids, weights = map(np.asarray, routing)
        rounded: list[Callable[[Any], Any]] = [lambda x: x] * 2
        if self.format is not None:
            rounded = [partial(worth, format=self.format, static=scale) for scale in scales or (None, None)]
        out = np.zeros(rows.shape)
        for token, slot in np.ndindex(ids.shape):
            expert = ids[token, slot]
            both = rounded[0](rows[token]) @ gate_up[expert].T + gate_up_bias[expert]
            gate, up = (both[::2], both[1::2]) if self.order == "interleaved" else np.split(both, 2)
            h = self.activation(gate, up).astype(np.float32)
            out[token] += weights[token, slot] * (rounded[1](h) @ down[expert].T + down_bias[expert])
        return out.astype(np.float32)


class _Source:
    """The experts of a checkpoint; all other weights are random."""

    def __init__(self, path: Path, family: Family):
        reader = compressed_tensors.Reader(path)
        layer = reader.layers[EXPERTS]
        self.inputs = layer.scheme.inputs
        self._reader, self._layer, self._random, self._biases = reader, layer, family.random(layer), family.biases
        self.config, self.layers, self.dense = self._random.config, self._random.layers, self._random.dense

    def experts(self, layer: int) -> jmx.Experts:
        experts, sizes = self._reader.experts(EXPERTS, "packed"), self._layer
        if not self._biases:
            return experts
        shapes = {"gate_up_bias": 2 * sizes.intermediate_size, "down_bias": sizes.hidden_size}
        key = jax.random.key(layer)
        drawn = {name: jax.random.normal(key, (sizes.num_experts, size)) / 8 for name, size in shapes.items()}
        return experts.with_arrays(experts.arrays() | drawn)


def check_tokens(path: Path, family: Family, rng: np.random.Generator) -> None:
    """Four steps of two rows: the logits are those of the same experts in numpy, and near what they are unrounded."""
    source = _Source(path, family)
    static = source.inputs is not None and INPUT_FORMATS[source.inputs].static
    differ = static and not path.name.startswith("modelopt")  # which shares them among experts
    with pytest.warns(UserWarning, match="static input scales differ") if differ else contextlib.nullcontext():
        model, plain = (family.from_source(source, dtype=jnp.float32) for _ in range(2))
    moe: Any = model.layers[0].moe
    assert moe.experts.input_format == source.inputs
    assert not static or moe.experts.gate_up_input_scale.shape == moe.experts.down_input_scale.shape == ()
    caches = [model.empty_cache(2, 16).layers for _ in range(2)]
    tokens, errors = jnp.asarray(rng.integers(source.config.vocab_size, size=2)), []
    if source.inputs is not None:
        plain.layers[0].moe = PlainMoE(moe, family.activation, rounds=False)
        rounded, exact = (decode_step(its, tokens, jnp.zeros(2, jnp.int32), caches[0])[0] for its in (model, plain))
        assert np.isfinite(np.asarray(rounded)).all()
        assert 1e-3 < relative_error(rounded, exact) <= INPUT_ERRORS.get(source.inputs, math.inf)
    plain.layers[0].moe = PlainMoE(moe, family.activation, rounds=source.inputs is not None)
    for position in range(4):
        starts = jnp.full(2, position)
        logits, caches[0] = decode_step(model, tokens, starts, caches[0])
        expected, caches[1] = decode_step(plain, tokens, starts, caches[1])
        errors.append(relative_error(logits, expected))
        tokens = Sampler()(logits, position)
    # In one of some thousand steps an h half way between two elements is rounded to either.
    assert sorted(errors)[-2 if source.inputs else -1] <= 1e-5
