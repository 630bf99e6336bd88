"""Making a gpt-oss model from a checkpoint, or of random weights in the shape of a published model."""

import os
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
from examples.common.checkpoint import Checkpoint
from examples.common.load import FileSource, RandomWeights, Source, fill
from examples.gpt_oss.model import GptOss
from jmx.checkpoint.gpt_oss import Config, Reader, file_name, is_checkpoint, read_config, tensor_shapes


class RandomSource(RandomWeights[Config]):
    """Random weights of the shapes of `config`, made on the device.

    ValueError for a `seed` outside 0..2^32 - 1.
    """

    def __init__(self, config: Config, seed: int = 0, format: jmx.Format = jmx.MXFP4):
        layers = range(config.num_hidden_layers)
        shapes, sizes = tensor_shapes(config), _expert_sizes(config)
        super().__init__(config, seed, shapes, layers, sizes, format, gate_up_order="interleaved", bias=True)


def file_source(checkpoint: Checkpoint) -> FileSource[Config]:
    """The weights of a checkpoint that another tool quantized, or of one in floats.

    CheckpointError unless it holds exactly the tensors of a model with its config.
    """
    config = read_config(checkpoint.path, quant_methods=None)
    shapes = tensor_shapes(config)
    experts = {layer: f"model.layers.{layer}.mlp.experts" for layer in range(config.num_hidden_layers)}
    names = {name: file_name(name) for name in shapes}
    return FileSource(checkpoint, config, shapes, names, experts, _expert_sizes(config))


def _expert_sizes(config: Config) -> tuple[int, int, int]:
    """E, H, I."""
    return config.num_experts, config.hidden_size, config.intermediate_size


def load(
    path: str | os.PathLike[str],
    *,
    format: jmx.Format | None = None,
    declared_inputs: bool = True,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> GptOss:
    """The model of a gpt-oss checkpoint; experts stay quantized from disk to device.

    Args:
        path: a directory in any form that jmx reads, or quantized by another tool that jmx supports.
        format: what float experts are quantized to on reading; required for those.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        dtype: of activations and dense weights, bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantized already.
    """
    if format is None and is_checkpoint(path):
        reader = Reader(path)
        with reader.progress(progress):
            return from_source(reader, dtype=dtype, backend=backend)
    checkpoint = Checkpoint(path, format=format, gate_up_order="interleaved", declared_inputs=declared_inputs)
    source = file_source(checkpoint)
    with checkpoint.progress(progress):
        return from_source(source, dtype=dtype, backend=backend)


def from_source(
    source: Source[Config], *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None
) -> GptOss:
    """The model of a source's weights, filled layer by layer. Peak memory is the model and one layer."""
    format = jmx.FORMATS["fp8_channel"]  # supports any sizes; `fill` replaces the experts
    make = partial(GptOss, source.config, format=format, dtype=dtype, backend=backend)
    return fill(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), source)
