"""OLMoE as a Flax NNX module, for any config of the family."""

from typing import Any

from flax import nnx

from jmx.checkpoint.model_configs import olmoe as configs
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families.grouped_query import grouped_query_family


class OLMoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Queries and keys are normalized over all heads together, then clipped if the config has a limit. Routing is a
    softmax over all experts, then the `top_k` largest (Muennighoff et al., 2024).
    """

    config: configs.Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        config, options = self.config, _attention(self.config)
        return Attention(config, window=None, clip=config.clip_qkv, **options, dtype=self.dtype, rngs=rngs)


def _attention(config: configs.Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "norms": "all_heads"}


FAMILY = grouped_query_family(configs, "OlmoeForCausalLM", OLMoE, attention=_attention)
