"""Making a gpt-oss model: out of a checkpoint in either form, or of random weights in the shape of a published one."""

import os
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from examples.common.checkpoint import Checkpoint
from examples.common.float_moe import FloatExperts
from examples.common.load import RandomWeights, Source, fill
from examples.gpt_oss.model import GptOss
from jmx.checkpoint import shards
from jmx.checkpoint.gpt_oss import Config, Reader, read_config
from jmx.checkpoint.gpt_oss.forms import HF, dense_shapes, top_shapes
from jmx.checkpoint.gpt_oss.sources import TOP
from jmx.experts import Experts
from jmx.numerics.formats import FP8_CHANNEL, MXFP4, Format


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


class RandomSource:
    """Random weights of the shapes that `config` says, made on the device: codes and scales are drawn directly.

    ValueError for a `seed` outside 0..2^32 - 1.
    """

    def __init__(self, config: Config, seed: int = 0, format: Format = MXFP4):
        self.config = config
        self._format = format
        self._weights = RandomWeights(seed)

    def top(self) -> dict[str, jax.Array]:
        return self._weights.dense("top", top_shapes(self.config))

    def layer(self, layer: int) -> dict[str, jax.Array]:
        return self._weights.dense(layer, dense_shapes(self.config))

    def experts(self, layer: int) -> Experts:
        config = self.config
        sizes = config.num_experts, config.hidden_size, config.intermediate_size
        return self._weights.experts(layer, sizes, "interleaved", self._format, bias=True)


class FileSource:
    """The weights of a checkpoint that another tool quantised. CheckpointError unless it holds all that it must."""

    def __init__(self, checkpoint: Checkpoint):
        self.config = read_config(checkpoint.path, quant_methods=None)
        self._checkpoint = checkpoint
        config = self.config
        names = {HF.top[name]: shape for name, shape in top_shapes(config).items()}
        for layer in range(config.num_hidden_layers):
            names |= {_in_layer(layer, HF.layer[name]): shape for name, shape in dense_shapes(config).items()}
        sizes = config.num_experts, config.hidden_size, config.intermediate_size
        checkpoint.check(names, {_in_layer(i, "mlp.experts"): sizes for i in range(config.num_hidden_layers)})

    def top(self) -> dict[str, jax.Array]:
        return {name: self._checkpoint.dense(HF.top[name]) for name in top_shapes(self.config)}

    def layer(self, layer: int) -> dict[str, jax.Array]:
        return {n: self._checkpoint.dense(_in_layer(layer, HF.layer[n])) for n in dense_shapes(self.config)}

    def experts(self, layer: int) -> Experts | FloatExperts:
        return self._checkpoint.experts(_in_layer(layer, "mlp.experts"))


def _in_layer(layer: int, name: str) -> str:
    return HF.layer_prefix.format(layer) + name


def load(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    declared_inputs: bool = True,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> GptOss:
    """The model of a gpt-oss checkpoint; experts stay as they are from disk to device.

    Args:
        path: a directory in the Hugging Face form or the original form, or quantised by another tool that jmx reads.
        format: what experts in floats are rounded to as they are read, which then is needed.
        declared_inputs: whether experts round their inputs to the format that the checkpoint declares.
        dtype: of activations and dense weights, bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        progress: whether to show a progress bar on stderr, where that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantised already.
    """
    if format is None and _is_published(Path(path)):
        reader = Reader(path)
        with reader.progress(progress):
            return from_source(reader, dtype=dtype, backend=backend)
    checkpoint = Checkpoint(path, format=format, gate_up_order="interleaved", declared_inputs=declared_inputs)
    source = FileSource(checkpoint)
    with checkpoint.progress(progress):
        return from_source(source, dtype=dtype, backend=backend)


def _is_published(directory: Path) -> bool:
    """Whether experts lie as in OpenAI's own checkpoints, or in what is converted from them."""
    if (directory / TOP).exists():
        return True
    names = shards.read_headers(directory)
    return any(name.endswith(("_proj_blocks", "_weight.blocks")) for name in names)


def from_source(
    source: Source[Config], *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None
) -> GptOss:
    """The model of a source's weights, a layer at a time: the peak is the model and one layer."""
    make = partial(GptOss, source.config, format=FP8_CHANNEL, dtype=dtype, backend=backend)  # which has any sizes
    return fill(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), source)
