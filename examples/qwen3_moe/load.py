"""Making a Qwen3-MoE model from a checkpoint, or of random weights in the shape of a published model."""

import dataclasses
import os
import warnings
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
from examples.common.checkpoint import Checkpoint
from examples.common.load import FileSource, RandomWeights, Source, fill, in_layer, whole_model
from examples.qwen3_moe.model import Qwen3MoE
from jmx.checkpoint.model_configs.qwen3_moe import Config, read_config

Shape = tuple[int, ...]


# Neutral names, as in `jmx.checkpoint.gpt_oss.Reader`, -> names in the files; in a layer after "layers.N." and
# "model.layers.N.".
TOP_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "unembedding": "lm_head.weight",
}
LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    **{f"{p}_{kind}": f"self_attn.{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "router_weight": "mlp.gate.weight",
    **{f"{p}_weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
}


def top_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of the arrays outside layers, by neutral name."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embedding": table, "final_norm": (config.hidden_size,)}
    return shapes if config.tie_word_embeddings else shapes | {"unembedding": table}


def layer_shapes(config: Config, layer: int) -> dict[str, Shape]:
    """Shapes of a layer's arrays except its experts, by neutral name."""
    hidden, dim = config.hidden_size, config.head_dim
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
    rows = {name: count * dim for name, count in heads.items()}
    shapes: dict[str, Shape] = {"input_norm": (hidden,), "post_attention_norm": (hidden,)}
    shapes |= {f"{name}_weight": (size, hidden) for name, size in rows.items()}
    shapes |= {"o_weight": (hidden, rows["q"]), "q_norm": (dim,), "k_norm": (dim,)}
    if config.attention_bias:
        shapes |= {f"{name}_bias": (size,) for name, size in (rows | {"o": hidden}).items()}
    if layer not in config.dense_layers:
        return shapes | {"router_weight": (config.num_experts, hidden)}
    wide = (config.intermediate_size, hidden)
    return shapes | {"gate_weight": wide, "up_weight": wide, "down_weight": wide[::-1]}


def expert_sizes(config: Config) -> tuple[int, int, int]:
    """E, H, I."""
    return config.num_experts, config.hidden_size, config.moe_intermediate_size


def tensor_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of all tensors outside the experts, by neutral name."""
    return whole_model(top_shapes(config), (layer_shapes(config, i) for i in range(config.num_hidden_layers)))


def file_source(checkpoint: Checkpoint) -> FileSource[Config]:
    """The weights of a checkpoint. CheckpointError unless it holds exactly the tensors of a model with its config."""
    config = read_config(checkpoint.path)
    untied, top = _untied(checkpoint, config)
    unread = {}
    if config.tie_word_embeddings and checkpoint.holds(TOP_NAMES["unembedding"]):
        unread[TOP_NAMES["unembedding"]] = (config.vocab_size, config.hidden_size)
    names = {name: top[name] for name in top_shapes(untied)}
    for layer in range(untied.num_hidden_layers):
        inside = layer_shapes(untied, layer)
        names |= {in_layer(layer, name): f"model.layers.{layer}.{LAYER_NAMES[name]}" for name in inside}
    experts = {layer: f"model.layers.{layer}.mlp.experts" for layer in _sparse_layers(untied)}
    return FileSource(checkpoint, untied, tensor_shapes(untied), names, experts, expert_sizes(untied), unread)


def _sparse_layers(config: Config) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers) if layer not in config.dense_layers]


def _untied(checkpoint: Checkpoint, config: Config) -> tuple[Config, dict[str, str]]:
    """The config, and names in the files outside layers, of a model whose tables are tied if its files allow it.

    As in transformers 5.23 (`PreTrainedModel.tie_weights`), files may hold either table, or both. Two that differ are
    not tied, with a UserWarning.
    """
    embedding, unembedding = TOP_NAMES["embedding"], TOP_NAMES["unembedding"]
    if not config.tie_word_embeddings or not checkpoint.holds(unembedding):
        return config, TOP_NAMES
    if not checkpoint.holds(embedding):
        return config, TOP_NAMES | {"embedding": unembedding}
    if checkpoint.equal(embedding, unembedding):
        return config, TOP_NAMES
    warnings.warn(
        f"{checkpoint.path}: `tie_word_embeddings` is true, but {unembedding!r} is not {embedding!r}: it is used",
        stacklevel=4,  # where the model is loaded
    )
    return dataclasses.replace(config, tie_word_embeddings=False), TOP_NAMES


class RandomSource(RandomWeights[Config]):
    """Random weights of the shapes of `config`, made on the device.

    ValueError for a `seed` outside 0..2^32 - 1.
    """

    def __init__(self, config: Config, seed: int = 0, format: jmx.Format = jmx.MXFP4):
        layers, sizes = _sparse_layers(config), expert_sizes(config)
        shapes = tensor_shapes(config)
        super().__init__(config, seed, shapes, layers, sizes, format, gate_up_order="concatenated", bias=False)


def load(
    path: str | os.PathLike[str],
    *,
    format: jmx.Format | None = None,
    declared_inputs: bool = True,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> Qwen3MoE:
    """The model of a Qwen3-MoE checkpoint; experts stay quantized from disk to device.

    Args:
        path: a directory of safetensors files, in floats or quantized by a tool that jmx supports.
        format: what float experts are quantized to on reading; None: they stay floats.
        declared_inputs: whether experts quantize their inputs to the format that the checkpoint declares.
        dtype: of activations, dense weights and float experts, bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        progress: whether to show a progress bar on stderr, if that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantized already.
    """
    checkpoint = Checkpoint(path, format=format, declared_inputs=declared_inputs)
    source = file_source(checkpoint)
    with checkpoint.progress(progress):
        return from_source(source, dtype=dtype, backend=backend)


def from_source(
    source: Source[Config], *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None
) -> Qwen3MoE:
    """The model of a source's weights, filled layer by layer. Peak memory is the model and one layer."""
    make = partial(Qwen3MoE, source.config, dtype=dtype, backend=backend)
    return fill(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), source)
