"""OLMoE as a Flax NNX module, for any config of the family."""

from typing import Any

from flax import nnx

from jmx.checkpoint.model_configs.olmoe import PUBLISHED, Config, read_config
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families import tensors
from jmx.models.families.family import Family
from jmx.models.sources.protocol import Shape


class OLMoE(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Queries and keys are normalized over all heads together, then clipped if the config has a limit. Routing is a
    softmax over all experts, then the `top_k` largest (Muennighoff et al., 2024).
    """

    config: Config

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        config, options = self.config, _attention(self.config)
        return Attention(config, window=None, clip=config.clip_qkv, **options, dtype=self.dtype, rngs=rngs)


def _attention(config: Config) -> dict[str, Any]:
    """Arguments of `Attention` that decide which arrays it has."""
    return {"qkv_bias": config.attention_bias, "out_bias": config.attention_bias, "norms": "all_heads"}


def _shapes(config: Config) -> dict[str, Shape]:
    return tensors.whole_model(config, tensors.attention_shapes(config, **_attention(config)))


FAMILY = Family(
    name="olmoe",
    architectures={"OlmoeForCausalLM": ("olmoe",)},
    config=Config,
    model=OLMoE,
    published=PUBLISHED,
    read_config=read_config,
    shapes=_shapes,
    file_name=tensors.file_name,
)
