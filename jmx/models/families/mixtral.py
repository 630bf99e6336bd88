"""Mixtral as a Flax NNX module, for any config of the family."""

from functools import partial
from typing import Any

from flax import nnx

import jmx
from jmx.checkpoint.model_configs.mixtral import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.sources.protocol import Shape


class Mixtral(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Routing is a softmax over all experts, then the `top_k` largest, divided by their sum (Jiang et al., 2024).
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        return Attention(self.config, window=self.config.sliding_window, dtype=self.dtype, rngs=rngs)

    def moe_options(self) -> dict[str, Any]:
        return {"activation": jmx.SwiGLU(), "routing": jmx.SoftmaxTopK(self.config.top_k, renormalize=True)}


def _shapes(config: Config) -> dict[str, Shape]:
    return tensors.whole_model(config, tensors.attention_shapes(config))


_LAYER_NAMES = tensors.LAYER_NAMES | {"router_weight": "block_sparse_moe.gate.weight"}

FAMILY = Family(
    name="mixtral",
    architectures={"MixtralForCausalLM": ("mixtral",)},
    config=Config,
    model=Mixtral,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=partial(tensors.file_name, layer_names=_LAYER_NAMES),
    expert_module="model.layers.{}.block_sparse_moe.experts",
    renamed={"block_sparse_moe": "mlp"},
)
