"""Qwen2-MoE as a Flax NNX module, for any config of the family."""

from typing import Any

from flax import nnx

from jmx.checkpoint.model_configs import qwen2_moe as configs
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.grouped_query import grouped_query_family
from jmx.models.shared_experts import SharedExperts
from jmx.models.sources.protocol import Shape


class Qwen2MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Routing is a softmax over all experts, then the `top_k` largest. A shared expert has a gate.
    """

    config: configs.Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        window = self.config.windows[layer]
        return Attention(self.config, window=window, **_attention(self.config), dtype=self.dtype, rngs=rngs)

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts:
        sizes = self.config.hidden_size, self.config.shared_expert_intermediate_size
        return SharedExperts(*sizes, gate=True, dtype=self.dtype, rngs=rngs)


def _attention(config: configs.Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.qkv_bias}


def _shared(config: configs.Config) -> dict[str, Shape]:
    return tensors.shared_shapes(config.hidden_size, config.shared_expert_intermediate_size, gate=True)


FAMILY = grouped_query_family(
    configs,
    "Qwen2MoeForCausalLM",
    Qwen2MoE,
    attention=_attention,
    beside_experts=_shared,
    layer_names=tensors.shared_names("mlp.shared_expert")
    | {"shared_expert_gate_weight": "mlp.shared_expert_gate.weight"},
)
