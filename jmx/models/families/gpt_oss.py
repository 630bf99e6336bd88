"""gpt-oss as a Flax NNX module, for any config of the family."""

from functools import partial
from pathlib import Path
from typing import Any

from flax import nnx

import jmx
from jmx.checkpoint.gpt_oss import Config, Reader, file_name, is_checkpoint, read_config, tensor_shapes
from jmx.checkpoint.model_configs.gpt_oss import PUBLISHED, SLIDING
from jmx.models.attention.module import Attention
from jmx.models.decoder import Model
from jmx.models.families.family import Family


class GptOss(Model):
    """The whole model; see `jmx.models.load` for making one from a checkpoint.

    Attention has biases and sinks, and uses a sliding window or the full context in each layer, by the config.
    """

    config: Config

    router_bias = True

    def make_attention(self, layer: int, rngs: nnx.Rngs) -> Attention:
        config, bias = self.config, self.config.attention_bias
        window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        return Attention(config, window=window, qkv_bias=bias, out_bias=bias, sinks=True, dtype=self.dtype, rngs=rngs)

    def moe_options(self) -> dict[str, Any]:
        config = self.config
        return {
            "activation": jmx.SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit),
            "routing": jmx.TopKSoftmax(config.top_k),
            "gate_up_order": "interleaved",
            "bias": True,
        }


def _published_form(path: Path) -> Reader | None:
    """The reader of a checkpoint as OpenAI publishes it, whose experts are MXFP4; None for others."""
    return Reader(path) if is_checkpoint(path) else None


FAMILY = Family(
    name="gpt_oss",
    architectures={"GptOssForCausalLM": ("gpt_oss",)},
    config=Config,
    model=GptOss,
    published=PUBLISHED,
    read_config=partial(read_config, quant_methods=None),
    shapes=tensor_shapes,
    file_name=file_name,
    gate_up_order="interleaved",
    expert_bias=True,
    reader=_published_form,
)
