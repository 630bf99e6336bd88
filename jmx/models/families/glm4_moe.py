"""GLM-4.5 as a Flax NNX module, for any config of the family."""

from functools import partial
from typing import Any

import jax
from flax import nnx

import jmx
from jmx.checkpoint.model_configs.glm4_moe import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.rope import rope_angles
from jmx.models.shared_experts import SharedExperts
from jmx.models.sources.protocol import Shape


class Glm4MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    The first channels of each head are rotated. Routing is that of DeepSeek-V3: sigmoids, a correction bias, groups of
    experts; and there are shared experts.
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        return Attention(self.config, window=None, **_attention(self.config), dtype=self.dtype, rngs=rngs)

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts:
        return SharedExperts(self.config.hidden_size, _shared_size(self.config), dtype=self.dtype, rngs=rngs)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_angles(positions, self.config.rotary_dim, self.config.rope_theta)

    def moe_options(self) -> dict[str, Any]:
        config = self.config
        routing = jmx.GroupedTopK(
            config.top_k,
            num_groups=config.n_group,
            topk_groups=config.topk_group,
            scoring="sigmoid",
            renormalize=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )
        return {"activation": jmx.SwiGLU(), "routing": routing, "correction_bias": True}


def _attention(config: Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "norms": "head" if config.use_qk_norm else None}


def _shared_size(config: Config) -> int:
    return config.n_shared_experts * config.moe_intermediate_size


def _shapes(config: Config) -> dict[str, Shape]:
    shared = tensors.shared_shapes(config.hidden_size, _shared_size(config))
    beside = shared | {"router_correction_bias": (config.num_experts,)}
    return tensors.whole_model(config, tensors.attention_shapes(config, **_attention(config)), beside)


_LAYER_NAMES = (
    tensors.LAYER_NAMES
    | tensors.shared_names("mlp.shared_experts")
    | {"router_correction_bias": "mlp.gate.e_score_correction_bias"}
)

FAMILY = Family(
    name="glm4_moe",
    architectures={"Glm4MoeForCausalLM": ("glm4_moe",)},
    config=Config,
    model=Glm4MoE,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=partial(tensors.file_name, layer_names=_LAYER_NAMES),
    unused=tensors.prediction_layers,
)
