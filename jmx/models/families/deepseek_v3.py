"""DeepSeek-V3 as a Flax NNX module, for any config of the family: also DeepSeek-V2 and Kimi-K2."""

from functools import partial

import jax
from flax import nnx

from jmx.checkpoint.model_configs.deepseek_v3 import PUBLISHED, Config, read_config
from jmx.models.attention.mla import LatentAttention
from jmx.models.families import grouped_experts, tensors
from jmx.models.families.family import Family
from jmx.models.rope import rope_angles
from jmx.models.sources.protocol import Shape


class DeepseekV3(grouped_experts.GroupedExpertsModel):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Attention is multi-head latent attention. Routing is limited to groups of experts: of sigmoids with a correction
    bias (V3), or of a softmax (V2). Layers that predict further tokens are not part of it.
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> LatentAttention:
        return LatentAttention(self.config, dtype=self.dtype, rngs=rngs)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        return rope_angles(positions, config.qk_rope_head_dim, config.rope_theta, config.yarn)


def _attention_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of the arrays of `LatentAttention`, by neutral name."""
    hidden, heads, rank = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    shapes: dict[str, Shape] = {
        "kv_a_weight": (rank + config.qk_rope_head_dim, hidden),
        "kv_a_norm": (rank,),
        "kv_b_weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
        "o_weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {"q_weight": (queries, hidden)}
    shapes |= {
        "q_a_weight": (config.q_lora_rank, hidden),
        "q_a_norm": (config.q_lora_rank,),
        "q_b_weight": (queries, config.q_lora_rank),
    }
    biased = ("q_a", "kv_a", "o") if config.attention_bias else ()
    return shapes | {f"{name}_bias": shapes[f"{name}_weight"][:1] for name in biased}


_ATTENTION_NAMES = {
    "q_weight": "self_attn.q_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    **{
        f"{name}_{kind}": f"self_attn.{module}.{kind}"
        for name, module in (
            ("q_a", "q_a_proj"),
            ("q_b", "q_b_proj"),
            ("kv_a", "kv_a_proj_with_mqa"),
            ("kv_b", "kv_b_proj"),
            ("o", "o_proj"),
        )
        for kind in ("weight", "bias")
    },
}
_LAYER_NAMES = tensors.LAYER_NAMES | _ATTENTION_NAMES | grouped_experts.NAMES


def _shapes(config: Config) -> dict[str, Shape]:
    return tensors.whole_model(config, _attention_shapes(config), grouped_experts.shapes(config))


FAMILY = Family(
    name="deepseek_v3",
    architectures={
        "DeepseekV3ForCausalLM": ("deepseek_v3", "kimi_k2"),
        "DeepseekV2ForCausalLM": ("deepseek_v2",),
    },
    config=Config,
    model=DeepseekV3,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=partial(tensors.file_name, layer_names=_LAYER_NAMES),
    unused=tensors.prediction_layers,
)
