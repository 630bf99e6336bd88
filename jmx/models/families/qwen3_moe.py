"""Qwen3-MoE as a Flax NNX module, for any config of the family."""

from typing import Any

from flax import nnx

from jmx.checkpoint.model_configs.qwen3_moe import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.sources.protocol import Shape


class Qwen3MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Queries and keys are normalized per head. Routing is a softmax over all experts, then the `top_k` largest.
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        window = self.config.sliding_window
        return Attention(self.config, window=window, **_attention(self.config), dtype=self.dtype, rngs=rngs)


def _attention(config: Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "norms": "head"}


def _shapes(config: Config) -> dict[str, Shape]:
    return tensors.whole_model(config, tensors.attention_shapes(config, **_attention(config)))


FAMILY = Family(
    name="qwen3_moe",
    architectures={"Qwen3MoeForCausalLM": ("qwen3_moe",)},
    config=Config,
    model=Qwen3MoE,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=tensors.file_name,
)
