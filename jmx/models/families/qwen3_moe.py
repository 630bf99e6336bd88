"""Qwen3-MoE as a Flax NNX module, for any config of the family."""

from functools import partial
from typing import Any

import jax
from flax import nnx

import jmx
from jmx.checkpoint.model_configs.qwen3_moe import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.block import Block, DenseBlock
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.layers import Linear
from jmx.models.rope import rope_angles
from jmx.models.sources.protocol import Shape


class Qwen3MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Queries and keys are normalized per head. Routing is a softmax over all experts, then the `top_k` largest.
    """

    config: Config

    def make_block(self, layer: int, rngs: nnx.Rngs) -> Block | DenseBlock:
        config, dtype = self.config, self.dtype
        attention = Attention(config, window=config.sliding_window, head_norms=True, dtype=dtype, rngs=rngs)
        if layer in config.dense_layers:
            return DenseBlock(config, attention, dtype=dtype, rngs=rngs)
        router = Linear(config.hidden_size, config.num_experts, bias=False, dtype=dtype, rngs=rngs)
        return Block(config, attention, router, self.make_moe(None, rngs))

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_angles(positions, self.config.head_dim, self.config.rope_theta)

    def moe_options(self) -> dict[str, Any]:
        config = self.config
        routing = jmx.SoftmaxTopK(config.top_k, renormalize=config.norm_topk_prob)
        return {"activation": jmx.SwiGLU(), "routing": routing}


_LAYER_NAMES = tensors.NORM_NAMES | tensors.ATTENTION_NAMES | tensors.MLP_NAMES | {"router_weight": "mlp.gate.weight"}


def _layer_shapes(config: Config, layer: int) -> dict[str, Shape]:
    shapes = tensors.norm_shapes(config) | tensors.attention_shapes(config, head_norms=True)
    if layer in config.dense_layers:
        return shapes | tensors.mlp_shapes(config.hidden_size, config.intermediate_size)
    return shapes | {"router_weight": (config.num_experts, config.hidden_size)}


def _shapes(config: Config) -> dict[str, Shape]:
    return tensors.whole_model(config, (_layer_shapes(config, layer) for layer in range(config.num_hidden_layers)))


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    config=Config,
    model=Qwen3MoE,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=partial(tensors.file_name, layer_names=_LAYER_NAMES),
)
