"""Mixtral as a Flax NNX module, for any config of the family."""

from flax import nnx

from jmx.checkpoint.model_configs import mixtral as configs
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families.grouped_query import grouped_query_family


class Mixtral(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Routing is a softmax over all experts, then the `top_k` largest, divided by their sum (Jiang et al., 2024).
    """

    config: configs.Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        return Attention(self.config, window=self.config.sliding_window, dtype=self.dtype, rngs=rngs)


FAMILY = grouped_query_family(
    configs,
    "MixtralForCausalLM",
    Mixtral,
    layer_names={"router_weight": "block_sparse_moe.gate.weight"},
    expert_module="model.layers.{}.block_sparse_moe.experts",
    renamed={"block_sparse_moe": "mlp"},
)
