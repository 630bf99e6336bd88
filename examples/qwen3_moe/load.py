"""Making a Qwen3-MoE model: out of a checkpoint, or of random weights in the shape of a published one."""

import dataclasses
import os
import warnings
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from examples.common.checkpoint import Checkpoint
from examples.common.float_moe import FloatExperts
from examples.common.load import RandomWeights, Source, fill
from examples.qwen3_moe.config import Config, read_config
from examples.qwen3_moe.model import Qwen3MoE
from jmx.experts import Experts
from jmx.numerics.formats import MXFP4, Format

Shape = tuple[int, ...]


def _published(num_hidden_layers: int, hidden_size: int, moe_intermediate_size: int, heads: int) -> Config:
    return Config(
        num_hidden_layers=num_hidden_layers,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_experts=128,
        top_k=8,
        norm_topk_prob=True,
        dense_layers=(),
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        attention_bias=False,
        rms_norm_eps=1e-6,
        sliding_window=None,
        rope_theta=1e6,
        tie_word_embeddings=False,
        eos_token_ids=(151645, 151643),
    )


# The published models, by their config.json and generation_config.json.
CONFIGS = {"30b-a3b": _published(48, 2048, 768, 32), "235b-a22b": _published(94, 4096, 1536, 64)}

# Neutral names, those of `jmx.checkpoint.gpt_oss.Reader`, and files' own, after "model.layers.N." in a layer.
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
    """Shapes of a layer's arrays but for its experts, by neutral name."""
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


class FileSource:
    """The weights of a checkpoint. CheckpointError unless it holds all that its config calls for."""

    def __init__(self, checkpoint: Checkpoint):
        config = read_config(checkpoint.path)
        self.config, self._top = _untied(checkpoint, config)
        self._checkpoint = checkpoint
        names = {self._top[name]: shape for name, shape in top_shapes(self.config).items()}
        if config.tie_word_embeddings and checkpoint.holds(TOP_NAMES["unembedding"]):
            names[TOP_NAMES["unembedding"]] = (config.vocab_size, config.hidden_size)  # even if it is not read
        for layer in range(self.config.num_hidden_layers):
            shapes = layer_shapes(self.config, layer).items()
            names |= {_in_layer(layer, LAYER_NAMES[name]): shape for name, shape in shapes}
        sparse = set(range(self.config.num_hidden_layers)) - {*self.config.dense_layers}
        checkpoint.check(names, {_in_layer(layer, "mlp.experts"): expert_sizes(self.config) for layer in sparse})

    def top(self) -> dict[str, jax.Array]:
        return {name: self._checkpoint.dense(self._top[name]) for name in top_shapes(self.config)}

    def layer(self, layer: int) -> dict[str, jax.Array]:
        names = layer_shapes(self.config, layer)
        return {name: self._checkpoint.dense(_in_layer(layer, LAYER_NAMES[name])) for name in names}

    def experts(self, layer: int) -> Experts | FloatExperts | None:
        if layer in self.config.dense_layers:
            return None
        return self._checkpoint.experts(_in_layer(layer, "mlp.experts"))


def _untied(checkpoint: Checkpoint, config: Config) -> tuple[Config, dict[str, str]]:
    """The config, and files' names outside layers, of a model whose tables are tied as far as its files allow.

    As transformers has it (5.23, `PreTrainedModel.tie_weights`): files may hold either table, or both. Two that differ
    stay two, with a UserWarning.
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


def _in_layer(layer: int, name: str) -> str:
    return f"model.layers.{layer}.{name}"


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
        return self._weights.dense(layer, layer_shapes(self.config, layer))

    def experts(self, layer: int) -> Experts | None:
        if layer in self.config.dense_layers:
            return None
        return self._weights.experts(layer, expert_sizes(self.config), "concatenated", self._format, bias=False)


def load(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    declared_inputs: bool = True,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    backend: str | None = None,
    progress: bool = False,
) -> Qwen3MoE:
    """The model of a Qwen3-MoE checkpoint; experts stay as they are from disk to device.

    Args:
        path: a directory of safetensors files, in floats or quantised by a tool that jmx reads.
        format: what experts in floats are rounded to as they are read; None: nothing.
        declared_inputs: whether experts round their inputs to the format that the checkpoint declares.
        dtype: of activations, dense weights and experts in floats, bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        progress: whether to show a progress bar on stderr, where that is a terminal.

    Raises:
        CheckpointError: files that are wrong or broken; a `format` for experts that are quantised already.
    """
    checkpoint = Checkpoint(path, format=format, declared_inputs=declared_inputs)
    source = FileSource(checkpoint)
    with checkpoint.progress(progress):
        return from_source(source, dtype=dtype, backend=backend)


def from_source(
    source: Source[Config], *, dtype: jax.typing.DTypeLike = jnp.bfloat16, backend: str | None = None
) -> Qwen3MoE:
    """The model of a source's weights, a layer at a time: the peak is the model and one layer."""
    make = partial(Qwen3MoE, source.config, dtype=dtype, backend=backend)
    return fill(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), source)
