"""GLM-4.5 as a Flax NNX module, for any config of the family."""

from typing import Any

import jax
from flax import nnx

from jmx.checkpoint.model_configs import glm4_moe as configs
from jmx.models.attention.module import Attention
from jmx.models.families import grouped_experts, tensors
from jmx.models.families.grouped_query import grouped_query_family
from jmx.models.rope import rope_angles


class Glm4MoE(grouped_experts.GroupedExpertsModel):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    The first channels of each head are rotated. Routing is that of DeepSeek-V3: sigmoids, a correction bias, groups of
    experts; and there are shared experts.
    """

    config: configs.Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        return Attention(self.config, window=None, **_attention(self.config), dtype=self.dtype, rngs=rngs)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        return rope_angles(positions, config.rotary_dim, config.rope_theta, config.yarn)


def _attention(config: configs.Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "norms": "head" if config.use_qk_norm else None}


FAMILY = grouped_query_family(
    configs,
    "Glm4MoeForCausalLM",
    Glm4MoE,
    attention=_attention,
    beside_experts=grouped_experts.shapes,
    layer_names=grouped_experts.NAMES,
    unused=tensors.prediction_layers,
)
