"""Qwen3-MoE as a Flax NNX module, for any config of the family."""

from typing import Any

from flax import nnx

from jmx.checkpoint.model_configs import qwen3_moe as configs
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families.grouped_query import grouped_query_family


class Qwen3MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Queries and keys are normalized per head. Routing is a softmax over all experts, then the `top_k` largest.
    """

    config: configs.Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        window = self.config.sliding_window
        return Attention(self.config, window=window, **_attention(self.config), dtype=self.dtype, rngs=rngs)


def _attention(config: configs.Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "norms": "head"}


FAMILY = grouped_query_family(configs, "Qwen3MoeForCausalLM", Qwen3MoE, attention=_attention)
