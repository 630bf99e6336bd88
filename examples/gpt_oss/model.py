"""gpt-oss as a Flax NNX module, for any config of the family."""

import jax
import jax.numpy as jnp
from flax import nnx

import jmx
import jmx.nnx
from examples.common.model import Attention, Block, Linear, Model
from examples.gpt_oss.rope import yarn_angles
from jmx.checkpoint.gpt_oss import Config


class GptOss(Model):
    """The whole model; see `examples.gpt_oss.load` for making one from a checkpoint.

    Attention has biases and sinks, and uses a sliding window or the full context in each layer, by the config.

    Args:
        config: sizes and constants (`jmx.checkpoint.gpt_oss.Config`).
        format: of the experts, until they are replaced.
        dtype: bfloat16 or float32.
        backend: name of the jmx backend that must run, or None.
        rngs: `nnx.Rngs` with the stream `params`.
    """

    def __init__(
        self,
        config: Config,
        *,
        format: jmx.Format = jmx.MXFP4,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        backend: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.config, self.format, self.dtype, self.backend = config, format, jnp.dtype(dtype), backend

        def block(layer_type: str) -> Block:
            window = config.sliding_window if layer_type == "sliding_attention" else None
            attention = Attention(config, window=window, sinks=True, dtype=dtype, rngs=rngs)
            router = Linear(config.hidden_size, config.num_experts, bias=True, dtype=dtype, rngs=rngs)
            return Block(config, attention, router, self.make_moe(None, rngs))

        super().__init__(config, [block(its) for its in config.layer_types], tied=False, dtype=dtype, rngs=rngs)

    def angles(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return yarn_angles(self.config, positions)

    def make_moe(self, experts: jmx.Experts | None, rngs: nnx.Rngs) -> jmx.nnx.MoE:
        config = self.config
        return jmx.nnx.MoE(
            config.hidden_size,
            config.intermediate_size,
            config.num_experts,
            config.top_k,
            format=self.format if experts is None else experts.format,
            activation=jmx.SwiGLU(config.swiglu_alpha, config.swiglu_beta, config.swiglu_limit),
            gate_up_order="interleaved" if experts is None else experts.gate_up_order,
            bias=True,
            router=False,
            param_dtype=self.dtype,
            backend=self.backend,
            experts=experts,
            rngs=rngs,
        )
