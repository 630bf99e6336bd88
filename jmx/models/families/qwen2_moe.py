"""Qwen2-MoE as a Flax NNX module, for any config of the family."""

from functools import partial

from flax import nnx

from jmx.checkpoint.model_configs.qwen2_moe import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.shared_experts import SharedExperts
from jmx.models.sources.protocol import Shape


class Qwen2MoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Routing is a softmax over all experts, then the `top_k` largest. A shared expert has a gate.
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        config = self.config
        return Attention(config, window=config.windows[layer], qkv_bias=config.qkv_bias, dtype=self.dtype, rngs=rngs)

    def make_shared_experts(self, rngs: nnx.Rngs) -> SharedExperts:
        sizes = self.config.hidden_size, self.config.shared_expert_intermediate_size
        return SharedExperts(*sizes, gate=True, dtype=self.dtype, rngs=rngs)


def _shapes(config: Config) -> dict[str, Shape]:
    shared = tensors.shared_shapes(config.hidden_size, config.shared_expert_intermediate_size, gate=True)
    return tensors.whole_model(config, tensors.attention_shapes(config, qkv_bias=config.qkv_bias), shared)


_LAYER_NAMES = (
    tensors.LAYER_NAMES
    | tensors.shared_names("mlp.shared_expert")
    | {"shared_expert_gate_weight": "mlp.shared_expert_gate.weight"}
)

FAMILY = Family(
    name="qwen2_moe",
    architectures={"Qwen2MoeForCausalLM": ("qwen2_moe",)},
    config=Config,
    model=Qwen2MoE,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=partial(tensors.file_name, layer_names=_LAYER_NAMES),
)
